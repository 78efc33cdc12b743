// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// Two ends whose ways lie at one place, by different devices.
func TestAWayIsItsOwnEnds(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		if !m.v6 {
			return
		}
		wire, err := netlink.LinkByName("wire")
		check(t, err)
		near, far := end(netip.MustParseAddr("2001:db8::77"), m.to.Port()), end(netip.MustParseAddr("2001:db8:1::77"), m.to.Port())
		_, to, err := net.ParseCIDR("2001:db8:1::/64")
		check(t, err)
		neigh := func(ip netip.AddrPort, link netlink.Link) {
			check(t, netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: ip.Addr().AsSlice(), HardwareAddr: Router[:], State: netlink.NUD_PERMANENT}))
		}
		nic, err := netlink.LinkByName("nic")
		check(t, err)
		check(t, netlink.RouteReplace(&netlink.Route{LinkIndex: wire.Attrs().Index, Dst: to}))
		neigh(near, nic)
		neigh(far, wire)
		for i := range uint16(3) {
			m.open(m.pod, end(m.from.Addr(), m.from.Port()+2*i), near)
			a := m.answer(m.pod, end(m.from.Addr(), m.from.Port()+2*i+1), far, syn)
			if a.Direct || a.Tuple().Src.Addr() != m.from.Addr() {
				m.t.Errorf("by another device: %v", a)
			}
		}
	})
}

// Over IPv6 the protocol, too, chooses among next hops: what one of two ends' flows has shown is no other protocol's way.
func TestAWayIsItsOwnProtocols(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		if !m.v6 || m.proto != oracle.TCP {
			return
		}
		route := &netlink.Route{Dst: &net.IPNet{IP: net.ParseIP("2001:db8:66::"), Mask: net.CIDRMask(64, 128)}}
		for _, name := range []string{"nic", "wire"} {
			link, err := netlink.LinkByName(name)
			check(t, err)
			gateway := net.ParseIP("fe80::60")
			check(t, netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: gateway, HardwareAddr: Router[:], State: netlink.NUD_PERMANENT}))
			route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{LinkIndex: link.Attrs().Index, Gw: gateway})
		}
		check(t, netlink.RouteReplace(route))
		udp := m
		udp.proto = oracle.UDP
		byNIC := func(m masqueraded, to netip.AddrPort) bool { // by the other device it keeps its address
			m.t.Helper()
			m.from = end(m.from.Addr(), m.from.Port()+1)
			a := m.answer(m.pod, m.from, to, syn)
			if a.Dropped != "" {
				m.t.Fatal(a)
			}
			return a.Tuple().Src.Addr() != m.from.Addr()
		}
		apart := 0
		for i := range 40 {
			to := end(netip.MustParseAddr(fmt.Sprintf("2001:db8:66::%x", i+1)), 80)
			alone := byNIC(m, to)
			m.edge.ageWays(t)
			m.edge.ClearFlows(t)
			if byNIC(udp, to) == alone {
				continue
			}
			apart++
			if byNIC(m, to) != alone {
				t.Errorf("TCP goes as UDP to %v: by the NIC %v, alone %v", to, !alone, alone)
			}
		}
		if apart == 0 {
			t.Error("no two protocols go apart")
		}
	})
}

// Rules by the source ask for the pod's address, which no longer is the packet's.
func TestAMasqueradedFlowIsRoutedAsThePods(t *testing.T) {
	const table = 100
	beyond := net.HardwareAddr{0x02, 0, 0, 0, 0x0b, 0x01}
	eachMasqueraded(t, func(m masqueraded) {
		nic, err := netlink.LinkByName("nic")
		check(t, err)
		gateway := External(60, m.v6).AsSlice()
		_, all, err := net.ParseCIDR(map[bool]string{false: "0.0.0.0/0", true: "::/0"}[m.v6])
		check(t, err)
		check(t, netlink.NeighSet(&netlink.Neigh{LinkIndex: nic.Attrs().Index, IP: gateway, HardwareAddr: beyond, State: netlink.NUD_PERMANENT}))
		check(t, netlink.RouteReplace(&netlink.Route{LinkIndex: nic.Attrs().Index, Dst: all, Gw: gateway, Table: table, Flags: int(netlink.FLAG_ONLINK)}))
		rule := netlink.NewRule()
		rule.Family, rule.Table, rule.Priority = map[bool]int{false: netlink.FAMILY_V4, true: netlink.FAMILY_V6}[m.v6], table, 50
		rule.Src = &net.IPNet{IP: m.pod.IP(m.v6).AsSlice(), Mask: net.CIDRMask(m.pod.IP(m.v6).BitLen(), m.pod.IP(m.v6).BitLen())}
		check(t, netlink.RuleAdd(rule))
		defer netlink.RuleDel(rule)
		worn, far := m.open(m.pod, m.from, m.to)
		flags := uint8(ack)
		if m.echo() {
			flags = 0
		}
		a := m.answer(m.pod, m.from, m.to, flags) // by the way that the first has shown
		m.want("more", a, 0, worn, far)
		if got := net.HardwareAddr(a.Frame[:6]); got.String() != beyond.String() {
			m.t.Errorf("protocol %d goes to %s, want %s", m.proto, got, beyond)
		}
	})
}
