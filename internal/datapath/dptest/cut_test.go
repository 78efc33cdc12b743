// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// retransmits is how long, in the programs' seconds, a sender of TCP may wait until it sends again what nobody
// acknowledges (Linux: TCP_RTO_MAX, 120 s).
const retransmits = 120_000_000_000 >> bpfgen.SecondShift

// ingress gives the server a policy: 7 allows nobody, 0 is none.
func (s scene) ingress(set uint64) {
	s.t.Helper()
	check(s.t, s.net.MstPoliciesV1.Put(s.server.ID, bpfgen.PodEndpointPolicy{Ingress: set}))
	s.net.SetPod(s.t, s.server)
}

// What a pod no longer takes from its client, its own next packet does not open again, whatever the client does.
func TestACutFlowIsNotOpenedFromItsOtherEnd(t *testing.T) {
	type cut struct {
		scene
		client func(flags uint8) Arrival
		answer func() Arrival
		deny   func()
	}
	cases := map[string]func(c cut){
		"as long as it retransmits": func(c cut) {
			c.deny()
			for range 3 {
				c.dropped(c.answer(), bpfgen.ReasonPolicyIngress)
				c.net.Age(c.t, retransmits)
			}
		},
		"when its client closes, and begins anew": func(c cut) {
			c.deny()
			c.dropped(c.client(fin|ack), bpfgen.ReasonPolicyIngress)
			c.dropped(c.client(syn), bpfgen.ReasonPolicyIngress)
		},
		"when its client had closed, and begins anew": func(c cut) {
			c.client(fin | ack)
			c.deny()
			c.dropped(c.client(syn), bpfgen.ReasonPolicyIngress)
		},
		"long after its client has reset it": func(c cut) {
			c.deny()
			c.dropped(c.client(rst), bpfgen.ReasonPolicyIngress)
			c.net.Age(c.t, retransmits)
		},
		"when its client resets, and begins anew": func(c cut) {
			c.deny()
			c.dropped(c.client(rst), bpfgen.ReasonPolicyIngress)
			c.dropped(c.client(syn), bpfgen.ReasonPolicyIngress)
		},
	}
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		for what, fn := range cases {
			for _, proto := range []uint8{oracle.TCP, oracle.SCTP} {
				for way, far := range map[string]bool{"here": false, "far": true, "by a Service": false} {
					net.Reset(t, 4)
					s := newScene(t, net, v6, proto)
					from, to := s.c, s.b
					send := func(flags uint8) Arrival { return s.send(s.client, from, to, flags) }
					if way == "by a Service" {
						to = s.vip
					} else if far {
						from = netip.AddrPortFrom(External(1, v6), 1000)
						send = func(flags uint8) Arrival { return s.receive(s.server, from, s.b, flags) }
					}
					answer := func() Arrival { return s.send(s.server, s.b, from, ack) }
					for _, flags := range []uint8{syn, ack} {
						if a := send(flags); a.Dropped != "" {
							t.Fatal(a)
						}
						if a := answer(); a.Dropped != "" {
							t.Fatal(a)
						}
					}
					fn(cut{s, send, answer, func() { s.ingress(7) }})
					if a := answer(); a.Dropped != ReasonName(bpfgen.ReasonPolicyIngress) {
						t.Errorf("%s: protocol %d, %s: %v", what, proto, way, a)
					}
					// What is allowed again begins anew.
					s.ingress(0)
					if a := send(syn); a.Dropped != "" {
						t.Errorf("%s: protocol %d, %s, allowed: %v", what, proto, way, a)
					}
				}
			}
		}
	})
}

// A client that is denied one backend of a Service is led to another from the same port, and the first goes on being cut.
func TestACutFlowStaysCutWhileItsClientHasAnotherBackend(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		for _, proto := range []uint8{oracle.TCP, oracle.SCTP} {
			for what, flags := range map[string]uint8{"closed": fin | ack, "reset": rst} {
				net.Reset(t, 4)
				s := newScene(t, net, v6, proto)
				s.open(s.vip, s.b)
				s.ingress(7)
				s.dropped(s.send(s.client, s.c, s.vip, flags), bpfgen.ReasonPolicyIngress)
				other := end(s.second.IP(v6), 8080)
				talk := func() {
					t.Helper()
					s.sees(s.send(s.client, s.c, s.vip, ack), s.second, s.c, other)
					s.sees(s.send(s.second, other, s.c, ack), s.client, s.vip, s.c)
				}
				net.SetService(t, proto, s.vip, other)
				s.sees(s.send(s.client, s.c, s.vip, syn), s.second, s.c, other)
				s.sees(s.send(s.second, other, s.c, syn|ack), s.client, s.vip, s.c)
				for range 3 {
					s.dropped(s.send(s.server, s.b, s.c, ack), bpfgen.ReasonPolicyIngress)
					s.dropped(s.send(s.client, s.c, s.b, ack), bpfgen.ReasonPolicyIngress)
					net.Age(t, 25)
					talk()
				}
				// Allowed again, it is a flow of its own, and not in the way of the new one.
				s.ingress(0)
				s.sees(s.send(s.server, s.b, s.c, ack), s.client, s.b, s.c)
				talk()
				if t.Failed() {
					t.Fatalf("%s, protocol %d", what, proto)
				}
			}
		}
	})
}

// A SYN that is sent again does not make room for the answer to the one that was let pass.
func TestAFlowThatIsCutHalfOpenIsNotOpenedByItsAnswer(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		for _, proto := range []uint8{oracle.TCP, oracle.SCTP} {
			net.Reset(t, 4)
			s := newScene(t, net, v6, proto)
			for _, to := range []netip.AddrPort{s.b, s.vip} {
				net.ClearFlows(t)
				s.sees(s.send(s.client, s.c, to, syn), s.server, s.c, s.b)
				s.ingress(7)
				for range 2 {
					s.dropped(s.send(s.client, s.c, to, syn), bpfgen.ReasonPolicyIngress)
				}
				s.dropped(s.send(s.server, s.b, s.c, syn|ack), bpfgen.ReasonPolicyIngress)
				s.dropped(s.send(s.client, s.c, to, syn), bpfgen.ReasonPolicyIngress)
				s.dropped(s.send(s.server, s.b, s.c, syn|ack), bpfgen.ReasonPolicyIngress)
				s.ingress(0)
			}
		}
	})
}

// Both ends use one port, and who sent first is denied: what the other one begins is its own, at once where a packet says
// that it begins, else soon after the cut, however often it tries.
func TestTheOtherEndOfACutFlowBeginsItsOwn(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		for _, proto := range []uint8{oracle.TCP, oracle.UDP, oracle.SCTP} {
			net.Reset(t, 4)
			s := newScene(t, net, v6, proto)
			a, b := end(s.client.IP(v6), 7946), end(s.server.IP(v6), 7946)
			s.sees(s.send(s.client, a, b, syn), s.server, a, b)
			s.sees(s.send(s.server, b, a, syn|ack), s.client, b, a)
			s.sees(s.send(s.client, a, b, ack), s.server, a, b)
			s.ingress(7)
			s.dropped(s.send(s.client, a, b, ack), bpfgen.ReasonPolicyIngress)
			if proto == oracle.UDP {
				for range 4 {
					s.dropped(s.send(s.server, b, a, 0), bpfgen.ReasonPolicyIngress)
					net.Age(t, bpfgen.CTCutLifetime/4)
				}
				net.Age(t, 2)
			}
			s.sees(s.send(s.server, b, a, syn), s.client, b, a)
			s.sees(s.send(s.client, a, b, syn|ack), s.server, a, b)
			s.sees(s.send(s.server, b, a, ack), s.client, b, a)
			s.ingress(0)
		}
	})
}

// A flow in the shadow is cut as any other.
func TestACutFlowInTheShadowIsNotOpenedFromItsOtherEnd(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		defer func() {
			s.ingress(0)
			check(t, net.MstFactsV1.Put(uint32(0), bpfgen.PodFacts{})) // for the tests behind
		}()
		s.open(s.vip, s.b)
		shadow := s.send(s.client, s.c, s.b, syn).Tuple().Src
		s.sees(s.send(s.server, s.b, shadow, syn|ack), s.client, s.b, s.c)
		s.talk(s.b, shadow, s.b)
		s.ingress(7)
		s.dropped(s.send(s.client, s.c, s.b, rst), bpfgen.ReasonPolicyIngress)
		s.dropped(s.send(s.client, s.c, s.b, syn), bpfgen.ReasonPolicyIngress)
		s.dropped(s.send(s.server, s.b, shadow, ack), bpfgen.ReasonPolicyIngress)
	})
}

// Who is asked by an echo does not ask by it: an echo request under the identifier of the other end's own is judged as any.
func TestAnEchoRequestIsNoAnswer(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		proto := uint8(oracle.ICMP)
		if v6 {
			proto = oracle.ICMPv6
		}
		s := newScene(t, net, v6, proto)
		a, b := end(s.client.IP(v6), 5), end(s.server.IP(v6), 5)
		s.ingress(7)
		for range 2 {
			s.dropped(s.send(s.client, a, b, syn), bpfgen.ReasonPolicyIngress)
			s.sees(s.send(s.server, b, a, syn), s.client, b, a)
			s.sees(s.send(s.client, a, b, ack), s.server, a, b)
			s.dropped(s.send(s.client, a, b, syn), bpfgen.ReasonPolicyIngress)
		}
		s.ingress(0)
		for range 2 { // each asks the other under one identifier
			s.sees(s.send(s.client, a, b, syn), s.server, a, b)
			s.sees(s.send(s.server, b, a, syn), s.client, b, a)
			s.sees(s.send(s.server, b, a, ack), s.client, b, a)
			s.sees(s.send(s.client, a, b, ack), s.server, a, b)
		}
	})
}

// The same of who is asked by a masqueraded pod: what it asks, the node answers.
func TestAnEchoRequestToAWornIdentifierIsTheNodes(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		if !m.echo() {
			return
		}
		worn, far := m.open(m.pod, m.from, m.to)
		if a := m.arrive(far, worn, syn); a.Dropped != "" || a.Direct || a.Tuple().Dst != worn {
			m.t.Errorf("%v", a)
		}
		m.want("answer", m.arrive(far, worn, ack), m.pod.ID, end(m.to.Addr(), m.from.Port()), m.from)
	})
}
