// SPDX-License-Identifier: Apache-2.0

package link

// Local MTU: pods of one node may send each other packets as long as loopback's,
// while to everybody else their MTU stays the uplink's. See docs/mtu.md.
//
// The pod's own interface keeps its MTU: sockets that go by the interface's
// (IP_PMTUDISC_PROBE and its kind), programs that read it, and routes that
// somebody adds are as right as before. What differs is the metric of the routes
// to the node's own pods, and the MTU of the host's end, which is what the kernel
// holds a packet from the pod against. Into a pod a long packet comes by the
// datapath's redirect only; the node's own routes to the pod say the pod's MTU,
// so that the kernel answers what is too long, or cuts it.

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// MaxLocalMTU is the largest MTU, in bytes, that a route can have
// (ip_metrics_convert in the kernel).
const MaxLocalMTU = 65535 - 15

// CanLocalMTU reports whether a mode's links carry more between pods of a node
// than to others: pairs do. A sub-interface sends by its parent, and never more
// than that takes.
func CanLocalMTU(mode string) bool {
	return mode == Bridge || traitsOf[mode].routed && traitsOf[mode].pair
}

// podMTU is the MTU, in bytes, of the pod's interface of a pair.
func (s Spec) podMTU() int {
	if s.MTU == 0 {
		return 1500 // the kernel's default (ETH_DATA_LEN)
	}
	return s.MTU
}

func (s Spec) validateLocalMTU() error {
	if s.LocalMTU == 0 {
		return nil
	}
	switch {
	case !CanLocalMTU(s.Mode):
		return fmt.Errorf("local MTU %d cannot be with %s: no packet may be longer than the uplink's MTU there", s.LocalMTU, s.Mode)
	case len(s.LocalCIDRs) == 0:
		return errors.New("local MTU needs to know the node's pods: give their CIDRs")
	case s.LocalMTU <= s.podMTU() || s.LocalMTU > MaxLocalMTU:
		return fmt.Errorf("local MTU %d is out of range: use more than the pod's MTU, %d, and at most %d", s.LocalMTU, s.podMTU(), MaxLocalMTU)
	}
	for _, c := range s.LocalCIDRs {
		if !c.IsValid() || c.Bits() == 0 || c != c.Masked() {
			return fmt.Errorf("local CIDR %s is not a network's: no bits may be set after its length, which is not 0", c)
		}
	}
	return nil
}

// widenHost makes the host's end take what the pod may send to its siblings. It
// must be done before the host has routes by it: the kernel raises an IPv6
// route's metric together with the interface (rt6_mtu_change).
func (b *builder) widenHost(host netlink.Link) error {
	if b.LocalMTU == 0 || host.Attrs().MTU == b.LocalMTU {
		return nil // a veth pair is made so
	}
	if err := b.node.LinkSetMTU(host, b.LocalMTU); err != nil {
		return fmt.Errorf("set MTU %d of %s: %w", b.LocalMTU, b.HostIfName, err)
	}
	host.Attrs().MTU = b.LocalMTU
	return nil
}

// narrowBridge keeps the bridge's own MTU at what pods take, while its ports
// take more. A bridge follows its ports until somebody sets it: from then on, it
// must be told of a pod that takes less.
func (b *builder) narrowBridge(br netlink.Link) error {
	if b.LocalMTU == 0 && br.Attrs().MTU == b.podMTU() {
		return nil
	}
	br, err := must(b.node, br.Attrs().Name)
	if err != nil {
		return err
	}
	if br.Attrs().Alias == narrowAlias && br.Attrs().MTU <= b.podMTU() {
		return nil
	}
	smallest, err := b.smallestPort(br)
	if err != nil {
		return err
	}
	now, mtu := br.Attrs().MTU, b.podMTU()
	if smallest > 0 {
		mtu = min(mtu, now)
	}
	follows := smallest <= now
	if follows && b.LocalMTU == 0 || !follows && now == mtu {
		return nil
	}
	steps := []int{mtu}
	if now == mtu {
		// Setting what it has would not be noticed.
		steps = []int{mtu + 1, mtu}
	}
	for _, step := range steps {
		if err := b.node.LinkSetMTU(br, step); err != nil {
			return fmt.Errorf("set MTU %d of %s: %w", step, br.Attrs().Name, err)
		}
	}
	if err := b.node.LinkSetAlias(br, narrowAlias); err != nil {
		return fmt.Errorf("set alias of %s: %w", br.Attrs().Name, err)
	}
	return nil
}

// narrowAlias says of a bridge that its MTU was set: it cannot be asked, and to
// look at all its ports for each new one would take ever longer.
const narrowAlias = "mustang bridge with an MTU of its own"

// smallestPort is the smallest MTU of the bridge's ports; 0: it has none.
func (b *builder) smallestPort(br netlink.Link) (int, error) {
	links, err := list(b.node)
	if err != nil {
		return 0, fmt.Errorf("ports of %s: %w", br.Attrs().Name, err)
	}
	smallest := 0
	for _, l := range links {
		if a := l.Attrs(); a.MasterIndex == br.Attrs().Index && (smallest == 0 || a.MTU < smallest) {
			smallest = a.MTU
		}
	}
	return smallest, nil
}

// hostRouteMTU is the metric of the node's route to the pod; 0 leaves it to the
// interface.
func (b *builder) hostRouteMTU() int {
	if b.LocalMTU == 0 {
		return 0
	}
	return b.podMTU()
}

// localRoutes gives the pod its ways to the node's own pods. Where the pod's other
// interface has one, that one stays.
func (b *builder) localRoutes(eth netlink.Link) error {
	if b.LocalMTU == 0 {
		return nil
	}
	if err := b.findBlackHoles(); err != nil {
		return err
	}
	for _, x := range []struct {
		own netip.Prefix
		gw  netip.Addr
	}{{b.IPv4, b.Gateway4}, {b.IPv6, b.Gateway6}} {
		if !x.own.IsValid() {
			continue
		}
		for _, cidr := range b.LocalCIDRs {
			if cidr.Addr().Is4() != x.own.Addr().Is4() {
				continue
			}
			if err := b.localRoute(eth, cidr, x.own, x.gw); err != nil {
				return err
			}
		}
	}
	return nil
}

// findBlackHoles lets the pod's TCP try shorter segments when long ones get lost
// (RFC 4821). On a bridge without mustang's programs, after `mustang reset`,
// nobody would tell it that they are too long. A pod's own choice stays.
func (b *builder) findBlackHoles() error {
	if b.Mode != Bridge {
		return nil
	}
	return b.inPod(func() error {
		key := b.sysctl("ipv4/tcp_mtu_probing") // also IPv6's
		if was, err := os.ReadFile(key); err == nil && string(was) != "0\n" {
			return nil
		}
		if err := os.WriteFile(key, []byte("1"), 0); err != nil {
			return fmt.Errorf("set sysctl %s in the pod: %w", key, err)
		}
		return nil
	})
}

func (b *builder) localRoute(eth netlink.Link, cidr, own netip.Prefix, gw netip.Addr) error {
	far := &netlink.Route{LinkIndex: eth.Attrs().Index, Dst: ipNet(cidr), Gw: gw.AsSlice(), MTU: b.LocalMTU}
	if traitsOf[b.Mode].routed {
		far.Flags = unix.RTNH_F_ONLINK
		return b.addLocalRoute(far)
	}
	// On a segment, neighbours are reached without the gateway, which itself is
	// no pod.
	near := func(p netip.Prefix, mtu int) *netlink.Route {
		r := &netlink.Route{LinkIndex: eth.Attrs().Index, Dst: ipNet(p), Src: own.Addr().AsSlice(), Scope: netlink.SCOPE_LINK, MTU: mtu}
		if p == own.Masked() {
			// In place of the one that the kernel made with the address.
			r.Protocol = unix.RTPROT_KERNEL
			if p.Addr().Is6() {
				r.Priority = kernelMetric6
			}
		}
		return r
	}
	var routes []*netlink.Route
	if gw.IsValid() {
		routes = append(routes, near(single(gw), 0))
	}
	inside := own.Contains(cidr.Addr()) && cidr.Bits() >= own.Bits()
	if inside {
		routes = append(routes, near(cidr, b.LocalMTU))
	} else if gw.IsValid() {
		routes = append(routes, far)
	}
	if !inside && cidr.Contains(own.Addr()) {
		routes = append(routes, near(own.Masked(), b.LocalMTU))
	}
	for _, r := range routes {
		if err := b.addLocalRoute(r); err != nil {
			return err
		}
	}
	return nil
}

// kernelMetric6 is the kernel's own for a connected network (IP6_RT_PRIO_ADDRCONF).
const kernelMetric6 = 256

func (b *builder) addLocalRoute(r *netlink.Route) error {
	if _, err := AddRoute(b.pod, r); err != nil {
		return fmt.Errorf("add route to the node's pods %s: %w", r.Dst, err)
	}
	return nil
}
