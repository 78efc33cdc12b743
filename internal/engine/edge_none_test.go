// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

// Where no address of the node takes node ports, the rest of the edge works: external addresses, also to the node's own
// sockets, whose answers are turned back. What flows wear follows the devices.
func TestAnEdgeWhoseAddressesTakeNoNodePorts(t *testing.T) {
	w := newEdgeWorld(t)
	want := Edge{Devices: []string{"w0"}, Prefixes: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}}
	if err := want.CheckPrefixes(); err == nil {
		t.Error("an address is in the prefix")
	}
	w.must(func(e *Engine) error { return e.SetEdge(want) })
	w.serve(w.home, "node", 8081)
	w.replace([]string{"198.51.100.1:8081"}, []string{"[2001:db8::1]:8081"}, nil)
	for v6, list := range externals {
		for _, to := range list {
			nodePort := netip.MustParseAddrPort(to).Port() == 30080
			name, _, err := askFor(map[bool]time.Duration{true: time.Second, false: 5 * time.Second}[nodePort], w.client, "tcp", to)
			if nodePort && err == nil || !nodePort && name != "node" {
				t.Errorf("IPv6 %v: %s: %q, %v", v6, to, name, err)
			}
		}
	}
	w.must(func(e *Engine) error { return e.SetEdge(want) }) // which looks for such Services anew
	w.must(func(e *Engine) error {
		turns, err := e.dp.Turns()
		if len(turns) != 1 {
			t.Errorf("answers are turned back at %v", turns)
		}
		return err
	})
	w.run("ip addr del 198.51.100.1/24 dev w0 && ip addr add 198.51.100.7/24 dev w0")
	w.must(func(e *Engine) error {
		changed, err := e.FollowEdge(want)
		s, unread := e.Edge()
		if err != nil || unread != nil || !changed || s.IP4 != netip.MustParseAddr("198.51.100.7") || len(s.Addresses) > 0 {
			t.Errorf("changed: %v; %+v, %v, %v", changed, s, err, unread)
		}
		changed, err = e.FollowEdge(want)
		if changed {
			t.Error("it changes once more")
		}
		return err
	})
}

// Where only IPv4's addresses of a second device are looked at for answers, no pod's IPv6 goes out there as it is.
func TestMasqueradeOfAFamilyThatADeviceCannotWear(t *testing.T) {
	w := newEdgeWorld(t)
	w.masqueraded()
	w.must(func(e *Engine) error {
		if err := e.SetEdge(Edge{Devices: []string{"w0", "w1"}, Prefixes: []netip.Prefix{netip.MustParsePrefix("198.51.0.0/16")}}); err != nil {
			return err
		}
		s, err := e.masqueradeStatus()
		if why := strings.Join(s.Because, "\n"); s.By == "ebpf" || !strings.Contains(why, "IPv6 addresses of device w1") || strings.Contains(why, "w0") {
			t.Errorf("masquerade is by %s: %q", s.By, s.Because)
		}
		return err
	})
}

// A device that carries IP alone has nothing in front of it that the programs could read.
func TestAnEdgeAtADeviceWithoutLinkHeader(t *testing.T) {
	n := newNode(t)
	n.run("ip tuntap add dev tun7 mode tun && ip addr add 203.0.113.7/32 dev tun7 && ip link set tun7 up")
	if err := n.do(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"tun7"}}) }); err == nil || !strings.Contains(err.Error(), "link header") {
		t.Errorf("got %v", err)
	}
}
