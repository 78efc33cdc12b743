// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"math"
	"testing"
)

// TestContentsThatCollideHaveNumbersOfTheirOwn: whoever comes later has the next number, and keeps
// it while it is there; what is gone keeps its own until the next plan.
func TestContentsThatCollideHaveNumbersOfTheirOwn(t *testing.T) {
	n := newNumbers()
	n.begin = func(digest) uint64 { return math.MaxUint64 } // the next ones are no hashes
	a, b, c := digestOf("a"), digestOf("b"), digestOf("c")
	is := func(what string, d digest, want uint64) {
		t.Helper()
		if got := n.number(d); got != want {
			t.Errorf("%s has number %d, want %d", what, got, want)
		}
	}
	is("a", a, math.MaxUint64)
	is("b", b, first)
	is("a again", a, math.MaxUint64)
	n.release(a)
	is("c, in the plan in which a goes", c, first+1)
	n.release(c)
	n.forget()
	is("b, when a is gone", b, first)
	is("c, when a is gone", c, math.MaxUint64)
	n.release(c)
	is("c, gone and come again", c, math.MaxUint64)
	n.forget()
	is("a, which comes after c", a, first+1)
}

// TestAPodWhoseLabelsCollide has an identity of its own: it is not let in for another's labels.
func TestAPodWhoseLabelsCollide(t *testing.T) {
	m := New(Limits{100, 100, 100, 100})
	m.Collide()
	for i := range 3 {
		m.SetPod(Pod{Key: member(i), Labels: map[string]string{"app": fmt.Sprint(i)}})
	}
	m.SetEndpoint(Endpoint{ID: 1, Pod: member(0)})
	m.SetPolicy(letting(0, 0, 1))
	m.Plan()
	s := m.endpoints[1].ingress
	if len(s.content) != 1 || m.pods[member(1)].identity == m.pods[member(2)].identity || s.content[m.pods[member(1)].identity.id].Rule == 0 {
		t.Errorf("the set has %v", s.content)
	}
}
