// SPDX-License-Identifier: Apache-2.0

// One source port, used again: for another connection, another Service, or the
// backend itself, while the first is open, closing or gone.

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// closeBoth ends a flow by both ends' FIN.
func (s scene) closeBoth(to, served netip.AddrPort) {
	s.t.Helper()
	s.sees(s.send(s.client, s.c, to, fin|ack), s.server, s.c, served)
	s.sees(s.send(s.server, served, s.c, fin|ack), s.client, to, s.c)
	s.sees(s.send(s.client, s.c, to, ack), s.server, s.c, served)
}

// talk exchanges packets of an open flow; src is what the server sees.
func (s scene) talk(to, src, served netip.AddrPort) {
	s.t.Helper()
	s.sees(s.send(s.client, s.c, to, ack), s.server, src, served)
	s.sees(s.send(s.server, served, src, ack), s.client, to, s.c)
}

func TestSynReopensAClosedFlow(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		for _, to := range []netip.AddrPort{s.b, s.vip, s.vip, s.b, s.b, s.vip} {
			s.open(to, s.b)
			s.closeBoth(to, s.b)
		}
	})
}

func TestSynReopensOntoAnotherBackend(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		s.open(s.vip, s.b)
		s.closeBoth(s.vip, s.b)
		other := end(s.second.IP(v6), 8080)
		net.SetService(t, s.proto, s.vip, other)
		s.sees(s.send(s.client, s.c, s.vip, syn), s.second, s.c, other)
		s.sees(s.send(s.second, other, s.c, syn|ack), s.client, s.vip, s.c)
		if f := s.flow(s.c, s.b); f != nil {
			t.Errorf("the old half is still there: %+v", f.Entry)
		}
	})
}

func TestSynAfterTheServersResetBeginsAnew(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		s.open(s.vip, s.b)
		s.sees(s.send(s.server, s.b, s.c, rst), s.client, s.vip, s.c)
		s.open(s.vip, s.b)
		net.Age(t, 15) // longer than a reset flow lives
		s.talk(s.vip, s.c, s.b)
		s.sees(s.send(s.server, s.b, s.c, ack), s.client, s.vip, s.c)
		net.Age(t, 15)
		s.sees(s.send(s.server, s.b, s.c, ack), s.client, s.vip, s.c)
	})
}

func TestRetransmittedSynStaysWithItsBackend(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		s.sees(s.send(s.client, s.c, s.vip, syn), s.server, s.c, s.b)
		net.SetService(t, s.proto, s.vip, end(s.second.IP(v6), 8080))
		for range 5 {
			s.sees(s.send(s.client, s.c, s.vip, syn), s.server, s.c, s.b)
		}
	})
}

// A pod is faster than its Service: what nobody has answered is led to the
// Service as soon as it is there.
func TestAFlowThatIsOlderThanItsService(t *testing.T) {
	for name, proto := range map[string]uint8{"tcp": oracle.TCP, "udp": oracle.UDP} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, proto)
				late := end(s.vip.Addr().Next(), 80)
				for range 2 {
					net.Age(t, 5) // what is kept of the flow for a moment is over
					if seen := s.send(s.client, s.c, late, syn); seen.Dropped != "" {
						t.Fatal(seen)
					}
				}
				net.SetService(t, proto, late, s.b)
				net.Age(t, 5)
				s.sees(s.send(s.client, s.c, late, syn), s.server, s.c, s.b)
				s.sees(s.send(s.server, s.b, s.c, syn|ack), s.client, late, s.c)
			})
		})
	}
}

func TestSynToABackendThatIsGoneGoesToAnother(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		s.sees(s.send(s.client, s.c, s.vip, syn), s.server, s.c, s.b)
		other := end(s.second.IP(v6), 8080)
		net.SetService(t, s.proto, s.vip, other)
		net.ForgetBackend(t, s.proto, s.b)
		s.sees(s.send(s.client, s.c, s.vip, syn), s.second, s.c, other)
		s.sees(s.send(s.second, other, s.c, syn|ack), s.client, s.vip, s.c)
	})
}

// As a change takes a backend away: the client's half goes first, while an answer is under way.
func TestAnAnswerWithoutItsClientsHalfBecomesNoFlow(t *testing.T) {
	for name, proto := range map[string]uint8{"udp": oracle.UDP, "sctp": oracle.SCTP} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, proto)
				s.sees(s.send(s.client, s.c, s.vip, syn), s.server, s.c, s.b)
				other := end(s.second.IP(v6), 8080)
				net.SetService(t, proto, s.vip, other)
				net.DeleteFlow(t, Tuple{proto, s.c, s.vip}, bpfgen.CTScopeFlow)
				s.sees(s.send(s.server, s.b, s.c, syn|ack), s.client, s.vip, s.c)
				s.sees(s.send(s.client, s.c, s.vip, syn), s.second, s.c, other)
				s.sees(s.send(s.second, other, s.c, syn|ack), s.client, s.vip, s.c)
			})
		})
	}
}

func TestEstablishedFlowKeepsARemovedBackend(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		s.open(s.vip, s.b)
		net.SetService(t, s.proto, s.vip, end(s.second.IP(v6), 8080))
		net.ForgetBackend(t, s.proto, s.b)
		s.talk(s.vip, s.c, s.b)
		net.RemoveService(t, s.proto, s.vip)
		s.talk(s.vip, s.c, s.b)
	})
}

func TestDirectAfterTranslatedOnOneSourcePort(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		s.open(s.vip, s.b)
		a := s.send(s.client, s.c, s.b, syn)
		shadow := a.Tuple().Src
		s.sees(a, s.server, shadow, s.b)
		if shadow == s.c {
			t.Fatal("two flows in the same tuple")
		}
		if net.Flow(t, Tuple{s.proto, s.c, s.b}, bpfgen.CTScopeShadow) == nil {
			t.Error("no entry in the shadow scope")
		}
		s.sees(s.send(s.server, s.b, shadow, syn|ack), s.client, s.b, s.c)
		for range 2 {
			s.talk(s.b, shadow, s.b)
			s.talk(s.vip, s.c, s.b)
		}
	})
}

func TestTranslatedAfterDirectOnOneSourcePort(t *testing.T) {
	for name, proto := range map[string]uint8{"tcp": oracle.TCP, "udp": oracle.UDP, "sctp": oracle.SCTP} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, proto)
				s.open(s.b, s.b)
				a := s.send(s.client, s.c, s.vip, syn)
				moved := a.Tuple().Src
				s.sees(a, s.server, moved, s.b)
				if moved.Port() < bpfgen.NATPortFirst || int(moved.Port()) >= bpfgen.NATPortFirst+bpfgen.NATPortCount {
					t.Fatalf("source %v, want a port of the translation's range", moved)
				}
				s.sees(s.send(s.server, s.b, moved, syn|ack), s.client, s.vip, s.c)
				for range 2 {
					s.talk(s.b, s.c, s.b)
					s.talk(s.vip, moved, s.b)
				}
			})
		})
	}
}

// While a pod's filters become links, what the stack is to carry meets both, the link first: the flow stays what it was made
// there. With one of them alone it is the pod's own, on a tuple that is taken.
func TestAFlowThatMeetsLinkAndFilter(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, proto := range []uint8{oracle.TCP, oracle.UDP, oracle.SCTP} {
			net := usualNetwork(t, way{})
			s := newScene(t, net, v6, proto)
			far := end(External(1, v6), 8080)
			net.SetService(t, proto, s.vip, far)
			s.client.Flags = bpfgen.EPHostEnd | bpfgen.EPServiceTc | bpfgen.EPSettling
			net.SetPod(t, s.client)
			for _, flags := range []uint8{syn, ack, ack} {
				first := s.send(s.client, s.c, s.vip, flags)
				s.left(first, s.c, far)
				a, err := net.Send(s.client, first.Frame)
				s.left(s.checked(a, err), s.c, far)
				s.sees(s.receive(s.client, far, s.c, flags|ack), s.client, s.vip, s.c)
			}
			s.client.Flags &^= bpfgen.EPSettling
			net.SetPod(t, s.client)
			if a := s.send(s.client, s.c, far, syn); a.Dropped != "" || a.Tuple().Src == s.c {
				t.Errorf("the pod's own: %v", a)
			}
		}
	}
}

// A flow in the shadow of another must not fall back to its own tuple when that
// one ends: the server knows it by its changed port only.
func TestShadowedFlowOutlivesTheOneThatHadItsTuple(t *testing.T) {
	ends := map[string]func(scene){
		"reopened elsewhere": func(s scene) {
			s.closeBoth(s.vip, s.b)
			other := end(s.second.IP(s.c.Addr().Is6()), 8080)
			s.net.SetService(s.t, s.proto, s.vip, other)
			s.sees(s.send(s.client, s.c, s.vip, syn), s.second, s.c, other)
		},
		"expired": func(s scene) {
			s.closeBoth(s.vip, s.b)
			s.net.Age(s.t, 130)
		},
	}
	for name, finish := range ends {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, oracle.TCP)
				s.open(s.vip, s.b)
				shadow := s.send(s.client, s.c, s.b, syn).Tuple().Src
				s.sees(s.send(s.server, s.b, shadow, syn|ack), s.client, s.b, s.c)
				s.talk(s.b, shadow, s.b)
				finish(s)
				s.talk(s.b, shadow, s.b)
			})
		})
	}
}

// While a flow may lie in a shadow, all others take the long way: not for longer.
func TestShadowsAreLookedForWhileThereMayBeAny(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		looked := func() bool {
			var facts bpfgen.PodFacts
			check(t, net.MstFactsV1.Lookup(uint32(0), &facts))
			return int32(facts.Shadowed-Now()) >= 0
		}
		check(t, net.MstFactsV1.Put(uint32(0), bpfgen.PodFacts{})) // of the runs before
		s.open(s.vip, s.b)
		if looked() {
			t.Error("before there is one")
		}
		shadow := s.send(s.client, s.c, s.b, syn).Tuple().Src
		s.sees(s.send(s.server, s.b, shadow, syn|ack), s.client, s.b, s.c)
		s.talk(s.b, shadow, s.b)
		net.Age(t, 80000) // the flow is seen again before it ends
		s.talk(s.b, shadow, s.b)
		net.Age(t, 80000)
		if !looked() {
			t.Error("not any more, though one lives")
		}
		net.Age(t, 10000)
		if looked() {
			t.Error("still, though the last has ended")
		}
	})
}

// Two Services have one backend; the client uses its port for both, one after the other.
func TestAClosedFlowsTupleGoesToAnotherServicesFlow(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		other := end(VIP(2, v6), 80)
		net.SetService(t, s.proto, other, s.b)
		s.open(s.vip, s.b)
		s.closeBoth(s.vip, s.b)
		a := s.send(s.client, s.c, other, syn)
		src := a.Tuple().Src
		s.sees(a, s.server, src, s.b)
		s.sees(s.send(s.server, s.b, src, syn|ack), s.client, other, s.c)
		s.talk(other, src, s.b)
		// The first Service again: its closed flow goes, the second's stays.
		s.send(s.client, s.c, s.vip, syn)
		s.talk(other, src, s.b)
	})
}

func TestALatePacketOfAClosedFlowStaysOutOfTheNextOne(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		other := end(VIP(2, v6), 80)
		net.SetService(t, s.proto, other, s.b)
		s.open(s.vip, s.b)
		s.closeBoth(s.vip, s.b)
		src := s.send(s.client, s.c, other, syn).Tuple().Src
		a := s.send(s.client, s.c, s.vip, fin|ack)
		if a.Dropped == "" && a.Tuple().Src == src {
			t.Errorf("a retransmitted FIN of the closed flow: %v, which is the new flow's tuple", a)
		}
	})
}

// A FIN of one end does not end the flow: the other may go on sending.
func TestAHalfClosedFlowKeepsItsTuple(t *testing.T) {
	for name, useOther := range map[string]bool{"from_a_direct_flow": false, "from_another_service": true} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, oracle.TCP)
				to := s.b
				if useOther {
					to = end(VIP(2, v6), 80)
					net.SetService(t, s.proto, to, s.b)
				}
				s.open(s.vip, s.b)
				s.sees(s.send(s.client, s.c, s.vip, fin|ack), s.server, s.c, s.b)
				a := s.send(s.client, s.c, to, syn)
				if a.Tuple().Src == s.c {
					t.Errorf("the new flow has the tuple of the half-closed one")
				}
				s.sees(s.send(s.server, s.b, s.c, ack), s.client, s.vip, s.c)
				s.sees(s.send(s.client, s.c, s.vip, ack), s.server, s.c, s.b)
			})
		})
	}
}

// A SYN straight to a backend is another flow than the Service's that is drained there.
func TestADirectSynLeavesADrainingFlowAlone(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		s.open(s.vip, s.b)
		net.RemoveService(t, s.proto, s.vip)
		net.ForgetBackend(t, s.proto, s.b)
		s.send(s.client, s.c, s.b, syn)
		s.talk(s.vip, s.c, s.b)
	})
}

func TestNoFreeSourcePort(t *testing.T) {
	net := NewNetwork(t, Options{Sizes: map[string]uint32{"mst_ct_v1": 65536}}, 4)
	s := newScene(t, net, false, oracle.TCP)
	ports := []uint16{s.c.Port()}
	for i := range bpfgen.NATPortCount {
		ports = append(ports, uint16(bpfgen.NATPortFirst+i))
	}
	alive := bpfgen.PodCtEntry{Expires: Now() + 1000}
	net.lookElsewhere(t)
	for _, p := range ports {
		key := keyOf(Tuple{s.proto, end(s.c.Addr(), p), s.b}, 0)
		check(t, net.MstCtV1.Put(key, alive))
	}
	s.dropped(s.send(s.client, s.c, s.vip, syn), bpfgen.ReasonNATPorts)
	if n := net.Drops(t, bpfgen.ReasonNATPorts, bpfgen.DirFromPod); n != 1 {
		t.Errorf("%d counted, want 1", n)
	}
}
