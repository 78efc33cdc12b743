// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// crowd is a model of one namespace with pods whose labels are all different, of which
// the first 250 are on this node, each selected by a policy of its own that allows the next.
func crowd(pods int) *Model {
	const room = 1 << 18
	m := New(Limits{room, room, room, room})
	for i := range pods {
		addrs := []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})}
		m.SetPod(Pod{Key: member(i), Labels: map[string]string{"app": fmt.Sprint(i)}, Addrs: addrs})
		if i < 250 {
			m.SetEndpoint(Endpoint{ID: uint32(i), Pod: member(i), Addrs: addrs})
			m.SetPolicy(letting(i, i, i+1))
		}
	}
	m.Plan()
	return m
}

func member(i int) Key { return Key{Namespace: "crowd", Name: fmt.Sprint(i)} }

func labelled(i int) Selector {
	return Selector{{Key: "app", Operator: In, Values: []string{fmt.Sprint(i)}}}
}

// letting is policy number i, which lets peer reach pod.
func letting(i, pod, peer int) Policy {
	from := labelled(peer)
	return Policy{Key: member(i), Pods: labelled(pod), IsolatesIngress: true, Ingress: []Rule{{Peers: []Peer{{Pods: &from}}}}}
}

// TestPolicyConcernsItsPods: of 250 pods with a policy each, a change of one policy has
// those looked at that it selected or selects, and no other.
func TestPolicyConcernsItsPods(t *testing.T) {
	m := crowd(300)
	concerned := func(what string, want ...uint32) {
		t.Helper()
		if got := slices.Sorted(maps.Keys(m.dirtyEndpoints)); !slices.Equal(got, want) {
			t.Errorf("%s: endpoints %v are looked at, and are to be %v", what, got, want)
		}
		m.Plan()
	}
	m.SetPolicy(letting(7, 7, 20))
	concerned("another peer", 7)
	m.SetPolicy(letting(7, 9, 20))
	concerned("another pod", 7, 9)
	m.SetPolicy(letting(1000, 280, 20))
	concerned("a pod of another node")
	m.DeletePolicy(member(7))
	concerned("gone", 9)
}

// A namespace's labels change, and no policy asks for any.
// TestBlocksThatOverlapInTooManyWays: one policy of 20,000 rules, each of which allows all but an address of its own,
// is an object that an API server takes. Who was there before it keeps its rules.
func TestBlocksThatOverlapInTooManyWays(t *testing.T) {
	m := crowd(2)
	allBut := func(i, rules int) Policy {
		p := Policy{Key: member(i), Pods: labelled(i), IsolatesEgress: true}
		for r := range rules {
			but := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), byte(r >> 8), byte(r)}), 32)
			p.Egress = append(p.Egress, Rule{Peers: []Peer{{Block: &Block{netip.MustParsePrefix("0.0.0.0/0"), []netip.Prefix{but}}}}})
		}
		return p
	}
	overlap := func() (n int) {
		for _, g := range m.groups {
			n += len(g.identities)
		}
		return n
	}
	m.SetPolicy(allBut(0, 1000))
	if m.Plan(); len(m.Conditions()) != 0 || overlap() < 1000*1000 {
		t.Fatalf("of 1,000 rules %d are not in force, %d overlaps", len(m.Conditions()), overlap())
	}
	m.SetPolicy(allBut(1, 20000))
	m.Plan()
	refused := m.Conditions()
	for _, c := range refused {
		if c.Rule.Policy != member(1) || !strings.Contains(c.Why(), "overlap") {
			t.Fatalf("%+v is not in force: %s", c.Rule, c.Why())
		}
	}
	if n := overlap(); n > maxOverlaps || len(refused) < 10000 || len(refused) == 20000 {
		t.Errorf("%d overlaps, at most %d; %d of 20,000 rules are not in force", n, maxOverlaps, len(refused))
	}
	m.DeletePolicy(member(1))
	if m.Plan(); len(m.Conditions()) != 0 {
		t.Errorf("%d rules are not in force, though none overlap too much", len(m.Conditions()))
	}
}

func BenchmarkNamespaceThatNobodySelects(b *testing.B) {
	m := crowd(10000)
	for i := 0; b.Loop(); i++ {
		m.SetNamespace(state.OwnerKubernetes, "crowd", map[string]string{"turn": fmt.Sprint(i)})
	}
}

// TestAFullTableIsAskedWhenThereMayBeRoom: while sets are refused room, what other pods
// do leaves them alone; they have their room in the plan in which another lets go of it.
func TestAFullTableIsAskedWhenThereMayBeRoom(t *testing.T) {
	const room = 1 << 18
	m := New(Limits{4, room, room, room})
	for i := range 6 {
		m.SetPod(Pod{Key: member(i), Labels: map[string]string{"app": fmt.Sprint(i)}})
	}
	for i := range 2 {
		m.SetEndpoint(Endpoint{ID: uint32(i), Pod: member(i)})
		p := letting(i, i, 2)
		p.Ingress[0].Peers[0].Pods = &Selector{{Key: "app", Operator: In, Values: []string{"2", "3", "4", "5"}}}
		m.SetPolicy(p)
	}
	m.Plan()
	var refused *set
	for _, s := range m.sets {
		if len(s.refused) > 0 {
			refused = s
		}
	}
	if refused == nil || len(m.Conditions()) != 1 {
		t.Fatalf("one rule of two is to find no room: %v", m.Conditions())
	}
	incomplete := func(want int) {
		t.Helper()
		got := 0
		for _, ep := range m.written.endpoints {
			if ep.IngressFlags&setIncomplete != 0 {
				got++
			}
		}
		if got != want {
			t.Errorf("%d endpoints are closed to what a refused rule might allow, want %d", got, want)
		}
	}
	incomplete(1)
	refused.content[7] = PeerRules{Rule: 7} // who fills the set again does away with it
	m.SetPod(Pod{Key: member(100), Labels: map[string]string{"app": "x"}})
	if m.Plan(); len(refused.content) != 1 {
		t.Error("a set is filled again although there is no more room than before")
	}
	delete(refused.content, 7)
	for i := range 2 {
		if m.endpoints[uint32(i)].ingress != refused {
			m.DeletePolicy(member(i))
		}
	}
	if m.Plan(); len(refused.content) != 4 || len(m.Conditions()) != 0 {
		t.Errorf("there is room, and the set has %d of 4 peers: %v", len(refused.content), m.Conditions())
	}
	incomplete(0)
}

// BenchmarkColdPlan is what an agent that starts has before it: pods and policies of a
// cluster, all in one namespace, each pod with a label of its own.
func BenchmarkColdPlan(b *testing.B) {
	const room, pods, policies, here = 1 << 18, 20000, 1000, 250
	for b.Loop() {
		m := New(Limits{room, room, room, room})
		for i := range policies {
			m.SetPolicy(letting(i, i%here, i))
		}
		for i := range pods {
			p := Pod{Key: member(i), Labels: map[string]string{"app": fmt.Sprint(i), "pod-template-hash": fmt.Sprint(i / 3), "tier": fmt.Sprint(i % 5)},
				Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})}}
			m.SetPod(p)
			if i < here {
				m.SetEndpoint(Endpoint{ID: uint32(i), Pod: p.Key, Addrs: p.Addrs})
			}
		}
		m.Plan()
	}
}

// A policy asks of 20,000 pods what nobody asked before, and goes again.
func BenchmarkPolicyThatAsksAnew(b *testing.B) {
	m := crowd(20000)
	for i := 0; b.Loop(); i++ {
		m.SetPolicy(letting(1000, i%250, 300+i%19000))
		m.Plan()
		m.DeletePolicy(member(1000))
		m.Plan()
	}
}
