// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"
	"strconv"
)

// set is what the policies that select some endpoints allow them in one
// direction. Endpoints with the same policies, and the same numbers behind the
// port names in them, share it. A policy with other rules makes another set, so
// that nobody who comes to a set meets what it allowed before.
type set struct {
	id        uint64
	digest    digest
	direction Direction
	policies  []Key
	named     []NamedPort // ingress: the names that the rules use, as the endpoints have them
	endpoints int

	rules   []rule
	content map[uint64]PeerRules // by identity
	refused map[refusal]bool
	fresh   bool            // its rules are not built yet
	whole   bool            // find its whole content again
	dirty   map[uint64]bool // find what it allows these again
	anyPods int             // rules that allow all pods
}

// rule is a policy's rule, or the part of it whose ports have names, in terms
// of the tables.
type rule struct {
	number    uint32
	ports     []portPrefix
	names     []Port // egress: each destination pod has its own numbers
	all       bool   // all ports
	anybody   bool
	anyPod    bool
	selectors []*selector
	group     *group
}

// refusal is a rule that is not wholly in force.
type refusal struct {
	rule  uint32
	table string
}

// setFor is the set of endpoints of pods like p with these policies, in their order. It is
// held by its caller.
func (m *Model) setFor(d Direction, policies []*Policy, p *pod) *set {
	parts := []string{"set", d.String()}
	keys := make([]Key, len(policies))
	for i, by := range policies {
		keys[i] = by.Key
		parts = append(parts, by.Namespace, by.Name, by.Owner.String(), by.content[d])
	}
	var named []NamedPort
	if d == Ingress {
		named = namesUsed(policies, p.named)
	}
	for _, n := range named {
		parts = append(parts, "p", n.Name, strconv.Itoa(int(n.Protocol)), strconv.Itoa(int(n.Number)))
	}
	content := digestOf(parts...)
	number := m.setNumbers.number(content)
	s := m.sets[number]
	if s == nil {
		s = &set{id: number, digest: content, direction: d, policies: keys, named: named, content: map[uint64]PeerRules{},
			dirty: map[uint64]bool{}, fresh: true}
		m.sets[number] = s
		m.renamed = true
	}
	s.endpoints++
	return s
}

// namesUsed are the named ports that ingress rules of policies name.
func namesUsed(policies []*Policy, named []NamedPort) []NamedPort {
	var out []NamedPort
	for _, n := range named {
		used := false
		for _, p := range policies {
			for _, r := range p.Ingress {
				used = used || slices.ContainsFunc(r.Ports, func(q Port) bool { return q.Name == n.Name && q.Protocol == n.Protocol })
			}
		}
		if used {
			out = append(out, n)
		}
	}
	return out
}

// release lets go of a set; without endpoints it goes.
func (m *Model) release(s *set) {
	if s == nil {
		return
	}
	if s.endpoints--; s.endpoints > 0 {
		return
	}
	for id, p := range s.content {
		m.dropPeer(PeerKey{s.id, id})
		m.releaseList(p.Ports)
	}
	m.peers -= len(s.content)
	m.dropRules(s)
	delete(m.sets, s.id)
	m.setNumbers.release(s.digest)
	m.renamed = true
	delete(m.strict, s)
}

// dropRules lets go of what the set's rules refer to.
func (m *Model) dropRules(s *set) {
	m.anyPod(-s.anyPods)
	s.anyPods = 0
	for _, r := range s.rules {
		m.asked.ask(portQuestions(r.names), -1)
		for _, sel := range r.selectors {
			delete(sel.users, s)
		}
	}
	for _, r := range s.rules {
		for _, sel := range r.selectors {
			if len(sel.users) == 0 && m.selectors[sel.key] == sel {
				m.dropSelector(sel)
			}
		}
		m.releaseGroup(r.group)
	}
	s.rules = nil
}

// anyPod counts rules for all pods: from the first on, every pod's address is
// entered.
func (m *Model) anyPod(n int) {
	before := m.anyPodRules
	m.anyPodRules += n
	if (before == 0) != (m.anyPodRules == 0) {
		for _, id := range m.identities {
			m.addressesChanged(id)
		}
	}
}

// build makes a new set's rules from its policies.
func (m *Model) build(s *set) {
	for _, k := range s.policies {
		p := m.policies[k.Namespace][k]
		for i, r := range p.rules(s.direction) {
			for _, made := range m.rulesOf(s, p, m.names.number(RuleName{k, s.direction, i}), r) {
				for _, sel := range made.selectors {
					sel.users[s] = append(sel.users[s], len(s.rules))
				}
				m.asked.ask(portQuestions(made.names), 1)
				if made.anyPod {
					s.anyPods++
				}
				s.rules = append(s.rules, made)
			}
		}
	}
	m.anyPod(s.anyPods)
	s.fresh, s.whole = false, true
	m.renamed = true
}

// rulesOf is r in terms of the tables: what its numbers allow, and apart what
// its names do. Egress by name is to pods only: nobody else has names for ports.
func (m *Model) rulesOf(s *set, p *Policy, number uint32, r Rule) []rule {
	plain := rule{number: number, all: len(r.Ports) == 0}
	var names []Port
	for _, port := range r.Ports {
		switch {
		case port.Name == "":
			plain.ports = append(plain.ports, split(uint8(port.Protocol), port.First, port.Last)...)
		case s.direction == Egress:
			names = append(names, port)
		default:
			plain.ports = append(plain.ports, resolve(port, s.named)...)
		}
	}
	var out []rule
	if plain.all || len(plain.ports) > 0 {
		m.addPeers(&plain, p.Namespace, r.Peers)
		out = append(out, plain)
	}
	if len(names) > 0 {
		out = append(out, rule{number: number, names: names, selectors: m.podSelectors(p.Namespace, r.Peers)})
	}
	return out
}

// resolve is the ports of that name and protocol.
func resolve(port Port, ports []NamedPort) []portPrefix {
	var out []portPrefix
	for _, n := range ports {
		if n.Name == port.Name && n.Protocol == port.Protocol {
			out = append(out, portPrefix{uint8(n.Protocol), 16, n.Number})
		}
	}
	return out
}

func (m *Model) addPeers(r *rule, namespace string, peers []Peer) {
	r.anybody = len(peers) == 0
	var blocks []Block
	for _, peer := range peers {
		switch {
		case peer.Block != nil:
			blocks = append(blocks, *peer.Block)
		case peer.everyPod():
			r.anyPod = true
		default:
			r.selectors = append(r.selectors, m.peerSelector(namespace, peer))
		}
	}
	if len(blocks) > 0 {
		r.group = m.groupOf(blocks)
	}
}

// podSelectors are the selectors of peers; also of those that stand for all pods.
func (m *Model) podSelectors(namespace string, peers []Peer) []*selector {
	var out []*selector
	for _, peer := range peers {
		if peer.Block == nil {
			out = append(out, m.peerSelector(namespace, peer))
		}
	}
	if len(peers) == 0 {
		out = append(out, m.selector("", &Selector{}, nil))
	}
	return out
}

func (p Peer) everyPod() bool {
	return p.Namespaces != nil && len(*p.Namespaces) == 0 && (p.Pods == nil || len(*p.Pods) == 0)
}

func (m *Model) peerSelector(namespace string, p Peer) *selector {
	var pods Selector
	if p.Pods != nil {
		pods = *p.Pods
	}
	return m.selector(namespace, p.Namespaces, pods)
}

// flags are what the datapath needs to look up for the set.
func (s *set) flags() uint16 {
	var f uint16
	for _, r := range s.rules {
		if r.anybody {
			f |= setAnybody
		}
		if r.anyPod {
			f |= setAnyPod
		}
		if len(r.selectors) > 0 {
			f |= setPods
		}
		if r.group != nil {
			f |= setPrefixes
		}
	}
	if len(s.refused) > 0 {
		f |= setIncomplete
	}
	return f
}

// selecting are the policies that isolate who, in order of their names.
func (m *Model) selecting(who *pod, d Direction) []*Policy {
	var out []*Policy
	for _, p := range m.policies[who.Namespace] {
		if p.isolates(d) && p.selects(who) {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b *Policy) int { return a.Compare(b.Key) })
	return out
}
