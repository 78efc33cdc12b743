// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// eachKeeping runs fn for both families and all protocols: a pod that keeps its
// address opens a flow to the outside, to which programs forward.
func eachKeeping(t *testing.T, fn func(m masqueraded)) {
	e := NewEdge(t, Options{NIC: true}, 2)
	check(t, e.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf | bpfgen.NodeMasquerade}))
	e.outside(t, true)
	eachToOutside(t, e, fn)
}

// outside has programs forward to the outside, by the NIC, or not.
func (e *Edge) outside(t *testing.T, on bool) {
	t.Helper()
	var r bpfgen.PodRemote
	if on {
		r.Ref = bpfgen.RemoteOutside
	}
	e.putRemote(t, 0, r)
	check(t, e.MstWearV1.Put(e.Ifindex, bpfgen.PodWear{Ip4: toAddr(e.Node(false)), Ip6: toAddr(e.Node(true)), Answers: bpfgen.WearAnswers}))
}

// more are the flags of a packet that is neither a flow's first nor its first answer.
func (m masqueraded) more() uint8 {
	if m.echo() { // an echo's flags would make it a reply
		return 0
	}
	return ack
}

// stack fails unless a packet is left to the node's stack, as it came.
func (m masqueraded) stack(what string, a Arrival, from, to netip.AddrPort) {
	m.t.Helper()
	if a.Direct || a.Dropped != "" || a.Tuple().Src != from || a.Tuple().Dst != to {
		m.t.Errorf("%v v6=%v: %s: %v, want it at the stack as %v>%v", m.proto, m.v6, what, a, from, to)
	}
}

func TestAPodsFlowToTheOutsideKeepsItsAddress(t *testing.T) {
	eachKeeping(t, func(m masqueraded) {
		for range 2 { // the second is of a pair that has been judged
			m.want("first", m.answer(m.pod, m.from, m.to, syn), 0, m.from, m.to)
			m.want("answer", m.arrive(m.to, m.from, syn|ack), m.pod.ID, m.to, m.from)
			for i := range 3 {
				a := m.answer(m.pod, m.from, m.to, m.more())
				m.want("more", a, 0, m.from, m.to)
				if got := hopLimit(a.Frame); got != 63 {
					m.t.Errorf("hop limit %d, want one less than 64", got)
				}
				m.want("more back", m.arrive(m.to, m.from, ack), m.pod.ID, m.to, m.from)
				if i == 1 { // both ends are judged again
					m.edge.SetPod(m.t, m.pod)
				}
			}
			m.from = end(m.from.Addr(), m.from.Port()+1)
			if m.echo() {
				m.to = end(m.to.Addr(), m.from.Port())
			}
		}
		// What somebody outside opens passes the stack.
		stranger, port := end(External(9, m.v6), 8080), end(m.pod.IP(m.v6), 8080)
		m.stack("a stranger's", m.arrive(stranger, port, syn), stranger, port)
	})
}

func TestWhatIsNotOutsideIsTheStacks(t *testing.T) {
	eachKeeping(t, func(m masqueraded) {
		for what, try := range map[string]func(){
			"the node": func() { m.to = end(m.edge.Node(m.v6), m.to.Port()) },
			"no route": func() {
				m.to = end(netip.MustParseAddr(map[bool]string{false: "198.18.0.1", true: "2001:db8:ffff::1"}[m.v6]), m.to.Port())
			},
			"another device": func() { check(m.t, m.edge.MstWearV1.Delete(m.edge.Ifindex)) },
			"no answers there": func() {
				check(m.t, m.edge.MstWearV1.Put(m.edge.Ifindex, bpfgen.PodWear{Ip4: toAddr(m.edge.Node(false)), Ip6: toAddr(m.edge.Node(true))}))
			},
			"the kernel is to masquerade it": func() {
				check(m.t, m.edge.MstMasqueradeV1.Put(m.pod.ID, uint32(masqueradeGroup)))
				check(m.t, m.edge.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf}))
			},
			"the stack does it": func() { m.edge.outside(m.t, false) },
		} {
			was := m
			m.edge.ClearFlows(m.t)
			try()
			for range 2 {
				m.stack(what, m.answer(m.pod, m.from, m.to, syn), m.from, m.to)
			}
			m = was
			m.edge.outside(m.t, true)
			check(m.t, m.edge.MstMasqueradeV1.Put(m.pod.ID, uint32(0)))
			check(m.t, m.edge.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf | bpfgen.NodeMasquerade}))
		}
	})
}

// Whose flows the programs forward may change at any time: a flow that began past
// the stack goes on through it, both ways, and one that began through it stays there.
func TestTheOutsideChangesHands(t *testing.T) {
	eachKeeping(t, func(m masqueraded) {
		m.want("first", m.answer(m.pod, m.from, m.to, syn), 0, m.from, m.to)
		m.want("answer", m.arrive(m.to, m.from, syn|ack), m.pod.ID, m.to, m.from)
		m.edge.outside(m.t, false)
		m.stack("more", m.answer(m.pod, m.from, m.to, m.more()), m.from, m.to)
		m.stack("more back", m.arrive(m.to, m.from, ack), m.to, m.from)
		m.edge.outside(m.t, true)
		for range 2 {
			m.stack("it stays", m.answer(m.pod, m.from, m.to, m.more()), m.from, m.to)
			m.stack("and its answers", m.arrive(m.to, m.from, ack), m.to, m.from)
		}
	})
}

func TestErrorsAboutFlowsToTheOutside(t *testing.T) {
	eachKeeping(t, func(m masqueraded) {
		s := scene{speaker: m.speaker}
		kind, quoted := uint8(11), 60
		if m.v6 {
			kind, quoted = 3, 80
		}
		m.want("first", m.answer(m.pod, m.from, m.to, syn), 0, m.from, m.to)
		from := func(about netip.AddrPort) Arrival {
			m.t.Helper()
			there := Eth(m.edge.MAC, Router).IP(about.Addr(), m.to.Addr()).L4(m.proto, about.Port(), m.to.Port(), 0).Payload(200)
			e := Eth(Router, m.edge.MAC).IP(External(9, m.v6), m.pod.IP(m.v6)).ICMP(kind, 0, 0).Data(quote(there, quoted))
			a, err := m.edge.Arrive(e.Frame())
			return m.checked(a, err)
		}
		a := from(m.from)
		s.quotes(a, m.pod, Tuple{m.proto, m.from, m.to}, External(9, m.v6).String())
		if !a.Direct {
			m.t.Errorf("an error about it: %v", a)
		}
		if a := from(end(m.pod.IP(m.v6), 4444)); a.Direct || a.Dropped != "" {
			m.t.Errorf("an error about nothing: %v, want it at the stack", a)
		}
	})
}

// Policy has its word there as everywhere: a flow that it no longer allows is cut
// for both ends, and no other begins.
func TestPolicyCutsFlowsToTheOutside(t *testing.T) {
	eachKeeping(t, func(m masqueraded) {
		m.want("first", m.answer(m.pod, m.from, m.to, syn), 0, m.from, m.to)
		m.want("answer", m.arrive(m.to, m.from, syn|ack), m.pod.ID, m.to, m.from)
		m.want("more", m.answer(m.pod, m.from, m.to, m.more()), 0, m.from, m.to)
		policy := func(p bpfgen.PodEndpointPolicy) {
			check(m.t, m.edge.MstPoliciesV1.Put(m.pod.ID, p))
			m.edge.SetPod(m.t, m.pod)
		}
		policy(bpfgen.PodEndpointPolicy{Egress: 7})
		defer policy(bpfgen.PodEndpointPolicy{})
		next, to := end(m.from.Addr(), m.from.Port()+1), m.to
		if m.echo() {
			to = end(to.Addr(), next.Port())
		}
		for what, a := range map[string]Arrival{
			"an answer": m.arrive(m.to, m.from, ack),
			"more":      m.answer(m.pod, m.from, m.to, m.more()),
			"another":   m.answer(m.pod, next, to, syn),
		} {
			if a.Dropped == "" {
				m.t.Errorf("%v v6=%v: %s: %v, and policy denies it", m.proto, m.v6, what, a)
			}
		}
		policy(bpfgen.PodEndpointPolicy{})
		m.want("another, allowed again", m.answer(m.pod, next, to, syn), 0, next, to)
	})
}
