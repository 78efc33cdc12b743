// SPDX-License-Identifier: Apache-2.0

package lab

// The address plan, the same in every lab: two labs do not see each other.
//
//	10.1.0.0/16    fd00:10:1::/64    pods, from .2; .1 is the gateway (not with veth and netkit)
//	10.2.0.0/16    fd00:10:2::/64    the wire between node (.1) and outside (.2); further nodes from .3
//	10.3.0.0/16    fd00:10:3::/64    the wire between nodes: .1, .2, …
//	10.4.0.0/16    fd00:10:4::/64    the wire that WireClients lays, between a node (.1) and outside (.2)
//	10.96.0.0/12   fd00:10:96::/108  Services, by convention; outside routes them to the node
//
// With several nodes each has a part of the pods' networks: n1 10.1.0.0/24 and
// fd00:10:1::/80, n2 10.1.1.0/24 and fd00:10:1:0:1::/80, and so on.
//
// The outside namespace also routes pods' addresses to the node; the node's
// default route leads outside.

import (
	"net/netip"
)

// The plan's networks.
var (
	PodCIDR4     = netip.MustParsePrefix("10.1.0.0/16")
	PodCIDR6     = netip.MustParsePrefix("fd00:10:1::/64")
	WireCIDR4    = netip.MustParsePrefix("10.2.0.0/16")
	WireCIDR6    = netip.MustParsePrefix("fd00:10:2::/64")
	NodesCIDR4   = netip.MustParsePrefix("10.3.0.0/16")
	NodesCIDR6   = netip.MustParsePrefix("fd00:10:3::/64")
	ClientsCIDR4 = netip.MustParsePrefix("10.4.0.0/16")
	ClientsCIDR6 = netip.MustParsePrefix("fd00:10:4::/64")
	ServiceCIDR4 = netip.MustParsePrefix("10.96.0.0/12")
	ServiceCIDR6 = netip.MustParsePrefix("fd00:10:96::/108")
)

// Uplink is the node's interface to the outside; outside calls its end the same.
const Uplink = "up0"

// Wire is a node's interface to the other nodes, where there are several.
const Wire = "wire0"

// ClientWire is what WireClients lays, at both ends.
const ClientWire = "client0"

// MaxNodes is how many a lab may have.
const MaxNodes = 16

// MaxPods is how many pods a node has addresses for, in a lab of so many nodes: the first
// is the gateway's, and the network's own and its broadcast address are nobody's.
func MaxPods(nodes int) int {
	v4, _ := podNets(1, nodes)
	return 1<<(32-v4.Bits()) - 3
}

// podNets are the networks of node i's pods, from 1, in a lab of so many nodes.
func podNets(i, nodes int) (v4, v6 netip.Prefix) {
	if nodes == 1 {
		return PodCIDR4, PodCIDR6
	}
	six := PodCIDR6.Addr().As16()
	six[9] = byte(i - 1)
	return netip.PrefixFrom(nth(PodCIDR4, (i-1)<<8), 24), netip.PrefixFrom(netip.AddrFrom16(six), 80)
}

// upAddrs are node i's addresses on the wire to outside, which has the second.
func upAddrs(i int) (v4, v6 netip.Addr) {
	if i > 1 {
		i++
	}
	return nth(WireCIDR4, i), nth(WireCIDR6, i)
}

// VIP4 and VIP6 are the i-th Service address, from 1.
func VIP4(i int) netip.Addr { return nth(ServiceCIDR4, i) }
func VIP6(i int) netip.Addr { return nth(ServiceCIDR6, i) }

// nth is the i-th address of a network, for i below 2³².
func nth(p netip.Prefix, i int) netip.Addr {
	b := p.Masked().Addr().As16()
	for k := 15; k >= 12; k-- {
		sum := int(b[k]) + i&0xff
		b[k] = byte(sum)
		i = i>>8 + sum>>8
	}
	if p.Addr().Is4() {
		return netip.AddrFrom16(b).Unmap()
	}
	return netip.AddrFrom16(b)
}
