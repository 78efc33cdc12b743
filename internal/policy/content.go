// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/binary"
	"slices"
)

// fill finds a set's content again, and notes what differs.
func (m *Model) fill(s *set) {
	s.refused = nil
	byIdentity := m.rulesByIdentity(s)
	known := map[string]wish{} // of rules without port names: the same for all peers
	content := make(map[uint64]PeerRules, len(byIdentity))
	for id, rules := range byIdentity {
		key := rulesKey(rules)
		w, ok := known[key]
		if !ok {
			var shared bool
			if w, shared = s.wish(rules, m.identities[id]); shared {
				known[key] = w
			}
		}
		if m.take(s, id, w, content) {
			continue
		}
		for _, r := range rules {
			s.refuse(s.rules[r].number, "ports")
		}
	}
	m.peers += len(content) - len(s.content)
	for id, p := range s.content {
		if _, stays := content[id]; !stays {
			m.dropped(s, id, p)
		}
		m.releaseList(p.Ports)
	}
	s.content = content
	s.whole = false
	clear(s.dirty)
	m.noteRefused(s)
}

// noteRefused keeps how full the table of peers was when a set was refused room in it:
// as long as it is not less full, asking again comes to the same.
func (m *Model) noteRefused(s *set) {
	if len(s.refused) > 0 {
		m.refusedAt = max(m.refusedAt, m.peers)
	}
}

// rulesByIdentity is which rules of a set each peer is in. A rule whose peers
// do not all find room is left out.
func (m *Model) rulesByIdentity(s *set) map[uint64][]int {
	out := map[uint64][]int{}
	room := m.limits.Peers - m.peers + len(s.content)
	for i, r := range s.rules {
		if r.group != nil && r.group.refused != "" {
			s.refuse(r.number, r.group.refused)
		}
		peers := r.peers()
		more := 0
		for id := range peers {
			if out[id] == nil {
				more++
			}
		}
		if len(out)+more > room {
			s.refuse(r.number, "peers")
			continue
		}
		for id := range peers {
			out[id] = append(out[id], i)
		}
	}
	return out
}

// peers are the identities that a rule is for.
func (r *rule) peers() map[uint64]bool {
	out := map[uint64]bool{}
	if r.anybody {
		out[Anybody] = true
	}
	if r.anyPod {
		out[AnyPod] = true
	}
	for _, sel := range r.selectors {
		for id := range sel.matches {
			if len(r.names) == 0 || r.reaches(id) {
				out[id.id] = true
			}
		}
	}
	if r.group != nil {
		for id := range r.group.identities {
			out[id] = true
		}
	}
	return out
}

// reaches says whether a pod has a port of a name that the rule allows.
func (r *rule) reaches(id *identity) bool {
	return slices.ContainsFunc(r.names, func(n Port) bool { return len(resolve(n, id.ports)) > 0 })
}

func (s *set) refuse(rule uint32, table string) {
	if s.refused == nil {
		s.refused = map[refusal]bool{}
	}
	s.refused[refusal{rule, table}] = true
}

func rulesKey(rules []int) string {
	b := make([]byte, 0, 4*len(rules))
	for _, r := range rules {
		b = binary.LittleEndian.AppendUint32(b, uint32(r))
	}
	return string(b)
}

// wish is what a peer is to be allowed: all by one rule, or a list; neither is
// nothing.
type wish struct {
	rule uint32
	list *list
}

// wish is what rules allow a peer; shared: whoever the peer is.
func (s *set) wish(rules []int, peer *identity) (w wish, shared bool) {
	ports := map[portPrefix]uint32{}
	add := func(list []portPrefix, number uint32) {
		for _, p := range list {
			if _, earlier := ports[p]; !earlier {
				ports[p] = number
			}
		}
	}
	shared = true
	for _, i := range rules {
		r := &s.rules[i]
		if r.all {
			return wish{rule: r.number}, shared
		}
		add(r.ports, r.number)
		if len(r.names) > 0 {
			shared = false
		}
		for _, n := range r.names {
			if peer != nil {
				add(resolve(n, peer.ports), r.number)
			}
		}
	}
	if len(ports) == 0 {
		return wish{}, shared
	}
	return wish{list: listOf(ports)}, shared
}

// take enters what a peer is to be allowed into content; false: its list found
// no room.
func (m *Model) take(s *set, id uint64, w wish, content map[uint64]PeerRules) bool {
	p := PeerRules{Rule: w.rule}
	if w.list != nil {
		if !m.acquireList(w.list) {
			return false
		}
		p = PeerRules{Ports: w.list.id, Lengths: w.list.lengths}
	}
	if p == (PeerRules{}) {
		return true
	}
	content[id] = p
	old, had := s.content[id]
	if had && old == p {
		return true
	}
	if had {
		m.strict[s] = true
	}
	m.putPeer(PeerKey{s.id, id}, p)
	return true
}

// refill finds again what a set allows one identity.
func (m *Model) refill(s *set, id uint64) {
	peer := m.identities[id] // nil: nobody has it any more
	var rules []int
	if peer != nil {
		for sel := range peer.selectors {
			rules = append(rules, sel.users[s]...)
		}
	}
	slices.Sort(rules)
	rules = slices.Compact(rules)
	old, had := s.content[id]
	fresh := map[uint64]PeerRules{}
	if len(rules) > 0 {
		w, _ := s.wish(rules, peer)
		switch {
		case !had && w != (wish{}) && m.peers >= m.limits.Peers:
			s.refuseAll(rules, "peers")
		case !m.take(s, id, w, fresh):
			s.refuseAll(rules, "ports")
		}
	}
	now, has := fresh[id]
	switch {
	case has:
		s.content[id] = now
		if !had {
			m.peers++
		}
	case had:
		delete(s.content, id)
		m.peers--
		m.dropped(s, id, old)
	}
	if had {
		m.releaseList(old.Ports)
	}
	m.noteRefused(s)
}

// dropped takes an entry out of a set. Where no pod has that identity any more, who had it is
// compared with what it has now: see compareIdentities.
func (m *Model) dropped(s *set, id uint64, p PeerRules) {
	k := PeerKey{s.id, id}
	m.dropPeer(k)
	if m.gone.identities[id] && m.identities[id] == nil {
		m.gone.allowed[k] = p
		return
	}
	m.strict[s] = true
}

func (s *set) refuseAll(rules []int, table string) {
	for _, r := range rules {
		s.refuse(s.rules[r].number, table)
	}
}
