// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net"
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
	"github.com/vishvananda/netlink"
)

// The short way at the edge. That a packet took it shows when the flow's entries
// are gone, and nobody said so.

// eachNear runs fn for TCP and UDP of both families, with a flow that is established: to a pod of the
// node's own and to another node's. exchange sends a packet of it each way.
func eachNear(t *testing.T, fn func(o outside, pod uint32, exchange func(what string))) {
	eachEdge(t, func(o outside) {
		if o.proto == oracle.SCTP {
			return // its packets all take the long way
		}
		onOneCPU(o.t)
		for _, pod := range []Pod{{}, o.edge.Pods[1]} {
			o.c = end(o.c.Addr(), o.c.Port()+1)
			b := end(External(2, o.v6), 8080)
			if pod.ID != 0 {
				b = end(pod.IP(o.v6), 8080)
			}
			o.nodePort(0, b)
			worn := o.worn(o.arrive(o.c, o.f, syn))
			back := func(flags uint8) Arrival {
				if pod.ID != 0 {
					return o.answer(pod, b, worn, flags)
				}
				return o.arrive(b, worn, flags)
			}
			exchange := func(what string) {
				o.t.Helper()
				o.want(what, o.arrive(o.c, o.f, ack), pod.ID, worn, b)
				o.want(what+", back", back(ack), 0, o.f, o.c)
			}
			o.want("the first answer", back(syn|ack), 0, o.f, o.c)
			exchange("the third")
			exchange("more")
			fn(o, pod.ID, exchange)
		}
	})
}

func TestFlowsAtTheEdgeTakeTheShortWay(t *testing.T) {
	eachNear(t, func(o outside, _ uint32, exchange func(string)) {
		for _, f := range o.edge.Flows(o.t) {
			if f.Left() >= 0 && !f.Established {
				o.t.Errorf("%v is not promoted", f.Tuple())
			}
		}
		o.edge.Network.loseFlows(o.t)
		exchange("by what is kept")
		o.edge.VoidFlows(o.t)
		if o.proto != oracle.TCP {
			return // its packet begins a flow
		}
		if a := o.arrive(o.c, o.f, ack); a.Direct || a.Dropped != "" || a.Tuple().Dst != o.f {
			o.t.Errorf("after the tables changed: %v", a)
		}
	})
}

func TestTheShortWayAtTheEdgeEndsWithItsPod(t *testing.T) {
	eachNear(t, func(o outside, pod uint32, exchange func(string)) {
		if pod == 0 {
			return
		}
		o.edge.Network.loseFlows(o.t)
		exchange("by what is kept")
		o.edge.SetPod(o.t, o.edge.Pods[1]) // another generation
		if a := o.arrive(o.c, o.f, ack); o.proto == oracle.TCP && (a.Direct || a.Tuple().Dst != o.f) {
			o.t.Errorf("after its endpoint changed: %v", a)
		}
	})
}

// A closing flow's entry learns of it on the short way.
func TestTheEdgeSeesFlowsClose(t *testing.T) {
	eachNear(t, func(o outside, pod uint32, exchange func(string)) {
		if o.proto != oracle.TCP || pod != 0 {
			return
		}
		o.arrive(o.c, o.f, fin|ack)
		f := o.edge.Flow(o.t, Tuple{o.proto, o.c, o.f}, bpfgen.CTScopeFlow)
		if f == nil || f.Entry.ClosingOrig == 0 || f.Left() > 121 {
			o.t.Errorf("after the client's FIN: %+v", f)
		}
	})
}

// A stranger's packets to a port that a flow wears do not hide it: nor do those to one that is worn next.
func TestNobodyKnowsAPortThatFlowsWear(t *testing.T) {
	eachNear(t, func(o outside, pod uint32, exchange func(string)) {
		worn := o.edge.Flow(o.t, Tuple{o.proto, o.c, o.f}, bpfgen.CTScopeFlow)
		if worn == nil {
			o.t.Fatal("no flow")
		}
		to := addrPort(worn.Entry.Other.Src, worn.Entry.Other.Sport)
		for range 3 {
			if a := o.arrive(end(External(9, o.v6), 99), to, syn); a.Direct || a.Tuple().Dst != to {
				o.t.Fatalf("a stranger's: %v", a)
			}
		}
		exchange("after a stranger's")
	})
}

// Nor when the edge has other ports by now, and the flow goes on under its own.
func TestNobodyKnowsAPortThatFlowsWoreBefore(t *testing.T) {
	eachNear(t, func(o outside, pod uint32, exchange func(string)) {
		worn := o.edge.Flow(o.t, Tuple{o.proto, o.c, o.f}, bpfgen.CTScopeFlow)
		if worn == nil {
			o.t.Fatal("no flow")
		}
		to := addrPort(worn.Entry.Other.Src, worn.Entry.Other.Sport)
		for i := range EdgePorts.Count { // as by datapath.FrontendTable.Worn
			o.edge.TellPort(o.t, EdgePorts.First+i)
		}
		o.edge.Wear(o.t, 50000, 100)
		defer o.edge.Wear(o.t, EdgePorts.First, EdgePorts.Count)
		for range 3 {
			if a := o.arrive(end(External(9, o.v6), 99), to, syn); a.Direct || a.Tuple().Dst != to {
				o.t.Fatalf("a stranger's: %v", a)
			}
		}
		exchange("after a stranger's")
	})
}

// What comes to the node at a port that no frontend ever had is the node's own, and asks nobody; at
// one that a Service gets, it is the Service's from then on.
func TestThePortOfANewServiceIsNoLongerTheNodesOwn(t *testing.T) {
	eachEdge(t, func(o outside) {
		b := end(External(2, o.v6), 8080)
		o.f = netip.AddrPortFrom(o.f.Addr(), 31000+uint16(o.proto))
		if o.v6 {
			o.f = netip.AddrPortFrom(o.f.Addr(), 31300+uint16(o.proto))
		}
		for range 3 {
			if a := o.arrive(o.c, o.f, syn); a.Direct || a.Dropped != "" || a.Tuple().Dst != o.f {
				o.t.Fatalf("before: %v", a)
			}
		}
		o.nodePort(0, b)
		a := o.arrive(o.c, o.f, syn)
		o.want("after", a, 0, o.worn(a), b)
	})
}

// A way that was kept half a turn of the kernel's counter of ticks ago (25 days at 1000 Hz) is over.
func TestAWayOfLongAgoIsOver(t *testing.T) {
	onOneCPU(t)
	e := NewEdge(t, Options{NIC: true}, 2)
	o := outside{speaker{t, e.Network, oracle.UDP}, e, false, end(External(1, false), 4000), end(e.Node(false), 30080)}
	b := end(External(2, false), 8080)
	o.nodePort(0, b)
	client := o.c.Port()
	goesTo := func(mac byte) {
		t.Helper()
		check(t, netlink.NeighSet(&netlink.Neigh{LinkIndex: int(e.Ifindex), IP: b.Addr().AsSlice(),
			HardwareAddr: net.HardwareAddr{2, 0xab, 0, 0, 0, mac}, State: netlink.NUD_PERMANENT}))
		for range 2 {
			client++
			a := o.arrive(end(o.c.Addr(), client), o.f, 0)
			if to := a.Frame[:6]; !a.Direct || to[1] == 0xab && to[5] != mac { // else the kernel is to find it
				t.Errorf("%v, to %x, want %x", a, to, mac)
			}
		}
	}
	goesTo(1)
	if e.ageWays(t) == 0 {
		t.Fatal("no way is kept")
	}
	goesTo(2)
}

// ageWays lets the ways that are kept of two ends be as long ago as can be, and says how many there are.
func (n *Network) ageWays(t *testing.T) (kept int) {
	t.Helper()
	for slot := range n.MstFastV1.MaxEntries() {
		var each []bpfgen.PodFastFlow
		check(t, n.MstFastV1.Lookup(slot, &each))
		aged := 0
		for i := range each {
			if way := &each[i].At.Way; way.Mtu != 0 {
				way.Until -= 1<<31 + 64 // and its own moment
				aged++
			}
		}
		if aged > 0 {
			check(t, n.MstFastV1.Put(slot, each))
		}
		kept += aged
	}
	return kept
}
