// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// selectAsLabelsSay compares what selectors have with the labels of all pods: it answers how much that is, and what is wrong.
func selectAsLabelsSay(m *Model) (compared int, wrong string) {
	for _, s := range m.selectors {
		want := map[*identity]bool{}
		for _, p := range m.pods {
			if (s.namespaces != nil || s.namespace == p.Namespace) && s.pods.Matches(p.Labels) &&
				(s.namespaces == nil || m.inNamespaces(*s.namespaces, p.Namespace)) {
				want[p.identity] = true
			} else if s.matches[p.identity] {
				return compared, fmt.Sprintf("%q of namespaces %v selects pod %s with labels %v", s.pods, s.namespaces, p.Key, p.Labels)
			}
		}
		if !maps.Equal(s.matches, want) {
			return compared, fmt.Sprintf("%q of namespaces %v selects %d identities, and is to select %d", s.pods, s.namespaces, len(s.matches), len(want))
		}
		compared += len(want)
	}
	return compared, ""
}

// TestSelectorsAndIdentitiesFindEachOther: in whatever order pods, policies and
// namespaces come, change and go, a selector has those that its labels say.
func TestSelectorsAndIdentitiesFindEachOther(t *testing.T) {
	const room = 1 << 16
	rng := rand.New(rand.NewPCG(34, 1))
	value := func() string { return fmt.Sprint(rng.IntN(3)) }
	labels := func() map[string]string {
		out := map[string]string{}
		for _, k := range []string{"a", "b", "c"} {
			if rng.IntN(3) > 0 {
				out[k] = value()
			}
		}
		return out
	}
	selector := func() Selector {
		s := Selector{}
		for range rng.IntN(3) {
			r := Requirement{Key: []string{"a", "b", "c"}[rng.IntN(3)], Operator: []Operator{In, In, NotIn, Exists, DoesNotExist}[rng.IntN(5)]}
			if r.Operator == In || r.Operator == NotIn {
				r.Values = []string{value(), value()}[:1+rng.IntN(2)]
			}
			s = append(s, r)
		}
		return s
	}
	key := func(n int) Key { return Key{Namespace: fmt.Sprint(rng.IntN(3)), Name: fmt.Sprint(rng.IntN(n))} }
	compared := 0
	for world := range 20 {
		m := New(Limits{room, room, room, room})
		for step := range 150 {
			k := key(6)
			switch rng.IntN(10) {
			case 0, 1, 2:
				m.SetPod(Pod{Key: k, Labels: labels()})
			case 3:
				m.DeletePod(k)
			case 4, 5:
				pods := selector()
				peer := Peer{Pods: &pods}
				if rng.IntN(2) == 0 {
					namespaces := selector()
					peer.Namespaces = &namespaces
				}
				m.SetPolicy(Policy{Key: k, IsolatesIngress: true, Ingress: []Rule{{Peers: []Peer{peer}}}})
			case 6:
				m.DeletePolicy(k)
			case 7:
				m.SetNamespace(state.OwnerKubernetes, k.Namespace, labels())
			case 8:
				if m.DeleteNamespace(state.OwnerKubernetes, k.Namespace); step > 100 {
					m.Watched()
				}
			case 9:
				m.SetEndpoint(Endpoint{ID: uint32(rng.IntN(4)), Pod: k})
			}
			m.Plan()
			n, wrong := selectAsLabelsSay(m)
			if compared += n; wrong != "" {
				t.Fatalf("world %d, step %d: %s", world, step, wrong)
			}
		}
		for k := range m.pods {
			m.DeletePod(k)
		}
		for _, p := range m.Policies() {
			m.DeletePolicy(p.Key)
		}
		if m.Plan(); len(m.labels.keys)+len(m.labels.other) > 0 {
			t.Fatalf("world %d: nobody selects anything, and the index has %v, %v", world, m.labels.keys, m.labels.other)
		}
		if m.Plan(); len(m.asked.users)+len(m.asked.idle)+len(m.asked.changed) > 0 || !m.asked.seen.empty() || len(m.identities)+len(m.byContent) > 0 {
			t.Fatalf("world %d: nobody asks anything, and identities are made of %+v", world, m.asked)
		}
	}
	if compared < 1000 {
		t.Errorf("only %d matches were compared", compared)
	}
}
