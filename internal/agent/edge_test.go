// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/engine"
)

// nic is one end of a pair.
func (w *scripted) nic(name string) netlink.Link {
	w.t.Helper()
	la := netlink.NewLinkAttrs()
	la.Name = name
	must(w.t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: la, PeerName: name + "p"}))
	l, err := netlink.LinkByName(name)
	must(w.t, err)
	must(w.t, netlink.LinkSetUp(l))
	return l
}

// edges wants clients outside to be served at these devices.
func (w *scripted) edges(when string, want ...string) {
	w.t.Helper()
	must(w.t, w.agent.with(context.Background(), func(e *engine.Engine) error {
		s, err := e.Edge()
		if !slices.Equal(s.Devices, want) {
			w.t.Errorf("%s: the edge is at %v, want %v", when, s.Devices, want)
		}
		return err
	}))
}

// Without devices by name, the edge is where the Node's addresses are, and follows them without a word of the Node's.
func TestTheEdgeFollowsTheNodesAddress(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer func() { w.close() }()
		w.config.Devices = nil
		first, second := w.nic("nic0"), w.nic("nic1")
		address, err := netlink.ParseAddr("192.0.2.1/24")
		must(t, err)
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.config.Node}}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}
		begin := func() {
			w.close()
			w.open()
			w.tellObjects(nil, nil)
			check(t, w.agent.watch.Nodes.Replace([]any{n}, ""))
			w.turn()
		}
		devicesChanged := func() {
			w.agent.sync.followEdge(context.Background())
			w.turn()
		}
		begin()
		w.edges("before any device has it")
		must(t, netlink.AddrAdd(first, address))
		devicesChanged()
		w.edges("it has come", "nic0")
		must(t, netlink.AddrDel(first, address))
		devicesChanged()
		w.edges("on its way", "nic0")
		again := &w.agent.sync.followRetry
		if !again.fails() {
			t.Error("an edge without an address is not tried again")
		}
		must(t, netlink.AddrAdd(first, address)) // of which nobody tells
		again.due = time.Now()
		if w.turn(); again.fails() {
			t.Error("the address is back, and the edge still fails")
		}
		must(t, netlink.AddrDel(first, address))
		devicesChanged()
		w.edges("on its way once more", "nic0")
		must(t, netlink.AddrAdd(second, address))
		devicesChanged()
		w.edges("it has moved", "nic1")
		must(t, netlink.AddrDel(second, address))
		begin()
		w.edges("an agent begins while it is away", "nic1")
		must(t, netlink.AddrAdd(first, address))
		devicesChanged()
		w.edges("it is back, elsewhere", "nic0")
	})
}

// Where each machine is a router, its address is on lo, and the default routes say which NICs clients are behind.
func TestTheEdgeOfANodeWhoseAddressIsOnLo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer func() { w.close() }()
		w.config.Devices = nil
		lo, err := netlink.LinkByName("lo")
		must(t, err)
		must(t, netlink.LinkSetUp(lo))
		must(t, netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(net.IPv4(192, 0, 2, 1))}))
		nics := []netlink.Link{w.nic("nic0"), w.nic("nic1"), w.nic("nic2")}
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.config.Node}}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}
		w.close() // with the devices as they are now
		w.open()
		w.tellObjects(nil, nil)
		check(t, w.agent.watch.Nodes.Replace([]any{n}, ""))
		w.turn()
		w.edges("before a route is there")
		route := &netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Src: net.IPv4(192, 0, 2, 1)}
		for _, l := range nics[:2] {
			route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{LinkIndex: l.Attrs().Index, Flags: int(netlink.FLAG_ONLINK), Gw: net.IPv4(198, 51, 100, 1)})
		}
		must(t, netlink.RouteAdd(route))
		w.agent.sync.followEdge(context.Background())
		w.turn()
		w.edges("two NICs lead out", "nic0", "nic1")
		must(t, w.agent.with(context.Background(), func(e *engine.Engine) error {
			s, err := e.Edge()
			if want := []netip.Addr{netip.MustParseAddr("192.0.2.1")}; !slices.Equal(s.Addresses, want) || s.IP4 != want[0] {
				t.Errorf("node ports are on %v, and flows wear %v; want %v", s.Addresses, s.IP4, want)
			}
			return err
		}))
		must(t, netlink.RouteDel(route))
		w.agent.sync.followEdge(context.Background())
		w.turn()
		w.edges("while no route is there", "nic0", "nic1")
	})
}

// Clients may come by the NIC of the Node's external address and by that of a default route; one that goes stays the edge's.
// Where no address takes node ports, the rest works, and the node is ready.
func TestTheEdgeIsWhereClientsMayCome(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer func() { w.close() }()
		w.config.Devices, w.config.NodePortAddresses = nil, []string{"203.0.113.0/24"}
		for i, address := range []string{"203.0.113.1/24", "198.51.100.1/24", "192.0.2.1/24", "100.64.0.1/24"} {
			a, err := netlink.ParseAddr(address)
			must(t, err)
			must(t, netlink.AddrAdd(w.nic(fmt.Sprintf("nic%d", i)), a))
		}
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.config.Node}}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}
		w.close()
		w.open()
		w.tellObjects(nil, nil)
		check(t, w.agent.watch.Nodes.Replace([]any{n}, ""))
		w.turn()
		w.edges("at the internal address, which takes no node ports", "nic2")
		if s := w.agent.sync; !s.synced.Load() || s.edgeRetry.fails() {
			t.Errorf("in force: %v; the edge fails: %v", s.synced.Load(), s.edgeRetry.fails())
		}
		n = n.DeepCopy()
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "198.51.100.1"})
		check(t, w.agent.watch.Nodes.Update(n))
		w.turn()
		w.edges("and at the external one", "nic1", "nic2")
		l, err := netlink.LinkByName("nic0")
		must(t, err)
		route := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: net.IPv4(203, 0, 113, 9)}
		must(t, netlink.RouteAdd(route))
		w.agent.sync.followEdge(context.Background())
		w.turn()
		w.edges("and by the default route", "nic0", "nic1", "nic2")
		must(t, w.agent.with(context.Background(), func(e *engine.Engine) error {
			s, err := e.Edge()
			if want := []netip.Addr{netip.MustParseAddr("203.0.113.1")}; !slices.Equal(s.Addresses, want) {
				t.Errorf("node ports are on %v, want %v", s.Addresses, want)
			}
			return err
		}))
		must(t, netlink.RouteDel(route))
		w.agent.sync.followEdge(context.Background())
		w.turn()
		w.edges("while that is away", "nic0", "nic1", "nic2")
		must(t, netlink.LinkDel(l))
		w.agent.sync.followEdge(context.Background())
		w.turn()
		w.edges("without that NIC", "nic1", "nic2")
	})
}
