// SPDX-License-Identifier: Apache-2.0

package lab

// The address plan, the same in every lab: two labs do not see each other.
//
//	10.1.0.0/16    fd00:10:1::/64    pods, from .2; .1 is the gateway (not with veth and netkit)
//	10.2.0.0/16    fd00:10:2::/64    the wire between node (.1) and outside (.2)
//	10.96.0.0/12   fd00:10:96::/108  Services, by convention; outside routes them to the node
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
	ServiceCIDR4 = netip.MustParsePrefix("10.96.0.0/12")
	ServiceCIDR6 = netip.MustParsePrefix("fd00:10:96::/108")
)

// Uplink is the node's interface to the outside; outside calls its end the same.
const Uplink = "up0"

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
