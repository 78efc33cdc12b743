// SPDX-License-Identifier: Apache-2.0

package link

// bridge: the host's end of each pod's pair is a port of one bridge, which
// holds the gateway's address. Pods of a node are neighbours on it.

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

func (b *builder) addBridge() (Result, error) {
	br, err := b.ensureBridge()
	if err != nil {
		return Result{}, err
	}
	eth, host, err := b.makePair()
	if err != nil {
		return Result{}, err
	}
	if err := errors.Join(b.narrowBridge(br), b.widenHost(host)); err != nil {
		return Result{}, err
	}
	if err := b.plugIn(host, br); err != nil {
		return Result{}, err
	}
	// On a bridge the gateway's address is the bridge's, and so is its MAC.
	attach := func() error { return b.attachPair(eth, host, br.Attrs().HardwareAddr) }
	if err := b.lease(eth, host, attach); err != nil {
		return Result{}, err
	}
	if err := attach(); err != nil {
		return Result{}, err
	}
	if err := up(b.node, host); err != nil {
		return Result{}, err
	}
	if err := b.podOnSegment(eth); err != nil {
		return Result{}, err
	}
	if err := b.localRoutes(eth); err != nil {
		return Result{}, err
	}
	// In this order: the port's carrier is what gives the bridge its own.
	for _, l := range []netlink.Link{host, br} {
		if err := settle(b.node, l); err != nil {
			return Result{}, err
		}
	}
	if br, err = must(b.node, b.BridgeName); err != nil { // its MTU is another by now
		return Result{}, err
	}
	res := pairResult(eth, host)
	res.setParent(br)
	return res, nil
}

// ensureBridge makes the node's bridge, or takes the one that is there.
func (b *builder) ensureBridge() (netlink.Link, error) {
	br, err := find(b.node, b.BridgeName)
	if err != nil {
		return nil, err
	}
	if br == nil {
		// A MAC of its own: else the bridge takes its lowest port's, and
		// changes it under the pods' neighbour entries as ports come and go.
		attrs := b.attrs(b.BridgeName, randomMAC())
		attrs.MTU = 0           // it follows its ports
		attrs.Group = linkGroup // an uninstall deletes no other
		snoop := false
		err := b.node.LinkAdd(&netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &snoop})
		if err != nil && !errors.Is(err, unix.EEXIST) { // another Add may be as fast
			return nil, fmt.Errorf("create bridge %s: %w", b.BridgeName, err)
		}
		if br, err = must(b.node, b.BridgeName); err != nil {
			return nil, err
		}
	}
	if br.Type() != "bridge" {
		return nil, fmt.Errorf("%s is a %s, not a bridge: choose another bridge name", b.BridgeName, br.Type())
	}
	if br.Attrs().Group == linkGroup {
		return br, b.holdGateway(br, endRouted)
	}
	// It may be what the node itself lives by.
	return br, errors.Join(b.keepMAC(br), b.holdGateway(br, endTheirs))
}

// keepMAC gives a bridge that was there, and has no ports yet, the address that it has: one
// that nobody gave it was its own as long as that, and would be its lowest port's, which come
// and go. Where it has ports, no pod's is the lowest (portMAC).
func (b *builder) keepMAC(br netlink.Link) error {
	all, err := list(b.node)
	if err != nil || slices.ContainsFunc(all, func(l netlink.Link) bool { return l.Attrs().MasterIndex == br.Attrs().Index }) {
		return err
	}
	if err := b.node.LinkSetHardwareAddr(br, br.Attrs().HardwareAddr); err != nil {
		return fmt.Errorf("have %s keep its MAC address: %w", b.BridgeName, err)
	}
	return nil
}

// portMAC is an address that no bridge takes as its own beside a NIC's: it takes the lowest.
func portMAC() net.HardwareAddr {
	mac := randomMAC()
	mac[0] = 0xfe // the highest of those that are locally administered, and one device's
	return mac
}

// holdGateway makes a node's interface the pods' gateway: the bridge, or the
// shim.
func (b *builder) holdGateway(l netlink.Link, e end) error {
	if err := b.ifSysctls(l.Attrs().Name, b.IPv6.IsValid() || hasIPv6(b.node, l), e); err != nil {
		return err
	}
	if err := up(b.node, l); err != nil {
		return err
	}
	if b.Lease != nil {
		return nil // the network's own router has it
	}
	var hold []netip.Prefix
	for _, x := range b.gateways() {
		if !b.onLAN(family(x.gw)).IsValid() { // else a router out there has it
			hold = append(hold, netip.PrefixFrom(x.gw, b.network(x.gw).Bits()))
		}
	}
	hold, err := b.withoutRouters(l, hold)
	if err != nil {
		return err
	}
	for _, p := range hold {
		err = errors.Join(err, b.addAddr(b.node, l, p))
	}
	return err
}

// hasIPv6 reports whether another pod already made l an IPv6 gateway, which an
// IPv4-only pod must not switch off.
func hasIPv6(h *netlink.Handle, l netlink.Link) bool {
	addrs, err := netns.AddrsIn(h, l)
	return err != nil || slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.To4() == nil })
}

// plugIn makes the host's end a port.
func (b *builder) plugIn(host, br netlink.Link) error {
	if err := b.ifSysctls(b.HostIfName, false, endSwitched); err != nil {
		return err
	}
	if err := b.node.LinkSetMaster(host, br); err != nil {
		return fmt.Errorf("make %s a port of %s: %w", b.HostIfName, b.BridgeName, err)
	}
	// A pod that reaches itself through a Service leaves by the port it came in.
	if err := b.node.LinkSetHairpin(host, true); err != nil {
		return fmt.Errorf("set hairpin of %s: %w", b.HostIfName, err)
	}
	return nil
}

// podOnSegment finishes a pod that shares a segment with its gateway.
func (b *builder) podOnSegment(eth netlink.Link) error {
	if err := b.podBase(eth, b.IPv4, b.IPv6); err != nil {
		return err
	}
	for _, x := range b.gateways() {
		if err := b.addDefaultRoute(eth, x.gw, 0); err != nil {
			return err
		}
	}
	return nil
}
