// SPDX-License-Identifier: Apache-2.0

package link

// Pods by macvlan or ipvlan on the very network that the node is on by their
// uplink. There the gateway is a router out there, and nobody else may have its
// address; what leads between node and pod is the shim, with routes and
// neighbours of their own: the node's address stays on the uplink alone, and the
// shim answers nobody's question for it, or the neighbours out there would learn
// the wrong link address.

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// findLAN looks for the node's own addresses, on the uplink, in the networks of
// the pod.
func (b *builder) findLAN(parent netlink.Link) error {
	addrs, err := netns.AddrsIn(b.node, parent)
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", b.Uplink, err)
	}
	b.lan = nil
	slices.SortStableFunc(addrs, func(x, y netlink.Addr) int { return cmp.Compare(passing(x), passing(y)) })
	for _, x := range addrs {
		a, _ := netip.AddrFromSlice(x.IP)
		a = a.Unmap()
		if x.Scope != unix.RT_SCOPE_UNIVERSE || x.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 || !b.network(a).Contains(a) {
			continue
		}
		if b.Mode == IPVlanL3 {
			return fmt.Errorf("IP %s is in the network of uplink %s, and pods by %s are behind the node, not beside it: give them a network of their own, or use %s", b.network(a), b.Uplink, b.Mode, IPVlan)
		}
		if b.network(a).Addr() == a {
			return fmt.Errorf("IP %s is the node's own, on %s: give the pod another", a, b.Uplink)
		}
		b.lan = append(b.lan, a)
	}
	return nil
}

// onLAN is the address under which the node speaks to the pod on its own network; zero: it is
// on none of that family.
func (b *builder) onLAN(f int) netip.Addr {
	if i := slices.IndexFunc(b.lan, func(a netip.Addr) bool { return family(a) == f }); i >= 0 {
		return b.lan[i]
	}
	return netip.Addr{}
}

// passing is 1 for an address that the node soon speaks under no more: a temporary or a
// deprecated one of IPv6. (Of IPv4 the same bit says that another was there before.)
func passing(x netlink.Addr) int {
	if x.IP.To4() == nil && x.Flags&(unix.IFA_F_TEMPORARY|unix.IFA_F_DEPRECATED) != 0 {
		return 1
	}
	return 0
}

// network is the pod's address and network of a's family.
func (b *builder) network(a netip.Addr) netip.Prefix {
	if a.Is4() {
		return b.IPv4
	}
	return b.IPv6
}

// meetNode leads the node to a pod on its own network, and the pod to the node,
// by the shim. Until then another pod may have the addresses.
func (b *builder) meetNode(eth, shim netlink.Link) error {
	b.met = true
	for _, node := range b.lan {
		if err := addNeigh(b.pod, eth, node, shim.Attrs().HardwareAddr); err != nil {
			return err
		}
	}
	for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
		node := b.onLAN(f)
		if !node.IsValid() {
			continue
		}
		pod := b.network(node).Addr()
		if err := addNeigh(b.node, shim, pod, eth.Attrs().HardwareAddr); err != nil {
			return err
		}
		r := &netlink.Route{LinkIndex: shim.Attrs().Index, Dst: ipNet(single(pod)), Src: node.AsSlice(), Scope: netlink.SCOPE_LINK}
		if err := b.node.RouteReplace(r); err != nil {
			return fmt.Errorf("add route to %s by %s: %w", pod, shim.Attrs().Name, err)
		}
	}
	return nil
}

// leaveNode is the reverse of meetNode on the node; absent is success.
func (b *builder) leaveNode() error {
	if !HasShim(b.Mode) || b.Uplink == "" {
		return nil
	}
	shim, err := find(b.node, ShimName(b.Mode, b.Uplink))
	if err != nil || shim == nil {
		return err
	}
	var errs []error
	for _, p := range []netip.Prefix{b.IPv4, b.IPv6} {
		if !p.IsValid() {
			continue
		}
		r := &netlink.Route{LinkIndex: shim.Attrs().Index, Dst: ipNet(single(p.Addr())), Scope: netlink.SCOPE_LINK}
		n := &netlink.Neigh{LinkIndex: shim.Attrs().Index, IP: net.IP(p.Addr().AsSlice()), Family: family(p.Addr())}
		for _, err := range []error{b.node.RouteDel(r), b.node.NeighDel(n)} {
			if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("remove the way to %s by %s: %w", p.Addr(), shim.Attrs().Name, err))
			}
		}
	}
	return errors.Join(errs...)
}
