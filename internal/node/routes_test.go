// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
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

// Of a node of which it is not known how it is reached, the routes stay as they are; others' go on.
func TestRoutesOfANodeThatIsNotFoundStay(t *testing.T) {
	n := newDoorNode(t)
	n.run("ip addr add 192.0.2.1/24 dev nic")
	remote := func(name, address, pods string) state.Node {
		return state.Node{Name: name, Mode: state.NodeDirect, Addrs: []netip.Addr{netip.MustParseAddr(address)}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix(pods)}}
	}
	is := func(when string, want ...string) {
		t.Helper()
		got := strings.Fields(n.run("ip route show proto 109 | cut -d' ' -f1"))
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("%s: routes to %v, want %v", when, got, want)
		}
	}
	list := []state.Node{remote("n2", "192.0.2.2", "10.1.2.0/24"), remote("n3", "192.0.2.3", "10.1.3.0/24")}
	if _, err := SyncRoutes(list, nil); err != nil {
		t.Fatal(err)
	}
	is("at first", "10.1.2.0/24", "10.1.3.0/24")
	list[0].Mode = state.NodeVXLAN // without the tunnel's device, the way there cannot be said
	list[1] = remote("n4", "192.0.2.4", "10.1.4.0/24")
	if _, err := SyncRoutes(list, nil); err == nil || !strings.Contains(err.Error(), "node n2") {
		t.Errorf("the error is %v", err)
	}
	is("n2 is not found, n3 has gone", "10.1.2.0/24", "10.1.4.0/24")
	if _, err := SyncRoutes(list[1:], nil); err != nil {
		t.Fatal(err)
	}
	is("without n2", "10.1.4.0/24")
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

// A route to pods by which a node itself would not be found would come and go for ever, or lead that node's packets astray.
func TestNoRouteToPodsTakesANodesAddress(t *testing.T) {
	n := newDoorNode(t)
	n.run("ip addr add 192.0.2.1/24 dev nic")
	remote := func(name, address, pods string) state.Node {
		return state.Node{Name: name, Mode: state.NodeDirect, Addrs: []netip.Addr{netip.MustParseAddr(address)}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix(pods)}}
	}
	remotes := []state.Node{remote("own", "192.0.2.2", "192.0.2.0/27"), remote("another's", "192.0.2.3", "192.0.2.64/27"), remote("it", "192.0.2.70", "10.1.0.0/24")}
	for range 2 {
		notes, err := SyncRoutes(remotes, nil)
		said := strings.Join(notes, "\n")
		if err != nil || len(notes) != 2 || !strings.Contains(said, "192.0.2.0/27 of node own has a node's address, 192.0.2.2") || !strings.Contains(said, "192.0.2.64/27 of node another's has a node's address, 192.0.2.70") {
			t.Errorf("%q, %v", notes, err)
		}
		if got := strings.Fields(n.run("ip route show proto 109 | cut -d' ' -f1")); !slices.Equal(got, []string{"10.1.0.0/24"}) {
			t.Errorf("routes to %q", got)
		}
		if current, err := RoutesCurrent(remotes, nil); !current || err != nil {
			t.Errorf("they are current: %v, %v", current, err)
		}
	}
}

// An address that was another machine's, by which that one is known, has moved here.
func TestOfTwoNodesThisIsTheOneOfItsName(t *testing.T) {
	n := newDoorNode(t)
	n.run("ip addr add 192.0.2.1/24 dev nic && ip addr add 192.0.2.100/24 dev nic")
	list := []state.Node{{Name: "a", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.100")}}, {Name: "b", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}},
		{Name: "c", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.3")}}}
	for name, want := range map[string]string{"b": "b", "a": "a", "": "a", "c": "a", "d": "a"} { // c has no address here
		if self, err := Self(list, name); self.Name != want || err != nil {
			t.Errorf("called %q, it is %q, %v; want %q", name, self.Name, err, want)
		}
	}
}
