// SPDX-License-Identifier: Apache-2.0

package reconcile_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/policy/policygen"
)

// errKilled ends a change in the middle.
var errKilled = errors.New("killed")

// applyOrDie applies a change; killed: a write panicked with errKilled.
func (n *node) applyOrDie(c policy.Change) (killed bool, err error) {
	defer func() {
		if r := recover(); r == errKilled {
			killed = true
		} else if r != nil {
			panic(r)
		}
	}()
	_, err = n.rec.Apply(c)
	return false, err
}

// Flows that a change denies are judged again also when the agent is killed in the middle of it, and the next one
// finds some of what it is to write in the tables.
func TestAKilledPolicyChangeJudgesAgain(t *testing.T) {
	cut := 0
	for seed := range uint64(100) {
		n, err := playKilled(rand.New(rand.NewPCG(1, seed)))
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		cut += n
	}
	if cut < 100 {
		t.Errorf("only %d flows were denied by a change that was cut off", cut)
	}
}

// playKilled answers how many flows changes that were cut off denied.
func playKilled(rng *rand.Rand) (cut int, err error) {
	left := 1 << 30
	n := newNode(func() {
		if left--; left == 0 {
			panic(errKilled)
		}
	})
	w := policygen.NewWorld(rng, limits)
	for range 12 {
		w.Step()
	}
	if _, err := n.rec.Apply(w.Model.Plan()); err != nil {
		return 0, err
	}
	for range 10 {
		var passed []policygen.Case
		for range 60 {
			if c := w.Case(); n.ends(c) == [2]bool{true, true} {
				passed = append(passed, c)
			}
		}
		before := maps.Clone(n.endpoints.m)
		w.Step()
		left = 1 + rng.IntN(6)
		killed, err := n.applyOrDie(w.Model.Plan())
		left = 1 << 30
		if err == nil && killed {
			w.Model.Again() // as an agent begins
			_, err = n.rec.Apply(w.Model.Plan())
		}
		if err != nil {
			return cut, err
		}
		for _, c := range passed {
			if !here(w, c) || w.Ends(c) == [2]bool{true, true} {
				continue
			}
			if killed {
				cut++
			}
			from, to := uint32(c.From+1), uint32(c.To+1)
			if n.endpoints.m[from] == before[from] && n.endpoints.m[to] == before[to] {
				return cut, fmt.Errorf("%+v is not allowed any more, and its flows are not judged again\n%v", c, w.Trace[len(w.Trace)-3:])
			}
		}
	}
	return cut, nil
}
