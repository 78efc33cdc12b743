// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"

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
