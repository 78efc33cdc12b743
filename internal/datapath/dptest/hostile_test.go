// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// What a pod, or somebody outside, may try to get past policy.

// hopLimitAt is where the hop limit is in a header of IPv6.
const hopLimitAt = 7

// isolate lets set 7 of a pod allow one peer alone, for its flows out or in.
func (d *Datapath) isolate(t *testing.T, p Pod, egress bool, peer netip.Addr) {
	t.Helper()
	check(t, d.MstIdentitiesV1.Put(toAddr(peer), bpfgen.PodIdentity{Pod: 100}))
	check(t, d.MstPeersV1.Put(bpfgen.PodPeerKey{Set: 7, Identity: 100}, bpfgen.PodPeerRules{Rule: 1}))
	policy := bpfgen.PodEndpointPolicy{Ingress: 7, IngressFlags: bpfgen.SetPods}
	if egress {
		policy = bpfgen.PodEndpointPolicy{Egress: 7, EgressFlags: bpfgen.SetPods}
	}
	check(t, d.MstPoliciesV1.Put(p.ID, policy))
	d.SetPod(t, p)
}

// A flow that policy has cut passes from no CPU, while another judges it again.
func TestACutFlowIsCutOnAllCPUs(t *testing.T) {
	for _, proto := range []uint8{oracle.UDP, oracle.TCP} {
		net := NewNetwork(t, Options{}, 3)
		s := newScene(t, net, false, proto)
		s.open(s.b, s.b)
		frame := s.packet(s.client, s.c, s.b, ack).Frame()
		check(t, net.MstPoliciesV1.Put(s.client.ID, bpfgen.PodEndpointPolicy{Egress: 7}))
		net.SetPod(t, s.client)
		s.dropped(s.send(s.client, s.c, s.b, ack), bpfgen.ReasonPolicyEgress)
		var passed, dropped atomic.Int64
		var senders sync.WaitGroup
		end := time.Now().Add(time.Second)
		for i := range runtime.NumCPU() {
			senders.Go(func() {
				runtime.LockOSThread() // never unlocked: its place ends with it
				var set unix.CPUSet
				set.Set(i)
				check(t, unix.SchedSetaffinity(0, &set))
				for time.Now().Before(end) {
					r, err := net.FromPod(s.client, frame)
					if check(t, err); r.Verdict == Drop {
						dropped.Add(1)
					} else {
						passed.Add(1)
					}
				}
			})
		}
		senders.Wait()
		if passed.Load() > 0 || dropped.Load() == 0 {
			t.Errorf("protocol %d: %d packets passed, %d were dropped", proto, passed.Load(), dropped.Load())
		}
	}
}

// An ICMP error goes from an end of a flow to who sent what it quotes, and so to nobody whom policy does not allow.
func TestErrorsGoToTheFlowsEnds(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		net := NewNetwork(t, Options{}, 3)
		s := newScene(t, net, v6, oracle.UDP)
		far, stranger := end(External(2, v6), 53), External(9, v6)
		net.isolate(t, s.client, true, far.Addr())
		s.left(s.send(s.client, s.c, far, 0), s.c, far)
		kind, code := uint8(3), uint8(3)
		if v6 {
			kind, code = 1, 4
		}
		failure := func(from Pod, to netip.Addr, about *Packet) []byte {
			return Eth(from.MAC, from.NodeMAC).IP(from.IP(v6), to).ICMP(kind, code, 0).Data(quote(about, 60)).Frame()
		}
		question, answer := s.packet(s.client, s.c, far, 0), s.packet(s.client, far, s.c, 0)
		for what, frame := range map[string][]byte{
			"about its own flow, to a stranger":       failure(s.client, stranger, answer),
			"about its own question, to the other":    failure(s.client, far.Addr(), question),
			"about another pod's flow, to a stranger": failure(s.second, stranger, answer),
			"about another pod's flow, to its end":    failure(s.second, far.Addr(), answer),
			"about another pod's flow, to that pod":   failure(s.second, s.c.Addr(), question),
		} {
			pod := s.client
			if what[:13] == "about another" {
				pod = s.second
			}
			a, err := net.Send(pod, frame)
			if check(t, err); a.Dropped != ReasonName(bpfgen.ReasonICMPErrorFlow) {
				t.Errorf("v6=%v, %s: %v", v6, what, a)
			}
		}
		if a, err := net.Send(s.client, failure(s.client, far.Addr(), answer)); err != nil || a.Dropped != "" {
			t.Errorf("v6=%v, of an end to the other: %v, %v", v6, a, err)
		}
		r, err := net.ToPod(s.second, Eth(Router, s.second.MAC).IP(stranger, s.second.IP(v6)).ICMP(kind, code, 0).Data(quote(question, 60)).Frame())
		if check(t, err); r.Reason != bpfgen.ReasonICMPErrorFlow {
			t.Errorf("v6=%v, from outside into a pod that sent nothing: %v", v6, r)
		}
	}
}

// What neighbours tell each other passes policy as long as it stays on the link.
func TestDiscoveryStaysOnTheLink(t *testing.T) {
	net := NewNetwork(t, Options{}, 2)
	p := net.Pods[1]
	check(t, net.MstPoliciesV1.Put(p.ID, bpfgen.PodEndpointPolicy{Egress: 7, Ingress: 8}))
	net.SetPod(t, p)
	router := netip.MustParseAddr("fe80::1")
	for kind := uint8(130); kind <= 143; kind++ {
		neighbours := kind >= 133 && kind <= 137
		listeners := kind <= 132 || kind == 143
		for _, c := range []struct {
			what string
			src  netip.Addr
			hops byte
			into bool
		}{
			{"from the link", router, 255, neighbours || listeners},
			{"from the link, as a host does", router, 1, listeners},
			{"from a neighbour", External(1, true), 255, neighbours},
			{"by a router", External(1, true), 254, false},
		} {
			frame := Eth(Router, p.MAC).IP(c.src, p.IP6).ICMP(kind, 0, 0).Payload(24).Byte(hopLimitAt, c.hops).Frame()
			r, err := net.ToPod(p, frame)
			if check(t, err); (r.Verdict == Next) != c.into {
				t.Errorf("type %d into the pod, %s: %v", kind, c.what, r)
			}
		}
		frame := Eth(p.MAC, p.NodeMAC).IP(p.IP6, router).ICMP(kind, 0, 0).Data(p.IP6.AsSlice()).Byte(hopLimitAt, 255).Frame()
		r, err := net.FromPod(p, frame)
		if check(t, err); (r.Verdict == Next) != (neighbours && kind != 134 && kind != 137) {
			t.Errorf("type %d to the router: %v", kind, r)
		}
		frame = Eth(p.MAC, p.NodeMAC).IP(External(77, true), router).ICMP(kind, 0, 0).Payload(24).Byte(hopLimitAt, 255).Frame()
		if r, err = net.FromPod(p, frame); err != nil || r.Verdict != Drop {
			t.Errorf("type %d from another's address: %v, %v", kind, r, err)
		}
	}
}

// The node forwards no discovery for a pod: beyond the link it is a flow as any other.
func TestDiscoveryIsNotForwarded(t *testing.T) {
	onWire(t)
	n := newWireNode(t, false, false)
	p := n.Pods[1]
	for _, isolated := range []bool{false, true} {
		if isolated {
			check(t, n.MstPoliciesV1.Put(p.ID, bpfgen.PodEndpointPolicy{Egress: 7}))
			n.SetPod(t, p)
		}
		n.ClearFlows(t)
		r := n.send(t, n.toFar(true).ICMP(136, 0, 0).Data(p.IP6.AsSlice()).Byte(hopLimitAt, 255), Context{})
		if isolated != (r.Reason == bpfgen.ReasonPolicyEgress) || len(n.Flows(t)) == 0 != isolated {
			t.Errorf("isolated=%v: %v, %d flows", isolated, r, len(n.Flows(t)))
		}
	}
}

// Multicast is judged by its source, which must be the sender's.
func TestMulticastIsOfItsSender(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		net := NewNetwork(t, Options{}, 3)
		p, other := net.Pods[1], net.Pods[2]
		group, none := netip.MustParseAddr("224.0.0.1"), netip.IPv4Unspecified()
		if v6 {
			group, none = netip.MustParseAddr("ff02::1"), netip.IPv6Unspecified()
		}
		for src, passes := range map[netip.Addr]bool{p.IP(v6): true, none: true, other.IP(v6): false, External(1, v6): false} {
			r, err := net.FromPod(p, Eth(p.MAC, [6]byte{1, 0, 0x5e, 0, 0, 1}).IP(src, group).UDP(1, 53).Payload(20).Frame())
			if check(t, err); (r.Verdict == Next) != passes || !passes && r.Reason != bpfgen.ReasonSpoofedAddress {
				t.Errorf("from %v: %v", src, r)
			}
		}
	}
}

// A client outside has no address of a pod behind a host end, by which that would have come.
func TestClientsOutsideHaveNoPodsAddress(t *testing.T) {
	e := NewEdge(t, Options{NIC: true}, 3)
	for _, v6 := range []bool{false, true} {
		e.ClearFlows(t)
		pod, friend := e.Pods[1], e.Pods[2]
		o := outside{speaker{t, e.Network, oracle.UDP}, e, v6, end(External(1, v6), 4000), end(e.Node(v6), 30080)}
		for _, flags := range []uint16{0, bpfgen.SvcKeepSource} {
			o.nodePort(flags, end(pod.IP(v6), 8080))
			for _, src := range []netip.Addr{friend.IP(v6), pod.IP(v6)} {
				if a := o.arrive(end(src, 4000), o.f, syn); a.Dropped != ReasonName(bpfgen.ReasonWireSpoofed) {
					t.Errorf("flags %d, as %v: %v", flags, src, a)
				}
			}
			if a := o.arrive(o.c, o.f, syn); a.Pod != pod.ID {
				t.Errorf("flags %d, as itself: %v", flags, a)
			}
		}
	}
}

// A fragment's identification, which its sender chooses, says nothing of the tables.
func TestAFragmentsIdentificationIsNoGeneration(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		net := NewNetwork(t, Options{}, 3)
		s := newScene(t, net, v6, oracle.TCP)
		s.open(s.b, s.b)
		s.talk(s.b, s.c, s.b)
		id := net.flowGeneration + 1 // that of the tables when policy will have changed, as the header has it
		id = id>>24 | id>>8&0xff00 | id<<8&0xff0000 | id<<24
		if !v6 {
			id >>= 16
		}
		f := Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.b.Addr()).Fragment(0, true, id).TCP(s.c.Port(), s.b.Port(), ack).Payload(28)
		if a, err := net.Send(s.client, f.Frame()); err != nil || a.Dropped != "" {
			t.Fatal(a, err)
		}
		check(t, net.MstPoliciesV1.Put(s.client.ID, bpfgen.PodEndpointPolicy{Egress: 7}))
		net.SetPod(t, s.client)
		s.dropped(s.send(s.client, s.c, s.b, ack), bpfgen.ReasonPolicyEgress)
	}
}

// A sibling that writes another's address does not touch that one's flows.
func TestASpoofedResetClosesNoFlow(t *testing.T) {
	net := NewNetwork(t, Options{InPod: true}, 3)
	s := newScene(t, net, false, oracle.TCP)
	s.open(s.b, s.b)
	before := s.flow(s.c, s.b)
	a, err := net.Receive(s.server, Eth(s.second.MAC, s.server.MAC).IP(s.c.Addr(), s.b.Addr()).TCP(s.c.Port(), s.b.Port(), rst).Frame())
	if check(t, err); a.Dropped != ReasonName(bpfgen.ReasonSpoofedMAC) {
		t.Errorf("a reset from another's address: %v", a)
	}
	if after := s.flow(s.c, s.b); after.Entry.ClosingOrig != 0 || after.Left() < before.Left()-2 {
		t.Errorf("closing %d, %d s left, was %d", after.Entry.ClosingOrig, after.Left(), before.Left())
	}
}

// What has no ports is found without: the bytes that lie there are a tunnel's, or a key's.
func TestErrorsAboutFlowsWithoutPorts(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.UDP)
		unreachable, tooBig := []uint8{3, 2}, []uint8{3, 4}
		request := func(p *Packet) *Packet { return p.ICMP(13, 0, 0x12340001).Payload(12) }
		if v6 {
			unreachable, tooBig = []uint8{4, 1}, []uint8{2, 0}
			request = func(p *Packet) *Packet { return p.ICMP(139, 0, 0x12340001).Payload(12) }
		}
		for name, of := range map[string]func(p *Packet) *Packet{
			"ESP":      func(p *Packet) *Packet { return p.Proto(50).Payload(40) },
			"GRE":      func(p *Packet) *Packet { return p.Proto(47).Payload(40) },
			"a few":    func(p *Packet) *Packet { return p.Proto(99).Payload(3) },
			"question": request,
		} {
			packet := func() *Packet { return of(Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.b.Addr())) }
			if a := s.sent(s.client, packet()); a.Pod != s.server.ID {
				t.Fatalf("%s: %v", name, a)
			}
			a := s.sent(s.server, Eth(s.server.MAC, s.server.NodeMAC).IP(s.b.Addr(), s.c.Addr()).ICMP(unreachable[0], unreachable[1], 0).Data(quote(packet(), 100)))
			if a.Pod != s.client.ID {
				t.Errorf("%s, from its other end: %v", name, a)
			}
			a, err := net.Receive(s.client, Eth(Router, s.client.MAC).IP(External(9, v6), s.c.Addr()).ICMP(tooBig[0], tooBig[1], 1280).Data(quote(packet(), 100)).Frame())
			if check(t, err); a.Pod != s.client.ID {
				t.Errorf("%s, from a router: %v", name, a)
			}
			if name == "question" {
				s.dropped(s.sent(s.server, Eth(s.server.MAC, s.server.NodeMAC).IP(s.b.Addr(), s.c.Addr()).ICMP(unreachable[0], unreachable[1], 0).Data(quote(packet().Echo(0x1234, false), 100))), bpfgen.ReasonICMPErrorFlow)
			}
		}
	})
}

// The transport header of a quoted packet may lie behind others.
func TestErrorsQuoteExtensionHeaders(t *testing.T) {
	for _, inPod := range []bool{false, true} {
		net := usualNetwork(t, way{inPod: inPod})
		s := newScene(t, net, true, oracle.TCP)
		s.open(s.vip, s.b)
		longest := func(p *Packet) *Packet {
			return p.Ext(oracle.HopByHop, 8).Ext(oracle.DestOpts, 24).Ext(oracle.Routing, 24).Fragment(0, false, 7).Ext(oracle.AH, 24).Ext(oracle.DestOpts, 8)
		}
		for _, headers := range []func(p *Packet) *Packet{
			func(p *Packet) *Packet { return p.Ext(oracle.DestOpts, 16) },
			func(p *Packet) *Packet { return p.Fragment(0, false, 7) },
			longest,
		} {
			there, back := s.packet(s.server, s.c, s.b, ack), s.packet(s.client, s.vip, s.c, ack)
			a := s.sent(s.server, Eth(s.server.MAC, s.server.NodeMAC).IP(s.b.Addr(), s.c.Addr()).ICMP(2, 0, 1280).Data(quote(headers(there), 400)))
			s.quotes(a, s.client, Tuple{oracle.TCP, s.c, s.vip}, s.vip.Addr().String())
			a = s.sent(s.client, Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.vip.Addr()).ICMP(2, 0, 1280).Data(quote(headers(back), 400)))
			s.quotes(a, s.server, Tuple{oracle.TCP, s.b, s.c}, s.c.Addr().String())
		}
		more := longest(s.packet(s.server, s.c, s.b, ack)).Ext(oracle.DestOpts, 8)
		s.dropped(s.sent(s.server, Eth(s.server.MAC, s.server.NodeMAC).IP(s.b.Addr(), s.c.Addr()).ICMP(2, 0, 1280).Data(quote(more, 400))), bpfgen.ReasonICMPErrorFlow)
	}
}

// Who sends datagrams in fragments learns of a narrow path as others do.
func TestErrorsAboutFragmentsOfIPv6(t *testing.T) {
	net := NewNetwork(t, Options{}, 3)
	s := newScene(t, net, true, oracle.UDP)
	far := end(External(2, true), 53)
	s.left(s.send(s.client, s.c, far, 0), s.c, far)
	for off, want := range map[int]string{0: "", 1200: ReasonName(bpfgen.ReasonICMPErrorFlow)} {
		about := Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), far.Addr()).Fragment(off, true, 5).UDP(s.c.Port(), far.Port()).Payload(1200)
		a, err := net.Receive(s.client, Eth(Router, s.client.MAC).IP(External(9, true), s.c.Addr()).ICMP(2, 0, 1280).Data(quote(about, 1000)).Frame())
		if check(t, err); a.Dropped != want {
			t.Errorf("packet too big about a fragment at %d: %v", off, a)
		}
	}
}

// Under its node's address a pod's datagram to the tunnel's port would be a packet of any of that node's pods.
func TestAMasqueradedPodHasNoTunnel(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		if m.proto != oracle.UDP {
			return
		}
		config := bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf | bpfgen.NodeMasquerade, Vni: tunnelID, Port: port(udpPort)}
		defer func() {
			config.Flags |= bpfgen.NodeMasquerade
			check(m.t, m.edge.MstNodeV1.Put(uint32(0), config))
		}()
		for _, by := range []uint32{bpfgen.NodeMasquerade, 0} { // the programs, or the stack
			for _, overlay := range []uint32{0, 77} {
				config.Overlay, config.Flags = overlay, bpfgen.NodeEbpf|by
				check(m.t, m.edge.MstNodeV1.Put(uint32(0), config))
				m.edge.ClearFlows(t)
				a := m.answer(m.pod, m.from, end(m.to.Addr(), udpPort), 0)
				if want := map[uint32]string{0: "", 77: ReasonName(bpfgen.ReasonTunnelPort)}[overlay]; a.Dropped != want {
					t.Errorf("by %d, device %d: %v", by, overlay, a)
				}
				for _, to := range []netip.AddrPort{m.to, end(External(50, m.v6), udpPort)} {
					if a := m.answer(m.pod, m.from, to, 0); a.Dropped != "" {
						t.Errorf("by %d, device %d, to %v: %v", by, overlay, to, a)
					}
				}
			}
		}
	})
}

// Node ports of two nodes that lead to each other end a packet as routers do that lead to each other.
func TestTheEdgeTakesFromTheHopLimit(t *testing.T) {
	eachEdge(t, func(o outside) {
		at := 8
		if o.v6 {
			at = hopLimitAt
		}
		o.nodePort(0, end(External(2, o.v6), 8080))
		for _, flags := range []uint8{syn, ack, ack} { // new, known, by the short way
			for _, hops := range []byte{1, 0, 64, 2} {
				a, err := o.edge.Arrive(o.frame(o.c, o.f, flags).Byte(at, hops).Frame())
				if check(t, err); hops <= 1 && a.Dropped != ReasonName(bpfgen.ReasonHopLimit) || hops > 1 && (a.Dropped != "" || a.Frame[14+at] != hops-1) {
					t.Errorf("%v v6=%v, hop limit %d: %v", o.proto, o.v6, hops, a)
				}
			}
		}
	})
}

// Nor has a client outside, whatever backend somebody gave a Service.
func TestAClientOutsideHasNoTunnel(t *testing.T) {
	eachEdge(t, func(o outside) {
		check(t, o.edge.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf, Vni: tunnelID, Port: port(udpPort), Overlay: 77}))
		for _, b := range []netip.AddrPort{end(External(2, o.v6), udpPort), end(External(2, o.v6), 8080)} {
			o.edge.ClearFlows(t)
			o.nodePort(0, b)
			a := o.arrive(o.c, o.f, syn)
			if denied := o.proto == oracle.UDP && b.Port() == udpPort; denied != (a.Dropped == ReasonName(bpfgen.ReasonTunnelPort)) || !denied && a.Dropped != "" {
				t.Errorf("protocol %d to %v: %v", o.proto, b, a)
			}
		}
	})
}

// Nor has a Service the tunnel, whoever names the node's address and its port.
func TestAServiceHasNoTunnel(t *testing.T) {
	eitherEdge(t, func(o outside) {
		config := bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf, Vni: tunnelID, Port: port(o.f.Port())}
		if config.Ip4 = toAddr(o.f.Addr()); o.v6 {
			config.Ip4, config.Ip6 = bpfgen.PodAddr{}, config.Ip4
		}
		o.nodePort(0, end(o.edge.Pods[1].IP(o.v6), 8080))
		for _, config.Overlay = range []uint32{77, 0} {
			check(t, o.edge.MstNodeV1.Put(uint32(0), config))
			o.edge.ClearFlows(t)
			for range 2 {
				a := o.arrive(o.c, o.f, syn)
				if passes := o.proto == oracle.UDP && config.Overlay != 0; passes != (a.Dropped == "" && !a.Direct && a.Tuple().Dst == o.f) {
					t.Errorf("protocol %d v6=%v, device %d: %v", o.proto, o.v6, config.Overlay, a)
				}
			}
		}
	})
}

// Nor has any pod, at a node: behind its hook somebody else may masquerade it.
func TestAPodHasNoTunnelToANode(t *testing.T) {
	eachTunnel(t, func(t *testing.T, v6, over6 bool) {
		n := newWireNode(t, true, over6)
		pod := n.Pods[1]
		for to, want := range map[netip.AddrPort]uint32{
			end(wireAddr(2, over6), udpPort):   bpfgen.ReasonTunnelPort,
			end(wireAddr(2, over6), udpPort+1): bpfgen.ReasonNone,
			end(External(50, over6), udpPort):  bpfgen.ReasonNone,
			end(farPod(9, over6), udpPort):     bpfgen.ReasonNone,
			end(n.Pods[2].IP(over6), udpPort):  bpfgen.ReasonNone,
		} {
			r, err := n.FromPod(pod, Eth(pod.MAC, pod.NodeMAC).IP(pod.IP(over6), to.Addr()).UDP(4000, to.Port()).Payload(24).Frame())
			if check(t, err); r.Reason != want {
				t.Errorf("to %v: %v, want %s", to, r, ReasonName(want))
			}
		}
	})
}

// No pod is a router of IPv6 to who is on one link with it.
func TestAPodIsNoRouter(t *testing.T) {
	for _, inPod := range []bool{false, true} {
		net := usualNetwork(t, way{inPod: inPod})
		p, other, own := net.Pods[1], net.Pods[2], netip.MustParseAddr("fe80::1")
		for kind, passes := range map[uint8]bool{133: true, 134: false, 135: true, 136: true, 137: false} {
			for _, packet := range []*Packet{Eth(p.MAC, all6).IP(own, netip.MustParseAddr("ff02::1")), Eth(p.MAC, other.MAC).IP(own, other.IP6), Eth(p.MAC, all6).IP(p.IP6, netip.MustParseAddr("ff02::1")).Ext(oracle.DestOpts, 8)} {
				r, err := net.FromPod(p, packet.ICMP(kind, 0, 0).Data(append(p.IP6.AsSlice(), make([]byte, 16)...)).Byte(hopLimitAt, 255).Frame())
				if check(t, err); (r.Verdict == Next) != passes || !passes && r.Reason != bpfgen.ReasonSpoofedAddress {
					t.Errorf("type %d, in the pod %v: %v", kind, inPod, r)
				}
			}
		}
	}
}

// A pod speaks for link-local addresses that may be its own, and not for its router's: it would be sent what leaves the link.
func TestAPodIsNotItsRouter(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		p, victim := net.Pods[1], net.Pods[2]
		router, other := netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fe80::2")
		check(t, net.MstRoutersV1.Put(p.ID, toAddr(router)))
		for what, frame := range map[string]func(as netip.Addr) []byte{
			"an advertisement": func(as netip.Addr) []byte {
				return Eth(p.MAC, victim.MAC).IP(as, victim.IP6).ICMP(136, 0, 0x60000000).Data(as.AsSlice()).Byte(hopLimitAt, 255).Frame()
			},
			"one from its own address": func(as netip.Addr) []byte {
				return Eth(p.MAC, victim.MAC).IP(p.IP6, victim.IP6).ICMP(136, 0, 0x60000000).Data(as.AsSlice()).Byte(hopLimitAt, 255).Frame()
			},
			"a solicitation": func(as netip.Addr) []byte {
				return Eth(p.MAC, victim.MAC).IP(as, victim.IP6).ICMP(135, 0, 0).Data(victim.IP6.AsSlice()).Byte(hopLimitAt, 255).Frame()
			},
			"a router's solicitation": func(as netip.Addr) []byte {
				return Eth(p.MAC, victim.MAC).IP(as, victim.IP6).ICMP(133, 0, 0).Byte(hopLimitAt, 255).Frame()
			},
		} {
			r, err := net.FromPod(p, frame(router))
			if check(t, err); r.Verdict != Drop || r.Reason != bpfgen.ReasonSpoofedAddress {
				t.Errorf("%s as its router: %v", what, r)
			}
			if r, err = net.FromPod(p, frame(other)); err != nil || r.Verdict != Next {
				t.Errorf("%s as another: %v, %v", what, r, err)
			}
		}
	})
}
