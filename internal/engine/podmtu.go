// SPDX-License-Identifier: Apache-2.0

package engine

// How long a packet a pod may send off its node: what the wire takes, less the
// tunnel's headers. It is the MTU of the pod's default routes; its interface
// keeps its own, and so do the routes to the node's own pods. And how many such
// packets at once: a tunnel takes no bundle of more than 64 KiB.

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
	"github.com/mustang-net/mustang/internal/store"
)

// podMTU is what n's nodes are reached with (0: there are none), and whether that is a tunnel.
func podMTU(n store.Nodes) (mtu int, tunnel bool, err error) {
	self, remotes, err := remotesOf(n.Nodes)
	if err != nil || len(remotes) == 0 {
		return 0, false, err
	}
	if mtu, err = peers.UnderlayMTU(remotes); err != nil {
		return 0, false, err
	}
	if tunnel = slices.ContainsFunc(remotes, func(r state.Node) bool { return r.Mode == state.NodeVXLAN }); tunnel {
		mtu -= peers.Overhead(self, remotes)
	}
	return mtu, tunnel, nil
}

// ToNodes says what a new pod's way to other nodes takes: the MTU of its default
// routes (0: its interface's own), and whether it is a tunnel. Whoever makes the
// pod's routes asks, for they come after its endpoint.
func ToNodes(scope Scope) (mtu int, tunnel bool, err error) {
	n, err := store.At(scope.withDefaults().StateDir).Nodes()
	return n.PodMTU, n.Tunnel, err
}

// narrowPod gives a new pod's routes the MTU.
func (e *Engine) narrowPod(ep state.Endpoint) error {
	n, err := e.store.Nodes()
	if err != nil || n.PodMTU == 0 {
		return err
	}
	return e.setPodMTU(ep, 0, n.PodMTU, n.Tunnel)
}

// syncPodMTU brings all pods from what one list of nodes asks to what another does.
func (e *Engine) syncPodMTU(before, now store.Nodes) error {
	if before.PodMTU == now.PodMTU && (before.Tunnel || !now.Tunnel) {
		return nil
	}
	if err := e.loadEndpoints(); err != nil {
		return err
	}
	var errs []error
	for _, ep := range e.known {
		errs = append(errs, e.setPodMTU(ep, before.PodMTU, now.PodMTU, now.Tunnel))
	}
	return errors.Join(errs...)
}

// setPodMTU changes the default routes of a pod behind a host end: one that is
// before, or none at all. Somebody else's stays. In front of a tunnel its bundles
// are kept to what that takes; larger ones want room over IPv6. A pod that is gone
// is success.
func (e *Engine) setPodMTU(ep state.Endpoint, before, now int, tunnel bool) error {
	if ep.Placement != state.HostEnd || ep.Netns == "" {
		return nil
	}
	if ep.LinkMTU > 0 && now >= ep.LinkMTU {
		now = 0 // the interface's own is as good
	}
	err := e.inPod(ep, func() error {
		if tunnel {
			if err := link.BundleForTunnel(&netlink.Handle{}, ep.PodIndex); err != nil {
				return err
			}
		}
		pod, err := netlink.LinkByIndex(ep.PodIndex)
		if err != nil {
			return err
		}
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			routes, err := netns.Routes(family, &netlink.Route{LinkIndex: ep.PodIndex, Table: unix.RT_TABLE_MAIN},
				netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			now, was := now, []int{0, before}
			if family == unix.AF_INET6 {
				now = link.JumboRoom(pod.Attrs(), now)
				was = append(was, link.WithJumboRoom(pod.Attrs(), before))
			}
			for _, r := range routes {
				if !defaultRoute(r) || r.MTU == now || !slices.Contains(was, r.MTU) {
					continue
				}
				r.MTU = now
				if err := netlink.RouteReplace(&r); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("set MTU %d of the routes, and the bundles, of endpoint %d: %w", now, ep.ID, err)
	}
	return nil
}

func defaultRoute(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0
}
