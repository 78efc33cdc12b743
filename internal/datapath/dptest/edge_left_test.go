// SPDX-License-Identifier: Apache-2.0

// Flows at the edge that have outlived what they were begun by: their Service, its
// address, the node's address, the route, or their other half.

package dptest

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// outlive opens a connection to o.f, which leads to b, and returns what b sees of it.
func (o outside) outlive(b netip.AddrPort) netip.AddrPort {
	o.t.Helper()
	worn := o.worn(o.arrive(o.c, o.f, syn))
	for range 2 {
		o.want("answer", o.arrive(b, worn, syn|ack), 0, o.f, o.c)
		o.want("more", o.arrive(o.c, o.f, ack), 0, worn, b)
	}
	return worn
}

// goesOn fails unless both ends of such a connection hear each other, by the short way and the long one.
func (o outside) goesOn(what string, worn, b netip.AddrPort) {
	o.t.Helper()
	for range 2 {
		o.want(what, o.arrive(o.c, o.f, ack), 0, worn, b)
		o.want(what+", back", o.arrive(b, worn, ack), 0, o.f, o.c)
		o.edge.VoidFlows(o.t)
	}
}

// isTheStacks fails unless a packet goes on untouched.
func (o outside) isTheStacks(what string, a Arrival, to netip.AddrPort) {
	o.t.Helper()
	if a.Direct || a.Dropped != "" || a.Tuple().Dst != to {
		o.t.Errorf("%s: %v", what, a)
	}
}

// A node port is removed: connections go on, whoever else asks for it.
func TestAStrangerEndsNoConnectionToAPortThatIsGone(t *testing.T) {
	eitherEdge(t, func(o outside) {
		b := end(External(2, o.v6), 8080)
		any := netip.IPv4Unspecified()
		if o.v6 {
			any = netip.IPv6Unspecified()
		}
		o.nodePort(0, b)
		worn := o.outlive(b)
		o.edge.RemoveService(o.t, o.proto, end(any, o.f.Port()))
		for range 3 {
			o.isTheStacks("a stranger's", o.arrive(end(External(9, o.v6), 99), o.f, syn), o.f)
			o.goesOn("after a stranger's", worn, b)
		}
	})
}

// The last frontend of an address is removed, and with it what says that the address is a Service's.
func TestConnectionsOutliveTheirAddress(t *testing.T) {
	eitherEdge(t, func(o outside) {
		b := end(External(2, o.v6), 8080)
		o.f = end(VIP(1, o.v6), 80)
		o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindLoadBalancer}, o.proto, o.f, b)
		worn := o.outlive(b)
		o.edge.RemoveService(o.t, o.proto, o.f)
		o.goesOn("without its address", worn, b)
		stranger := end(External(9, o.v6), 99)
		for _, flags := range []uint8{syn, ack} {
			o.isTheStacks("a stranger's", o.arrive(stranger, o.f, flags), o.f)
		}
		o.isTheStacks("at another port", o.arrive(o.c, end(o.f.Addr(), 81), ack), end(o.f.Addr(), 81))
		o.goesOn("after a stranger's", worn, b)
		if o.proto == oracle.TCP {
			o.arrive(o.c, o.f, fin|ack)
			o.arrive(b, worn, fin|ack)
			o.arrive(o.c, o.f, ack)
			o.isTheStacks("anew", o.arrive(o.c, o.f, syn), o.f)
		}
	})
}

// What a router says of an answer to a client reaches the pod behind the tunnel from where its client's packets do: the
// other node takes nothing there from a router.
func TestAnErrorGoesThroughTheTunnelAsItsFlowDoes(t *testing.T) {
	eachEdge(t, func(o outside) {
		own := o.edge.Tunnel(o.t, o.v6)
		s := scene{speaker: o.speaker}
		kind, code, quoted := uint8(3), uint8(4), 60
		if o.v6 {
			kind, code, quoted = 2, 0, 80
		}
		b := end(External(2, o.v6), 8080)
		o.nodePort(0, b)
		worn := o.arrive(o.c, o.f, syn).Tuple().Src
		if worn.Addr() != own {
			o.t.Fatalf("it wears %v", worn)
		}
		back := Eth(o.edge.MAC, Router).IP(o.f.Addr(), o.c.Addr()).L4(o.proto, o.f.Port(), o.c.Port(), ack).Payload(200)
		e := Eth(Router, o.edge.MAC).IP(External(9, o.v6), o.f.Addr()).ICMP(kind, code, 1400).Data(quote(back, quoted))
		a, err := o.edge.Arrive(e.Frame())
		s.quotes(o.checked(a, err), Pod{}, Tuple{o.proto, b, worn}, own.String())
		if a.Headers.Dst != b.Addr() || !a.Direct {
			o.t.Errorf("%v", a)
		}
	})
}

// The node loses the address that a flow wears: what can begin anew wears the next, and the
// client of what cannot hears of it.
func TestAFlowFromOutsideWearsNoAddressThatIsGone(t *testing.T) {
	eachEdge(t, func(o outside) {
		own, next := o.edge.Node(o.v6), External(203, o.v6)
		o.f = end(VIP(1, o.v6), 80)
		b := end(External(2, o.v6), 8080)
		o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindLoadBalancer}, o.proto, o.f, b)
		o.outlive(b)
		o.edge.mark(o.t, own, 0)
		o.edge.mark(o.t, next, bpfgen.SvcAddress|bpfgen.SvcNode)
		check(o.t, o.edge.MstEdgeV2.Put(uint32(bpfgen.EdgeWire), bpfgen.PodEdgeConfig{
			Ip4: toAddr(External(203, false)), Ip6: toAddr(External(203, true)), PortFirst: EdgePorts.First, PortCount: EdgePorts.Count}))
		o.edge.VoidFlows(o.t)
		flags := uint8(ack)
		if o.proto == oracle.SCTP {
			flags = 0
		}
		if a := o.arrive(o.c, o.f, flags); o.proto == oracle.UDP && (a.Dropped != "" || !a.Direct || a.Tuple().Src.Addr() != next) {
			o.t.Errorf("%v, want it from %v", a, next)
		} else if o.proto != oracle.UDP && a.Dropped != ReasonName(bpfgen.ReasonMidstreamNAT) {
			o.t.Errorf("%v, want a reset", a)
		}
		o.edge.mark(o.t, own, bpfgen.SvcAddress|bpfgen.SvcNode)
		o.edge.mark(o.t, next, 0)
		o.edge.Wear(o.t, EdgePorts.First, EdgePorts.Count)
		o.edge.RemoveService(o.t, o.proto, o.f)
	})
}

// The route of a masqueraded flow moves to another device: one that is none of the edge's, where nobody translates its
// answers back, or one where other addresses are worn.
func TestAMasqueradedFlowThatStraysEnds(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		m.strays(false)
		m.edge.ClearFlows(m.t)
		m.strays(true)
	})
}

// strays has the flow opened, and its route moved. @toEdge: to a device of the edge's
func (m masqueraded) strays(toEdge bool) {
	m.t.Helper()
	worn, far := m.open(m.pod, m.from, m.to)
	m.want("answer", m.arrive(far, worn, syn|ack), m.pod.ID, m.to, m.from)
	door, err := netlink.LinkByIndex(int(m.edge.Door))
	check(m.t, err)
	route := &netlink.Route{LinkIndex: door.Attrs().Index, Dst: netlink.NewIPNet(m.to.Addr().AsSlice()), Scope: netlink.SCOPE_LINK}
	check(m.t, netlink.RouteReplace(route))
	defer func() { check(m.t, netlink.RouteDel(route)) }()
	if toEdge {
		check(m.t, m.edge.MstWearV1.Put(m.edge.Door, bpfgen.PodWear{Ip4: toAddr(External(60, false)), Ip6: toAddr(External(60, true))}))
		defer func() { check(m.t, m.edge.MstWearV1.Delete(m.edge.Door)) }()
	}
	m.edge.VoidFlows(m.t)
	more := uint8(ack)
	if m.echo() {
		more = 0
	}
	m.dropped(m.answer(m.pod, m.from, m.to, more), bpfgen.ReasonNoRoute)
	if f := m.edge.Flow(m.t, Tuple{m.proto, m.from, m.to}, bpfgen.CTScopeFlow); f != nil {
		m.t.Errorf("the flow is still there: %+v", f.Entry)
	}
	a := m.answer(m.pod, m.from, m.to, syn)
	if !toEdge {
		m.isTheStacks("anew", a, m.to)
	} else if a.Dropped != "" || a.Tuple().Src.Addr() != External(60, m.v6) {
		m.t.Errorf("anew: %v", a)
	}
}

// Two CPUs give one tuple to two clients at the same moment. Who has lost it gets another with the next try.
func TestTwoFlowsAreGivenOneTuple(t *testing.T) {
	eitherEdge(t, func(o outside) {
		b := end(External(2, o.v6), 8080)
		o.nodePort(0, b)
		worn := o.worn(o.arrive(o.c, o.f, syn))
		winner := end(External(9, o.v6), o.c.Port())
		half := o.edge.Flow(o.t, Tuple{o.proto, worn, b}, bpfgen.CTScopeFlow)
		half.Entry.Other.Src = toAddr(winner.Addr())
		o.edge.rewrite(o.t, *half)
		o.edge.VoidFlows(o.t)
		next := o.worn(o.arrive(o.c, o.f, syn))
		if next == worn {
			o.t.Errorf("both wear %v", worn)
		}
		o.want("the winner's answer", o.arrive(b, worn, syn|ack), 0, o.f, winner)
		o.want("the other one's", o.arrive(b, next, syn|ack), 0, o.f, o.c)
	})
}

// The half of an established flow that the other end sees was forgotten, as when its table is full, and another flow has its
// tuple by now: neither hears the other's.
func TestAnEstablishedFlowsTupleIsAnothersByNow(t *testing.T) {
	eitherEdge(t, func(o outside) {
		b := end(External(2, o.v6), 8080)
		o.nodePort(0, b)
		worn := o.outlive(b)
		winner := end(External(9, o.v6), o.c.Port())
		half := o.edge.Flow(o.t, Tuple{o.proto, worn, b}, bpfgen.CTScopeFlow)
		half.Entry.Other.Src = toAddr(winner.Addr())
		o.edge.rewrite(o.t, *half)
		o.edge.VoidFlows(o.t)
		o.edge.Age(o.t, bpfgen.CTRefresh)
		for range 3 {
			if r := o.arrive(o.c, o.f, ack); r.Dropped == "" && r.Tuple().Src == worn && r.Tuple().Dst == b {
				o.t.Errorf("into another's: %v", r)
			}
			o.want("the other one's answer", o.arrive(b, worn, syn|ack), 0, o.f, winner)
		}
	})
}

// A bridge sends to all its ports what is for a pod of which it does not know yet where that is: it
// becomes no flow of the others'.
func TestWhatABridgeFloodsIsNoFlowOfOthers(t *testing.T) {
	eachFamily(t, func(t *testing.T, v6 bool) {
		net := usualNetwork(t, way{})
		from, to, other := end(External(1, v6), 4000), net.Pods[1], net.Pods[2]
		frame := func(flags uint8) []byte {
			return Eth(Router, to.MAC).IP(from.Addr(), to.IP(v6)).TCP(from.Port(), 80, flags).Payload(24).Frame()
		}
		for _, flags := range []uint8{syn, ack} {
			r, err := net.ToPod(other, frame(flags))
			if err != nil || r.Verdict != Drop {
				t.Errorf("at another pod's hook: %v, %v", r, err)
			}
			if r, err = net.ToPod(to, frame(flags)); err != nil || r.Verdict != Next {
				t.Errorf("at its own: %v, %v", r, err)
			}
			f := net.Flow(t, Tuple{oracle.TCP, from, end(to.IP(v6), 80)}, bpfgen.CTScopeFlow)
			if f == nil || f.Entry.Responder.Endpoint != to.ID {
				t.Errorf("its flow: %+v", f)
			}
		}
	})
}

// The same of what a pod sends to somebody else on the bridge: its flow goes on to there.
func TestAFloodedFrameDivertsNoFlow(t *testing.T) {
	eachFamily(t, func(t *testing.T, v6 bool) {
		for _, proto := range []uint8{oracle.TCP, oracle.UDP} {
			net := usualNetwork(t, way{})
			s := newScene(t, net, v6, proto)
			far, lan := end(External(1, v6), 80), [6]byte{2, 9, 9, 9, 9, 9}
			s.left(s.send(s.client, s.c, far, syn), s.c, far)
			s.sees(s.receive(s.client, far, s.c, syn|ack), s.client, far, s.c)
			s.left(s.send(s.client, s.c, far, ack), s.c, far)
			copied := Eth(s.client.MAC, lan).IP(s.c.Addr(), far.Addr()).L4(proto, s.c.Port(), far.Port(), ack).Payload(24).Frame()
			if r, err := net.ToPod(s.second, copied); err != nil || r.Verdict != Drop {
				t.Errorf("at another pod's hook: %v, %v", r, err)
			}
			net.VoidFlows(t)
			s.left(s.send(s.client, s.c, far, ack), s.c, far)
			if f := net.Flow(t, Tuple{proto, s.c, far}, bpfgen.CTScopeFlow); f == nil || f.Entry.Responder.Endpoint != 0 {
				t.Errorf("its flow: %+v", f)
			}
		}
	})
}
