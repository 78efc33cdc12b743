// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/internal/engine"
)

func newEdgeCmd(g *globals) *cobra.Command {
	cmd := &cobra.Command{Use: "edge", Short: "Services for clients outside, and for the node itself"}
	cmd.AddCommand(newEdgeSetCmd(g), newEdgeShowCmd(g), newEdgeRmCmd(g))
	return cmd
}

func newEdgeSetCmd(g *globals) *cobra.Command {
	var want engine.Edge
	var prefixes []string
	var ports string
	cmd := &cobra.Command{
		Use:   "set",
		Short: "Serve clients behind these NICs, and the node's own sockets",
		Long: `Makes the edge what the flags say, whatever it was. Node ports, external and load
balancer addresses of Services work for clients behind the NICs of --dev, and all
Services for the node's own sockets with --host.`,
		Example: "  mustang edge set --dev eth0 --host",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(want.Devices) == 0 && !want.Host {
				return usagef("give --dev, --host or both; `mustang edge rm` takes the edge away")
			}
			if len(prefixes) > 0 && len(want.Devices) == 0 {
				return usagef("--addresses has no meaning without --dev, whose addresses it chooses from: drop it, or give --dev")
			}
			for _, text := range prefixes {
				p, err := netip.ParsePrefix(text)
				if err != nil {
					return usagef("--addresses %q is not a CIDR, as 192.0.2.0/24", text)
				}
				want.Prefixes = append(want.Prefixes, p)
			}
			if ports != "" {
				var err error
				if want.Ports, err = portRange(ports); err != nil {
					return err
				}
			}
			if g.shared != nil {
				return errAgentsEdge
			}
			if err := want.CheckPrefixes(); err != nil {
				return err
			}
			return g.with(cmd.Context(), false, func(e *engine.Engine) error { return e.SetEdge(want) })
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&want.Devices, "dev", nil, "NIC behind which clients are; may be repeated")
	f.StringSliceVar(&prefixes, "addresses", nil, "CIDR: only these of the NICs' addresses take node ports (default: all)")
	f.StringVar(&ports, "ports", "", "source ports that flows from outside wear (default: 61000-65535)")
	f.BoolVar(&want.Host, "host", false, "the node's own sockets get Services, too")
	refuseEmpty(f)
	return cmd
}

// errAgentsEdge: what the command line made of the edge, the next change of a device would undo.
var errAgentsEdge = errors.New("the agent of this node keeps the edge as its settings say (devices, node-port-addresses, host-services): change those")

func portRange(text string) (r engine.PortRange, err error) {
	first, last, _ := strings.Cut(text, "-")
	a, errFirst := strconv.ParseUint(first, 10, 16)
	b, errLast := strconv.ParseUint(last, 10, 16)
	if errFirst != nil || errLast != nil || a == 0 || b <= a {
		return r, usagef("--ports %q is not FIRST-LAST, as 61000-65535", text)
	}
	return engine.PortRange{First: uint16(a), Last: uint16(b)}, nil
}

// edgeView is the edge as it is printed.
type edgeView struct {
	Devices   []string `json:"devices"`
	Addresses []string `json:"addresses"`
	Wears     []string `json:"wears"`
	Ports     string   `json:"ports"`
	Host      bool     `json:"host"`
	Door      string   `json:"door,omitempty"`
}

func newEdgeShowCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "show",
		Short: "Show the edge",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return g.with(cmd.Context(), true, func(e *engine.Engine) error {
				s, err := e.Edge()
				if err != nil {
					return err
				}
				v := edgeView{Devices: append([]string{}, s.Devices...), Addresses: texts(s.Addresses), Wears: []string{}, Host: s.Host, Door: s.Door}
				for _, a := range []netip.Addr{s.IP4, s.IP6} {
					if a.IsValid() {
						v.Wears = append(v.Wears, a.String())
					}
				}
				if s.Ports.First > 0 {
					v.Ports = fmt.Sprintf("%d-%d", s.Ports.First, s.Ports.Last)
				}
				return g.print(cmd.OutOrStdout(), v, func(w io.Writer) {
					row(w, "NICs", orDash(strings.Join(v.Devices, " ")))
					row(w, "node ports on", orDash(strings.Join(v.Addresses, " ")))
					row(w, "flows wear", orDash(strings.Join(v.Wears, " ")))
					row(w, "with ports", orDash(v.Ports))
					row(w, "node's own sockets", v.Host)
					row(w, "their SCTP by", orDash(v.Door))
				})
			})
		},
	}
}

func newEdgeRmCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "rm",
		Short: "Take the edge away; Services inside stay",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if g.shared != nil {
				return errAgentsEdge
			}
			return g.with(cmd.Context(), false, func(e *engine.Engine) error { return e.SetEdge(engine.Edge{}) })
		},
	}
}
