// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"maps"
	"math"
	"net/netip"
	"slices"
)

// unknownSet is the policy set of endpoints whose pods are not known: it has
// no rules.
var unknownSet = digestOf("set", "unknown")

// Unknown is what an endpoint whose pod is not known gets: it is closed.
var Unknown = Isolation{unknownSet.number(), unknownSet.number(), setUnknown, setUnknown}

// goneSets is Gone while a change is made, so that what goes and comes again is
// in it once.
type goneSets struct {
	ports map[PortKey]bool
	peers map[PeerKey]bool

	identities map[uint64]bool       // that pods had
	allowed    map[PeerKey]PeerRules // what sets allowed those
}

func (m *Model) begin() {
	m.change = Change{Put: newTables(), Late: map[netip.Addr]Identity{}}
	m.gone = goneSets{map[PortKey]bool{}, map[PeerKey]bool{}, map[uint64]bool{}, map[PeerKey]PeerRules{}}
	clear(m.strict)
}

func (m *Model) putPort(k PortKey, rule uint32) {
	delete(m.gone.ports, k)
	m.change.Put.Ports[k] = rule
}

func (m *Model) dropPort(k PortKey) {
	delete(m.change.Put.Ports, k)
	m.gone.ports[k] = true
}

func (m *Model) putPeer(k PeerKey, p PeerRules) {
	delete(m.gone.peers, k)
	m.change.Put.Peers[k] = p
}

func (m *Model) dropPeer(k PeerKey) {
	delete(m.change.Put.Peers, k)
	m.gone.peers[k] = true
}

func (m *Model) putPrefix(p netip.Prefix, id uint64) { m.change.Put.Prefixes[p] = id }
func (m *Model) dropPrefix(p netip.Prefix) {
	m.change.Gone.Prefixes = append(m.change.Gone.Prefixes, p)
}

// Plan is what the tables must become. Whoever asks writes it, and calls Again
// when that failed.
func (m *Model) Plan() Change {
	isolations := m.planEndpoints()
	if m.dirtyPrefixes || m.singlesRefused > m.singles() { // there may be room for a refused group now
		m.replacePrefixes()
	}
	m.planSets()
	m.planAddrs()
	m.planIsolations(isolations)
	c := m.finish()
	m.begin()
	m.names.forget(m.hasRule)
	for _, n := range []*numbers{&m.peerNumbers, &m.setNumbers, &m.groupNumbers, &m.listNumbers} {
		n.forget()
	}
	if m.full {
		m.full = false
		m.kept = Kept{} // what is in force now is not asked again for its room
		return Change{Full: true, Put: m.Tables()}
	}
	return c
}

// Look plans for who only looks, where the last plan was not written: the next
// one is full all the same.
func (m *Model) Look() {
	if m.full {
		m.Plan()
		m.full = true
	}
}

// Again makes the next plan full: nobody knows what the tables hold.
func (m *Model) Again() { m.full = true }

// planEndpoints gives the endpoints that may need others their sets. Old sets
// are let go when all have theirs, and these their rules, so that what both use
// stays.
func (m *Model) planEndpoints() (changed []uint32) {
	var old []*set
	selected := map[string][2][]*Policy{}
	for id := range m.dirtyEndpoints {
		changed = append(changed, id)
		ep := m.endpoints[id]
		if ep == nil {
			continue
		}
		old = append(old, ep.ingress, ep.egress)
		ep.ingress, ep.egress = nil, nil
		p := m.podOf(ep.Pod, ep.UID)
		if p == nil || p.identity == nil {
			continue
		}
		alike := p.alike()
		policies, known := selected[alike]
		if !known {
			policies = [2][]*Policy{m.selecting(p, Ingress), m.selecting(p, Egress)}
			selected[alike] = policies
		}
		if len(policies[Ingress]) > 0 {
			ep.ingress = m.setFor(Ingress, policies[Ingress], p)
		}
		if len(policies[Egress]) > 0 {
			ep.egress = m.setFor(Egress, policies[Egress], p)
		}
	}
	var fresh []*set
	for _, s := range m.sets {
		if s.fresh {
			fresh = append(fresh, s)
		}
	}
	for _, s := range m.inOrder(fresh) {
		m.build(s)
	}
	for _, s := range old {
		m.release(s)
	}
	m.lookAgain()
	m.meet()
	clear(m.dirtyEndpoints)
	return changed
}

// alike is one string for pods that policies select alike.
func (p *pod) alike() string {
	parts := []string{p.Namespace}
	for _, k := range slices.Sorted(maps.Keys(p.Labels)) {
		parts = append(parts, k, p.Labels[k])
	}
	return join(parts...)
}

// inOrder sorts sets: that is the order in which they are given room.
func (m *Model) inOrder(list []*set) []*set {
	slices.SortFunc(list, func(a, b *set) int {
		if m.kept.Sets[a.id] != m.kept.Sets[b.id] {
			if m.kept.Sets[a.id] {
				return -1
			}
			return 1
		}
		return cmp.Or(slices.CompareFunc(a.policies, b.policies, Key.Compare), cmp.Compare(a.id, b.id))
	})
	return list
}

// planSets fills the sets whose content may differ, and then those with refused
// rules, once more, if there may be room now: while a table is full every change of
// any pod comes here.
func (m *Model) planSets() {
	var changed, refused []*set
	for _, s := range m.sets {
		if s.whole || len(s.dirty) > 0 {
			changed = append(changed, s)
		}
	}
	for _, s := range m.inOrder(changed) {
		if s.whole || len(s.refused) > 0 {
			m.fill(s)
			continue
		}
		for id := range s.dirty {
			m.refill(s, id)
		}
		clear(s.dirty)
	}
	if m.peers >= m.refusedAt && !m.portsChange() {
		return
	}
	m.refusedAt = 0
	for _, s := range m.sets {
		if len(s.refused) > 0 {
			refused = append(refused, s)
		}
	}
	for _, s := range m.inOrder(refused) {
		m.fill(s)
	}
	if m.portsChange() { // a list that is there now takes no room: ask once more
		m.refusedAt = math.MaxInt
	}
}

// portsChange says that this plan puts or drops ports of lists.
func (m *Model) portsChange() bool { return len(m.change.Put.Ports)+len(m.gone.ports) > 0 }

// planAddrs finds again who has the addresses about which something changed.
// Those that come get room after those that go have left.
func (m *Model) planAddrs() {
	compared := map[[2]uint64]bool{}
	var coming []netip.Addr
	for a := range m.dirtyAddrs {
		who := m.whoHas(a)
		old, had := m.written.identities[a]
		switch {
		case !had && who != (Identity{}):
			coming = append(coming, a)
			continue
		case had && who == (Identity{}):
			delete(m.written.identities, a)
			m.change.Gone.Identities = append(m.change.Gone.Identities, a)
		case old != who:
			m.written.identities[a] = who
			if old.Prefix != 0 && who.Prefix == 0 {
				m.change.Late[a] = who
			} else {
				m.change.Put.Identities[a] = who
			}
		}
		delete(m.dirtyAddrs, a)
		if had && old.Pod != who.Pod && !compared[[2]uint64{old.Pod, who.Pod}] {
			compared[[2]uint64{old.Pod, who.Pod}] = true
			m.compareIdentities(old.Pod, who.Pod)
		}
	}
	m.enter(coming)
}

// enter gives addresses that are in no table yet their identities, as long as
// there is room. The others stay dirty.
func (m *Model) enter(coming []netip.Addr) {
	if len(m.written.identities)+len(coming) > m.limits.Identities {
		slices.SortFunc(coming, func(a, b netip.Addr) int {
			if m.kept.Addrs[a] != m.kept.Addrs[b] {
				if m.kept.Addrs[a] {
					return -1
				}
				return 1
			}
			return a.Compare(b)
		})
		coming = coming[:max(0, m.limits.Identities-len(m.written.identities))]
	}
	for _, a := range coming {
		m.written.identities[a] = m.whoHas(a)
		m.change.Put.Identities[a] = m.written.identities[a]
		delete(m.dirtyAddrs, a)
	}
}

// whoHas is what the table is to say of an address.
func (m *Model) whoHas(a netip.Addr) Identity {
	who := Identity{Prefix: m.written.singles[a]}
	if m.node[a] {
		who.Pod = Node
	} else if id := m.holder(a); id != nil {
		who.Pod = id.id
	}
	return who
}

// compareIdentities finds the sets that allowed the old holder of an address
// something else than they allow the new one.
func (m *Model) compareIdentities(old, fresh uint64) {
	for _, s := range m.sets {
		before, had := s.content[old]
		if !had {
			before, had = m.gone.allowed[PeerKey{s.id, old}]
		}
		if had && (fresh < first || before != s.content[fresh]) || s.anyPods > 0 && old >= first && fresh < first {
			m.strict[s] = true
		}
	}
}

// planIsolations finds the endpoints whose sets or flags differ.
func (m *Model) planIsolations(changed []uint32) {
	flags := map[*set]uint16{}
	for _, s := range m.sets {
		flags[s] = s.flags()
		if len(m.dirtyAddrs) > 0 && flags[s]&(setPods|setAnyPod) != 0 {
			flags[s] |= setIncomplete
		}
	}
	stricter := map[uint32]bool{}
	for id, ep := range m.endpoints {
		now := m.isolation(ep, flags)
		old := m.written.endpoints[id]
		if now.Ingress != 0 && now.Ingress != old.Ingress || now.Egress != 0 && now.Egress != old.Egress ||
			m.strict[ep.ingress] || m.strict[ep.egress] {
			stricter[id] = true
		}
		if now == old {
			continue
		}
		m.change.Put.Endpoints[id] = now
		m.written.endpoints[id] = now
	}
	for _, id := range changed {
		if _, was := m.written.endpoints[id]; was && m.endpoints[id] == nil {
			delete(m.written.endpoints, id)
			m.change.Gone.Endpoints = append(m.change.Gone.Endpoints, id)
		}
	}
	for id := range stricter {
		m.change.Stricter = append(m.change.Stricter, id)
	}
	slices.Sort(m.change.Stricter)
}

// unknown says that nobody knows what pod has ep. One in the node's namespace has no
// interface: ep is of another one of that name, from before.
func (m *Model) unknown(ep *endpoint) bool {
	p := m.podOf(ep.Pod, ep.UID)
	return ep.Pod != (Key{}) && (p == nil || p.HostNetwork)
}

func (m *Model) isolation(ep *endpoint, flags map[*set]uint16) Isolation {
	if m.unknown(ep) {
		return Unknown
	}
	var i Isolation
	if ep.ingress != nil {
		i.Ingress, i.IngressFlags = ep.ingress.id, flags[ep.ingress]
	}
	if ep.egress != nil {
		i.Egress, i.EgressFlags = ep.egress.id, flags[ep.egress]
	}
	return i
}

func (m *Model) finish() Change {
	c := m.change
	for k := range m.gone.ports {
		c.Gone.Ports = append(c.Gone.Ports, k)
	}
	for k := range m.gone.peers {
		c.Gone.Peers = append(c.Gone.Peers, k)
	}
	return c
}

// Tables is everything that the tables are to hold by the last plan.
func (m *Model) Tables() Tables {
	t := newTables()
	for _, l := range m.lists {
		for p, rule := range l.rules {
			t.Ports[l.key(p)] = rule
		}
	}
	for _, s := range m.sets {
		for id, p := range s.content {
			t.Peers[PeerKey{s.id, id}] = p
		}
	}
	for a, who := range m.written.identities {
		t.Identities[a] = who
	}
	for p, id := range m.written.prefixes {
		t.Prefixes[p] = id
	}
	for id, i := range m.written.endpoints {
		t.Endpoints[id] = i
	}
	return t
}
