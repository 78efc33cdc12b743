// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// door is the node's own client of a Service, by the door.
type door struct{ outside }

func eachDoor(t *testing.T, fn func(d door)) {
	eachEdge(t, func(o outside) {
		o.c, o.f = end(o.edge.Node(o.v6), 4000), end(External(210, o.v6), 80)
		fn(door{o})
	})
}

func (d door) service(backends ...netip.AddrPort) {
	d.t.Helper()
	d.edge.SetService(d.t, d.proto, d.f, backends...)
}

func (d door) enter(from, to netip.AddrPort, flags uint8) Arrival {
	d.t.Helper()
	a, err := d.edge.Enter(d.frame(from, to, flags).Frame())
	return d.checked(a, err)
}

// home fails unless a packet went to the node's own socket as from→to.
func (d door) home(what string, a Arrival, from, to netip.AddrPort) {
	d.t.Helper()
	if got := a.Tuple(); a.Dropped != "" || !a.Home || got.Src != from || got.Dst != to {
		d.t.Fatalf("%v v6=%v: %s: %v, want it at the node as %v>%v", d.proto, d.v6, what, a, from, to)
	}
}

// The pod is isolated: no policy keeps the node from it.
func TestDoorToAPodAndBack(t *testing.T) {
	eachDoor(t, func(d door) {
		p := d.edge.Pods[1]
		b := end(p.IP(d.v6), 8080)
		d.service(b)
		check(d.t, d.edge.MstPoliciesV1.Put(p.ID, bpfgen.PodEndpointPolicy{Ingress: 7}))
		d.want("first", d.enter(d.c, d.f, syn), p.ID, d.c, b)
		d.home("answer", d.answer(p, b, d.c, syn|ack), d.f, d.c)
		for range 3 {
			d.want("more", d.enter(d.c, d.f, ack), p.ID, d.c, b)
			d.home("more back", d.answer(p, b, d.c, ack), d.f, d.c)
		}
	})
}

// The node wears its address and a port at the NIC, so that the answer is found there.
func TestDoorToAnotherNodeAndBack(t *testing.T) {
	eachDoor(t, func(d door) {
		b := end(External(2, d.v6), 8080)
		d.service(b)
		a := d.enter(d.c, d.f, syn)
		worn := d.worn(a)
		d.want("first", a, 0, worn, b)
		d.home("answer", d.arrive(b, worn, syn|ack), d.f, d.c)
		d.want("more", d.enter(d.c, d.f, ack), 0, worn, b)
		d.home("more back", d.arrive(b, worn, ack), d.f, d.c)
	})
}

// The node does not see itself: the Service's address stands in for it, and what
// is sent there comes by the door again.
func TestDoorToTheNodeItselfAndBack(t *testing.T) {
	eachDoor(t, func(d door) {
		b, stands := end(d.edge.Node(d.v6), 8080), end(d.f.Addr(), d.c.Port())
		d.service(b)
		d.home("first", d.enter(d.c, d.f, syn), stands, b)
		d.home("answer", d.enter(b, stands, syn|ack), d.f, d.c)
		d.home("more", d.enter(d.c, d.f, ack), stands, b)
		d.home("more back", d.enter(b, stands, ack), d.f, d.c)
	})
}

// By an address of the node's own, that is its client's as well, only a port of the
// edge's leads the node's answer into the door.
func TestDoorAtTheNodesOwnAddress(t *testing.T) {
	eachDoor(t, func(d door) {
		d.f = end(d.edge.Node(d.v6), 30080)
		p := d.edge.Pods[1]
		b := end(p.IP(d.v6), 8080)
		d.nodePort(0, b)
		d.want("first", d.enter(d.c, d.f, syn), p.ID, d.c, b)
		d.home("answer", d.answer(p, b, d.c, syn|ack), d.f, d.c)
		d.want("more", d.enter(d.c, d.f, ack), p.ID, d.c, b)
		d.home("more back", d.answer(p, b, d.c, ack), d.f, d.c)

		b, d.c = end(External(2, d.v6), 8080), end(d.c.Addr(), 4001)
		d.nodePort(0, b)
		a := d.enter(d.c, d.f, syn)
		worn := d.worn(a)
		d.want("first to another node", a, 0, worn, b)
		d.home("answer of another node", d.arrive(b, worn, syn|ack), d.f, d.c)

		b = end(d.edge.Node(d.v6), 8080)
		d.nodePort(0, b)
		seen := map[uint16]bool{}
		for i := range 4 {
			d.edge.Wear(d.t, 65520, 16) // with the last port of all
			d.c = end(d.c.Addr(), uint16(5000+i))
			a := d.enter(d.c, d.f, syn)
			stands := a.Tuple().Src
			if stands.Addr() != d.f.Addr() || stands.Port() < 65520 || stands.Port() == 65535 || seen[stands.Port()] {
				d.t.Fatalf("%v v6=%v: the node sees %v", d.proto, d.v6, stands)
			}
			seen[stands.Port()] = true
			d.home("first to itself", a, stands, b)
			d.home("answer of itself", d.enter(b, stands, syn|ack), d.f, d.c)
			d.home("more to itself", d.enter(d.c, d.f, ack), stands, b)
			d.home("more back of itself", d.enter(b, stands, ack), d.f, d.c)
		}
		d.edge.Wear(d.t, EdgePorts.First, EdgePorts.Count)
		if a := d.enter(end(d.c.Addr(), 4002), d.f, ack); d.proto != oracle.UDP && (a.Dropped != "midstream_nat" || !a.Refused) {
			d.t.Errorf("%v v6=%v: in the middle of an unknown flow: %v", d.proto, d.v6, a)
		}
	})
}

// What is not the node's, or no Service's, goes on as if there were no door.
func TestDoorLetsOthersPass(t *testing.T) {
	eachDoor(t, func(d door) {
		d.service(end(External(2, d.v6), 8080))
		p := end(d.edge.Pods[1].IP(d.v6), 4000)
		d.want("a pod's", d.enter(p, d.f, syn), 0, p, d.f)
		other := end(d.f.Addr(), 81)
		if a := d.enter(d.c, other, syn); a.Dropped != "service_port" || !a.Refused {
			d.t.Errorf("%v v6=%v: another port of the cluster's address: %v", d.proto, d.v6, a)
		}
		d.edge.mark(d.t, d.f.Addr(), bpfgen.SvcAddress) // as an external one
		d.want("another port", d.enter(d.c, other, syn), 0, d.c, other)
		d.service()
		if a := d.enter(end(d.c.Addr(), 4001), d.f, syn); a.Dropped != "no_backend" || !a.Refused {
			d.t.Errorf("%v v6=%v: without a backend: %v", d.proto, d.v6, a)
		}
	})
}

// An error about a packet of the node's goes to the node's stack by the way it came,
// under its sender's own address, which the check of that way knows.
func TestDoorErrorsAreTheStacks(t *testing.T) {
	eachDoor(t, func(d door) {
		s := scene{speaker: d.speaker}
		kind, code, quoted := uint8(3), uint8(3), 60
		if d.v6 {
			kind, code, quoted = 1, 4, 80
		}
		about := func(mac [6]byte, from, b, seen netip.AddrPort) *Packet {
			there := Eth(d.edge.MAC, Router).IP(seen.Addr(), b.Addr()).L4(d.proto, seen.Port(), b.Port(), ack).Payload(200)
			return Eth(mac, d.edge.MAC).IP(from.Addr(), seen.Addr()).ICMP(kind, code, 0).Data(quote(there, quoted))
		}
		b, far := end(d.edge.Pods[1].IP(d.v6), 8080), end(External(2, d.v6), 8080)
		d.service(far)
		worn := d.worn(d.enter(d.c, d.f, syn))
		for _, from := range []netip.AddrPort{far, end(External(9, d.v6), 0)} {
			a, err := d.edge.Arrive(about(Router, from, far, worn).Frame())
			s.quotes(d.checked(a, err), Pod{}, Tuple{d.proto, d.c, d.f}, from.Addr().String())
			if a.Direct || a.Headers.Dst != worn.Addr() {
				d.t.Errorf("%v", a)
			}
		}
		d.service(b)
		c := end(d.c.Addr(), 4001)
		d.want("first", d.enter(c, d.f, syn), d.edge.Pods[1].ID, c, b)
		a, err := d.edge.Answer(d.edge.Pods[1], about(d.edge.Pods[1].MAC, b, b, c).Frame())
		s.quotes(d.checked(a, err), Pod{}, Tuple{d.proto, c, d.f}, b.Addr().String())
		if a.Direct {
			d.t.Errorf("%v", a)
		}
	})
}
