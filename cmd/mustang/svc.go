// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/policy/manifest"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

func newSvcCmd(g *globals) *cobra.Command {
	cmd := &cobra.Command{Use: "svc", Aliases: []string{"service"}, Short: "Services: addresses that lead to backends"}
	cmd.AddCommand(newSvcAddCmd(g), newSvcLsCmd(g), newSvcRmCmd(g), newSvcApplyCmd(g))
	return cmd
}

func newSvcAddCmd(g *globals) *cobra.Command {
	var spec service.Spec
	var replace, reset bool
	cmd := &cobra.Command{
		Use:   "add",
		Short: "Add a Service",
		Example: "  mustang svc add --service 10.96.0.100:5201 --backend 192.168.10.10:5201\n" +
			"  mustang svc add --service 10.96.0.101:80 --protocol tcp --backend 192.168.10.10:8080 --node-port 30080 --affinity 3h",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			list, err := service.Parse(spec)
			if err != nil {
				return err
			}
			if reset && !replace {
				return usagef("--reset has no meaning without --replace, for no backend is removed: drop it, or give both")
			}
			own(list)
			return g.with(cmd.Context(), false, func(e *engine.Engine) error {
				if !replace {
					return e.AddServices(list...)
				}
				e.ResetRemoved = reset
				return e.UpsertServices(list)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&spec.Service, "service", "", "address and port that clients use")
	f.StringSliceVar(&spec.Backends, "backend", nil, "address and port of a backend; may be repeated, or absent: then connections are refused")
	f.StringVar(&spec.Protocol, "protocol", "", "tcp, udp or sctp (default: tcp and udp)")
	f.Uint16Var(&spec.NodePort, "node-port", 0, "this port of the node's addresses, too (see mustang edge)")
	f.StringSliceVar(&spec.ExternalIPs, "external-ip", nil, "this address, too, which something outside routes to the node")
	f.StringSliceVar(&spec.LoadBalancerIPs, "lb-ip", nil, "this address of a load balancer, too")
	f.StringSliceVar(&spec.SourceRanges, "source-range", nil, "clients of --lb-ip must be in this CIDR (default: anybody)")
	f.StringVar(&spec.Affinity, "affinity", "", "a client keeps its backend for this long, as 3h (default: it does not)")
	f.StringVar(&spec.InternalPolicy, "internal-policy", "", "Local: only backends on this node (default: Cluster, any)")
	f.StringVar(&spec.ExternalPolicy, "external-policy", "", "Local: from outside only to backends on this node, which see the client's address (default: Cluster)")
	f.StringVar(&spec.Algorithm, "algorithm", "", "maglev: every node leads a flow to the same backend (default: random)")
	f.BoolVar(&replace, "replace", false, "change an existing Service to this")
	refuseEmpty(f)
	resetFlag(cmd, &reset)
	cobra.CheckErr(cmd.MarkFlagRequired("service"))
	return cmd
}

func resetFlag(cmd *cobra.Command, reset *bool) {
	cmd.Flags().BoolVar(reset, "reset", false, "backends that are removed are gone: reset their TCP connections, too (default: those go on)")
}

// own makes the command line the owner of every Service.
func own(list []state.Service) {
	for i := range list {
		list[i].Owner = state.OwnerCLI
	}
}

// serviceView is one frontend of a Service as it is printed.
type serviceView struct {
	ID       uint32             `json:"id"`
	Protocol state.Protocol     `json:"protocol"`
	Service  string             `json:"service"` // address
	Port     uint16             `json:"port"`
	Backends []string           `json:"backends"`
	Owner    state.Owner        `json:"owner"`
	Name     string             `json:"name"`
	Kind     state.FrontendKind `json:"kind"`
	// Outside are the backends of clients outside the cluster, where they have others.
	Outside      *[]string       `json:"outside,omitempty"`
	Affinity     string          `json:"affinity,omitempty"`
	Algorithm    state.Algorithm `json:"algorithm"`
	SourceRanges []string        `json:"sourceRanges,omitempty"`
	Internal     string          `json:"internalTrafficPolicy,omitempty"` // where it is not Cluster
	External     string          `json:"externalTrafficPolicy,omitempty"` // the same
	Drop         bool            `json:"drop,omitempty"`                  // instead of refusing: there are backends, but none that this node may use
}

func viewService(b state.Binding) serviceView {
	v := serviceView{
		ID: b.Number, Protocol: b.Frontend.Protocol, Owner: b.Owner, Backends: texts(b.Backends),
		Service: b.Frontend.AddrPort.Addr().String(), Port: b.Frontend.AddrPort.Port(),
		Name: b.Service.String(), Kind: b.Kind, Algorithm: b.Algorithm, Drop: b.Drop,
	}
	if b.Affinity > 0 {
		v.Affinity = b.Affinity.String()
	}
	if len(b.SourceRanges) > 0 {
		v.SourceRanges = texts(b.SourceRanges)
	}
	return v
}

func texts[T fmt.Stringer](list []T) []string {
	out := make([]string, len(list))
	for i, v := range list {
		out[i] = v.String()
	}
	return out
}

// policies shows the traffic policies of a Service that are not as any has them.
func (v *serviceView) policies(s state.Service) {
	if s.Internal != state.PolicyCluster {
		v.Internal = s.Internal.String()
	}
	if s.External != state.PolicyCluster {
		v.External = s.External.String()
	}
}

// viewServices puts what clients from outside get beside the rest of a frontend. service: what the owner gave, if that is
// known
func viewServices(list []state.Binding, service func(state.ServiceID) (state.Service, bool)) []serviceView {
	out := make([]serviceView, 0, len(list))
	for _, b := range list {
		if n := len(out) - 1; b.Outside && n >= 0 && out[n].ID == b.Number {
			backends := texts(b.Backends)
			out[n].Outside = &backends
			continue
		}
		v := viewService(b)
		if s, known := service(b.Service); known {
			v.policies(s)
		}
		out = append(out, v)
	}
	return out
}

func newSvcLsCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List Services; -o wide says more of each",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return g.with(cmd.Context(), true, func(e *engine.Engine) error {
				list, err := e.Services()
				if err != nil {
					return err
				}
				views := viewServices(list, e.Service)
				if g.shared == nil && !g.structured() && len(list) > 0 { // an agent has had them all along
					fmt.Fprintln(cmd.ErrOrStderr(), "Services restored from maps")
				}
				return g.print(cmd.OutOrStdout(), views, func(w io.Writer) { printServices(w, views, g.Output == "wide") })
			})
		},
	}
}

func printServices(w io.Writer, views []serviceView, wide bool) {
	if !wide {
		row(w, "ID", "PRO", "SERVICE", "PORT", "BACKENDS")
		for _, v := range views {
			row(w, v.ID, v.Protocol, v.Service, v.Port, strings.Join(v.Backends, ","))
		}
		return
	}
	row(w, "ID", "PRO", "SERVICE", "PORT", "KIND", "OWNER", "NAME", "AFFINITY", "PICKS", "SOURCES", "POLICIES", "BACKENDS", "FROM OUTSIDE")
	for _, v := range views {
		outside := "same"
		if v.Outside != nil {
			outside = orDash(strings.Join(*v.Outside, ","))
		}
		var policies []string
		if v.Internal != "" {
			policies = append(policies, "internal "+v.Internal)
		}
		if v.External != "" {
			policies = append(policies, "external "+v.External)
		}
		row(w, v.ID, v.Protocol, v.Service, v.Port, v.Kind, v.Owner, v.Name, orDash(v.Affinity), v.Algorithm,
			orDash(strings.Join(v.SourceRanges, ",")), orDash(strings.Join(policies, ",")), orDash(strings.Join(v.Backends, ",")), outside)
	}
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func newSvcRmCmd(g *globals) *cobra.Command {
	var addr, protocol string
	var reset bool
	cmd := &cobra.Command{
		Use:   "rm [ID…]",
		Short: "Remove Services, by --service or by the ids that `svc ls` shows",
		Long: `New connections stop at once. Established TCP goes on for as long as its backend
lives, unless --reset is given. UDP sockets that were connected through the
Service are ended, so that the application connects anew; no other socket is
touched.`,
		Example: "  mustang svc rm --service 10.96.0.100:5201\n  mustang svc rm 3 4",
		RunE: func(cmd *cobra.Command, args []string) error {
			if (addr == "") == (len(args) == 0) {
				return usagef("name what to remove by --service, or by ids")
			}
			if protocol != "" && addr == "" {
				return usagef("--protocol has no meaning with ids, each of which has its own: drop it, or name what to remove by --service")
			}
			return g.with(cmd.Context(), false, func(e *engine.Engine) error {
				var list []state.Frontend
				var err error
				if addr != "" {
					list, err = frontendsAt(e, addr, protocol)
				} else {
					list, err = frontendsByID(e, args)
				}
				if err != nil {
					return err
				}
				e.ResetRemoved = reset
				return e.RemoveServices(list...)
			})
		},
	}
	resetFlag(cmd, &reset)
	cmd.Flags().StringVar(&addr, "service", "", "address and port")
	cmd.Flags().StringVar(&protocol, "protocol", "", "tcp, udp or sctp (default: whichever exist)")
	return cmd
}

// frontendsAt are the existing frontends at addr, of every protocol unless one
// is named; when none exists all that it could be, so that the error names one.
func frontendsAt(e *engine.Engine, addr, protocol string) ([]state.Frontend, error) {
	a, err := service.ParseAddrPort("service", addr)
	if err != nil {
		return nil, err
	}
	protocols, err := service.ParseProtocols(protocol)
	if err != nil {
		return nil, err
	}
	if protocol == "" {
		protocols = append(protocols, state.SCTP)
	}
	services, err := e.Services()
	if err != nil {
		return nil, err
	}
	var found, all []state.Frontend
	for _, p := range protocols {
		f := state.Frontend{AddrPort: a, Protocol: p}
		all = append(all, f)
		for _, s := range services {
			if s.Frontend == f {
				found = append(found, f)
			}
		}
	}
	if len(found) == 0 {
		return all, nil
	}
	return found, nil
}

func frontendsByID(e *engine.Engine, args []string) ([]state.Frontend, error) {
	services, err := e.Services()
	if err != nil {
		return nil, err
	}
	byID := make(map[uint32]state.Frontend, len(services))
	for _, s := range services {
		byID[s.Number] = s.Frontend
	}
	var out []state.Frontend
	var errs []error
	for _, arg := range args {
		id, err := strconv.ParseUint(arg, 10, 32)
		if err != nil {
			errs = append(errs, usagef("id %q is not a number; `mustang svc ls` shows the ids", arg))
			continue
		}
		f, ok := byID[uint32(id)]
		if !ok {
			errs = append(errs, fmt.Errorf("service id %d: %w; `mustang svc ls` shows the ids", id, engine.ErrNotFound))
			continue
		}
		out = append(out, f)
	}
	return out, errors.Join(errs...)
}

func newSvcApplyCmd(g *globals) *cobra.Command {
	var file string
	var reset bool
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Add or replace the Services of a YAML or JSON list; others stay",
		Long: `Reads a list of {service: ADDRESS:PORT, protocol: tcp|udp|sctp, backends: [ADDRESS:PORT…]},
in YAML or JSON; also nodePort, externalIPs, loadBalancerIPs, sourceRanges,
affinity, internalTrafficPolicy, externalTrafficPolicy and algorithm, as svc add
has them. Everything is checked before the first change, and all changes take
effect or none.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			specs, err := readSpecs(g, file, input(cmd))
			if err != nil {
				return err
			}
			list, err := service.ParseAll(specs)
			if err != nil {
				return err
			}
			own(list)
			return g.with(cmd.Context(), false, func(e *engine.Engine) error {
				e.ResetRemoved = reset
				return e.UpsertServices(list)
			})
		},
	}
	resetFlag(cmd, &reset)
	fileFlag(cmd, &file, "file", "file to read, - for standard input")
	cobra.CheckErr(cmd.MarkFlagRequired("file"))
	return cmd
}

func readSpecs(g *globals, file string, stdin io.Reader) ([]service.Spec, error) {
	text, err := g.readFile(file, stdin)
	if err != nil {
		return nil, usagef("read Services: %w", err)
	}
	var all []service.Spec
	for _, doc := range manifest.Documents(text) { // the reader of YAML takes the first alone
		var specs []service.Spec
		if err := yaml.UnmarshalStrict(doc, &specs); err != nil {
			var list []any
			if yaml.Unmarshal(doc, &list) == nil {
				err = cmp.Or(wrongEntry[service.Spec](list), err)
			}
			return nil, usagef("%s is not a list of {service, protocol, backends, …}: %w", fileName(file), err)
		}
		all = append(all, specs...)
	}
	if all == nil {
		return nil, usagef("%s has no list of Services", fileName(file))
	}
	return all, nil
}
