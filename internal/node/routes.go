// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// routeProtocol marks our routes, so that nobody else's is ever pruned ("m";
// the kernel and the usual daemons have other numbers, see rtnetlink(7)).
const routeProtocol = 'm'

// Self is the node of the list that this machine is: it has one of its addresses. Of several,
// as where an address has moved here that another was known by, it is the one called name, if
// that is known. Without one, the zero node.
func Self(nodes []state.Node, name string) (self state.Node, err error) {
	local, err := localAddrs()
	for _, n := range nodes {
		here := slices.ContainsFunc(n.Addrs, func(a netip.Addr) bool { _, ok := local[a]; return ok })
		if here && (self.Name == "" || n.Name == name) {
			self = n
		}
	}
	return self, err
}

// localAddrs are this namespace's addresses, and the links that have them.
func localAddrs() (map[netip.Addr]int, error) {
	list, err := netns.Addrs(nil)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	out := make(map[netip.Addr]int, len(list))
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			out[ip.Unmap()] = a.LinkIndex
		}
	}
	return out, nil
}

// OwnAddresses are this namespace's addresses that others than it can mean.
func OwnAddresses() (out []netip.Addr, err error) {
	local, err := localAddrs()
	for a := range local {
		if a.IsGlobalUnicast() {
			out = append(out, a)
		}
	}
	return out, err
}

// wish is a route that should be there.
type wish struct {
	node  state.Node
	route netlink.Route
}

// SyncRoutes makes the routes to the pods of remotes, and removes those of ours
// that are not wanted any more. Somebody else's route to a node's pods stays,
// and so does the lack of one where the node is not on a link of this one: both
// are a cloud's or a routing daemon's business. notes says so.
func SyncRoutes(remotes []state.Node, overlay *Overlay) (notes []string, err error) {
	have, err := podRoutes()
	if err != nil {
		return nil, err
	}
	missing, obsolete, notes, err := compareRoutes(remotes, overlay, have)
	errs := []error{err}
	for _, w := range missing {
		if err := netlink.RouteReplace(&w.route); err != nil {
			errs = append(errs, fmt.Errorf("add route to %s, of node %s: %w", w.route.Dst, w.node.Name, err))
		}
	}
	for _, r := range obsolete {
		errs = append(errs, deleteRoute(r))
	}
	return notes, errors.Join(errs...)
}

// RoutesCurrent says whether SyncRoutes has nothing to do.
func RoutesCurrent(remotes []state.Node, overlay *Overlay) (bool, error) {
	have, err := podRoutes()
	if err != nil {
		return false, err
	}
	missing, obsolete, _, err := compareRoutes(remotes, overlay, have)
	return err == nil && len(missing)+len(obsolete) == 0, err
}

// compareRoutes says which routes are to come and which to go.
func compareRoutes(remotes []state.Node, overlay *Overlay, have map[netip.Prefix][]netlink.Route) (missing []wish, obsolete []netlink.Route, notes []string, err error) {
	var errs []error
	wanted := map[netip.Prefix]bool{}
	ipv6 := overlay.hasIPv6()
	addrs := addressesOf(remotes)
	for _, n := range remotes {
		beside := ""
		if n.Mode == state.NodeVXLAN {
			beside = "; what comes from those pods and not by the tunnel is dropped"
		}
		wishes, note, err := wishesOf(n, overlay, ipv6)
		if note != "" {
			notes = append(notes, note)
		}
		if err != nil { // it is not known which are wanted: what there is stays
			errs = append(errs, err)
			for _, p := range n.PodCIDRs {
				wanted[p] = true
			}
			continue
		}
		for _, w := range wishes {
			dst := prefixOf(w.route.Dst)
			if other, taken := foreign(have[dst]); taken {
				notes = append(notes, fmt.Sprintf("the route to %s, of node %s, is another's (protocol %s) and stays%s", dst, n.Name, other.Protocol, beside))
				continue
			}
			if a, has := firstIn(addrs, dst); has && n.Mode != state.NodeVXLAN {
				notes = append(notes, fmt.Sprintf("pod CIDR %s of node %s has a node's address, %s: by a route to those pods that node would not be found, so none is made; give pods another", dst, n.Name, a))
				continue
			}
			wanted[dst] = true
			if !slices.ContainsFunc(have[dst], w.isThere) {
				missing = append(missing, w)
			}
		}
	}
	for dst, list := range have {
		for _, r := range list {
			if r.Protocol == routeProtocol && !wanted[dst] {
				obsolete = append(obsolete, r)
			}
		}
	}
	return missing, obsolete, notes, errors.Join(errs...)
}

// addressesOf are all addresses of nodes, in order.
func addressesOf(nodes []state.Node) (out []netip.Addr) {
	for _, n := range nodes {
		out = append(out, n.Addrs...)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// firstIn is the first of addresses in order that is in p.
func firstIn(addrs []netip.Addr, p netip.Prefix) (netip.Addr, bool) {
	i, _ := slices.BinarySearchFunc(addrs, p.Addr(), netip.Addr.Compare)
	if i == len(addrs) || !p.Contains(addrs[i]) {
		return netip.Addr{}, false
	}
	return addrs[i], true
}

// isThere says whether r is the route wished for.
func (w wish) isThere(r netlink.Route) bool {
	want := w.route
	return r.LinkIndex == want.LinkIndex && r.Gw.Equal(want.Gw) && r.MTU == want.MTU && r.MTULock == want.MTULock && r.Src.Equal(want.Src)
}

// RemoveRoutes removes all of ours.
func RemoveRoutes() error {
	_, err := SyncRoutes(nil, nil)
	return err
}

func deleteRoute(r netlink.Route) error {
	if err := netlink.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("remove route to %s: %w", r.Dst, err)
	}
	return nil
}

// podRoutes are the main table's routes by destination.
func podRoutes() (map[netip.Prefix][]netlink.Route, error) {
	out := map[netip.Prefix][]netlink.Route{}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		list, err := netns.Routes(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for _, r := range list {
			if r.Dst != nil {
				out[prefixOf(r.Dst)] = append(out[prefixOf(r.Dst)], r)
			}
		}
	}
	return out, nil
}

func foreign(list []netlink.Route) (netlink.Route, bool) {
	for _, r := range list {
		if r.Protocol != routeProtocol {
			return r, true
		}
	}
	return netlink.Route{}, false
}

// wishesOf are the routes to a node's pods; ipv6 says that the tunnel takes those of IPv6.
func wishesOf(n state.Node, overlay *Overlay, ipv6 bool) (out []wish, note string, err error) {
	for _, p := range n.PodCIDRs {
		r := netlink.Route{Dst: ipNet(p), Protocol: routeProtocol, Table: unix.RT_TABLE_MAIN}
		if n.Mode == state.NodeVXLAN {
			if p.Addr().Is6() && !ipv6 {
				note = fmt.Sprintf("this node has no IPv6, so there is no way to %s, of node %s", p, n.Name)
				continue
			}
			if err := overlay.lead(&r, p.Addr().Is4()); err != nil {
				return nil, "", fmt.Errorf("node %s: %w", n.Name, err)
			}
			out = append(out, wish{n, r})
			continue
		}
		gw := n.Addr(p.Addr().Is4())
		link, onLink, err := onLink(gw)
		if err != nil {
			return nil, "", fmt.Errorf("node %s: %w", n.Name, err)
		}
		if !onLink {
			note = fmt.Sprintf("node %s is on no link of this node: routes to its pods are the network's business", n.Name)
			continue
		}
		r.Gw, r.LinkIndex = gw.AsSlice(), link
		out = append(out, wish{n, r})
	}
	return out, note, nil
}

// noWay is what the kernel says where no route leads: none at all, one of type
// unreachable, prohibit or blackhole, or that it does not have the family.
var noWay = []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, unix.EOPNOTSUPP}

// onLink says by which link an address is reached, and whether without a router.
func onLink(a netip.Addr) (link int, yes bool, err error) {
	routes, err := netlink.RouteGet(a.AsSlice())
	for _, none := range noWay {
		if errors.Is(err, none) {
			return 0, false, nil
		}
	}
	if err != nil {
		return 0, false, fmt.Errorf("look up the route to %s: %w", a, err)
	}
	if len(routes) == 0 || len(routes[0].Gw) > 0 || routes[0].Via != nil {
		return 0, false, nil
	}
	return routes[0].LinkIndex, true, nil
}

// UnseenMTUs are routes by devices with an MTU of their own that programs do not
// see: bpf_fib_lookup tells it only where it is locked.
func UnseenMTUs(devices []Device) (out []string, err error) {
	by := make(map[int]Device, len(devices))
	for _, d := range devices {
		by[d.Index] = d
	}
	list, err := netns.Routes(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range list {
		for _, index := range hops(r) {
			if d, ok := by[index]; ok && r.Type == unix.RTN_UNICAST && r.MTU > 0 && r.MTU < d.MTU && !r.MTULock {
				out = append(out, fmt.Sprintf("%s by %s has the MTU %d", r.Dst, d.Name, r.MTU))
			}
		}
	}
	return out, nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func prefixOf(n *net.IPNet) netip.Prefix {
	a, _ := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), ones)
}
