// SPDX-License-Identifier: Apache-2.0

package link

// veth, routed: the host is the pod's router. The pod has one route, to a next
// hop that nobody owns, and a permanent neighbour that says where it is.
// proxy_arp would do the same, but holds the first answer back by up to 0.8 s
// (neigh/*/proxy_delay). netkit is routed the same way.

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func (b *builder) addVeth() (Result, error) {
	eth, host, err := b.makePair()
	if err != nil {
		return Result{}, err
	}
	return b.routedPair(eth, host)
}

// routedPair finishes a pair whose host end is the pod's router.
func (b *builder) routedPair(eth, host netlink.Link) (Result, error) {
	if err := b.widenHost(host); err != nil {
		return Result{}, err
	}
	if err := b.attachPair(eth, host, host.Attrs().HardwareAddr); err != nil {
		return Result{}, err
	}
	if err := b.hostRouted(host, eth); err != nil {
		return Result{}, err
	}
	if err := b.podRouted(eth, host); err != nil {
		return Result{}, err
	}
	return pairResult(eth, host), nil
}

// makePair creates the pair from within the pod: its interface appears there,
// the peer appears in the node's namespace, and neither is ever moved.
func (b *builder) makePair() (eth, host netlink.Link, err error) {
	attrs := b.attrs(b.IfName, b.podMAC())
	attrs.Group = linkGroup
	hostMAC := randomMAC()
	if b.Mode == Bridge {
		hostMAC = portMAC()
	}
	veth := &netlink.Veth{
		LinkAttrs:        attrs,
		PeerMTU:          uint32(b.LocalMTU), // 0: the pod's
		PeerName:         b.HostIfName,
		PeerHardwareAddr: hostMAC,
		PeerNamespace:    netlink.NsFd(b.nodeNS.Fd()),
	}
	if err := b.pod.LinkAdd(veth); err != nil {
		return nil, nil, fmt.Errorf("create veth %s with host end %s: %w", b.IfName, b.HostIfName, err)
	}
	if eth, err = must(b.pod, b.IfName); err != nil {
		return nil, nil, err
	}
	// Each end knows the other's index, and the rest was given.
	attrs = b.attrs(b.HostIfName, veth.PeerHardwareAddr)
	attrs.Index, attrs.MTU = eth.Attrs().ParentIndex, cmp.Or(b.LocalMTU, eth.Attrs().MTU)
	return eth, &netlink.Veth{LinkAttrs: attrs}, nil
}

func (b *builder) hostRouted(host, eth netlink.Link) error {
	if err := b.ifSysctls(b.HostIfName, b.IPv6.IsValid(), endRouted); err != nil {
		return err
	}
	if err := up(b.node, host); err != nil {
		return err
	}
	for _, x := range b.gateways() {
		if x.gw.IsLinkLocalUnicast() && x.gw.Is6() {
			// So that the pod can ping its gateway, and traceroute shows it.
			if err := b.addAddr(b.node, host, netip.PrefixFrom(x.gw, 64)); err != nil {
				return err
			}
		}
		if b.Mode == NetkitL3 {
			continue // nobody has a link address
		}
		if err := addNeigh(b.node, host, x.ip, eth.Attrs().HardwareAddr); err != nil {
			return err
		}
	}
	return nil
}

// podRouted finishes the pod's side, and only then the host's routes: they
// need both ends up, and a route is what makes the pod reachable.
func (b *builder) podRouted(eth, host netlink.Link) error {
	if err := b.podBase(eth, only(b.IPv4), only(b.IPv6)); err != nil {
		return err
	}
	if err := settle(b.node, host); err != nil {
		return err
	}
	for _, x := range b.gateways() {
		if b.Mode != NetkitL3 {
			if err := addNeigh(b.pod, eth, x.gw, host.Attrs().HardwareAddr); err != nil {
				return err
			}
		}
		if err := b.addDefaultRoute(eth, x.gw, unix.RTNH_F_ONLINK); err != nil {
			return err
		}
		if err := addHostRoute(b.node, host, x.ip, b.hostRouteMTU()); err != nil {
			return err
		}
	}
	return b.localRoutes(eth)
}

func pairResult(eth, host netlink.Link) Result {
	return Result{
		HostIfIndex: host.Attrs().Index, HostMAC: host.Attrs().HardwareAddr, HostMTU: host.Attrs().MTU,
		PodIfIndex: eth.Attrs().Index, PodMAC: eth.Attrs().HardwareAddr, PodMTU: eth.Attrs().MTU,
	}
}

func (r *Result) setParent(l netlink.Link) {
	r.ParentIfIndex, r.ParentMAC, r.ParentMTU = l.Attrs().Index, l.Attrs().HardwareAddr, l.Attrs().MTU
}
