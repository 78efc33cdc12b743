// SPDX-License-Identifier: Apache-2.0

package main

// mustang node: the other nodes, without Kubernetes.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/policy/manifest"
	"github.com/mustang-net/mustang/internal/state"
)

func newNodeCmd(g *globals) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "node",
		Short: "Join this node to others",
		Long: `Each node is told of all: the one that has an address of this machine is this
node. Routes to the others' pods follow, and the datapath.`,
	}
	cmd.AddCommand(newNodeAddCmd(g), newNodeRmCmd(g), newNodeLsCmd(g), newNodeApplyCmd(g), newNodeSetCmd(g), newNodeSyncCmd(g))
	return cmd
}

func newNodeAddCmd(g *globals) *cobra.Command {
	var s node.Spec
	cmd := &cobra.Command{
		Use:     "add NAME",
		Short:   "Add a node, or replace it",
		Example: "  mustang node add n2 --address 10.3.0.2,fd00:10:3::2 --pod-cidr 10.1.1.0/24,fd00:10:1:0:1::/80",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s.Name = args[0]
			n, err := node.Parse(s)
			if err != nil {
				return usageError{err}
			}
			n.Owner = state.OwnerCLI
			return g.with(cmd.Context(), false, func(e *engine.Engine) error { return e.AddNode(n) })
		},
	}
	fl := cmd.Flags()
	fl.StringSliceVar(&s.Address, "address", nil, "where it is on the wire between nodes: an address, or one of each family")
	fl.StringSliceVar(&s.PodCIDRs, "pod-cidr", nil, "where its pods are; may be given several times")
	fl.StringVar(&s.Mode, "mode", string(state.NodeDirect), "how its pods are reached: direct or vxlan")
	refuseEmpty(fl)
	cobra.CheckErr(cmd.MarkFlagRequired("address"))
	return cmd
}

func newNodeRmCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "rm NAME",
		Short: "Remove a node made by node add",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.with(cmd.Context(), false, func(e *engine.Engine) error {
				return e.RemoveNode(args[0], state.OwnerCLI)
			})
		},
	}
}

// nodeView is a node as it is printed.
type nodeView struct {
	state.Node
	Self bool `json:"self"`
}

func newNodeLsCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List nodes",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return g.with(cmd.Context(), true, func(e *engine.Engine) error {
				list, _, err := e.Nodes()
				if err != nil {
					return err
				}
				self, err := e.Self()
				if err != nil {
					return err
				}
				views := []nodeView{}
				for _, n := range list {
					n.Addrs, n.PodCIDRs = append([]netip.Addr{}, n.Addrs...), append([]netip.Prefix{}, n.PodCIDRs...) // lists, also of nothing
					views = append(views, nodeView{n, n.Name == self.Name})
				}
				return g.print(cmd.OutOrStdout(), views, func(w io.Writer) {
					row(w, "NAME", "ADDRESSES", "POD CIDRS", "MODE", "OWNER")
					for _, v := range views {
						mode := string(v.Mode)
						if v.Self {
							mode = "this node"
						}
						row(w, v.Name, joined(v.Addrs), joined(v.PodCIDRs), mode, v.Owner)
					}
				})
			})
		},
	}
}

func joined[T fmt.Stringer](list []T) string {
	out := make([]string, len(list))
	for i, x := range list {
		out[i] = x.String()
	}
	return strings.Join(out, ",")
}

func newNodeApplyCmd(g *globals) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Make the nodes those of a YAML or JSON file, the same on every node",
		Long: `Reads {settings: {hostRouting, devices, vni, port}, nodes: [{name, addresses,
podCIDRs, mode}…]}. Nodes of the command line that the file does not have are
removed, others' stay. Everything is checked before the first change.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := readNodes(g, file, input(cmd))
			if err != nil {
				return err
			}
			list, err := node.ParseFile(f)
			if err != nil {
				return usageError{err}
			}
			return g.with(cmd.Context(), false, func(e *engine.Engine) error {
				return e.ApplyNodes(state.OwnerCLI, list, f.Settings)
			})
		},
	}
	fileFlag(cmd, &file, "file", "file to read, - for standard input")
	cobra.CheckErr(cmd.MarkFlagRequired("file"))
	return cmd
}

func readNodes(g *globals, file string, stdin io.Reader) (f node.File, err error) {
	text, err := g.readFile(file, stdin)
	if err != nil {
		return f, usagef("read nodes: %w", err)
	}
	if text, err = manifest.One(text); err != nil {
		return f, usagef("%s: %w: put all nodes into one {settings, nodes}", fileName(file), err)
	}
	if err := yaml.UnmarshalStrict(text, &f); err != nil {
		var whole map[string]any
		if yaml.Unmarshal(text, &whole) == nil {
			list, _ := whole["nodes"].([]any)
			err = cmp.Or(wrongEntry[node.Spec](list), within("settings", wrongFields[node.SettingsSpec](whole["settings"])), wrongFields[node.File](whole), err)
		}
		return f, usagef("%s is not {settings, nodes}: %w", fileName(file), err)
	}
	if _, err := f.Settings.Apply(node.DefaultSettings()); err != nil {
		return f, usagef("%s: settings: %w", fileName(file), err)
	}
	if f.Nodes == nil {
		return f, usagef("%s has no nodes, and those that it does not name would be removed; write nodes: [] where that is meant", fileName(file))
	}
	return f, nil
}

func newNodeSetCmd(g *globals) *cobra.Command {
	var s node.SettingsSpec
	cmd := &cobra.Command{
		Use:   "set",
		Short: "Change this node's own settings; without flags, show them",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := s.Apply(node.DefaultSettings()); err != nil {
				return usageError{err}
			}
			// What is empty keeps its value: a nought would say nothing.
			changed := func(name string) bool { return cmd.Flags().Changed(name) }
			if changed("vni") && s.VNI == 0 || changed("port") && s.Port == 0 {
				return usagef("0 is out of range for --vni and --port, which begin at 1")
			}
			if !slices.ContainsFunc([]string{"host-routing", "devices", "vni", "port"}, changed) {
				return g.with(cmd.Context(), true, func(e *engine.Engine) error { return printSettings(g, cmd.OutOrStdout(), e) })
			}
			return g.with(cmd.Context(), false, func(e *engine.Engine) error { return e.SetNode(s) })
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&s.HostRouting, "host-routing", "", "who forwards between pods and the wire: ebpf, or legacy: the host's stack, with its firewall")
	fl.StringSliceVar(&s.Devices, "devices", nil, "the links to other nodes; auto: those with a default route, this node's addresses or the ways to others")
	fl.IntVar(&s.VNI, "vni", 0, "vxlan: the network's number, the same on every node")
	fl.IntVar(&s.Port, "port", 0, "vxlan: the UDP port, the same on every node")
	refuseEmpty(fl)
	return cmd
}

func newNodeSyncCmd(g *globals) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "sync",
		Short: "Bring the ways to other nodes up to date with this node's devices",
		Long: `A NIC that gets another MTU, is restarted or comes back as another: routes, programs
and what pods are told of the MTU follow. With --follow, whenever that happens, until
interrupted. The agent does it by itself.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			sync := func(ctx context.Context) error {
				return g.with(ctx, false, func(e *engine.Engine) error {
					changed, err := e.FollowDevices()
					if changed && err == nil {
						fmt.Fprintln(cmd.OutOrStdout(), "brought up to date")
					}
					return err
				})
			}
			if !follow {
				return sync(cmd.Context())
			}
			if g.shared != nil {
				return errors.New("the agent of this node follows its devices by itself; leave out --follow")
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
			defer stop()
			return node.Follow(ctx, func() error {
				err := sync(ctx)
				if err != nil && ctx.Err() == nil {
					fmt.Fprintln(cmd.ErrOrStderr(), "Error:", err)
				}
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&follow, "follow", false, "whenever devices, addresses, routes or routing rules change")
	return cmd
}

func printSettings(g *globals, w io.Writer, e *engine.Engine) error {
	_, set, err := e.Nodes()
	if err != nil {
		return err
	}
	return g.print(w, set, func(w io.Writer) {
		devices := "auto"
		if len(set.Devices) > 0 {
			devices = strings.Join(set.Devices, ",")
		}
		row(w, "HOST ROUTING", "DEVICES", "VNI", "PORT")
		row(w, set.HostRouting, devices, set.VNI, set.Port)
	})
}
