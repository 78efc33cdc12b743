// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/internal/cni"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

func newEpCmd(g *globals) *cobra.Command {
	cmd := &cobra.Command{Use: "ep", Aliases: []string{"endpoint"}, Short: "Endpoints: the pods' interfaces that mustang serves"}
	cmd.AddCommand(newEpAddCmd(g), newEpLsCmd(g), newEpRmCmd(g))
	return cmd
}

var servicePathValues = []state.ServicePath{state.PathBoth, state.PathSocket, state.PathTC, state.PathNone}

func newEpAddCmd(g *globals) *cobra.Command {
	var path string
	var spec engine.EndpointSpec
	var labels podLabelFlags
	cmd := &cobra.Command{
		Use:     "add",
		Short:   "Attach the datapath to an interface inside a pod",
		Example: "  mustang ep add --ifname eth0 --netns /var/run/netns/pod-a",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains(servicePathValues, state.ServicePath(path)) {
				return usagef("service-path %q is none of both, socket, tc, none", path)
			}
			if spec.Netns = g.path(spec.Netns); !netns.Is(spec.Netns) {
				return usagef("--netns: %s is not a network namespace; `ip netns` lists the named ones, and /proc/PID/ns/net is a process's", spec.Netns)
			}
			spec.Owner, spec.ServicePath = state.OwnerCLI, state.ServicePath(path)
			pod, err := labels.spec("")
			if err != nil {
				return err
			}
			spec.Labels, spec.Ports, spec.Pod, spec.Masquerade = pod.labels, pod.ports, pod.ref, pod.masquerade
			return attach(cmd.Context(), g, spec)
		},
	}
	f := cmd.Flags()
	f.StringVar(&spec.IfName, "ifname", "", "the interface inside the pod")
	f.StringVar(&spec.Netns, "netns", "", "path of the pod's network namespace")
	f.BoolVar(&spec.InPod, "in-pod", false, "attach inside the pod also when the interface is one end of a pair, whose other end is not this node's")
	f.StringVar(&path, "service-path", string(state.PathBoth), "where its Services are translated: both, socket, tc or none")
	labels.register(f)
	refuseEmpty(f)
	cobra.CheckErr(cmd.MarkFlagRequired("ifname"))
	cobra.CheckErr(cmd.MarkFlagRequired("netns"))
	return cmd
}

// attach makes an interface an endpoint.
func attach(ctx context.Context, g *globals, spec engine.EndpointSpec) error {
	return g.with(ctx, false, func(e *engine.Engine) error {
		_, err := e.AddEndpoint(ctx, spec)
		return errors.Join(err, cni.LookAgain(g.scope())) // its addresses may be in the plugin's pools
	})
}

// detach removes the endpoint of an interface; an absent one is success.
func detach(ctx context.Context, g *globals, netns, ifname string) error {
	path, err := filepath.Abs(g.path(netns))
	if err != nil {
		return err
	}
	return g.with(ctx, true, func(e *engine.Engine) error {
		id, err := e.FindEndpoint(path, ifname)
		if errors.Is(err, engine.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		return e.RemoveEndpoint(id)
	})
}

// endpointView is an endpoint as it is printed.
type endpointView struct {
	ID          uint32        `json:"id"`
	Namespace   string        `json:"namespace,omitempty"` // of Kubernetes
	Pod         string        `json:"pod,omitempty"`
	IPs         []string      `json:"ips"`
	Netns       string        `json:"netns"`
	IfName      string        `json:"ifname"`
	Host        string        `json:"host"` // the host's end; "" in-pod
	IfIndex     int           `json:"ifindex"`
	LxcMAC      string        `json:"lxc_mac"`
	NodeMAC     string        `json:"node_mac"`
	Placement   string        `json:"placement"`
	ServicePath string        `json:"service_path"`
	Attach      string        `json:"attach"`
	MTU         int           `json:"mtu"`
	Owner       state.Owner   `json:"owner"`
	FromPod     state.Counter `json:"from_pod"`
	ToPod       state.Counter `json:"to_pod"`
}

func viewEndpoint(e *engine.Engine, ep state.Endpoint) (endpointView, error) {
	v := endpointView{
		ID: ep.ID, Namespace: ep.Pod.Namespace, Pod: ep.Pod.Name, Netns: ep.Netns, IfName: ep.IfName, Host: ep.HostIf, IfIndex: ep.IfIndex,
		LxcMAC: ep.MAC.String(), NodeMAC: ep.NodeMAC.String(), Placement: string(ep.Placement),
		ServicePath: string(ep.ServicePath), Attach: ep.Attach, MTU: ep.MTU, Owner: ep.Owner, IPs: texts(ep.Addrs()),
	}
	var err error
	v.FromPod, v.ToPod, err = e.Counters(ep.ID)
	return v, err
}

func newEpLsCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List endpoints; -o wide adds where they are and what they sent",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return g.with(cmd.Context(), true, func(e *engine.Engine) error {
				list, err := e.Endpoints()
				if err != nil {
					return err
				}
				views := make([]endpointView, len(list))
				for i, ep := range list {
					if views[i], err = viewEndpoint(e, ep); err != nil {
						return err
					}
				}
				return g.print(cmd.OutOrStdout(), views, func(w io.Writer) { endpointTable(w, views, g.Output == "wide") })
			})
		},
	}
}

func endpointTable(w io.Writer, views []endpointView, wide bool) {
	header := []any{"ID", "IP", "HOST", "IFINDEX", "LXCMAC", "NODEMAC"}
	if wide {
		header = append(header, "PATH", "ATTACH", "FROM-POD", "TO-POD", "IFNAME", "NETNS", "POD")
	}
	row(w, header...)
	for _, v := range views {
		host := v.Host
		if host == "" {
			host = "(in pod)"
		}
		cells := []any{v.ID, strings.Join(v.IPs, ","), host, v.IfIndex, v.LxcMAC, v.NodeMAC}
		if wide {
			cells = append(cells, v.ServicePath, v.Attach, counterText(v.FromPod), counterText(v.ToPod), v.IfName, v.Netns, podText(v))
		}
		row(w, cells...)
	}
}

// podText is the pod as why and observe name it, where its name is known.
func podText(v endpointView) string {
	switch {
	case v.Pod == "":
		return "-"
	case v.Namespace == "":
		return v.Pod
	}
	return v.Namespace + "/" + v.Pod
}

func counterText(c state.Counter) string {
	return fmt.Sprintf("%d/%s", c.Packets, strings.ReplaceAll(size(c.Bytes), " ", ""))
}

func newEpRmCmd(g *globals) *cobra.Command {
	var netns, ifname string
	var force bool
	cmd := &cobra.Command{
		Use:   "rm [ID…]",
		Short: "Give interfaces back to plain kernel networking, by --netns and --ifname or by id",
		Long: `Give interfaces back to plain kernel networking, by --netns and --ifname or by id.
A netkit pair that was made with policy blackhole, as pod add does, then drops
everything; ` + "`ip link set HOST-END type netkit forward peer forward`" + ` opens it.
A living pod that a runtime made is left alone without --force: no policy would hold
it, and no agent would put it back.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			named := netns != "" || ifname != ""
			if named == (len(args) > 0) || named && (netns == "" || ifname == "") {
				return usagef("name what to remove by --netns and --ifname, or by ids")
			}
			return g.with(cmd.Context(), true, func(e *engine.Engine) error {
				ids, err := endpointIDs(e, g.path(netns), ifname, args)
				if err != nil {
					return err
				}
				if !force {
					if err := runtimes(e, ids); err != nil {
						return err
					}
				}
				for _, id := range ids {
					err = errors.Join(err, e.RemoveEndpoint(id))
				}
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "also of living pods that a runtime made")
	cmd.Flags().StringVar(&ifname, "ifname", "", "the interface inside the pod")
	cmd.Flags().StringVar(&netns, "netns", "", "path of the pod's network namespace")
	return cmd
}

// runtimes says which of these endpoints a runtime made, and still has.
func runtimes(e *engine.Engine, ids []uint32) error {
	known, err := e.Endpoints()
	if err != nil {
		return err
	}
	dead, err := e.Dead(state.OwnerCNI)
	if err != nil {
		return err
	}
	for _, ep := range known {
		gone := slices.ContainsFunc(dead, func(d state.Endpoint) bool { return d.ID == ep.ID })
		if ep.Owner == state.OwnerCNI && !gone && slices.Contains(ids, ep.ID) {
			err = errors.Join(err, fmt.Errorf("endpoint %d is of a pod that a runtime made (%s in %s): no policy would hold it, and no agent would put it back; delete the pod, or `mustang ep rm --force %[1]d`", ep.ID, ep.IfName, ep.Netns))
		}
	}
	return err
}

// endpointIDs are those of what is named, all of which is there.
func endpointIDs(e *engine.Engine, netns, ifname string, args []string) ([]uint32, error) {
	if netns != "" {
		path, err := filepath.Abs(netns)
		if err != nil {
			return nil, err
		}
		id, err := e.FindEndpoint(path, ifname)
		if err != nil {
			return nil, err
		}
		return []uint32{id}, nil
	}
	known, err := e.Endpoints()
	if err != nil {
		return nil, err
	}
	var ids []uint32
	for _, arg := range args {
		n, err := strconv.ParseUint(arg, 10, 32)
		if err != nil {
			return nil, usagef("id %q is not a number; `mustang ep ls` shows the ids", arg)
		}
		id := uint32(n)
		if !slices.ContainsFunc(known, func(ep state.Endpoint) bool { return ep.ID == id }) {
			return nil, fmt.Errorf("endpoint %d: %w; `mustang ep ls` lists those that exist", id, engine.ErrNotFound)
		}
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}
