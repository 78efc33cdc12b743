// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

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

// TestNamespaceConcernsItsSelectors: no selector of pods in a policy's own namespace is
// asked about a namespace's labels. With all of them asked about all pods it takes
// ten times as long as this allows, and more.
func TestNamespaceConcernsItsSelectors(t *testing.T) {
	m := crowd(20000)
	best := time.Hour
	for i := range 5 {
		start := time.Now()
		m.SetNamespace(state.OwnerKubernetes, "crowd", map[string]string{"turn": fmt.Sprint(i)})
		best = min(best, time.Since(start))
	}
	if best > 5*time.Millisecond {
		t.Errorf("a namespace's labels take %v, although no policy asks for any", best)
	}
}
