// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// A node that several devices lead to has the program at each: what comes from there
// comes by any of them.
func TestDevicesOfSeveralNextHops(t *testing.T) {
	n := newDoorNode(t)
	n.run("ip link add second type veth peer name far && ip link set far up && ip link set second up")
	for family, c := range map[string]struct{ node, route string }{
		"IPv4":                    {"192.0.2.1", "192.0.2.1 nexthop dev nic nexthop dev second"},
		"IPv6":                    {"2001:db8:9::1", "2001:db8:9::1 nexthop via fe80::9 dev nic nexthop via fe80::9 dev second"},
		"IPv4 by link-local IPv6": {"192.0.2.2", "192.0.2.2 nexthop via inet6 fe80::9 dev nic nexthop via inet6 fe80::9 dev second"},
	} {
		n.run("ip route add %s", c.route)
		far := state.Node{Name: "far", Addrs: []netip.Addr{netip.MustParseAddr(c.node)}}
		devices, err := Devices(nil, state.Node{}, []state.Node{far})
		names := map[string]bool{}
		for _, d := range devices {
			names[d.Name] = true
		}
		if err != nil || !names["nic"] || !names["second"] {
			t.Errorf("%s: %v, %v; want nic and second among them", family, devices, err)
		}
	}
}

// What a tunnel for IP alone carries has no link header, which programs read.
func TestDevicesWithoutALinkHeaderAreLeftOut(t *testing.T) {
	n := newDoorNode(t)
	n.run("ip tuntap add dev bare mode tun && ip addr add 10.77.0.1/24 dev bare && ip link set bare up")
	n.run("ip route add 192.0.2.1 dev bare && ip route add 192.0.2.2 dev nic")
	by := func(a string, mode state.NodeMode) []state.Node {
		return []state.Node{{Name: "far", Addrs: []netip.Addr{netip.MustParseAddr(a)}, Mode: mode}}
	}
	self := state.Node{Addrs: []netip.Addr{netip.MustParseAddr("10.77.0.1")}}
	for _, named := range [][]string{nil, {"bare", "nic"}} {
		devices, err := Devices(named, self, slices.Concat(by("192.0.2.1", state.NodeDirect), by("192.0.2.2", state.NodeDirect)))
		if err != nil || len(devices) != 1 || devices[0].Name != "nic" {
			t.Errorf("of %q: %v, %v; want nic alone", named, devices, err)
		}
	}
	if err := CheckDevices([]string{"nic", "bare"}); err == nil || !strings.Contains(err.Error(), "device bare carries IP without a link header") {
		t.Errorf("%v", err)
	}
	for want, remotes := range map[string][]state.Node{"bare": by("192.0.2.1", state.NodeDirect), "": slices.Concat(by("192.0.2.1", state.NodeVXLAN), by("192.0.2.2", state.NodeDirect))} {
		if got, err := BareWay(remotes); got != want || err != nil {
			t.Errorf("%v: %q, %v, want %q", remotes, got, err, want)
		}
	}
}

// A router's advertisement may say that IPv6 takes less than the device does.
func TestThePathsMTUIsNoMoreThanIPv6Takes(t *testing.T) {
	n := newDoorNode(t)
	n.run("sysctl -qw net.ipv6.conf.nic.mtu=1400")
	n.run("ip route add 2001:db8:9::1 dev nic && ip route add 192.0.2.1 dev nic")
	for to, want := range map[string]int{"2001:db8:9::1": 1400, "192.0.2.1": 1500} {
		if got, err := pathMTU(netip.MustParseAddr(to)); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", to, got, err, want)
		}
	}
}

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
