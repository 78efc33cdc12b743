// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"slices"
	"strconv"
)

// RuleName says which rule of which object a number is.
type RuleName struct {
	Policy    Key
	Direction Direction
	Index     int // in the policy's list of that direction, from 0
}

// SetName says what a policy set is.
type SetName struct {
	Direction Direction
	Policies  []Key // that select the endpoint, by name; none: its pod is not known yet
}

// names give rules numbers of 32 bits, which are hashes too: only of rules that
// collide does the number depend on which came first.
type names struct {
	rules   map[uint32]RuleName
	numbers map[RuleName]uint32
	gone    []RuleName // in that order; some may have come again
}

// remembered is how many rules that are gone keep their numbers: flows that they
// allowed may still be told of.
const remembered = 1024

func newNames() names {
	return names{rules: map[uint32]RuleName{}, numbers: map[RuleName]uint32{}}
}

// left notes that p, or what it said, goes.
func (n *names) left(p *Policy) {
	for _, d := range []Direction{Ingress, Egress} {
		for i := range p.rules(d) {
			n.gone = append(n.gone, RuleName{p.Key, d, i})
		}
	}
}

// forget lets go of the rules that went first, but those that are there.
func (n *names) forget(there func(RuleName) bool) {
	if len(n.gone) <= remembered {
		return
	}
	for _, k := range n.gone[:len(n.gone)-remembered] {
		if !there(k) {
			delete(n.rules, n.numbers[k])
			delete(n.numbers, k)
		}
	}
	n.gone = slices.Clone(n.gone[len(n.gone)-remembered:])
}

// policy gives numbers to the rules of p.
func (n *names) policy(p *Policy) {
	for _, d := range []Direction{Ingress, Egress} {
		for i := range p.rules(d) {
			n.number(RuleName{p.Key, d, i})
		}
	}
}

func (n *names) number(k RuleName) uint32 {
	if id, ok := n.numbers[k]; ok {
		return id
	}
	id := uint32(hash("rule", k.Policy.Namespace, k.Policy.Name, k.Policy.Owner.String(), k.Direction.String(), strconv.Itoa(k.Index)))
	for ; id == 0 || n.rules[id] != (RuleName{}); id++ {
	}
	n.numbers[k] = id
	n.rules[id] = k
	return id
}

// Rule is the rule that a verdict names.
func (m *Model) Rule(id uint32) (RuleName, bool) {
	r, ok := m.names.rules[id]
	return r, ok
}

// Set is the policy set whose number, or the low half of it, is id.
func (m *Model) Set(id uint64) (SetName, bool) {
	if s := m.sets[id]; s != nil {
		return SetName{s.direction, s.policies}, true
	}
	for n, s := range m.sets {
		if uint32(n) == uint32(id) {
			return SetName{s.direction, s.policies}, true
		}
	}
	return SetName{}, false
}

// Names is what the numbers in verdicts of this node's endpoints stand for: the
// rules of all sets in use. It can be kept for readers without a model.
type Names struct {
	Rules map[uint32]RuleName
	Sets  map[uint64]SetName
}

// Rule is the rule that a verdict names.
func (n Names) Rule(id uint32) (RuleName, bool) {
	r, ok := n.Rules[id]
	return r, ok
}

// Set is the policy set whose number, or the low half of it, is id.
func (n Names) Set(id uint64) (SetName, bool) {
	if s, ok := n.Sets[id]; ok {
		return s, true
	}
	for full, s := range n.Sets {
		if uint32(full) == uint32(id) {
			return s, true
		}
	}
	return SetName{}, false
}

// Names are the names as of the last plan; changed: since those that were kept.
func (m *Model) Names() (_ Names, changed bool) {
	if !m.renamed {
		return Names{}, false
	}
	out := Names{Rules: map[uint32]RuleName{}, Sets: make(map[uint64]SetName, len(m.sets))}
	for id, s := range m.sets {
		out.Sets[id] = SetName{s.direction, s.policies}
		for _, r := range s.rules {
			out.Rules[r.number] = m.names.rules[r.number]
		}
	}
	return out, true
}

// NamesKept says that whoever shows names has what Names said.
func (m *Model) NamesKept() { m.renamed = false }

// Selecting are the policies that isolate an endpoint in a direction; known is
// false while its pod is not known, and then it is closed.
func (m *Model) Selecting(id uint32, d Direction) (policies []Key, known bool) {
	ep := m.endpoints[id]
	if ep == nil || m.unknown(ep) {
		return nil, false
	}
	s := ep.ingress
	if d == Egress {
		s = ep.egress
	}
	if s == nil {
		return nil, true
	}
	return s.policies, true
}

// Condition is a rule that is not wholly in force, and so allows less than it says.
type Condition struct {
	Rule  RuleName
	Table string // that was full, or overlaps
}

// Why says what keeps the rule out of force.
func (c Condition) Why() string {
	if c.Table == overlaps {
		return "its blocks, and those of other rules, overlap in too many ways"
	}
	return "the table of " + c.Table + " is full"
}

// Conditions are all rules that are not wholly in force, each once.
func (m *Model) Conditions() []Condition {
	var out []Condition
	add := func(rule uint32, table string) { out = append(out, Condition{m.names.rules[rule], table}) }
	for _, s := range m.sets {
		for r := range s.refused {
			add(r.rule, r.table)
		}
	}
	for number := range m.missing() {
		add(number, "identities")
	}
	slices.SortFunc(out, func(a, b Condition) int {
		return cmp.Or(a.Rule.Policy.Compare(b.Rule.Policy), cmp.Compare(a.Rule.Direction, b.Rule.Direction),
			cmp.Compare(a.Rule.Index, b.Rule.Index), cmp.Compare(a.Table, b.Table))
	})
	return slices.Compact(out)
}

// missing are the rules that allow some pod whose address found no room.
func (m *Model) missing() map[uint32]bool {
	out := map[uint32]bool{}
	seen := map[*identity]bool{}
	for a := range m.dirtyAddrs {
		id := m.holder(a)
		if id == nil || seen[id] {
			continue
		}
		seen[id] = true
		for sel := range id.selectors {
			for s, rules := range sel.users {
				for _, i := range rules {
					out[s.rules[i].number] = true
				}
			}
		}
	}
	if len(seen) == 0 || m.anyPodRules == 0 {
		return out
	}
	for _, s := range m.sets {
		for _, r := range s.rules {
			if r.anyPod {
				out[r.number] = true
			}
		}
	}
	return out
}

// LeftOut is how many addresses the table of identities did not take after the
// last plan: rules that select those pods do not allow them.
func (m *Model) LeftOut() int { return len(m.dirtyAddrs) }
