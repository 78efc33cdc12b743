// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net/netip"
	"strings"
	"testing"
)

// What a path carries is the route's metric, or the smallest of its devices' MTUs.
func TestThePathsMTUIsTheRoutes(t *testing.T) {
	n := newDoorNode(t)
	n.run("ip link add narrow type veth peer name far && ip link set far up && ip link set narrow mtu 1400 up")
	n.run("sysctl -qw net.ipv4.nexthop_compat_mode=0 && ip nexthop add id 7 dev narrow")
	for _, c := range []struct {
		name, route string
		want        int
	}{
		{"a device", "192.0.2.1 dev nic", 1500},
		{"a narrow one", "192.0.2.1 dev narrow", 1400},
		{"a metric", "192.0.2.1 dev nic mtu 1300", 1300},
		{"several hops", "192.0.2.1 nexthop dev nic nexthop dev narrow", 1400},
		{"several hops in another order", "192.0.2.1 nexthop dev narrow nexthop dev nic", 1400},
		{"a device", "2001:db8:9::1 dev nic", 1500},
		{"a metric", "2001:db8:9::1 dev nic mtu 1300", 1300},
		{"several hops", "2001:db8:9::1 nexthop via fe80::9 dev nic nexthop via fe80::9 dev narrow", 1400},
		{"several hops in another order", "2001:db8:9::1 nexthop via fe80::9 dev narrow nexthop via fe80::9 dev nic", 1400},
		{"a nexthop object", "192.0.2.1 nhid 7", 1400},
		{"a route that refuses", "unreachable 192.0.2.1", 0},
	} {
		n.run("ip route add %s", c.route)
		to, family := netip.MustParseAddr("192.0.2.1"), "-4"
		if strings.HasPrefix(c.route, "2001") {
			to, family = netip.MustParseAddr("2001:db8:9::1"), "-6"
		}
		if got, err := pathMTU(to); err != nil || got != c.want {
			t.Errorf("%s (%s): %d, %v, want %d", c.name, c.route, got, err, c.want)
		}
		n.run("ip %s route flush %s", family, to)
	}
}
