// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// fromFar is a frame of a pod of another node as it comes from the wire.
func fromFar(network byte, to netip.Addr, flags uint8) *Packet {
	return Eth([6]byte{2, 1}, [6]byte{}).IP(farPod(network, to.Is6()), to).TCP(5000, 80, flags).Payload(40)
}

func (n *wireNode) fromNetdev(t *testing.T, frame []byte) Result {
	t.Helper()
	r, err := n.Run(n.netdev, frame, Context{})
	check(t, err)
	return r
}

// toHostEnd lets a packet leave the host's stack for a pod; in is where that got it.
func (n *wireNode) toHostEnd(t *testing.T, pod Pod, frame []byte, in uint32) Result {
	t.Helper()
	r, err := n.Run(n.PodPrograms.ToPod, frame, Context{Endpoint: pod.ID, CameIn: in})
	check(t, err)
	return r
}

// enters fails unless the packet goes straight into the pod, as the tuple.
func (n *wireNode) enters(t *testing.T, r Result, pod Pod, src, dst netip.AddrPort) {
	t.Helper()
	h, fault := oracle.Parse(r.Packet)
	if r.Verdict != Redirect || r.RedirectKind != bpfgen.RedirectPeer || r.RedirectIfindex != pod.Ifindex {
		t.Fatalf("%v, want it in pod %d", r, pod.ID)
	}
	if got := TupleOf(h); fault != "" || got.Src != src || got.Dst != dst {
		t.Errorf("%s %v, want %v>%v", fault, got, src, dst)
	}
	if ip, l4 := oracle.Sums(r.Packet, h); ip == oracle.SumBad || l4 != oracle.SumGood {
		t.Errorf("checksums %v, %v", ip, l4)
	}
	if [6]byte(r.Packet) != pod.MAC || [6]byte(r.Packet[6:]) != pod.NodeMAC {
		t.Errorf("link addresses %x, want the pod's and its gateway's", r.Packet[:12])
	}
}

// passes fails unless the packet goes on to the stack as it was.
func passes(t *testing.T, r Result, frame []byte) {
	t.Helper()
	if r.Verdict != Next || !bytes.Equal(r.Packet, frame) {
		t.Errorf("%v, want it to go on unchanged", r)
	}
}

func TestANodesPodReachesAPodPastTheStack(t *testing.T) {
	n := newWireNode(t, false, false)
	eachFamily(t, func(t *testing.T, v6 bool) {
		pod := n.Pods[1]
		src, dst := netip.AddrPortFrom(farPod(9, v6), 5000), netip.AddrPortFrom(pod.IP(v6), 80)
		n.enters(t, n.fromNetdev(t, fromFar(9, pod.IP(v6), syn).Frame()), pod, src, dst)
		f := n.Flow(t, Tuple{oracle.TCP, src, dst}, bpfgen.CTScopeFlow)
		if f == nil || f.Entry.Flags&bpfgen.CTViaStack != 0 || f.Entry.Opener.Generation != thereRef || f.Entry.Responder.Endpoint != pod.ID {
			t.Errorf("the flow's entry is %+v", f)
		}
		if c := n.Counters(t, pod); c.ToPod.Packets == 0 {
			t.Error("the packet is not counted")
		}
	})
}

func TestWhatIsNotOfANodesPodGoesByTheStack(t *testing.T) {
	n := newWireNode(t, false, false)
	eachFamily(t, func(t *testing.T, v6 bool) {
		pod := n.Pods[1]
		external := Eth([6]byte{2, 1}, [6]byte{}).IP(External(1, v6), pod.IP(v6)).TCP(5000, 80, syn).Frame()
		toHost := Eth([6]byte{2, 1}, [6]byte{}).IP(External(1, v6), wireAddr(1, v6)).TCP(5000, 80, syn).Frame()
		otherMAC := Eth([6]byte{2, 1}, [6]byte{2, 2}).IP(farPod(9, v6), pod.IP(v6)).TCP(5000, 80, syn).Frame()
		arp := Eth([6]byte{2, 1}, [6]byte{}).Raw(0x0806, make([]byte, 46))
		errorFrame := Eth([6]byte{2, 1}, [6]byte{}).IP(farPod(9, v6), pod.IP(v6)).ICMP(map[bool]uint8{false: 3, true: 1}[v6], 3, 0).Payload(48).Frame()
		for what, frame := range map[string][]byte{"from outside": external, "to the host": toHost, "to another machine": otherMAC, "arp": arp, "an ICMP error": errorFrame} {
			t.Run(what, func(t *testing.T) { passes(t, n.fromNetdev(t, frame), frame) })
		}
	})
}

// A flow that came through the stack keeps doing so.
func TestAFlowThatCameByTheStackStaysThere(t *testing.T) {
	n := newWireNode(t, false, false)
	eachFamily(t, func(t *testing.T, v6 bool) {
		pod := n.Pods[1]
		frame := fromFar(9, pod.IP(v6), syn).Frame()
		r, err := n.ToPod(pod, frame)
		check(t, err)
		passes(t, r, frame)
		next := fromFar(9, pod.IP(v6), ack).Frame()
		passes(t, n.fromNetdev(t, next), next)
		answer := Eth(pod.MAC, pod.NodeMAC).IP(pod.IP(v6), farPod(9, v6)).TCP(80, 5000, syn|ack).Frame()
		r, err = n.FromPod(pod, answer)
		check(t, err)
		passes(t, r, answer)
	})
}

// What overtook its datagram's first fragment goes where that one will go, and nowhere by another's address.
func TestAFragmentThatOvertookItsFirstFromTheWire(t *testing.T) {
	n := newWireNode(t, false, false)
	eachFamily(t, func(t *testing.T, v6 bool) {
		pod := n.Pods[1]
		later := func(src netip.Addr) []byte {
			return Eth([6]byte{2, 1}, [6]byte{}).IP(src, pod.IP(v6)).Fragment(24, false, 9).Proto(oracle.UDP).Payload(24).Frame()
		}
		r := n.fromNetdev(t, later(farPod(9, v6)))
		if r.Verdict != Redirect || r.RedirectKind != bpfgen.RedirectPeer || r.RedirectIfindex != pod.Ifindex {
			t.Errorf("%v, want it in pod %d", r, pod.ID)
		}
		outside := later(External(1, v6))
		passes(t, n.fromNetdev(t, outside), outside)
		if r := n.fromNetdev(t, later(n.Pods[2].IP(v6))); r.Verdict != Drop || r.Reason != bpfgen.ReasonWireSpoofed {
			t.Errorf("by a local pod's address: %v", r)
		}
	})
}

// Where datagrams are put together, all of one go there from the fragment on that overtook the first, also
// those that the host's stack has routed; what the stack routes in order enters.
func TestAFragmentThatOvertookItsFirstTakesTheOthersAlong(t *testing.T) {
	n := newWireNode(t, false, false)
	var config bpfgen.PodNodeConfig
	check(t, n.MstNodeV1.Lookup(uint32(0), &config))
	config.Gather = 1
	check(t, n.MstNodeV1.Put(uint32(0), config))
	eachFamily(t, func(t *testing.T, v6 bool) {
		pod := n.Pods[1]
		check(t, n.MstPoliciesV1.Put(pod.ID, bpfgen.PodEndpointPolicy{}))
		frame := func(id uint32, off int) *Packet {
			return Eth([6]byte{2, 1}, [6]byte{}).IP(farPod(9, v6), pod.IP(v6)).Fragment(off, off < 48, id)
		}
		first := func(id uint32) []byte { return frame(id, 0).UDP(5000, 80).Payload(16).UDPLen(8 + 64).Frame() }
		later := func(id uint32, off int) []byte {
			return frame(id, off).Proto(oracle.UDP).Payload(24).Frame()
		}
		for _, f := range [][]byte{later(9, 48), first(9), later(9, 24)} {
			if r := n.fromNetdev(t, f); !goesToGather(r) {
				t.Errorf("at the NIC: %v", r)
			}
			if r, err := n.ToPod(pod, f); err != nil || !goesToGather(r) {
				t.Errorf("at the pod: %v, %v", r, err)
			}
		}
		if r := n.fromNetdev(t, Eth([6]byte{2, 1}, [6]byte{}).IP(n.Pods[2].IP(v6), pod.IP(v6)).Fragment(24, false, 9).Proto(oracle.UDP).Payload(24).Frame()); r.Verdict != Drop || r.Reason != bpfgen.ReasonWireSpoofed {
			t.Errorf("by a local pod's address: %v", r)
		}
		for _, f := range [][]byte{first(11), later(11, 24), later(11, 48)} {
			r, err := n.ToPod(pod, f)
			check(t, err)
			passes(t, r, f)
		}
		// Of another datagram, in order.
		for _, f := range [][]byte{first(10), later(10, 24)} {
			r := n.fromNetdev(t, f)
			if r.Verdict == Drop {
				t.Errorf("in order: %v", r)
			}
		}
	})
}

func TestAPodsAddressFromTheWireIsDropped(t *testing.T) {
	n := newWireNode(t, false, false)
	eachFamily(t, func(t *testing.T, v6 bool) {
		frame := Eth([6]byte{2, 1}, [6]byte{}).IP(n.Pods[2].IP(v6), n.Pods[1].IP(v6)).TCP(5000, 80, syn).Frame()
		if r := n.fromNetdev(t, frame); r.Verdict != Drop || r.Reason != bpfgen.ReasonWireSpoofed {
			t.Errorf("%v", r)
		}
		if n.Drops(t, bpfgen.ReasonWireSpoofed, bpfgen.DirToPod) == 0 {
			t.Error("not counted")
		}
	})
}

func TestPodsInsideOthersAreLeftAlone(t *testing.T) {
	n := newWireNode(t, false, false)
	inner := n.Pods[2]
	inner.Flags = bpfgen.EPInPod | bpfgen.EPServiceTc
	n.SetPod(t, inner)
	frame := fromFar(9, inner.IP4, syn).Frame()
	passes(t, n.fromNetdev(t, frame), frame)
}

// send lets pod 1 send to the far pod, from where the wire is.
func (n *wireNode) send(t *testing.T, p *Packet, c Context) Result {
	t.Helper()
	c.Endpoint = 1
	r, err := n.Run(n.PodPrograms.FromPod, p.Frame(), c)
	check(t, err)
	return r
}

func (n *wireNode) toFar(v6 bool) *Packet {
	pod := n.Pods[1]
	return Eth(pod.MAC, pod.NodeMAC).IP(pod.IP(v6), farPod(9, v6))
}

// hopLimit is a frame's.
func hopLimit(frame []byte) uint8 {
	if frame[12] == 0x86 {
		return frame[21]
	}
	return frame[22]
}

func TestAPodReachesAnotherNodePastTheStack(t *testing.T) {
	wire := onWire(t)
	n := newWireNode(t, false, false)
	for _, v6 := range []bool{false, true} {
		p := n.toFar(v6).TCP(5000, 80, syn).Payload(100)
		r := n.send(t, p, Context{})
		if r.Verdict != Redirect || r.RedirectKind != bpfgen.RedirectNeigh || r.RedirectIfindex != wire {
			t.Fatalf("IPv6 %t: %v, want it at the wire", v6, r)
		}
		h, fault := oracle.Parse(r.Packet)
		if ip, l4 := oracle.Sums(r.Packet, h); fault != "" || ip == oracle.SumBad || l4 != oracle.SumGood || hopLimit(r.Packet) != 63 {
			t.Errorf("IPv6 %t: %s, checksums %v, %v, hop limit %d", v6, fault, ip, l4, hopLimit(r.Packet))
		}
	}
}

func TestWhatIsNotPlainGoesByTheStackUnchanged(t *testing.T) {
	onWire(t)
	for _, tunnel := range []bool{false, true} {
		n := newWireNode(t, tunnel, false)
		for _, v6 := range []bool{false, true} {
			limit := map[bool]int{false: 8, true: 7}[v6]
			network := map[bool]int{false: 20, true: 40}[v6]
			most := wireMTU - network - 20
			if tunnel {
				most -= 50
			}
			for what, p := range map[string]*Packet{
				"hop limit":    n.toFar(v6).TCP(5001, 80, syn).Byte(limit, 1),
				"over the MTU": n.toFar(v6).TCP(5002, 80, syn).Payload(most + 1),
				"to nobody":    Eth(n.Pods[1].MAC, n.Pods[1].NodeMAC).IP(n.Pods[1].IP(v6), External(1, v6)).TCP(5003, 80, syn),
			} {
				if what == "hop limit" && !v6 {
					p.BadIPSum() // nobody here looks
				}
				t.Run(fmt.Sprintf("tunnel %t/IPv6 %t/%s", tunnel, v6, what), func(t *testing.T) {
					passes(t, n.send(t, p, Context{}), p.Frame())
				})
			}
			if r := n.send(t, n.toFar(v6).TCP(5004, 80, syn).Payload(most), Context{}); r.Verdict != Redirect {
				t.Errorf("tunnel %t, IPv6 %t: %v of a packet that just fits", tunnel, v6, r)
			}
			// The header may say less than a pod sends.
			for i, flags := range []uint8{syn, ack, ack, ack} {
				if r := n.send(t, n.toFar(v6).TCP(5008, 80, flags), Context{}); r.Verdict != Redirect {
					t.Fatalf("tunnel %t, IPv6 %t: packet %d: %v", tunnel, v6, i, r)
				}
				long := append(n.toFar(v6).TCP(5008, 80, flags).Frame(), make([]byte, wireMTU)...)
				if r, err := n.Run(n.PodPrograms.FromPod, long, Context{Endpoint: n.Pods[1].ID}); err != nil || r.Verdict != Next {
					t.Errorf("tunnel %t, IPv6 %t: %v of a packet that is longer than its header says, behind packet %d (%v)", tunnel, v6, r, i, err)
				}
			}
			// A bundle is held by its segments. (A test run's has no kind, and a header is
			// pushed before bundles of TCP only: there, test/nodes has real ones.)
			if tunnel {
				continue
			}
			if r := n.send(t, n.toFar(v6).TCP(5005, 80, syn).Payload(2*1000), Context{GSOSize: 1000, GSOSegs: 2}); r.Verdict != Redirect {
				t.Errorf("tunnel %t, IPv6 %t: %v of a bundle whose segments fit", tunnel, v6, r)
			}
			big := n.toFar(v6).TCP(5006, 80, syn).Payload(2 * 1490)
			if r := n.send(t, big, Context{GSOSize: 1490, GSOSegs: 2}); r.Verdict != Next {
				t.Errorf("tunnel %t, IPv6 %t: %v of a bundle whose segments do not fit", tunnel, v6, r)
			}
			bundle := n.toFar(v6).SCTP(5007, 80, oracle.Init).Payload(1000)
			if r := n.send(t, bundle, Context{GSOSize: 0xffff, GSOSegs: 2}); r.Verdict != Next { // GSO_BY_FRAGS
				t.Errorf("tunnel %t, IPv6 %t: %v of SCTP's bundle, which does not say how long its packets are", tunnel, v6, r)
			}
		}
	}
}

func TestLegacyLeavesAllToTheStack(t *testing.T) {
	onWire(t)
	n := newWireNode(t, false, false)
	check(t, n.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{}))
	p := n.toFar(false).TCP(5000, 80, syn)
	passes(t, n.send(t, p, Context{}), p.Frame())
}

// A node that was removed: its flows go by the stack, which knows no way; one
// that came instead of it is found anew.
func TestAFlowOfARemovedNodeIsJudgedAgain(t *testing.T) {
	onWire(t)
	n := newWireNode(t, false, false)
	if r := n.send(t, n.toFar(false).TCP(5000, 80, syn), Context{}); r.Verdict != Redirect {
		t.Fatal(r)
	}
	n.putRemote(t, thereRef&0xffff, bpfgen.PodRemote{})
	if r := n.send(t, n.toFar(false).TCP(5000, 80, ack), Context{}); r.Verdict != Next {
		t.Errorf("the node is gone: %v", r)
	}
	const anew = thereRef + 1<<16
	n.putRemote(t, anew&0xffff, bpfgen.PodRemote{Ref: anew})
	check(t, n.MstRemoteNetsV1.Put(bpfgen.PodPrefix{Length: 96 + 16, Addr: farPod(9, false).As16()}, uint32(anew)))
	if r := n.send(t, n.toFar(false).TCP(5000, 80, ack), Context{}); r.Verdict != Redirect {
		t.Errorf("another node is there: %v", r)
	}
}

// The way of a flow's packets is asked for once in a moment: a change of a route
// reaches the flow when it is over, and a longer packet at once. Then it holds for another one.
func TestAWayHoldsForAMoment(t *testing.T) {
	wire := onWire(t)
	link, err := netlink.LinkByIndex(int(wire))
	check(t, err)
	neighbour := net.HardwareAddr{2, 0xab, 0, 0, 0, 1}
	for _, proto := range []uint8{oracle.UDP, oracle.TCP} { // TCP's flows lie near
		for _, c := range []struct{ tunnel, v6, over6 bool }{
			{false, false, false}, {false, true, true}, {true, false, false}, {true, true, false}, {true, false, true}, {true, true, true},
		} {
			n := newWireNode(t, c.tunnel, c.over6)
			out := func(flags uint8, payload int) Result {
				return n.send(t, n.toFar(c.v6).L4(proto, 5000, 80, flags).Payload(payload), Context{})
			}
			want := append(append([]byte{}, neighbour...), link.Attrs().HardwareAddr...)
			want = append(want, map[bool][]byte{false: {0x08, 0x00}, true: {0x86, 0xdd}}[c.over6]...)
			meet := func() {
				check(t, netlink.NeighSet(&netlink.Neigh{
					LinkIndex: int(wire), IP: wireAddr(2, c.over6).AsSlice(), HardwareAddr: neighbour, State: netlink.NUD_PERMANENT}))
			}
			holds := func() {
				t.Helper()
				var third Result
				for range 20 { // on a machine that has other work, the moment may be over before the third
					for range 2 { // the first belongs to the flow, the second asks for the way
						if r := out(ack, 0); r.Verdict != Redirect {
							t.Fatal(r)
						}
					}
					if third = out(ack, 0); bytes.Equal(third.Packet[:14], want) {
						break
					}
				}
				if third.RedirectKind != bpfgen.RedirectNeigh || !bytes.Equal(third.Packet[:14], want) {
					t.Errorf("%d, %+v: the third packet goes %v as %x, want %x", proto, c, third, third.Packet[:14], want)
				}
			}
			meet()
			out(syn, 0)
			holds()
			if other := n.send(t, n.toFar(c.v6).UDP(5001, 80), Context{}); bytes.Equal(other.Packet[:14], want) {
				t.Errorf("%d, %+v: another flow goes the way of the first", proto, c)
			}
			if r := out(ack, wireMTU); r.Verdict != Next {
				t.Errorf("%d, %+v: a packet over the MTU: %v", proto, c, r)
			}
			check(t, netlink.LinkSetDown(link))
			for end := time.Now().Add(time.Minute); out(ack, 0).Verdict != Next; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("%d, %+v: a flow goes by a device that is down", proto, c)
				}
			}
			check(t, netlink.LinkSetUp(link))
			giveRoutes(t, link)
			meet()
			holds()
		}
	}
}

// Whose node was not known, or gone, when a packet went there, is heard when it has come.
func TestAFlowIsOlderThanItsNode(t *testing.T) {
	eachTunnel(t, func(t *testing.T, v6, over6 bool) {
		wire := onWire(t)
		for _, outside := range []bool{false, true} { // what is of no node is the outside
			for _, known := range []bool{false, true} { // the flow began when its node was there
				n := newWireNode(t, true, over6)
				if outside {
					n.putRemote(t, 0, bpfgen.PodRemote{Ref: bpfgen.RemoteOutside})
					check(t, n.MstWearV1.Put(wire, bpfgen.PodWear{Answers: bpfgen.WearAnswers}))
				}
				pod, far := n.Pods[1], farPod(9, v6)
				tuple := Tuple{oracle.TCP, netip.AddrPortFrom(pod.IP(v6), 80), netip.AddrPortFrom(far, 5000)}
				send := func(flags uint8) Result { return n.send(t, n.toFar(v6).TCP(80, 5000, flags), Context{}) }
				if known && send(syn).Verdict != Redirect {
					t.Fatal("it does not begin in the tunnel")
				}
				n.putRemote(t, thereRef&0xffff, bpfgen.PodRemote{})
				check(t, n.MstRemoteNetsV1.Delete(netOf(far)))
				send(syn)
				f := n.Flow(t, tuple, bpfgen.CTScopeFlow)
				if want := map[bool]uint32{true: bpfgen.RemoteOutside}[outside && !known]; f == nil || f.Entry.Responder.Endpoint != 0 || f.Entry.Responder.Generation != want {
					t.Fatalf("outside %t, known %t: its entry is %+v", outside, known, f)
				}
				n.join(t, true, over6)
				answer := fromThere(over6).wrap(fromFar(9, pod.IP(v6), syn|ack).Frame())
				n.enters(t, n.fromNetdev(t, answer), pod, tuple.Dst, tuple.Src)
				if r := send(ack); r.Verdict != Redirect || r.RedirectKind != bpfgen.RedirectNeigh {
					t.Errorf("outside %t, known %t: %v, want it in the tunnel", outside, known, r)
				}
			}
		}
	})
}

// What is longer than the pod takes is the stack's as its sender sent it, who is to be told.
func TestWhatAPodDoesNotTakeIsNotTranslated(t *testing.T) {
	eachTunnel(t, func(t *testing.T, v6, over6 bool) {
		onWire(t)
		for _, tunnel := range []bool{false, true} {
			for _, proto := range []uint8{oracle.TCP, oracle.UDP} {
				n := newWireNode(t, tunnel, over6)
				pod := n.Pods[1]
				client, vip := netip.AddrPortFrom(pod.IP(v6), 5000), netip.AddrPortFrom(VIP(1, v6), 443)
				n.SetService(t, proto, vip, netip.AddrPortFrom(farPod(9, v6), 80))
				request := func(flags uint8) {
					n.send(t, Eth(pod.MAC, pod.NodeMAC).IP(client.Addr(), vip.Addr()).L4(proto, 5000, 443, flags), Context{})
				}
				answer := func(flags uint8, size int) (Result, []byte) {
					frame := Eth([6]byte{2, 1}, [6]byte{}).IP(farPod(9, v6), client.Addr()).L4(proto, 80, 5000, flags).Payload(size).Frame()
					if tunnel {
						return n.fromNetdev(t, fromThere(over6).wrap(frame)), frame
					}
					return n.fromNetdev(t, frame), frame
				}
				request(syn)
				r, _ := answer(syn|ack, 0)
				n.enters(t, r, pod, vip, client)
				request(ack)
				pod.MTU = 400
				n.SetPod(t, pod)
				for range 3 { // by the long way, and as often as it takes for the short one
					r, _ := answer(ack, 100)
					n.enters(t, r, pod, vip, client)
					r, sent := answer(ack, 500)
					if want := map[bool]Verdict{false: Next, true: Redirect}[tunnel]; r.Verdict != want || !bytes.Equal(r.Packet[12:], sent[12:]) {
						t.Errorf("tunnel %t, protocol %d: %v, want it at the stack as it came", tunnel, proto, r)
					}
				}
			}
		}
	})
}

// Who is not its sender ends no flow: another node by the tunnel, and whoever is on the wire where a node is reached by it.
func TestAStrangerBeginsNoFlowAnew(t *testing.T) {
	eachTunnel(t, func(t *testing.T, v6, over6 bool) {
		onWire(t)
		n := newWireNode(t, true, over6)
		pod := n.Pods[1]
		client, vip := netip.AddrPortFrom(pod.IP(v6), 5000), netip.AddrPortFrom(VIP(1, v6), 443)
		n.SetService(t, oracle.TCP, vip, netip.AddrPortFrom(farPod(9, v6), 80))
		request := func(flags uint8) Result {
			return n.send(t, Eth(pod.MAC, pod.NodeMAC).IP(client.Addr(), vip.Addr()).TCP(5000, 443, flags), Context{})
		}
		answer := func(flags uint8) []byte {
			return Eth([6]byte{2, 1}, [6]byte{}).IP(farPod(9, v6), client.Addr()).TCP(80, 5000, flags).Frame()
		}
		request(syn)
		n.enters(t, n.fromNetdev(t, fromThere(over6).wrap(answer(syn|ack))), pod, vip, client)
		request(ack)
		request(fin | ack)
		passes(t, n.fromNetdev(t, answer(syn)), answer(syn))
		other := fromThere(over6)
		other.src = wireAddr(3, over6)
		if r := n.fromNetdev(t, other.wrap(answer(syn))); r.Verdict != Drop || r.Reason != bpfgen.ReasonTunnelSource {
			t.Errorf("by another node: %v", r)
		}
		n.enters(t, n.fromNetdev(t, fromThere(over6).wrap(answer(ack))), pod, vip, client)
		if r := request(ack); r.Verdict != Redirect {
			t.Errorf("the flow has ended: %v", r)
		}
	})
}
