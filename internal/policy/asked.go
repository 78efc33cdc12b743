// SPDX-License-Identifier: Apache-2.0

package policy

// What rules ask about pods. Identities are made of that alone: pods of Jobs and StatefulSets
// have labels that are unique to each, and as long as no selector asks for those, what allows
// a thousand of them is one entry.

import (
	"slices"
	"strings"
)

// question is one about a pod that has the answer yes or no, but for ports: there it is the
// numbers of that name.
type question struct {
	about      subject
	key, value string // of a label; of a port its name and protocol
}

type subject uint8

const (
	aboutValue    subject = iota // does the label have this value?
	aboutPresence                // is the label there?
	aboutPort
)

// questions are those of s.
func (s Selector) questions() []question {
	var out []question
	for _, r := range s {
		switch r.Operator {
		case In, NotIn:
			for _, v := range distinct(r.Values) {
				out = append(out, question{aboutValue, r.Key, v})
			}
		case Exists, DoesNotExist:
			out = append(out, question{aboutPresence, r.Key, ""})
		}
	}
	return out
}

func portQuestions(names []Port) []question {
	out := make([]question, len(names))
	for i, n := range names {
		out[i] = portQuestion(n.Name, n.Protocol.String())
	}
	return out
}

func portQuestion(name, protocol string) question { return question{aboutPort, name, protocol} }

// asked is which questions there are.
type asked struct {
	users   map[question]int // selectors and rules that ask it
	changed map[question]bool
	seen    view              // what identities are made of
	idle    map[question]bool // in seen, and by the last plan nobody asks it any more
}

func newAsked() asked {
	return asked{map[question]int{}, map[question]bool{}, newView(), map[question]bool{}}
}

// ask has n more, or fewer, users ask these.
func (a *asked) ask(list []question, n int) {
	for _, q := range list {
		before := a.users[q]
		if a.users[q] += n; a.users[q] == 0 {
			delete(a.users, q)
		}
		if before == 0 || before+n == 0 {
			a.changed[q] = true
		}
	}
}

// update brings seen up to date, and answers what differs. A question goes out of it one plan
// after its last user, so that no set that asks it is in the tables while pods change their
// identities for that: full says that nobody knows what the tables hold.
func (a *asked) update(full bool) view {
	differs := newView()
	for q := range a.idle {
		switch {
		case a.users[q] > 0:
			delete(a.idle, q)
		case !full:
			delete(a.idle, q)
			a.seen.set(q, false)
			differs.set(q, true)
		}
	}
	for q := range a.changed {
		switch {
		case a.users[q] == 0:
			if a.seen.has(q) {
				a.idle[q] = true
			}
		case !a.seen.has(q):
			a.seen.set(q, true)
			differs.set(q, true)
		}
	}
	clear(a.changed)
	return differs
}

// Trailing says that the next plan takes away what the last one has left in the tables: pods are
// still told apart by what nobody asks any more.
func (m *Model) Trailing() bool { return len(m.asked.idle) > 0 }

// view is a set of questions, by what they are about.
type view struct {
	labels map[string]*askedLabel
	ports  map[question]bool
}

type askedLabel struct {
	presence bool
	values   map[string]bool
}

func newView() view { return view{map[string]*askedLabel{}, map[question]bool{}} }

func (v view) has(q question) bool {
	if q.about == aboutPort {
		return v.ports[q]
	}
	l := v.labels[q.key]
	return l != nil && (q.about == aboutPresence && l.presence || q.about == aboutValue && l.values[q.value])
}

func (v view) set(q question, in bool) {
	if q.about == aboutPort {
		setIn(v.ports, q, in)
		return
	}
	l := v.labels[q.key]
	if l == nil {
		l = &askedLabel{values: map[string]bool{}}
		v.labels[q.key] = l
	}
	if q.about == aboutPresence {
		l.presence = in
	} else {
		setIn(l.values, q.value, in)
	}
	if !l.presence && len(l.values) == 0 {
		delete(v.labels, q.key)
	}
}

func setIn[K comparable](m map[K]bool, k K, in bool) {
	if in {
		m[k] = true
	} else {
		delete(m, k)
	}
}

func (v view) empty() bool { return len(v.labels) == 0 && len(v.ports) == 0 }

// concerns says whether some answer of p is another one than that of a pod without labels and ports.
func (v view) concerns(p *Pod) bool {
	for k, l := range v.labels {
		if value, has := p.Labels[k]; has && (l.presence || l.values[value]) {
			return true
		}
	}
	return len(v.ports) > 0 && slices.ContainsFunc(p.Ports, v.seesPort)
}

func (v view) seesPort(n NamedPort) bool {
	return v.ports[portQuestion(n.Name, n.Protocol.String())]
}

// otherValue is that of a label that is there with a value that nobody asks for. No label has
// it: it is no UTF-8.
const otherValue = "\xff"

type label struct{ key, value string }

// labelsOf are the labels of p as far as they are asked for, in their order.
func (v view) labelsOf(p *Pod) []label {
	var out []label
	for k, value := range p.Labels {
		switch l := v.labels[k]; {
		case l == nil:
		case l.values[value]:
			out = append(out, label{k, value})
		case l.presence:
			out = append(out, label{k, otherValue})
		}
	}
	slices.SortFunc(out, func(a, b label) int { return strings.Compare(a.key, b.key) })
	return out
}

// portsOf are the named ports of p that are asked for.
func (v view) portsOf(p *pod) []NamedPort {
	if len(v.ports) == 0 {
		return nil
	}
	var out []NamedPort
	for _, n := range p.named {
		if v.seesPort(n) {
			out = append(out, n)
		}
	}
	return out
}
