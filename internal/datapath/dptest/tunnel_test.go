// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// eachTunnel runs fn for inner packets of both families over both.
func eachTunnel(t *testing.T, fn func(t *testing.T, v6, over6 bool)) {
	for _, v6 := range []bool{false, true} {
		for _, over6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("IPv6 %t over IPv6 %t", v6, over6), func(t *testing.T) { fn(t, v6, over6) })
		}
	}
}

func fromThere(over6 bool) tunnelled {
	return tunnelled{src: wireAddr(2, over6), dst: wireAddr(1, over6), vni: tunnelID, port: udpPort}
}

// TestAPacketIsFollowedThroughBothNodes takes a request from a pod to a Service
// whose backend is on another node, out by the tunnel, and its answer back in.
func TestAPacketIsFollowedThroughBothNodes(t *testing.T) {
	wire := onWire(t)
	for i := range 8 {
		v6, over6, proto := i&1 == 1, i&2 == 2, []uint8{oracle.TCP, oracle.SCTP}[i>>2]
		n := newWireNode(t, true, over6)
		pod := n.Pods[1]
		vip := netip.AddrPortFrom(VIP(1, v6), 80)
		backend := netip.AddrPortFrom(farPod(9, v6), 8080)
		client := netip.AddrPortFrom(pod.IP(v6), 5000)
		n.SetService(t, proto, vip, backend)

		request := Eth(pod.MAC, pod.NodeMAC).IP(client.Addr(), vip.Addr()).L4(proto, 5000, 80, syn).Payload(100)
		r := n.send(t, request, Context{})
		if r.Verdict != Redirect || r.RedirectKind != bpfgen.RedirectNeigh || r.RedirectIfindex != wire {
			t.Fatalf("%v, want it at the wire", r)
		}
		if !over6 && oracle.Sum(r.Packet[14:34]) != 0 {
			t.Error("the outer header's checksum is bad")
		}
		w, sport, inner := unwrap(t, r.Packet)
		if want := (tunnelled{src: wireAddr(1, over6), dst: wireAddr(2, over6), vni: tunnelID, port: udpPort}); w != want {
			t.Errorf("in the tunnel %+v, want %+v", w, want)
		}
		if sport < 49152 {
			t.Errorf("source port %d is not dynamic", sport)
		}
		h, fault := oracle.Parse(inner)
		if got := TupleOf(h); fault != "" || got.Src != client || got.Dst != backend || [6]byte(inner) != thereMAC || hopLimit(inner) != 63 {
			t.Errorf("inside %s %v to %x, hop limit %d", fault, got, inner[:6], hopLimit(inner))
		}
		if ip, l4 := oracle.Sums(inner, h); ip == oracle.SumBad || l4 != oracle.SumGood {
			t.Errorf("inside: checksums %v, %v", ip, l4)
		}

		answer := Eth(thereMAC, [6]byte{2, 3}).IP(backend.Addr(), client.Addr()).L4(proto, 8080, 5000, syn|ack).Payload(60).Frame()
		n.enters(t, n.fromNetdev(t, fromThere(over6).wrap(answer)), pod, vip, client)
	}
}

// All packets of a flow have one source port in the tunnel, and flows differ.
func TestAFlowHasOnePortInTheTunnel(t *testing.T) {
	onWire(t)
	n := newWireNode(t, true, false)
	ports := map[uint16]bool{}
	for flow := range uint16(32) {
		seen := map[uint16]bool{}
		for _, size := range []int{0, 10, 1000} {
			r := n.send(t, n.toFar(false).UDP(6000+flow, 53).Payload(size), Context{})
			if r.Verdict != Redirect {
				t.Fatal(r)
			}
			_, sport, _ := unwrap(t, r.Packet)
			seen[sport], ports[sport] = true, true
		}
		if len(seen) != 1 {
			t.Errorf("flow %d: ports %v", flow, seen)
		}
	}
	if len(ports) < 16 {
		t.Errorf("32 flows have %d ports", len(ports))
	}
}

func TestTheTunnelLeadsIntoThePod(t *testing.T) {
	eachTunnel(t, func(t *testing.T, v6, over6 bool) {
		n := newWireNode(t, true, over6)
		pod := n.Pods[1]
		frame := fromThere(over6).wrap(fromFar(9, pod.IP(v6), syn).Frame())
		n.enters(t, n.fromNetdev(t, frame), pod, netip.AddrPortFrom(farPod(9, v6), 5000), netip.AddrPortFrom(pod.IP(v6), 80))
	})
}

// What is for the node itself comes out of the tunnel at the NIC, too, and its device receives it as if it had done that.
func TestTheTunnelLeadsToTheNode(t *testing.T) {
	eachTunnel(t, func(t *testing.T, v6, over6 bool) {
		n := newWireNode(t, true, over6)
		to := func(src netip.Addr) *Packet { return Eth([6]byte{2, 1}, [6]byte{}).IP(src, wireAddr(1, v6)) }
		frame := to(farPod(9, v6)).TCP(5000, 6443, syn).Payload(100).Frame()
		r := n.fromNetdev(t, fromThere(over6).wrap(frame))
		if r.Verdict != Redirect || r.RedirectKind != bpfgen.RedirectIngress || r.RedirectIfindex != overlayIndex || r.Mark != nodeKey {
			t.Fatalf("%v, mark %#x, want it at the tunnel's device", r, r.Mark)
		}
		if !bytes.Equal(r.Packet[12:], frame[12:]) {
			t.Errorf("it is\n%x, want\n%x", r.Packet[12:], frame[12:])
		}
		r = n.fromNetdev(t, fromThere(over6).wrap(to(farPod(8, v6)).TCP(5000, 6443, syn).Frame()))
		if r.Verdict != Drop || r.Reason != bpfgen.ReasonTunnelSource {
			t.Errorf("of another node's pod: %v", r)
		}
		n.TellPort(t, 30080)
		nodePort := fromThere(over6).wrap(to(farPod(9, v6)).TCP(5000, 30080, syn).Frame())
		passes(t, n.fromNetdev(t, nodePort), nodePort)
		fragment := fromThere(over6).wrap(to(farPod(9, v6)).Fragment(0, true, 9).UDP(5000, 53).Payload(80).Frame())
		passes(t, n.fromNetdev(t, fragment), fragment)
	})
}

// The stack's packets are pushed into the tunnel at its device, where they fit and pods' are; else the device does.
func TestTheNodeSendsThroughTheTunnel(t *testing.T) {
	wire := onWire(t)
	for i := range 4 {
		v6, over6 := i&1 == 1, i&2 == 2
		n := newWireNode(t, true, over6)
		packet := func(size int) []byte {
			return Eth([6]byte{2, 1}, [6]byte{}).IP(wireAddr(1, v6), farPod(9, v6)).TCP(6443, 5000, ack).Payload(size).Frame()
		}
		frame := packet(100)
		r, err := n.Run(n.toOverlay, frame, Context{})
		check(t, err)
		if r.Verdict != Redirect || r.RedirectKind != bpfgen.RedirectNeigh || r.RedirectIfindex != wire {
			t.Fatalf("IPv6 %t over IPv6 %t: %v, want it at the wire", v6, over6, r)
		}
		w, sport, inner := unwrap(t, r.Packet)
		if want := (tunnelled{src: wireAddr(1, over6), dst: wireAddr(2, over6), vni: tunnelID, port: udpPort}); w != want || sport < 49152 {
			t.Errorf("in the tunnel %+v from port %d, want %+v", w, sport, want)
		}
		if !bytes.Equal(inner[12:], frame[12:]) || [6]byte(inner) != thereMAC {
			t.Errorf("inside\n%x, want\n%x", inner, frame)
		}
		device := func(what string, frame []byte) {
			t.Helper()
			r, err := n.Run(n.toOverlay, frame, Context{})
			check(t, err)
			if r.Verdict != Next || [6]byte(r.Packet) != thereMAC || !bytes.Equal(r.Packet[12:], frame[12:]) {
				t.Errorf("%s: %v, want it left to the device", what, r)
			}
		}
		device("longer than fits", packet(wireMTU-60))
		var config bpfgen.PodNodeConfig
		check(t, n.MstNodeV1.Lookup(uint32(0), &config))
		config.Flags = 0
		check(t, n.MstNodeV1.Put(uint32(0), config))
		device("with legacy host routing", frame)
	}
}

// What is not exactly as a node of ours sends it is the tunnel device's business.
func TestOddTunnelPacketsAreLeftToTheDevice(t *testing.T) {
	eachTunnel(t, func(t *testing.T, v6, over6 bool) {
		n := newWireNode(t, true, over6)
		odd := map[string]func(*tunnelled){
			"stranger":     func(w *tunnelled) { w.src = wireAddr(77, over6) },
			"another VNI":  func(w *tunnelled) { w.vni++ },
			"another port": func(w *tunnelled) { w.port++ },
			"not to us":    func(w *tunnelled) { w.dst = wireAddr(9, over6) },
			"congestion":   func(w *tunnelled) { w.tos = 3 },
			"a fragment":   func(w *tunnelled) { w.frag = true },
		}
		for what, change := range odd {
			w := fromThere(over6)
			change(&w)
			frame := w.wrap(fromFar(9, n.Pods[1].IP(v6), syn).Frame())
			t.Run(what, func(t *testing.T) { passes(t, n.fromNetdev(t, frame), frame) })
		}
		nobody := fromThere(over6).wrap(fromFar(9, External(3, v6), syn).Frame())
		passes(t, n.fromNetdev(t, nobody), nobody)
		notIP := fromThere(over6).wrap(Eth([6]byte{2, 1}, [6]byte{}).Raw(0x0806, make([]byte, 46)))
		passes(t, n.fromNetdev(t, notIP), notIP)
	})
}

// An inner source must be of the node whose tunnel it came by, a flow's later
// packets no less than its first.
func TestASourceOfAnotherNodeIsDropped(t *testing.T) {
	eachTunnel(t, func(t *testing.T, v6, over6 bool) {
		n := newWireNode(t, true, over6)
		pod := n.Pods[1]
		dropped := func(r Result, reason uint32) {
			t.Helper()
			if r.Verdict != Drop || r.Reason != reason || n.Drops(t, reason, bpfgen.DirToPod) == 0 {
				t.Errorf("%v, want it dropped: %s", r, ReasonName(reason))
			}
		}
		dropped(n.fromNetdev(t, fromThere(over6).wrap(fromFar(8, pod.IP(v6), syn).Frame())), bpfgen.ReasonTunnelSource)
		dropped(n.fromNetdev(t, fromThere(over6).wrap(
			Eth([6]byte{2, 1}, [6]byte{}).IP(External(1, v6), pod.IP(v6)).TCP(1, 2, syn).Frame())), bpfgen.ReasonTunnelSource)
		dropped(n.fromNetdev(t, fromThere(over6).wrap(
			Eth([6]byte{2, 1}, [6]byte{}).IP(n.Pods[2].IP(v6), pod.IP(v6)).TCP(1, 2, syn).Frame())), bpfgen.ReasonWireSpoofed)
		other := fromThere(over6)
		other.src = wireAddr(3, over6)
		first := other.wrap(fromFar(8, pod.IP(v6), syn).Frame())
		n.enters(t, n.fromNetdev(t, first), pod, netip.AddrPortFrom(farPod(8, v6), 5000), netip.AddrPortFrom(pod.IP(v6), 80))
		dropped(n.fromNetdev(t, fromThere(over6).wrap(fromFar(8, pod.IP(v6), ack).Frame())), bpfgen.ReasonTunnelSource)
	})
}

// Without the tunnel nobody is a pod that is reached by it: what the NIC leaves to the stack gets no further than the pod's
// host end, nor what comes in where no program is. The node's own packets, gathered fragments and other nodes are no such.
func TestAPodOfTheTunnelIsNotBelievedWithoutIt(t *testing.T) {
	const gather, nic = overlayIndex + 1, overlayIndex + 2
	eachTunnel(t, func(t *testing.T, v6, over6 bool) {
		n := newWireNode(t, true, over6)
		pod := n.Pods[1]
		var node bpfgen.PodNodeConfig
		check(t, n.MstNodeV1.Lookup(uint32(0), &node))
		node.Gather = gather
		check(t, n.MstNodeV1.Put(uint32(0), node))
		check(t, n.MstRemoteNetsV1.Put(netOf(wireAddr(2, v6)), uint32(thereRef)))
		frame := fromFar(9, pod.IP(v6), syn).Frame()
		passes(t, n.fromNetdev(t, frame), frame)
		for what, frame := range map[string][]byte{
			"SYN":            frame,
			"RST":            fromFar(9, pod.IP(v6), rst).Frame(),
			"UDP":            Eth([6]byte{2, 1}, pod.MAC).IP(farPod(9, v6), pod.IP(v6)).UDP(1, 2).Frame(),
			"first fragment": Eth([6]byte{2, 1}, pod.MAC).IP(farPod(9, v6), pod.IP(v6)).Fragment(0, true, 7).UDP(1, 2).Payload(40).Frame(),
			"later fragment": Eth([6]byte{2, 1}, pod.MAC).IP(farPod(9, v6), pod.IP(v6)).Fragment(64, false, 8).UDP(1, 2).Frame(),
		} {
			if r := n.toHostEnd(t, pod, frame, nic); r.Verdict != Drop || r.Reason != bpfgen.ReasonTunnelSource {
				t.Errorf("%s: %v", what, r)
			}
		}
		for i, in := range []uint32{0, overlayIndex, gather} {
			frame := Eth([6]byte{2, 1}, pod.MAC).IP(farPod(9, v6), pod.IP(v6)).TCP(uint16(100+i), 80, syn).Frame()
			passes(t, n.toHostEnd(t, pod, frame, in), frame)
		}
		for i, other := range []netip.Addr{External(1, v6), wireAddr(2, v6)} {
			frame := Eth([6]byte{2, 1}, pod.MAC).IP(other, pod.IP(v6)).TCP(uint16(200+i), 80, syn).Frame()
			passes(t, n.toHostEnd(t, pod, frame, nic), frame)
		}
	})
}

// A connection that comes by the tunnel and the stack goes on, and ends, only by what comes that way; also where its
// packets take the short way.
func TestWhoIsBesideTheTunnelEndsNoConnection(t *testing.T) {
	const nic = overlayIndex + 2
	eachTunnel(t, func(t *testing.T, v6, over6 bool) {
		n := newWireNode(t, true, over6)
		pod := n.Pods[1]
		frame := func(flags uint8) []byte {
			return Eth([6]byte{2, 1}, pod.MAC).IP(farPod(9, v6), pod.IP(v6)).TCP(5000, 80, flags).Frame()
		}
		byTunnel := func(flags uint8) { passes(t, n.toHostEnd(t, pod, frame(flags), overlayIndex), frame(flags)) }
		beside := func(flags uint8) {
			t.Helper()
			if r := n.toHostEnd(t, pod, frame(flags), nic); r.Verdict != Drop || r.Reason != bpfgen.ReasonTunnelSource {
				t.Errorf("flags %#x: %v", flags, r)
			}
		}
		byTunnel(syn)
		n.send(t, Eth(pod.MAC, pod.NodeMAC).IP(pod.IP(v6), farPod(9, v6)).TCP(80, 5000, syn|ack), Context{})
		for range 3 { // by the long way, then by the short one
			byTunnel(ack)
			for _, flags := range []uint8{ack, syn, rst, fin | ack} {
				beside(flags)
			}
		}
		f := n.Flow(t, Tuple{oracle.TCP, netip.AddrPortFrom(farPod(9, v6), 5000), netip.AddrPortFrom(pod.IP(v6), 80)}, bpfgen.CTScopeFlow)
		if f == nil || f.Entry.ClosingOrig|f.Entry.ClosingReply != 0 {
			t.Errorf("the connection has ended: %+v", f)
		}
		byTunnel(rst)
	})
}

func TestTheTunnelsDeviceJudges(t *testing.T) {
	n := newWireNode(t, true, false)
	frame := fromFar(9, n.Pods[1].IP4, syn).Frame()
	r, err := n.Run(n.fromOverlay, frame, Context{})
	check(t, err)
	if r.Verdict != Drop || r.Reason != bpfgen.ReasonTunnelPeer {
		t.Errorf("without a tunnel's key: %v", r)
	}
	r, err = n.Run(n.fromOverlay, frame, Context{Mark: nodeKey})
	check(t, err)
	passes(t, r, frame)
	// What the node tells neighbours, of which there are none, is no loss to count.
	before := n.Drops(t, bpfgen.ReasonNoRemote, bpfgen.DirFromPod)
	r, err = n.Run(n.toOverlay, Eth([6]byte{0x33, 0x33}, [6]byte{2, 2}).IP(External(1, true), netip.MustParseAddr("ff02::16")).UDP(1, 2).Frame(), Context{})
	check(t, err)
	if r.Verdict != Drop || n.Drops(t, bpfgen.ReasonNoRemote, bpfgen.DirFromPod) != before {
		t.Errorf("to a group: %v", r)
	}
	for _, c := range []struct {
		to     netip.Addr
		reason uint32
	}{{farPod(9, false), bpfgen.ReasonNone}, {farPod(9, true), bpfgen.ReasonNone}, {External(1, false), bpfgen.ReasonNoRemote}} {
		r, err := n.Run(n.toOverlay, Eth([6]byte{2, 1}, [6]byte{2, 2}).IP(n.Pods[1].IP(c.to.Is6()), c.to).TCP(1, 2, syn).Frame(), Context{})
		check(t, err)
		if r.Reason != c.reason || c.reason == 0 && (r.Verdict != Next || [6]byte(r.Packet) != thereMAC) {
			t.Errorf("to %s: %v", c.to, r)
		}
	}
}
