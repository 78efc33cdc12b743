// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net/netip"
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
