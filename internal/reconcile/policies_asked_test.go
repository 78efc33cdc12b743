// SPDX-License-Identifier: Apache-2.0

package reconcile_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/policy/policygen"
)

// asking is a world of few labels, in which nearly every policy that comes or goes changes what
// identities are made of.
type asking struct {
	rng   *rand.Rand
	model *policy.Model
	pods  [askingPods]policy.Pod
	rules [3]*policy.Policy
}

const (
	askingPods = 6
	askingHere = 2 // of them, with the endpoint of their number plus one
)

func newAsking(rng *rand.Rand) *asking {
	w := &asking{rng: rng}
	for i := range w.pods {
		p := policy.Pod{Key: policy.Key{Namespace: "ns", Name: fmt.Sprint(i)}, Labels: map[string]string{"name": fmt.Sprint(i)},
			Addrs: []netip.Addr{policygen.Addr(i, false)}}
		for _, k := range []string{"a", "b"} {
			if v := rng.IntN(3); v > 0 {
				p.Labels[k] = fmt.Sprint(v)
			}
		}
		w.pods[i] = p
	}
	w.begin()
	return w
}

// begin is another process, which has not heard of what there was before.
func (w *asking) begin() {
	w.model = policy.New(limits)
	for i, p := range w.pods {
		w.model.SetPod(p)
		if i < askingHere {
			w.model.SetEndpoint(policy.Endpoint{ID: uint32(i + 1), Pod: p.Key, Addrs: p.Addrs})
		}
	}
	for _, p := range w.rules {
		if p != nil {
			w.model.SetPolicy(*p)
		}
	}
}

// step replaces a policy, or takes it away.
func (w *asking) step() {
	i := w.rng.IntN(len(w.rules))
	key := policy.Key{Namespace: "ns", Name: fmt.Sprint("np", i)}
	if w.rules[i] != nil && w.rng.IntN(3) == 0 {
		w.rules[i] = nil
		w.model.DeletePolicy(key)
		return
	}
	p := policy.Policy{Key: key, IsolatesIngress: true, Pods: w.selector("name", askingHere), Ingress: []policy.Rule{{}}}
	for range 1 + w.rng.IntN(2) {
		s := w.selector([]string{"a", "b"}[w.rng.IntN(2)], 3)
		if w.rng.IntN(3) == 0 {
			s = append(s, w.selector([]string{"a", "b"}[w.rng.IntN(2)], 3)...)
		}
		p.Ingress[0].Peers = append(p.Ingress[0].Peers, policy.Peer{Pods: &s})
	}
	if w.rng.IntN(3) == 0 {
		a := policygen.Addr(w.rng.IntN(askingPods), false)
		p.Ingress[0].Peers = append(p.Ingress[0].Peers, policy.Peer{Block: &policy.Block{CIDR: netip.PrefixFrom(a, 32)}})
	}
	w.rules[i] = &p
	w.model.SetPolicy(p)
}

func (w *asking) selector(key string, values int) policy.Selector {
	r := policy.Requirement{Key: key, Operator: []policy.Operator{policy.In, policy.NotIn, policy.Exists, policy.DoesNotExist}[w.rng.IntN(4)]}
	if r.Operator == policy.In || r.Operator == policy.NotIn {
		r.Values = []string{fmt.Sprint(w.rng.IntN(values))}
	}
	return policy.Selector{r}
}

// allowed says, slowly, whether a pod may reach one that is here.
func (w *asking) allowed(from, to int) bool {
	isolated := false
	for _, p := range w.rules {
		if p == nil || !p.Pods.Matches(w.pods[to].Labels) {
			continue
		}
		isolated = true
		if slices.ContainsFunc(p.Ingress[0].Peers, func(peer policy.Peer) bool {
			if peer.Block != nil {
				return peer.Block.CIDR.Contains(w.pods[from].Addrs[0])
			}
			return peer.Pods.Matches(w.pods[from].Labels)
		}) {
			return true
		}
	}
	return !isolated
}

// verdicts are those of all pairs, by name.
func verdicts(of func(from, to int) bool) (out [askingPods][askingHere]bool) {
	for from := range askingPods {
		for to := range askingHere {
			out[from][to] = from == to || of(from, to)
		}
	}
	return out
}

// TestEveryInstantOfWhatIdentitiesAreMadeOf: when a policy asks about pods what nobody asked before,
// or the last that asks goes, pods get other identities. Nobody passes in between who passes
// neither before nor after, also when another process takes over, or one is killed halfway; and
// after each change verdicts are those of the API.
func TestEveryInstantOfWhatIdentitiesAreMadeOf(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	worlds := 400
	if testing.Short() {
		worlds = 60
	}
	for i := range worlds {
		if err := playAsking(rand.New(rand.NewPCG(seed, uint64(i)))); err != nil {
			t.Fatalf("seed %d, world %d: %v", seed, i, err)
		}
	}
}

func playAsking(rng *rand.Rand) error {
	var look func()
	left := 0
	n := newNode(func() {
		look()
		if left--; left == 0 {
			panic(errKilled)
		}
	})
	w := newAsking(rng)
	old := verdicts(w.allowed)
	for step := range 25 {
		for range 1 + rng.IntN(2) {
			w.step()
		}
		fresh := verdicts(w.allowed)
		var wrong error
		look = func() {
			for from, all := range verdicts(n.reaches) {
				for to, passes := range all {
					if wrong == nil && passes && !old[from][to] && !fresh[from][to] {
						wrong = fmt.Errorf("step %d: pod %d reaches pod %d in between, and neither before nor after", step, from, to)
					}
				}
			}
		}
		if rng.IntN(4) == 0 {
			w.begin()
		}
		if rng.IntN(4) == 0 {
			left = 1 + rng.IntN(8)
		}
		killed, err := n.applyOrDie(w.model.Plan())
		if left = 0; err == nil && killed {
			w.model.Again()
			_, err = n.rec.Apply(w.model.Plan())
		}
		if err == nil && w.model.Trailing() && rng.IntN(2) == 0 { // at once, as the engine does, or with the next change
			_, err = n.rec.Apply(w.model.Plan())
		}
		if err = cmp.Or(err, wrong); err != nil {
			return err
		}
		if got := verdicts(n.reaches); got != fresh {
			return fmt.Errorf("step %d: verdicts are %v, and are to be %v", step, got, fresh)
		}
		old = fresh
	}
	return nil
}

// reaches is what the programs say of a pod to one that is here.
func (n *node) reaches(from, to int) bool {
	p := n.policies.m[uint32(to+1)]
	return p.Ingress == 0 || n.rule(p.Ingress, p.IngressFlags, policygen.Addr(from, false), policygen.Case{Number: 6})
}
