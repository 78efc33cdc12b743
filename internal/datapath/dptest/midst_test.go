// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// eachConnection runs fn with a connection of the client's to the server, for TCP and SCTP.
func eachConnection(t *testing.T, fn func(s scene)) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		for _, proto := range []uint8{oracle.TCP, oracle.SCTP} {
			net.Reset(t, 4)
			s := newScene(t, net, v6, proto)
			s.open(s.b, s.b)
			if fn(s); t.Failed() {
				t.Fatalf("protocol %d", proto)
			}
		}
	})
}

// clientSpeaks and serverSpeaks are packets in the middle of the connection.
func (s scene) clientSpeaks(reason uint32) {
	s.speaks(s.send(s.client, s.c, s.b, ack), s.server, reason)
}
func (s scene) serverSpeaks(reason uint32) {
	s.speaks(s.send(s.server, s.b, s.c, ack), s.client, reason)
}

func (s scene) speaks(a Arrival, to Pod, reason uint32) {
	s.t.Helper()
	if reason != bpfgen.ReasonNone {
		s.dropped(a, reason)
	} else if a.Dropped != "" || a.Pod != to.ID {
		s.t.Errorf("%v, want it at pod %d", a, to.ID)
	}
}

// A connection that has expired is its opener's still: a RST that is not its own, silence, and a word of the other end
// do not make it one of that end's, which policy asks about other things.
func TestAConnectionStaysItsOpeners(t *testing.T) {
	eachConnection(t, func(s scene) {
		s.send(s.client, s.c, s.b, rst) // of a wrong number: the server does not heed it
		s.net.Age(s.t, 12)
		s.serverSpeaks(bpfgen.ReasonNone)
		s.clientSpeaks(bpfgen.ReasonNone)
		s.ingress(7)
		for range 3 {
			s.clientSpeaks(bpfgen.ReasonPolicyIngress)
			s.serverSpeaks(bpfgen.ReasonPolicyIngress)
		}
		s.ingress(0)
		s.clientSpeaks(bpfgen.ReasonNone)
		s.serverSpeaks(bpfgen.ReasonNone)
	})
}

// What policy has cut stays cut, however long nobody speaks, but for who opens it anew.
func TestSilenceMendsNoCut(t *testing.T) {
	eachConnection(t, func(s scene) {
		s.ingress(7)
		s.clientSpeaks(bpfgen.ReasonPolicyIngress)
		for range 2 {
			s.net.Age(s.t, bpfgen.CTCutLifetime+2)
			s.serverSpeaks(bpfgen.ReasonPolicyIngress)
			s.clientSpeaks(bpfgen.ReasonPolicyIngress)
		}
		s.ingress(0)
		s.send(s.client, s.c, s.b, syn)
		s.serverSpeaks(bpfgen.ReasonNone)
	})
}

// A connection of which nothing is known goes on with whoever speaks first. Where either end may have opened it,
// it is as long as both may.
func TestAConnectionThatEitherEndMayHaveOpened(t *testing.T) {
	eachConnection(t, func(s scene) {
		s.net.ClearFlows(s.t)
		s.serverSpeaks(bpfgen.ReasonNone)
		s.clientSpeaks(bpfgen.ReasonNone)
		s.ingress(7)
		s.clientSpeaks(bpfgen.ReasonPolicyIngress)
		s.serverSpeaks(bpfgen.ReasonPolicyIngress)
		s.ingress(0)
	})
	// The server could not have opened it: what is asked is the client's alone.
	eachConnection(t, func(s scene) {
		check(s.t, s.net.MstPoliciesV1.Put(s.client.ID, bpfgen.PodEndpointPolicy{Ingress: 7}))
		s.net.ClearFlows(s.t)
		s.serverSpeaks(bpfgen.ReasonPolicyIngress)
		s.clientSpeaks(bpfgen.ReasonNone)
		s.net.SetPod(s.t, s.client)
		s.net.SetPod(s.t, s.server)
		s.clientSpeaks(bpfgen.ReasonNone)
		s.serverSpeaks(bpfgen.ReasonNone)
		check(s.t, s.net.MstPoliciesV1.Put(s.client.ID, bpfgen.PodEndpointPolicy{}))
	})
}
