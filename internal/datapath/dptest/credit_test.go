// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// Where a TCP flow begins that finds no room near, and what its first packets
// cost: on the credit of flows that have proved themselves it begins where it will stay.

func (d *Datapath) credit(t testing.TB) int32 {
	t.Helper()
	var credit int32
	check(t, d.MstCreditV1.Lookup(uint32(0), &credit))
	return credit
}

func (d *Datapath) setCredit(t testing.TB, credit int32) {
	t.Helper()
	check(t, d.MstCreditV1.Put(uint32(0), credit))
}

// begins says whether the next flow's entries lie in the big table.
func (s scene) begins(from, to, served netip.AddrPort) bool {
	s.t.Helper()
	s.c = from
	s.sees(s.send(s.client, from, to, syn), s.server, from, served)
	f, half := s.flow(from, to), s.flow(from, served)
	if f == nil || half == nil || f.big != half.big {
		s.t.Fatalf("halves %+v and %+v", f, half)
	}
	return f.big
}

func TestAFlowThatProvedItselfVouchesForAnother(t *testing.T) {
	for _, by := range []string{"pod", "Service"} {
		t.Run(by, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				net.fillNear(t)
				s := newScene(t, net, v6, oracle.TCP)
				to, halves := s.vip, int32(2)
				if by == "pod" {
					to, halves = s.b, 1
				}
				at := func(i uint16) netip.AddrPort { return end(s.c.Addr(), s.c.Port()+i) }
				if s.begins(at(1), to, s.b) {
					t.Error("without credit the first flow began in the big table")
				}
				if got := net.credit(t); got != 0 {
					t.Errorf("credit %d after a flow that nobody has answered", got)
				}
				s.sees(s.send(s.server, s.b, at(1), syn|ack), s.client, to, at(1))
				s.sees(s.send(s.client, at(1), to, ack), s.server, at(1), s.b)
				if got := net.credit(t); got != halves {
					t.Errorf("credit %d after a flow of %d entries proved itself", got, halves)
				}
				if !s.begins(at(2), to, s.b) {
					t.Error("a flow began in the small table beside credit")
				}
				if got := net.credit(t); got != 0 {
					t.Errorf("credit %d after it was taken", got)
				}
				if s.begins(at(3), to, s.b) {
					t.Error("more flows began in the big table than have proved themselves")
				}
			})
		})
	}
}

func TestCreditHasABound(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		net.fillNear(t)
		s := newScene(t, net, v6, oracle.TCP)
		s.open(s.vip, s.b)
		s.closeBoth(s.vip, s.b)
		net.setCredit(t, bpfgen.CTCredit-1)
		s.open(s.vip, s.b) // in the place of the dead: two entries give, and none takes
		if got := net.credit(t); got != bpfgen.CTCredit {
			t.Errorf("credit %d, want the bound %d", got, bpfgen.CTCredit)
		}
	})
}

func TestAFloodTakesNoMoreThanTheCredit(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		net.fillNear(t)
		s := newScene(t, net, v6, oracle.TCP)
		net.setCredit(t, 20)
		for i := range uint16(100) {
			from := end(s.c.Addr(), 3000+i)
			s.sees(s.send(s.client, from, s.b, syn), s.server, from, s.b)
			// Refused, or answered by who lets others wait: neither proves anything.
			s.sees(s.send(s.server, s.b, from, []uint8{rst | ack, syn | ack}[i%2]), s.client, s.b, from)
		}
		big := 0
		for _, f := range net.Flows(t) {
			if f.big {
				big++
			}
		}
		if got := net.credit(t); big != 20 || got != 0 {
			t.Errorf("%d entries of a flood in the big table, credit %d: want 20 and none", big, got)
		}
	})
}

// The handshake's last packet takes the short way, and the entry learns of it where it must.
func TestTheThirdPacketProvesAFlowOnTheShortWay(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		onOneCPU(t)
		net.fillNear(t)
		s := newScene(t, net, v6, oracle.TCP)
		for _, credit := range []int32{0, 2} {
			s.c = end(s.c.Addr(), s.c.Port()+1)
			net.setCredit(t, credit)
			s.sees(s.send(s.client, s.c, s.vip, syn), s.server, s.c, s.b)
			s.sees(s.send(s.client, s.c, s.vip, ack), s.server, s.c, s.b) // before any answer it proves nothing
			s.wantFlow(s.c, s.vip, bpfgen.CTPreNAT, false, 60)
			s.sees(s.send(s.server, s.b, s.c, syn|ack), s.client, s.vip, s.c)
			s.wantFlow(s.c, s.vip, bpfgen.CTPreNAT, false, 60)
			s.sees(s.send(s.client, s.c, s.vip, ack), s.server, s.c, s.b)
			s.wantFlow(s.c, s.vip, bpfgen.CTPreNAT, true, 86400)
			s.wantFlow(s.c, s.b, bpfgen.CTPostNAT, true, 86400)
		}
	})
}

// A flow without translation that lies where it will stay lives by its answer: the packets that
// follow need no entry.
func TestAnAnswerInPlaceIsEnoughToLiveOn(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		onOneCPU(t)
		net.fillNear(t)
		s := newScene(t, net, v6, oracle.TCP)
		net.setCredit(t, 1)
		s.sees(s.send(s.client, s.c, s.b, syn), s.server, s.c, s.b)
		s.wantFlow(s.c, s.b, bpfgen.CTDirect, false, 60)
		s.sees(s.send(s.server, s.b, s.c, syn|ack), s.client, s.b, s.c)
		s.wantFlow(s.c, s.b, bpfgen.CTDirect, false, 86400)
		s.talk(s.b, s.c, s.b)
		if got := net.credit(t); got != 0 {
			t.Errorf("credit %d before an entry saw its opener again", got)
		}
		s.sees(s.send(s.client, s.c, s.b, fin|ack), s.server, s.c, s.b)
		if got := net.credit(t); got != 1 {
			t.Errorf("credit %d after the flow's end", got)
		}
	})
}
