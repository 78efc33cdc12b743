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
// reaches the flow when it is over, and a longer packet at once.
func TestAWayHoldsForAMoment(t *testing.T) {
	wire := onWire(t)
	link, err := netlink.LinkByIndex(int(wire))
	check(t, err)
	neighbour := net.HardwareAddr{2, 0xab, 0, 0, 0, 1}
	for _, c := range []struct{ tunnel, v6, over6 bool }{
		{false, false, false}, {false, true, true}, {true, false, false}, {true, true, false}, {true, false, true}, {true, true, true},
	} {
		n := newWireNode(t, c.tunnel, c.over6)
		check(t, netlink.NeighSet(&netlink.Neigh{
			LinkIndex: int(wire), IP: wireAddr(2, c.over6).AsSlice(), HardwareAddr: neighbour, State: netlink.NUD_PERMANENT}))
		out := func(payload int) Result {
			return n.send(t, n.toFar(c.v6).UDP(5000, 80).Payload(payload), Context{})
		}
		want := append(append([]byte{}, neighbour...), link.Attrs().HardwareAddr...)
		want = append(want, map[bool][]byte{false: {0x08, 0x00}, true: {0x86, 0xdd}}[c.over6]...)
		var third Result
		for range 20 { // on a machine that has other work, the moment may be over before the third
			for range 2 { // the first opens a flow, the second asks for the way
				if r := out(0); r.Verdict != Redirect {
					t.Fatal(r)
				}
			}
			if third = out(0); bytes.Equal(third.Packet[:14], want) {
				break
			}
		}
		if third.RedirectKind != bpfgen.RedirectNeigh || !bytes.Equal(third.Packet[:14], want) {
			t.Errorf("%+v: the third packet goes %v as %x, want %x", c, third, third.Packet[:14], want)
		}
		if other := n.send(t, n.toFar(c.v6).UDP(5001, 80), Context{}); bytes.Equal(other.Packet[:14], want) {
			t.Errorf("%+v: another flow goes the way of the first", c)
		}
		if r := out(wireMTU); r.Verdict != Next {
			t.Errorf("%+v: a packet over the MTU: %v", c, r)
		}
		check(t, netlink.LinkSetDown(link))
		for end := time.Now().Add(time.Minute); out(0).Verdict != Next; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%+v: a flow goes by a device that is down", c)
			}
		}
		check(t, netlink.LinkSetUp(link))
		giveRoutes(t, link)
	}
}

// connects is a pod of the node that opens connections to a far one, by its address or by a Service.
type connects struct {
	*wireNode
	t       *testing.T
	tunnel  *tunnelled // nil: direct
	pod     Pod
	to, far netip.AddrPort
	ports   uint16 // the first of its own
}

func eachConnects(t *testing.T, fn func(c connects)) { eachConnectsBy(t, []bool{false, true}, fn) }

// eachConnectsBy: by a Service (true), by the far pod's address (false).
func eachConnectsBy(t *testing.T, services []bool, fn func(c connects)) {
	for _, tunnel := range []bool{false, true} {
		n := newWireNode(t, tunnel, false)
		for i := range uint16(2 * len(services)) {
			v6, service := i&1 != 0, services[i/2]
			t.Run(fmt.Sprintf("tunnel %t/IPv6 %t/Service %t", tunnel, v6, service), func(t *testing.T) {
				onOneCPU(t)
				c := connects{wireNode: n, t: t, pod: n.Pods[1], far: netip.AddrPortFrom(farPod(9, v6), 80), ports: 5000 + 1000*i}
				if c.to = c.far; service {
					c.to = netip.AddrPortFrom(VIP(1, v6), 443)
					n.SetService(t, oracle.TCP, c.to, c.far)
				}
				if tunnel {
					from := fromThere(false)
					c.tunnel = &from
				}
				fn(c)
				n.SetPod(t, c.pod)
				n.join(t, tunnel, false)
			})
		}
	}
}

func (c *connects) own(port uint16) netip.AddrPort {
	return netip.AddrPortFrom(c.pod.IP(c.far.Addr().Is6()), c.ports+port)
}

// forgetRemotes: who looks for the node that has the far pod finds none any more.
func (c *connects) forgetRemotes() {
	c.t.Helper()
	for _, key := range []bpfgen.PodPrefix{{Length: 96 + 16, Addr: farPod(9, false).As16()}, {Length: 16, Addr: farPod(9, true).As16()}} {
		check(c.t, c.MstRemoteNetsV1.Delete(key))
	}
}

func (c *connects) packet(port uint16, flags uint8) *Packet {
	return Eth(c.pod.MAC, c.pod.NodeMAC).IP(c.own(port).Addr(), c.to.Addr()).TCP(c.own(port).Port(), c.to.Port(), flags)
}

// out lets the pod send, and fails unless that is on its way to the far pod.
func (c *connects) out(port uint16, flags uint8) Result {
	c.t.Helper()
	r := c.send(c.t, c.packet(port, flags), Context{})
	if r.Verdict == Drop {
		c.t.Fatal(r)
	}
	sent := r.Packet
	if c.tunnel != nil && r.Verdict == Redirect {
		_, _, sent = unwrap(c.t, sent)
	}
	h, fault := oracle.Parse(sent)
	if got := TupleOf(h); fault != "" || got.Dst != c.far || got.Src != c.own(port) {
		c.t.Errorf("%v %s, want %v>%v", got, fault, c.own(port), c.far)
	}
	if ip, l4 := oracle.Sums(sent, h); ip == oracle.SumBad || l4 != oracle.SumGood {
		c.t.Errorf("checksums %v, %v", ip, l4)
	}
	return r
}

// in is an answer of the far pod's, which must reach the pod as one of whom it asked.
func (c *connects) in(port uint16, flags uint8) {
	c.t.Helper()
	frame := Eth([6]byte{2, 1}, [6]byte{}).IP(c.far.Addr(), c.own(port).Addr()).TCP(c.far.Port(), c.own(port).Port(), flags).Frame()
	if c.tunnel != nil {
		frame = c.tunnel.wrap(frame)
	}
	c.enters(c.t, c.fromNetdev(c.t, frame), c.pod, c.to, c.own(port))
}

func (c *connects) open(port uint16) {
	c.t.Helper()
	c.out(port, syn)
	c.in(port, syn|ack)
	c.out(port, ack)
	c.in(port, ack)
}

// A connection by pod address, on the port of one by Service to the same pod of another node, though its
// pair was judged: beside an open one it takes another port, after a closed one the answers are its own.
func TestAConnectionOfItsOwnToAnotherNodesPod(t *testing.T) {
	eachConnectsBy(t, []bool{true}, func(c connects) {
		direct := c
		direct.to = c.far
		for port, near := range []bool{false, true} { // where the Service's flow lies; then there is a shadow, and no SYN is entered at once
			if !near {
				c.fillNear(c.t)
			}
			c.open(uint16(port))
			if !near {
				c.freeNear(c.t)
			}
			direct.open(10 + uint16(port))
			r := c.send(c.t, direct.packet(uint16(port), syn), Context{})
			h, fault := oracle.Parse(r.Packet)
			if got := TupleOf(h); r.Verdict == Drop || fault != "" || got.Dst != c.far || got.Src == c.own(uint16(port)) {
				c.t.Errorf("near %t: %v %v %s, want another port than the Service's flow has, whose answers would be its own", near, r, got, fault)
			}
			c.in(uint16(port), ack)
		}
		c.open(2)
		c.out(2, fin|ack)
		c.in(2, fin|ack)
		c.out(2, ack)
		direct.open(2)
	})
}

// Who looks for the far pod, or for the near one, finds nobody any more.
func TestConnectionsToAnotherNodeTakeTheShortWay(t *testing.T) {
	eachConnects(t, func(c connects) {
		c.open(0)
		c.forgetRemotes()
		for _, a := range []netip.Addr{c.pod.IP4, c.pod.IP6} {
			check(c.t, c.MstEndpointAddrsV1.Delete(toAddr(a)))
		}
		before := counted(c.t, c.Network, c.pod)
		for port := uint16(1); port <= 3; port++ {
			c.open(port)
			c.out(port, fin|ack)
			c.in(port, fin|ack)
			c.out(port, ack)
			for _, dst := range []netip.AddrPort{c.to, c.far} {
				f := c.Flow(c.t, Tuple{oracle.TCP, c.own(port), dst}, bpfgen.CTScopeFlow)
				if f == nil || !f.near || f.Entry.Responder.Generation != thereRef || f.Left() > 121 {
					c.t.Errorf("%v: %+v", dst, f)
				}
			}
		}
		after := counted(c.t, c.Network, c.pod)
		if sent, got := after.FromPod.Packets-before.FromPod.Packets, after.ToPod.Packets-before.ToPod.Packets; sent != 12 || got != 9 {
			c.t.Errorf("counted %d packets from the pod and %d to it, want 12 and 9", sent, got)
		}
	})
}

func TestAPairOfAnotherNodeEndsWithWhatItRestsOn(t *testing.T) {
	eachConnects(t, func(c connects) {
		var port uint16
		for name, change := range map[string]func(){
			"the pod's endpoint": func() { c.SetPod(c.t, c.pod) },
			"its node":           func() { c.putRemote(c.t, thereRef&0xffff, bpfgen.PodRemote{}) },
			"time":               func() { c.agePairs(c.t) },
			"the tables":         func() { c.VoidFlows(c.t) },
		} {
			c.open(port)
			change()
			c.forgetRemotes()
			c.out(port+1, syn)
			f := c.Flow(c.t, Tuple{oracle.TCP, c.own(port + 1), c.to}, bpfgen.CTScopeFlow)
			if f == nil || f.Entry.Responder.Generation != 0 {
				c.t.Errorf("%s changed, and the flow is entered as judged before: %+v", name, f)
			}
			c.join(c.t, c.tunnel != nil, false)
			port += 2
		}
	})
}

// A TCP flow goes the way that was found for its SYN; the SYN that follows it goes it, too, by the pod's address.
func TestAConnectionGoesTheWayOfItsSyn(t *testing.T) {
	eachConnects(t, func(c connects) {
		link, err := netlink.LinkByIndex(int(onWire(c.t)))
		check(c.t, err)
		neighbour := net.HardwareAddr{2, 0xab, 0, 0, 0, 1}
		for _, v6 := range []bool{false, true} {
			check(c.t, netlink.NeighSet(&netlink.Neigh{
				LinkIndex: link.Attrs().Index, IP: wireAddr(2, v6).AsSlice(), HardwareAddr: neighbour, State: netlink.NUD_PERMANENT}))
		}
		want := append(append([]byte{}, neighbour...), link.Attrs().HardwareAddr...)
		known := func(r Result) bool {
			return r.RedirectKind == bpfgen.RedirectNeigh && bytes.Equal(r.Packet[:12], want)
		}
		service := c.to != c.far
		var first, second, next Result
		for port := range uint16(20) { // on a machine that has other work, the moment may be over before
			first, second, next = c.out(2*port, syn), c.out(2*port, ack), c.out(2*port+1, syn)
			if known(second) && (known(next) || service) {
				break
			}
		}
		if first.RedirectKind != bpfgen.RedirectNeigh || !known(second) {
			c.t.Errorf("SYN %v, ACK %v as %x, want %x", first, second, second.Packet[:12], want)
		}
		if !service && !known(next) {
			c.t.Errorf("the next SYN goes %v as %x, want %x", next, next.Packet[:12], want)
		}
		if r := c.send(c.t, c.packet(0, ack).Payload(wireMTU), Context{}); r.Verdict != Next {
			c.t.Errorf("a packet over the MTU: %v", r)
		}
		last := c.packet(0, ack)
		if c.far.Addr().Is6() {
			last.Byte(7, 1)
		} else {
			last.Byte(8, 1).BadIPSum() // nobody here looks
		}
		if r := c.send(c.t, last, Context{}); r.Verdict != Next {
			c.t.Errorf("a packet whose hop limit runs out: %v", r)
		}
	})
}
