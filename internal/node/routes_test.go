// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net/netip"
	"slices"
	"testing"
)

// A route that refuses is no way to a node, and no reason to leave the others without theirs.
func TestARouteThatRefusesIsNoWay(t *testing.T) {
	n := newDoorNode(t)
	for family, a := range map[string]netip.Addr{"-4": netip.MustParseAddr("192.0.2.1"), "-6": netip.MustParseAddr("2001:db8:9::1")} {
		for _, kind := range []string{"blackhole", "prohibit", "unreachable"} {
			n.run("ip %s route add %s %s", family, kind, a)
			if _, yes, err := onLink(a); err != nil || yes {
				t.Errorf("%s %s: %v, %v", kind, a, yes, err)
			}
			n.run("ip %s route del %s %s", family, kind, a)
		}
	}
}

// Programs hold no packet against a route's MTU that is not locked, so such routes are named.
func TestRoutesWhoseMTUProgramsDoNotSee(t *testing.T) {
	n := newDoorNode(t)
	nic, err := linkNamed("nic")
	if err != nil {
		t.Fatal(err)
	}
	n.run("ip route add 192.0.2.0/24 dev nic mtu 1400 && ip route add 198.18.0.0/24 dev nic mtu 1400 table 7")
	n.run("ip -6 route add 2001:db8:9::/64 dev nic mtu 1400")
	for _, seen := range []string{"198.18.1.0/24 dev nic", "198.18.2.0/24 dev nic mtu lock 1400", "198.18.3.0/24 dev nic mtu 1500", "198.18.4.0/24 dev lo mtu 1400"} {
		n.run("ip route add %s", seen)
	}
	got, err := UnseenMTUs([]Device{deviceOf(nic)})
	slices.Sort(got)
	want := []string{"192.0.2.0/24 by nic has the MTU 1400", "198.18.0.0/24 by nic has the MTU 1400", "2001:db8:9::/64 by nic has the MTU 1400"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
}
