// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// follows is what FollowDevices says.
func (n *node) follows() (changed bool) {
	n.t.Helper()
	n.must(func(e *Engine) (err error) { changed, err = e.FollowDevices(); return err })
	return changed
}

// behindARouter is a list whose nodes need no routes of ours.
func behindARouter() []state.Node {
	return []state.Node{
		{Name: "n1", Addrs: []netip.Addr{netip.MustParseAddr("10.3.1.1"), netip.MustParseAddr("fd00:3:1::1")}, Mode: state.NodeDirect,
			PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}},
		{Name: "n2", Addrs: []netip.Addr{netip.MustParseAddr("10.3.2.1"), netip.MustParseAddr("fd00:3:2::1")}, Mode: state.NodeDirect,
			PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.10.0.0/24")}},
	}
}

// A list that came before this node's address made its own entry another's: its pods
// would be strangers' for as long as nothing else changes.
func TestANodeFindsItselfOnceItHasItsAddress(t *testing.T) {
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	w.wire(0, 1)
	n.run("ip route add default via 198.51.100.9 && ip -6 route add default via 2001:db8::9")
	n.must(func(e *Engine) error { return e.ApplyNodes(state.OwnerCLI, behindARouter(), peers.SettingsSpec{}) })
	if n.follows() {
		t.Error("something follows, and the node is on no list")
	}
	n.run("ip addr add 10.3.1.1/32 dev lo && ip addr add fd00:3:1::1/128 dev lo")
	n.must(func(e *Engine) error {
		_, warnings, err := e.nodesStatus()
		if !strings.Contains(strings.Join(warnings, "\n"), "taken for another") {
			t.Errorf("status warns of %q", warnings)
		}
		return err
	})
	if !n.follows() {
		t.Error("nothing follows the node's address")
	}
	n.must(func(e *Engine) error {
		self := behindARouter()[0]
		config, _, err := e.dp.Node.Get(0)
		if config.Ip4 != datapath.FromAddr(self.Addrs[0]) || config.Ip6 != datapath.FromAddr(self.Addrs[1]) {
			t.Errorf("programs are told that the node is %v and %v", config.Ip4, config.Ip6)
		}
		if ref, other, _ := e.dp.Peers.Get(datapath.FromAddr(self.Addrs[0])); other {
			t.Errorf("the node is the other node %#x", ref)
		}
		if ref, other, _ := e.dp.Nets.Get(datapath.PrefixOf(self.PodCIDRs[0])); other {
			t.Errorf("its pods are those of the other node %#x", ref)
		}
		return err
	})
	if n.follows() {
		t.Error("it goes on")
	}
}

// A pod that cannot be told its MTU is told again, and nothing else is done again with it:
// each device and each route that comes or goes is another try.
func TestAPodThatCannotBeToldIsToldAgainAlone(t *testing.T) {
	w := newRoutedNode(t, false)
	w.must(func(e *Engine) error {
		_, err := e.AddEndpoint(t.Context(), EndpointSpec{Netns: w.node.pod(1), IfName: "eth0", Owner: state.OwnerCNI})
		return err
	})
	pod := w.name + "-p1"
	// A gateway that is out of reach: the route cannot be written.
	w.run("ip -n %[1]s route add 10.9.9.9 dev eth0 && ip -n %[1]s route replace default via 10.9.9.9 && ip -n %[1]s route del 10.9.9.9", pod)
	w.run("ip link set w0 mtu 1400")
	synced := 0 // each time, it is said that n2 is on no link
	w.opts.Notify = func(string) { synced++ }
	for try, want := range []bool{true, false, false} {
		synced = 0
		if err := w.do(func(e *Engine) error { _, err := e.FollowDevices(); return err }); !errors.Is(err, ErrUntold) {
			t.Fatalf("try %d: %v", try, err)
		}
		if synced > 0 != want {
			t.Errorf("try %d: the ways to other nodes are made again: %v", try, synced > 0)
		}
	}
	w.run("ip -n %[1]s route add 10.9.9.9 dev eth0", pod)
	if !w.follows() || w.follows() {
		t.Error("it is not told, or goes on")
	}
	if route := w.run("ip -n %s route show default", pod); !strings.Contains(route, "mtu 1400") {
		t.Errorf("the pod's route is %s", route)
	}
}

// newRoutedNode is n1 of behindARouter, which reaches others by w0; with edge, clients
// outside come by it, too.
func newRoutedNode(t *testing.T, edge bool) *edgeWorld {
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	n.run("ip addr add 10.3.1.1/32 dev lo && ip addr add fd00:3:1::1/128 dev lo")
	w.wire(0, 1)
	w.route()
	if edge {
		w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0"}}) })
	}
	w.must(func(e *Engine) error { return e.ApplyNodes(state.OwnerCLI, behindARouter(), peers.SettingsSpec{}) })
	return w
}

func (w *edgeWorld) route() {
	w.run("ip route add default via 198.51.100.9 && ip -6 route add default via 2001:db8::9")
}

// A NIC that comes back as another gets its programs, whatever number it has: what
// held the one before holds nothing.
func TestANICThatComesBackGetsItsPrograms(t *testing.T) {
	for _, edge := range []bool{false, true} {
		for _, same := range []bool{false, true} {
			t.Run(fmt.Sprintf("edge %v, the same number %v", edge, same), func(t *testing.T) {
				w := newRoutedNode(t, edge)
				index := w.carried(edge)
				w.run("ip link del w0")
				if !same {
					index += 1000
				}
				w.plug(0, index)
				w.route()
				if !w.follows() {
					t.Error("nothing follows the NIC")
				}
				w.carried(false)
				if edge {
					w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0"}}) })
					w.carried(true)
				}
				if w.follows() {
					t.Error("it goes on")
				}
			})
		}
	}
}

// While it is away, it is in nobody's way: neither an upgrade's nor a Service's that
// has answers turned back.
func TestANICThatIsGoneIsInNobodysWay(t *testing.T) {
	if !datapath.Probe().TCX {
		t.Skip("this kernel has no tcx: filters go with their device")
	}
	w := newRoutedNode(t, true)
	gone := fmt.Sprintf("interface %d, which is gone", w.carried(true))
	w.run("ip link del w0")
	w.replace([]string{"*198.51.100.1:8081"}, []string{"*[2001:db8::1]:8081"}, local)
	w.becomesAnotherBuilds()
	if _, err := w.add(w.node.pod(1)); err != nil {
		t.Error(err)
	}
	w.must(func(e *Engine) error {
		s, err := e.Edge()
		if !slices.Equal(s.Devices, []string{gone}) {
			t.Errorf("the edge is at %q, want %q", s.Devices, gone)
		}
		all, unknown := e.Status()
		if !slices.ContainsFunc(all.Warnings, func(s string) bool { return strings.Contains(s, "of the edge is gone") }) {
			t.Errorf("status does not warn of it: %q", all.Warnings)
		}
		return errors.Join(err, unknown)
	})
	w.must(func(e *Engine) error { return e.SetEdge(Edge{}) })
	w.must(func(e *Engine) error {
		s, err := e.Edge()
		if len(s.Devices) > 0 {
			t.Errorf("no edge is at %q", s.Devices)
		}
		return err
	})
}

// carried is w0, which alone carries the NIC's program, and the edge's with edge.
func (w *edgeWorld) carried(edge bool) (ifindex int) {
	w.t.Helper()
	l, err := netlink.LinkByName("w0")
	if err != nil {
		w.t.Fatal(err)
	}
	ifindex = l.Attrs().Index
	w.must(func(e *Engine) error {
		if wires := e.dp.WireDevices(); !slices.Equal(wires, []int{ifindex}) {
			w.t.Errorf("devices %v carry the NIC's program, want %d", wires, ifindex)
		}
		edges, err := e.dp.Edges()
		if edge && !slices.Equal(edges, []int{ifindex}) {
			w.t.Errorf("devices %v carry the edge's programs, want %d", edges, ifindex)
		}
		return err
	})
	return ifindex
}

// A device that settings name and that is away holds up no change, and is one of the node's once it is back.
func TestANamedDeviceThatIsAwayHoldsUpNothing(t *testing.T) {
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	w.wire(0, 1)
	w.wire(1, 2)
	set := peers.SettingsSpec{Devices: []string{"w0", "w1"}}
	n.must(func(e *Engine) error { return e.ApplyNodes(state.OwnerCLI, behindARouter(), set) })
	n.run("ip link del w1")
	n.must(func(e *Engine) error { return e.ApplyNodes(state.OwnerCLI, behindARouter()[:1], set) })
	n.must(func(e *Engine) error {
		list, _, err := e.Nodes()
		if len(list) != 1 {
			t.Errorf("nodes %v, want one less", list)
		}
		if _, warnings, _ := e.nodesStatus(); !strings.Contains(strings.Join(warnings, "\n"), "device w1 does not exist") {
			t.Errorf("status warns of %q", warnings)
		}
		return err
	})
	if err := n.do(func(e *Engine) error { return e.SetNode(peers.SettingsSpec{Devices: []string{"w0", "nosuch0"}}) }); err == nil {
		t.Error("a device that never was there is named")
	}
	n.must(func(e *Engine) error { return e.SetNode(set) })
	n.run("ip addr add 10.3.2.1/32 dev lo") // now this node is one of the list
	n.must(func(e *Engine) error { return e.ApplyNodes(state.OwnerCLI, behindARouter(), set) })
	w.plug(1, 0)
	if !n.follows() {
		t.Error("nothing follows the device that is back")
	}
	n.must(func(e *Engine) error {
		w1, err := netlink.LinkByName("w1")
		if err == nil && !slices.Contains(e.dp.WireDevices(), w1.Attrs().Index) {
			t.Errorf("programs are at %v, not at %d", e.dp.WireDevices(), w1.Attrs().Index)
		}
		return err
	})
}
