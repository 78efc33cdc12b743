// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// group is the blocks of a rule. An address has a prefix identity: which groups
// hold it.
type group struct {
	id         uint64
	digest     digest
	order      int
	blocks     []Block
	refs       int
	identities map[uint64]bool // that this group is in
	refused    string          // the table that it does not fit into, so none of it is in force
	admitted   bool            // it has been in force, and so its single addresses have their room
}

// groupOf is the group of these blocks, held by its caller. All prefixes are masked.
func (m *Model) groupOf(blocks []Block) *group {
	texts := make([]string, len(blocks))
	for i, b := range blocks {
		excepts := make([]string, len(b.Except))
		for j, e := range b.Except {
			excepts[j] = e.String()
		}
		slices.Sort(excepts)
		texts[i] = b.CIDR.String() + "-" + strings.Join(excepts, ",")
	}
	slices.Sort(texts)
	d := digestOf(append([]string{"group"}, slices.Compact(texts)...)...)
	id := m.groupNumbers.number(d)
	g := m.groups[id]
	if g == nil {
		m.groupsMade++
		g = &group{id: id, digest: d, order: m.groupsMade, blocks: blocks, identities: map[uint64]bool{}}
		m.groups[id] = g
		m.dirtyPrefixes = true
	}
	g.refs++
	return g
}

func (m *Model) releaseGroup(g *group) {
	if g == nil {
		return
	}
	if g.refs--; g.refs > 0 {
		return
	}
	delete(m.groups, g.id)
	m.groupNumbers.release(g.digest)
	m.dirtyPrefixes = true
}

// atPrefix is what begins at a prefix: blocks that hold it, and blocks that
// except it.
type atPrefix struct {
	prefix         netip.Prefix
	holds, excepts []*holding
}

// holding is a block while the walk is inside it.
type holding struct {
	group    *group
	inside   bool
	excepted int
}

func (h *holding) active() bool { return h.inside && h.excepted == 0 }

// noGroup is the identity of an address that a prefix holds and no group does.
var noGroup = digestOf("prefix")

// v6 prefixes that hold all of IPv4 as the tables map it.
var mapped = netip.MustParseAddr("::ffff:0:0")

// maxOverlaps bounds, over all prefixes, how many groups hold each: time and memory go by that. A thousand groups
// that hold all but two networks of their own have two million.
const maxOverlaps = 1 << 21

// overlaps is no table: what a group is refused for when it, and others, hold too much that others hold as well.
const overlaps = "overlaps"

// walk finds the prefix identity of every prefix that the groups mention: what
// holds a prefix holds all of it, since every exception is a prefix of its own.
func (m *Model) walk() (prefixes map[netip.Prefix]uint64, singles map[netip.Addr]uint64) {
	m.admitGroups()
	for {
		prefixes, singles, all := m.walkAdmitted()
		if len(all) == 0 {
			return prefixes, singles
		}
		// Half of those that overlap where there were too many, the youngest: as when a table is full.
		slices.SortFunc(all, func(a, b *group) int { return cmp.Compare(a.order, b.order) })
		for _, g := range all[len(all)/2:] {
			g.refused, g.admitted = overlaps, false
		}
	}
}

// walkAdmitted walks the groups that are not refused, as far as maxOverlaps; where that
// is not all, it returns the groups that hold the prefix where it stopped.
func (m *Model) walkAdmitted() (prefixes map[netip.Prefix]uint64, singles map[netip.Addr]uint64, tooMany []*group) {
	prefixes, singles = map[netip.Prefix]uint64{}, map[netip.Addr]uint64{}
	w := walker{numbers: &m.peerNumbers, counts: map[*group]int{}, memo: map[string]uint64{}}
	for _, d := range m.prefixDigests {
		m.peerNumbers.release(d)
	}
	for _, g := range m.groups {
		g.identities = map[uint64]bool{}
	}
	room := maxOverlaps
	for _, at := range m.mentioned() {
		w.leave(at.prefix)
		w.enter(at)
		if room -= len(w.counts); room < 0 {
			tooMany = slices.Collect(maps.Keys(w.counts))
			break
		}
		id := w.identity()
		if at.prefix.IsSingleIP() {
			singles[at.prefix.Addr()] = id
		} else {
			prefixes[at.prefix] = id
		}
	}
	m.prefixDigests = w.digests
	return prefixes, singles, tooMany
}

type walker struct {
	numbers *numbers
	stack   []*atPrefix
	counts  map[*group]int // of active blocks
	memo    map[string]uint64
	digests []digest
}

func (w *walker) leave(p netip.Prefix) {
	for n := len(w.stack); n > 0; n = len(w.stack) {
		top := w.stack[n-1]
		if top.prefix.Overlaps(p) {
			return
		}
		for _, h := range top.excepts {
			w.change(h, func() { h.excepted-- })
		}
		for _, h := range top.holds {
			w.change(h, func() { h.inside = false })
		}
		w.stack = w.stack[:n-1]
	}
}

func (w *walker) enter(at *atPrefix) {
	for _, h := range at.holds {
		w.change(h, func() { h.inside = true })
	}
	for _, h := range at.excepts {
		w.change(h, func() { h.excepted++ })
	}
	w.stack = append(w.stack, at)
}

func (w *walker) change(h *holding, do func()) {
	before := h.active()
	do()
	switch after := h.active(); {
	case after && !before:
		w.counts[h.group]++
	case before && !after:
		if w.counts[h.group]--; w.counts[h.group] == 0 {
			delete(w.counts, h.group)
		}
	}
}

// identity is the one of the groups that are active now.
func (w *walker) identity() uint64 {
	if len(w.counts) == 0 {
		return noGroup.number()
	}
	ids := make([]uint64, 0, len(w.counts))
	for g := range w.counts {
		ids = append(ids, g.id)
	}
	slices.Sort(ids)
	key := make([]byte, 0, 8*len(ids))
	for _, id := range ids {
		key = binary.LittleEndian.AppendUint64(key, id)
	}
	id, ok := w.memo[string(key)]
	if !ok {
		d := digestOf("prefix", string(key))
		id = w.numbers.number(d)
		w.digests = append(w.digests, d)
		w.memo[string(key)] = id
		for g := range w.counts {
			g.identities[id] = true
		}
	}
	return id
}

// mentioned are all prefixes of the groups that fit into the tables, each
// before those inside it.
func (m *Model) mentioned() []*atPrefix {
	at := map[netip.Prefix]*atPrefix{}
	find := func(p netip.Prefix) *atPrefix {
		if at[p] == nil {
			at[p] = &atPrefix{prefix: p}
		}
		return at[p]
	}
	maps6 := false
	for _, g := range m.groups {
		if g.refused != "" {
			continue
		}
		for _, b := range g.blocks {
			h := &holding{group: g}
			find(b.CIDR).holds = append(find(b.CIDR).holds, h)
			maps6 = maps6 || b.CIDR.Contains(mapped)
			for _, e := range b.Except {
				find(e).excepts = append(find(e).excepts, h)
			}
		}
	}
	if maps6 { // IPv4 is not inside ::/0, though the table has it there
		find(netip.PrefixFrom(netip.IPv4Unspecified(), 0))
	}
	out := make([]*atPrefix, 0, len(at))
	for _, a := range at {
		out = append(out, a)
	}
	slices.SortFunc(out, func(a, b *atPrefix) int {
		return cmp.Or(a.prefix.Addr().Compare(b.prefix.Addr()), cmp.Compare(a.prefix.Bits(), b.prefix.Bits()))
	})
	return out
}

// admitGroups refuses groups whose prefixes find no room, the youngest first:
// half of a group could allow what the other half excepts.
func (m *Model) admitGroups() {
	groups := make([]*group, 0, len(m.groups))
	for _, g := range m.groups {
		groups = append(groups, g)
	}
	slices.SortFunc(groups, func(a, b *group) int { return cmp.Compare(a.order, b.order) })
	seen := map[netip.Prefix]bool{}
	wide, single := 1, m.singles() // one for 0.0.0.0/0
	m.singlesRefused = 0
	for _, g := range groups {
		moreWide, moreSingle := 0, 0
		more := map[netip.Prefix]bool{}
		g.each(func(p netip.Prefix) {
			switch {
			case seen[p] || more[p]:
				return
			case p.IsSingleIP():
				moreSingle++
			default:
				moreWide++
			}
			more[p] = true
		})
		g.refused = ""
		switch {
		case wide+moreWide > m.limits.Prefixes:
			g.refused = "prefixes"
		case moreSingle > 0 && !g.admitted && single+moreSingle > m.limits.Identities:
			g.refused, m.singlesRefused = "identities", m.singles()
		}
		if g.admitted = g.refused == ""; !g.admitted {
			continue
		}
		wide, single = wide+moreWide, single+moreSingle
		maps.Copy(seen, more)
	}
}

// singles is how many addresses pods and the node may need in the table that
// single addresses of blocks are in, too.
func (m *Model) singles() int { return len(m.claims) + len(m.node) }

func (g *group) each(fn func(netip.Prefix)) {
	for _, b := range g.blocks {
		fn(b.CIDR)
		for _, e := range b.Except {
			fn(e)
		}
	}
}

// replacePrefixes brings prefix identities up to date, and notes what differs.
func (m *Model) replacePrefixes() {
	m.dirtyPrefixes = false
	before := make(map[*group]map[uint64]bool, len(m.groups))
	for _, g := range m.groups {
		before[g] = g.identities
	}
	prefixes, singles := m.walk()
	for p, id := range prefixes {
		if old, had := m.written.prefixes[p]; !had || old != id {
			m.putPrefix(p, id)
		}
	}
	for p := range m.written.prefixes {
		if _, stays := prefixes[p]; !stays {
			m.dropPrefix(p)
		}
	}
	for a, id := range singles {
		if m.written.singles[a] != id {
			m.dirtyAddrs[a] = true
		}
	}
	for a := range m.written.singles {
		if _, stays := singles[a]; !stays {
			m.dirtyAddrs[a] = true
		}
	}
	m.written.prefixes, m.written.singles = prefixes, singles
	for _, s := range m.sets {
		for _, r := range s.rules {
			if r.group == nil {
				continue
			}
			// An address may have changed its prefix identity, whatever the set has of both.
			m.strict[s] = true
			if r.group.refused != "" || !maps.Equal(before[r.group], r.group.identities) {
				s.whole = true
			}
		}
	}
}
