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
		"when its client resets, and begins anew": func(c cut) {
			c.deny()
			c.dropped(c.client(rst), bpfgen.ReasonPolicyIngress)
			c.dropped(c.client(syn), bpfgen.ReasonPolicyIngress)
		},
	}
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		for what, fn := range cases {
			for _, proto := range []uint8{oracle.TCP, oracle.SCTP} {
				for _, far := range []bool{false, true} {
					net.Reset(t, 4)
					s := newScene(t, net, v6, proto)
					from := s.c
					send := func(flags uint8) Arrival { return s.send(s.client, from, s.b, flags) }
					if far {
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
					fn(cut{s, send, answer, func() {
						check(t, net.MstPoliciesV1.Put(s.server.ID, bpfgen.PodEndpointPolicy{Ingress: 7}))
						net.SetPod(t, s.server)
					}})
					if a := answer(); a.Dropped != ReasonName(bpfgen.ReasonPolicyIngress) {
						t.Errorf("%s: protocol %d, far %v: %v", what, proto, far, a)
					}
					// What is allowed again begins anew.
					check(t, net.MstPoliciesV1.Put(s.server.ID, bpfgen.PodEndpointPolicy{}))
					net.SetPod(t, s.server)
					if a := send(syn); a.Dropped != "" {
						t.Errorf("%s: protocol %d, far %v, allowed: %v", what, proto, far, a)
					}
				}
			}
		}
	})
}
