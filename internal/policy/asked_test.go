// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

const uid = "batch.kubernetes.io/controller-uid"

// production is a namespace with pods of Jobs, each with a label of its own, and this node's: each
// of those has a policy of its own, which allows whoever is in production.
func production(jobs, here int) *Model {
	m := New(Limits{Peers: 1 << 18, Ports: 1 << 18, Identities: 1 << 18, Prefixes: 1 << 16})
	m.SetNamespace(state.OwnerKubernetes, "ns", map[string]string{"env": "prod"})
	for i := range jobs {
		m.SetPod(job(i))
	}
	env := Selector{{Key: "env", Operator: In, Values: []string{"prod"}}}
	for i := range here {
		k, addrs := Key{Namespace: "ns", Name: fmt.Sprint("s", i)}, []netip.Addr{netip.AddrFrom4([4]byte{10, 2, 0, byte(i)})}
		m.SetPod(Pod{Key: k, Labels: map[string]string{"app": k.Name}, Addrs: addrs})
		m.SetEndpoint(Endpoint{ID: uint32(i + 1), Pod: k, Addrs: addrs})
		m.SetPolicy(Policy{Key: k, Pods: Selector{{Key: "app", Operator: In, Values: []string{k.Name}}}, IsolatesIngress: true,
			Ingress: []Rule{{Peers: []Peer{{Namespaces: &env}}}}})
	}
	return m
}

func job(i int) Pod {
	return Pod{Key: Key{Namespace: "ns", Name: fmt.Sprint("j", i)}, Labels: map[string]string{"app": "job", uid: fmt.Sprint(i)},
		Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})}, Ports: []NamedPort{{Name: "http", Protocol: 6, Number: uint16(i)}}}
}

// asking is a policy of the first pod here that lets in the jobs that s selects.
func asking(s Selector) Policy {
	return Policy{Key: Key{Namespace: "ns", Name: "asking"}, Pods: Selector{{Key: "app", Operator: In, Values: []string{"s0"}}},
		IsolatesIngress: true, Ingress: []Rule{{Peers: []Peer{{Pods: &s}}}}}
}

// tablesOf is what is in the tables; an endpoint that is not isolated may be there.
func tablesOf(m *Model) Tables {
	t := m.Tables()
	maps.DeleteFunc(t.Endpoints, func(_ uint32, i Isolation) bool { return i == Isolation{} })
	return t
}

// TestLabelsThatNobodyAsksForCostNothing: a hundred sets that allow three thousand pods, each with
// a label and a port of its own, have an entry each.
func TestLabelsThatNobodyAsksForCostNothing(t *testing.T) {
	m := production(3000, 100)
	m.Plan()
	if m.peers != 100 || len(m.identities) != 1 || len(m.Conditions()) != 0 {
		t.Errorf("%d entries for %d identities, %d rules not in force; want 100 for 1, and none", m.peers, len(m.identities), len(m.Conditions()))
	}
	m.SetPod(job(3000))
	if c := m.Plan(); len(c.Put.Peers)+len(c.Gone.Peers)+len(c.Stricter) > 0 || len(c.Put.Identities) != 1 {
		t.Errorf("one more pod changes more than its address: %+v", c)
	}
}

// TestAQuestionThatComesAndGoes splits the identities about which it is, and no other; who is not
// asked is not judged again; and when it has gone everything is as before.
func TestAQuestionThatComesAndGoes(t *testing.T) {
	const jobs, here = 300, 20
	for _, c := range []struct {
		selector   Selector
		identities int
		allowed    func(i int) bool
	}{
		{Selector{{Key: uid, Operator: In, Values: []string{"7", "8", "none"}}}, 3, func(i int) bool { return i == 7 || i == 8 }},
		{Selector{{Key: uid, Operator: NotIn, Values: []string{"7"}}}, 2, func(i int) bool { return i != 7 }},
		{Selector{{Key: uid, Operator: Exists}}, 2, func(int) bool { return true }},
		{Selector{{Key: uid, Operator: DoesNotExist}}, 2, func(int) bool { return false }},
		{Selector{{Key: uid, Operator: Exists}, {Key: uid, Operator: NotIn, Values: []string{"7"}}}, 3, func(i int) bool { return i != 7 }},
	} {
		t.Run(fmt.Sprint(c.selector), func(t *testing.T) {
			m := production(jobs, here)
			m.DeletePolicy(Key{Namespace: "ns", Name: "s0"})
			m.Plan()
			before := tablesOf(m)
			m.SetPolicy(asking(c.selector))
			change := m.Plan()
			if len(m.identities) != c.identities || m.peers > here*c.identities {
				t.Errorf("%d identities with %d entries, want %d", len(m.identities), m.peers, c.identities)
			}
			if !slices.Equal(change.Stricter, []uint32{1}) {
				t.Errorf("endpoints %v are judged again, and only the first allows something else", change.Stricter)
			}
			asker, other := m.endpoints[1].ingress, m.endpoints[2].ingress
			for i := range jobs {
				id := m.written.identities[job(i).Addrs[0]].Pod
				if got := asker.content[id].Rule != 0; got != c.allowed(i) || other.content[id].Rule == 0 {
					t.Fatalf("job %d is let in: %v, and by a set that does not ask: %v", i, got, other.content[id].Rule != 0)
				}
			}
			m.DeletePolicy(asking(nil).Key)
			m.Plan() // the tables have sets that ask until this is written
			change = m.Plan()
			if len(change.Stricter) > 0 {
				t.Errorf("nobody asks any more, and endpoints %v are judged again", change.Stricter)
			}
			if !reflect.DeepEqual(tablesOf(m), before) {
				t.Errorf("nobody asks any more, and %d identities with %d entries stay", len(m.identities), m.peers)
			}
			if again := m.Plan(); !again.Empty() {
				t.Errorf("the next plan changes something: %+v", again)
			}
		})
	}
}

// TestANameOfAPortThatIsAskedFor: pods have their own numbers of it, and egress rules see them.
func TestANameOfAPortThatIsAskedFor(t *testing.T) {
	m := production(10, 2)
	p := asking(Selector{})
	p.IsolatesIngress, p.IsolatesEgress, p.Ingress, p.Egress = false, true, nil, p.Ingress
	p.Egress[0].Ports = []Port{{Protocol: 6, Name: "http"}}
	m.SetPolicy(p)
	m.Plan()
	egress := m.endpoints[1].egress
	if len(m.identities) != 11 || len(egress.content) != 10 {
		t.Errorf("%d identities, of which %d may be reached, want 11 and 10", len(m.identities), len(egress.content))
	}
	for i := range 10 {
		rules := egress.content[m.written.identities[job(i).Addrs[0]].Pod]
		if l := m.lists[rules.Ports]; l == nil || l.rules[portPrefix{6, 16, uint16(i)}] == 0 {
			t.Errorf("the port of job %d may not be reached", i)
		}
	}
	m.DeletePolicy(p.Key)
	m.Plan()
	if m.Plan(); len(m.identities) != 1 {
		t.Errorf("%d identities, and nobody asks for the name any more", len(m.identities))
	}
}

// TestAnotherProcessPlansTheSame: what was asked for once, and is not any more, leaves nothing behind.
func TestAnotherProcessPlansTheSame(t *testing.T) {
	m := production(20, 5)
	for i := range 5 {
		m.SetPolicy(asking(Selector{{Key: uid, Operator: NotIn, Values: []string{fmt.Sprint(i)}}}))
		m.Plan()
	}
	m.Again()
	m.DeletePolicy(asking(nil).Key)
	for m.Plan(); m.Trailing(); {
		m.Plan()
	}
	again := production(20, 5)
	again.Plan()
	if !reflect.DeepEqual(tablesOf(m), tablesOf(again)) {
		t.Errorf("%d peers and %d identities, another process has %d and %d", m.peers, len(m.identities), again.peers, len(again.identities))
	}
	if !maps.Equal(m.asked.users, again.asked.users) {
		t.Errorf("%v is asked, by another process %v", m.asked.users, again.asked.users)
	}
}
