// SPDX-License-Identifier: Apache-2.0

package engine

// How long a packet a pod may send off its node: what the wire takes, less the
// tunnel's headers. It is the MTU of the pod's default routes; its interface
// keeps its own, and so do the routes to the node's own pods. And how many such
// packets at once: a tunnel takes no bundle of more than 64 KiB.

import (
	"cmp"
	"errors"
	"fmt"
	"os"
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
	self, remotes, err := remotesOf(n)
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

// Connect is link.Add for a pod of the scope, whose routes are made by what its way to other
// nodes takes once its endpoint is there, and looked at again when they are. What is made
// stays when an error comes after it.
func Connect(scope Scope, spec link.Spec) (link.Result, error) {
	var way Way
	spec.ToNodes = func() (_ int, _ bool, err error) {
		way, err = ToNodes(scope)
		return way.MTU, way.Tunnel, err
	}
	res, err := link.Add(spec)
	if err == nil && link.CanLocalMTU(spec.Mode) {
		err = way.Follow(scope, cmp.Or(spec.Here.NetNS, spec.NetNS), res.PodIfIndex, res.PodMTU)
	}
	return res, err
}

// Way is what a new pod's way to other nodes takes.
type Way struct {
	MTU    int // bytes, of its default routes; 0: its interface's own
	Tunnel bool
	list   os.FileInfo // by which that is so; nil: there is none
}

// ToNodes is the way of a pod whose endpoint is there.
func ToNodes(scope Scope) (Way, error) {
	s := store.At(scope.withDefaults().StateDir)
	list, err := s.NodesFile()
	if err != nil {
		return Way{}, err
	}
	n, err := s.Nodes()
	return Way{n.ToldMTU(), n.Tunnel, list}, err
}

// Follow brings a pod's routes, which were made by w, to what has become of it meanwhile:
// who changed the list told the pods whose routes there were.
//
// pod: the network namespace, as this process finds it; index, mtu: of the interface there
func (w Way) Follow(scope Scope, pod string, index, mtu int) error {
	list, err := store.At(scope.withDefaults().StateDir).NodesFile()
	if err != nil || unreplaced(list, w.list) {
		return err
	}
	now, err := ToNodes(scope)
	if err != nil || now.MTU == w.MTU && now.Tunnel == w.Tunnel {
		return err
	}
	err = netns.Do(pod, func() error { return setMTU(index, mtu, []int{w.MTU}, now.MTU, now.Tunnel) })
	if err != nil {
		return fmt.Errorf("set MTU %d of a new pod's routes: %w", now.MTU, err)
	}
	return nil
}

// unreplaced says that nobody has replaced a file. A number may be used again, by one of another time.
func unreplaced(a, b os.FileInfo) bool {
	if a == nil || b == nil {
		return a == b
	}
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime())
}

// narrowPod gives a new pod's routes the MTU.
func (e *Engine) narrowPod(ep state.Endpoint) error {
	n, err := e.store.Nodes()
	if err != nil || n.ToldMTU() == 0 {
		return err
	}
	return e.setPodMTU(ep, []int{0}, n.ToldMTU(), n.Tunnel)
}

// untilTold is the list now as long as not all pods have been told what it asks: whoever is
// not reached keeps an MTU of before, and is told by the next change, or the next try.
func untilTold(before, now store.Nodes) store.Nodes {
	if len(before.Telling) == 0 && before.PodMTU == now.PodMTU && (before.Tunnel || !now.Tunnel) {
		return now
	}
	others := slices.DeleteFunc(slices.Clone(before.PodMTUs()), func(mtu int) bool { return mtu == now.PodMTU })
	now.PodMTU, now.Telling = 0, append(others, now.PodMTU)
	return now
}

// ErrUntold says that a list of nodes is in force, and that pods could not be told the
// MTU that it asks for: their routes are theirs, too. The next try tells them.
var ErrUntold = errors.New("not all pods could be told the MTU")

// tellPods brings all pods to what now asks, which is the present list from then on.
func (e *Engine) tellPods(telling, now store.Nodes) error {
	if len(telling.Telling) == 0 {
		return nil
	}
	if err := e.loadEndpoints(); err != nil {
		return err
	}
	var errs []error
	for _, ep := range e.known {
		errs = append(errs, e.setPodMTU(ep, telling.Telling, now.PodMTU, now.Tunnel))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w: %w", ErrUntold, err)
	}
	return e.store.PutNodes(now)
}

// tellAgain tells pods what some could not be told, where all else is as it is to be.
func (e *Engine) tellAgain(telling store.Nodes) error {
	now := telling
	now.PodMTU, now.Telling = telling.ToldMTU(), nil
	return e.tellPods(telling, now)
}

// setPodMTU changes the default routes of a pod behind a host end: one that is one
// of before, or none at all. Somebody else's stays. In front of a tunnel its bundles
// are kept to what that takes; larger ones want room over IPv6. A pod that is gone,
// or its interface, is success.
func (e *Engine) setPodMTU(ep state.Endpoint, before []int, now int, tunnel bool) error {
	if ep.Placement != state.HostEnd || ep.Netns == "" {
		return nil
	}
	err := e.inPod(ep, func() error { return setMTU(ep.PodIndex, ep.LinkMTU, before, now, tunnel) })
	if err != nil && !errors.As(err, new(netlink.LinkNotFoundError)) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("set MTU %d of the routes, and the bundles, of endpoint %d: %w", now, ep.ID, err)
	}
	return nil
}

// setMTU is setPodMTU in the pod's namespace.
func setMTU(index, mtu int, before []int, now int, tunnel bool) error {
	if mtu > 0 && now >= mtu {
		now = 0 // the interface's own is as good
	}
	if tunnel {
		if err := link.BundleForTunnel(&netlink.Handle{}, index); err != nil {
			return err
		}
	}
	pod, err := netlink.LinkByIndex(index)
	if err != nil {
		return err
	}
	was6 := []int{0}
	for _, mtu := range before {
		was6 = append(was6, mtu, link.WithJumboRoom(pod.Attrs(), mtu))
	}
	return errors.Join(
		setRouteMTU(unix.AF_INET, index, append([]int{0}, before...), now),
		setRouteMTU(unix.AF_INET6, index, was6, link.JumboRoom(pod.Attrs(), now)))
}

// setRouteMTU changes the default routes by an interface of the calling thread's
// namespace whose MTU is one of was.
func setRouteMTU(family, index int, was []int, now int) error {
	routes, err := netns.Routes(family, &netlink.Route{LinkIndex: index, Table: unix.RT_TABLE_MAIN},
		netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
	if err != nil {
		return err
	}
	for _, r := range routes {
		if !defaultRoute(r) || r.MTU == now || !slices.Contains(was, r.MTU) {
			continue
		}
		r.MTU = now
		r.Flags &^= unix.RTNH_F_DEAD | unix.RTNH_F_LINKDOWN // as it is now, which nobody may ask for
		if err := netlink.RouteReplace(&r); err != nil {
			return err
		}
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
