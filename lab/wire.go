// SPDX-License-Identifier: Apache-2.0

package lab

// Wires: between each node and outside, and between the nodes.

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// makeUplinks lays the wire between each node and outside. Several nodes are
// plugged into a switch there, which is outside's interface.
func (l *Lab) makeUplinks() error {
	if len(l.nodes) == 1 {
		return l.makeWire(l.Node().Space, Uplink, l.outside.Space, Uplink)
	}
	if err := l.outside.Do(func() error { return l.makeBridge(Uplink, nil) }); err != nil {
		return fmt.Errorf("outside: %w", err)
	}
	for _, n := range l.nodes {
		if err := l.plug(n, Uplink, l.outside.Space); err != nil {
			return err
		}
	}
	return nil
}

// joinNodes gives several nodes a network of their own: two are joined by a
// wire, so that nothing but the nodes is in the way of what is measured.
func (l *Lab) joinNodes() error {
	sw := Space{}
	switch len(l.nodes) {
	case 1:
		return nil
	case 2:
		if err := l.makeWire(l.nodes[0].Space, Wire, l.nodes[1].Space, Wire); err != nil {
			return err
		}
	default:
		var err error
		if sw, err = l.makeNodesSwitch(); err != nil {
			return err
		}
	}
	for i, n := range l.nodes {
		n.Wire4, n.Wire6 = nth(NodesCIDR4, i+1), nth(NodesCIDR6, i+1)
		if err := n.Do(func() error {
			return setUp(Wire, addrs(n.Wire4, NodesCIDR4, n.Wire6, NodesCIDR6))
		}); err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	for _, n := range l.nodes {
		if err := n.Do(func() error { return settleWire(Wire, n.Wire6) }); err != nil {
			return err
		}
		if sw.NetNS == "" {
			continue
		}
		if err := sw.Do(func() error { return settleLink(n.Name) }); err != nil {
			return fmt.Errorf("switch: %w", err)
		}
	}
	return nil
}

// WireClients lays a wire between outside and the first node, by which outside
// reaches Services from then on: as between two nodes, no switch is in the way of
// what is measured.
func (l *Lab) WireClients() error {
	n := l.Node()
	if err := l.makeWire(n.Space, ClientWire, l.outside.Space, ClientWire); err != nil {
		return err
	}
	node4, node6, out4, out6 := nth(ClientsCIDR4, 1), nth(ClientsCIDR6, 1), nth(ClientsCIDR4, 2), nth(ClientsCIDR6, 2)
	if err := n.Do(func() error { return setUp(ClientWire, addrs(node4, ClientsCIDR4, node6, ClientsCIDR6)) }); err != nil {
		return fmt.Errorf("node %s: %w", n.Name, err)
	}
	err := l.outside.Do(func() error {
		for _, p := range []netip.Prefix{ServiceCIDR4, ServiceCIDR6} {
			if err := netlink.RouteDel(&netlink.Route{Dst: ipNet(p)}); err != nil {
				return fmt.Errorf("remove route to %s: %w", p, err)
			}
		}
		if err := setUp(ClientWire, addrs(out4, ClientsCIDR4, out6, ClientsCIDR6),
			hop{node4, node6, []netip.Prefix{ServiceCIDR4, ServiceCIDR6}}); err != nil {
			return err
		}
		return settleWire(ClientWire, out6)
	})
	if err != nil {
		return fmt.Errorf("outside: %w", err)
	}
	return n.Do(func() error { return settleWire(ClientWire, node6) })
}

func (l *Lab) makeNodesSwitch() (sw Space, err error) {
	ns, err := createNetNS(l.nsName(switchName))
	if err != nil {
		return sw, err
	}
	sw = Space{NetNS: ns, env: l.info.mark()}
	if err := sw.Do(func() error { return l.makeBridge(Wire, nil) }); err != nil {
		return sw, fmt.Errorf("switch: %w", err)
	}
	if err := sw.Do(func() error { return linkUp(Wire) }); err != nil {
		return sw, fmt.Errorf("switch: %w", err)
	}
	for _, n := range l.nodes {
		if err := l.plug(n, Wire, sw); err != nil {
			return sw, err
		}
	}
	return sw, nil
}

// plug lays a wire from a node's interface name to the switch of that name in
// another space. Its port there has the node's name.
func (l *Lab) plug(n *Node, name string, sw Space) error {
	if err := l.makeWire(n.Space, name, sw, n.Name); err != nil {
		return err
	}
	return sw.Do(func() error {
		port, err := netlink.LinkByName(n.Name)
		if err != nil {
			return fmt.Errorf("look up %s: %w", n.Name, err)
		}
		br, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("look up %s: %w", name, err)
		}
		if err := netlink.LinkSetMaster(port, br); err != nil {
			return fmt.Errorf("plug %s into %s: %w", n.Name, name, err)
		}
		return linkUp(n.Name)
	})
}

// makeBridge makes a switch in the current namespace, where no firewall looks
// at what it switches. mac nil: it has a port's.
func (l *Lab) makeBridge(name string, mac net.HardwareAddr) error {
	if err := errors.Join(enableIPv6(), setBridgeNF(false)); err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = name, l.cfg.MTU, mac
	snoop := false
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &snoop}); err != nil {
		return fmt.Errorf("create switch %s: %w", name, err)
	}
	return nil
}

// makeWire lays a veth pair, each end created where it belongs.
func (l *Lab) makeWire(from Space, name string, to Space, peer string) error {
	far, err := vns.GetFromPath(to.NetNS)
	if err != nil {
		return err
	}
	defer far.Close()
	if err := from.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = name, l.cfg.MTU
		err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer, PeerMTU: uint32(l.cfg.MTU), PeerNamespace: netlink.NsFd(far)})
		if err != nil {
			return fmt.Errorf("create wire %s: %w", name, err)
		}
		return l.widenWire(name)
	}); err != nil {
		return err
	}
	return to.Do(func() error { return l.widenWire(peer) })
}

// hop is a next hop of each family, and what is reached by it.
type hop struct {
	via4, via6 netip.Addr
	to         []netip.Prefix
}

// addrs are an address of each family with their networks' lengths.
func addrs(ip4 netip.Addr, net4 netip.Prefix, ip6 netip.Addr, net6 netip.Prefix) []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(ip4, net4.Bits()), netip.PrefixFrom(ip6, net6.Bits())}
}

// setUp gives the current namespace its loopback, its end of a wire with
// addresses, and routes by it.
func setUp(name string, own []netip.Prefix, hops ...hop) error {
	if err := linkUp("lo"); err != nil {
		return err
	}
	if err := linkUp(name); err != nil {
		return err
	}
	wire, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("look up %s: %w", name, err)
	}
	for _, p := range own {
		a := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(wire, a); err != nil {
			return fmt.Errorf("add address %s to %s: %w", p, name, err)
		}
	}
	for _, h := range hops {
		for _, to := range h.to {
			via := h.via4
			if to.Addr().Is6() {
				via = h.via6
			}
			r := &netlink.Route{LinkIndex: wire.Attrs().Index, Dst: ipNet(to), Gw: via.AsSlice()}
			if err := netlink.RouteAdd(r); err != nil {
				return fmt.Errorf("add route to %s via %s: %w", to, via, err)
			}
		}
	}
	return nil
}

func linkUp(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("look up %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
