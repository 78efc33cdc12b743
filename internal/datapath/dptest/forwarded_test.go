// SPDX-License-Identifier: Apache-2.0

// The parent link's program and packets that no socket sent: what the node
// forwards, by real links and the kernel's own routes.

package dptest

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

func TestTheParentAndWhatTheNodeForwards(t *testing.T) {
	for _, family := range []string{"ipv4", "ipv6"} {
		t.Run(family, func(t *testing.T) {
			d := usualNetwork(t, way{inPod: true}).Datapath
			runtime.LockOSThread() // and never unlocked: the thread ends with the test, and the namespace with it
			ns, err := netns.New()
			check(t, err)
			defer ns.Close()
			newRouter(t, d, family == "ipv6").routes(t)
		})
	}
}

// TestTheParentKnowsWhatTheNodeMasquerades: by ipvlan in l3 mode the node's stack lies between a pod's hook
// and the parent, and may have given the packet the node's address.
func TestTheParentKnowsWhatTheNodeMasquerades(t *testing.T) {
	eachFamily(t, func(t *testing.T, v6 bool) {
		runtime.LockOSThread()
		ns, err := netns.New()
		check(t, err)
		defer ns.Close()
		newRouter(t, usualNetwork(t, way{inPod: true}).Datapath, v6)
		w := newWire(t, true, v6)
		p, own, nobody := w.Pods[1], netip.MustParseAddr("10.2.0.1"), netip.MustParseAddr("10.9.9.9")
		if v6 {
			own, nobody = netip.MustParseAddr("fd00:10:2::1"), netip.MustParseAddr("fd00:9::9")
		}
		w.leaves(t, "by a mode that no stack lies in the way of", w.datagram(p.MAC, own).Frame(), bpfgen.ReasonSpoofedAddress)
		p.Flags = bpfgen.EPInPod | bpfgen.EPServiceTc | bpfgen.EPNodeRoutes
		w.SetPod(t, p)
		w.SetNetns(t, p, w.netns)
		w.leaves(t, "of no flow", w.datagram(p.MAC, own).Frame(), bpfgen.ReasonSpoofedAddress)
		w.seen(t, p, w.datagram(p.MAC, p.IP(v6)).Frame())
		w.leaves(t, "as the pod sent it", w.datagram(p.MAC, p.IP(v6)).Frame(), bpfgen.ReasonNone)
		w.leaves(t, "masqueraded", w.datagram(p.MAC, own).Frame(), bpfgen.ReasonNone)
		w.leaves(t, "from nobody's address", w.datagram(p.MAC, nobody).Frame(), bpfgen.ReasonSpoofedAddress)
		w.leaves(t, "from another port", Eth(p.MAC, toWire).IP(own, External(1, v6)).UDP(1001, 53).Frame(), bpfgen.ReasonSpoofedAddress)
		w.leaves(t, "to somebody else", Eth(p.MAC, toWire).IP(own, External(2, v6)).UDP(1000, 53).Frame(), bpfgen.ReasonSpoofedAddress)
	})
}

// router is a node: its uplink, which is a parent; a link that stands for its
// own child there, the way to the pods; and one to a network of its own.
type router struct {
	*Datapath
	v6      bool
	up      netlink.Link
	forward *ebpf.Program
}

func newRouter(t *testing.T, d *Datapath, v6 bool) *router {
	t.Helper()
	r := &router{Datapath: d, v6: v6}
	for _, key := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		sysctl(t, key, "1")
	}
	addLink(t, "lo")
	r.up = addLink(t, "up0", "10.2.0.1/16", "fd00:10:2::1/64")
	shim := addLink(t, "shim0", "10.1.0.1/16", "fd00:10:1::1/64")
	other := addLink(t, "other0", "172.20.0.1/16", "fd00:20::1/64")
	addRoute(t, r.up, "0.0.0.0/0", "10.2.0.2")
	addRoute(t, r.up, "::/0", "fd00:10:2::2")
	addRoute(t, other, "172.30.0.0/16", "172.20.0.9")
	addRoute(t, other, "fd00:30::/64", "fd00:20::9")
	for _, dst := range []string{"172.40.0.0/16", "fd00:40::/64"} {
		check(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(t, dst), Type: unix.RTN_BLACKHOLE}))
	}
	index := r.up.Attrs().Index
	d.SetParent(t, index, [6]byte(r.up.Attrs().HardwareAddr), true)
	d.SetOwnChild(t, index, shim.Attrs().Index)
	attachEgress(t, r.up, d.LoadParent(t, 1).Program)
	var err error
	r.forward, err = Forwarder(index)
	check(t, err)
	t.Cleanup(func() { r.forward.Close() })
	return r
}

func (r *router) routes(t *testing.T) {
	for _, c := range []struct {
		what   string
		v4, v6 string
		passes bool
	}{
		{"the uplink's own address", "10.2.0.1", "fd00:10:2::1", true},
		{"another address of the node", "10.1.0.1", "fd00:10:1::1", true},
		{"of a network that the node is connected to", "172.20.0.7", "fd00:20::7", true},
		{"of the pods' network", "10.1.0.250", "fd00:10:1::fa", false},
		{"of the wire", "10.2.0.250", "fd00:10:2::fa", false},
		{"from beyond the default gateway", "192.0.2.7", "2001:db8::7", false},
		{"from beyond another gateway", "172.30.0.7", "fd00:30::7", false},
		{"of a network that is shut off", "172.40.0.7", "fd00:40::7", false},
	} {
		src := netip.MustParseAddr(map[bool]string{false: c.v4, true: c.v6}[r.v6])
		r.sends(t, c.what, r.datagram(src), c.passes)
		if !r.v6 {
			r.sends(t, "ARP, "+c.what, ARP([6]byte(r.up.Attrs().HardwareAddr), src, netip.MustParseAddr("10.2.0.2")), c.passes)
		}
	}
	r.sends(t, "no network protocol", Eth([6]byte(r.up.Attrs().HardwareAddr), toWire).Raw(0x88cc, make([]byte, 46)), true)

	sysctl(t, "ipv4/conf/lo/forwarding", "0")
	sysctl(t, "ipv6/conf/lo/forwarding", "0")
	own := netip.MustParseAddr(map[bool]string{false: "10.2.0.1", true: "fd00:10:2::1"}[r.v6])
	r.sends(t, "a node that does not forward", r.datagram(own), false)
	if !r.v6 {
		r.sends(t, "ARP of a node that does not forward", ARP([6]byte(r.up.Attrs().HardwareAddr), own, netip.MustParseAddr("10.2.0.2")), true)
	}
}

func (r *router) datagram(src netip.Addr) []byte {
	return Eth([6]byte(r.up.Attrs().HardwareAddr), toWire).IP(src, External(1, r.v6)).UDP(1000, 53).Payload(8).Frame()
}

// sends lets the uplink send a frame that has no socket. Where the kernel says something of
// its own there meanwhile, so that two are counted, it is sent again.
func (r *router) sends(t *testing.T, what string, frame []byte, passes bool) {
	t.Helper()
	var sent, dropped uint64
	for range 20 {
		sentBefore, droppedBefore := r.counters(t)
		_, err := r.Run(r.forward, frame, Context{})
		check(t, err)
		sent, dropped = r.counters(t)
		sent, dropped = sent-sentBefore, dropped-droppedBefore
		if sent+dropped <= 1 {
			break
		}
	}
	if (sent == 1) != passes || (dropped == 1) == passes {
		t.Errorf("%s: %d sent, %d dropped as %s; want that it passes: %v",
			what, sent, dropped, ReasonName(bpfgen.ReasonSpoofedAddress), passes)
	}
}

func (r *router) counters(t *testing.T) (sent, dropped uint64) {
	t.Helper()
	l, err := netlink.LinkByIndex(r.up.Attrs().Index)
	check(t, err)
	return l.Attrs().Statistics.TxPackets, r.Drops(t, bpfgen.ReasonSpoofedAddress, bpfgen.DirParent)
}

// addLink makes one end of a wire whose other end is up, too, and says nothing
// of its own accord.
func addLink(t *testing.T, name string, addrs ...string) netlink.Link {
	t.Helper()
	if name != "lo" {
		check(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-peer"}))
		sysctl(t, "ipv6/conf/"+name+"-peer/disable_ipv6", "1")
		sysctl(t, "ipv6/conf/"+name+"/accept_dad", "0")
		sysctl(t, "ipv6/conf/"+name+"/addr_gen_mode", "1") // no link-local address, and so no greetings
		peer, err := netlink.LinkByName(name + "-peer")
		check(t, err)
		check(t, netlink.LinkSetUp(peer))
	}
	l, err := netlink.LinkByName(name)
	check(t, err)
	check(t, netlink.LinkSetUp(l))
	for _, a := range addrs {
		ownAddress(t, l, netip.MustParsePrefix(a))
	}
	return l
}

func addRoute(t *testing.T, l netlink.Link, dst, gateway string) {
	t.Helper()
	check(t, netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(t, dst), Gw: net.ParseIP(gateway)}))
}

func ipNet(t *testing.T, s string) *net.IPNet {
	t.Helper()
	_, n, err := net.ParseCIDR(s)
	check(t, err)
	return n
}

func sysctl(t *testing.T, key, value string) {
	t.Helper()
	check(t, os.WriteFile("/proc/sys/net/"+key, []byte(value), 0))
}

// attachEgress works on every kernel, with tcx or without. The namespace may outlive the
// test: what the link sends then must not meet tables that are another's.
func attachEgress(t *testing.T, l netlink.Link, p *ebpf.Program) {
	t.Helper()
	index := l.Attrs().Index
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	err := netlink.QdiscAdd(qdisc)
	check(t, errors.Join(err, netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1},
		Fd:          p.FD(), Name: "parent", DirectAction: true,
	})))
	t.Cleanup(func() { check(t, netlink.QdiscDel(qdisc)) })
}
