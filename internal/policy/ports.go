// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"math/bits"
	"slices"
	"strconv"
)

// portPrefix is the ports of a protocol whose first length bits are port's.
type portPrefix struct {
	protocol, length uint8
	port             uint16
}

// split cuts a range of ports into the fewest prefixes.
func split(protocol uint8, first, last uint16) []portPrefix {
	var out []portPrefix
	for from, to := uint32(first), uint32(last); from <= to; {
		// The largest block that begins at from and does not pass to.
		free := bits.TrailingZeros32(from | 1<<16)
		for free > 0 && from+1<<free-1 > to {
			free--
		}
		out = append(out, portPrefix{protocol, uint8(16 - free), uint16(from)})
		from += 1 << free
	}
	return out
}

// list is ports with the rule that allows each; sets and peers that allow the
// same share it. Its id is its content's, which never changes; it has one from when a
// peer refers to it.
type list struct {
	id      uint64
	digest  digest
	rules   map[portPrefix]uint32
	lengths uint32
	refs    int
}

func listOf(rules map[portPrefix]uint32) *list {
	l := &list{rules: rules}
	parts := []string{"ports"}
	keys := make([]portPrefix, 0, len(rules))
	for p := range rules {
		keys = append(keys, p)
		l.lengths |= 1 << p.length
	}
	slices.SortFunc(keys, func(a, b portPrefix) int {
		return cmp.Or(cmp.Compare(a.protocol, b.protocol), cmp.Compare(a.port, b.port), cmp.Compare(a.length, b.length))
	})
	for _, p := range keys {
		parts = append(parts, strconv.Itoa(int(p.protocol)), strconv.Itoa(int(p.port)), strconv.Itoa(int(p.length)),
			strconv.FormatUint(uint64(rules[p]), 10))
	}
	l.digest = digestOf(parts...)
	return l
}

func (l *list) key(p portPrefix) PortKey {
	return PortKey{Ports: l.id, Port: p.port, Protocol: p.protocol, Length: p.length}
}

// acquireList makes a peer refer to a list; false: the table does not take it.
func (m *Model) acquireList(l *list) bool {
	l.id = m.listNumbers.number(l.digest)
	if known := m.lists[l.id]; known != nil {
		known.refs++
		return true
	}
	if m.ports+len(l.rules) > m.limits.Ports {
		m.listNumbers.release(l.digest)
		return false
	}
	m.ports += len(l.rules)
	l.refs = 1
	m.lists[l.id] = l
	for p, rule := range l.rules {
		m.putPort(l.key(p), rule)
	}
	return true
}

func (m *Model) releaseList(id uint64) {
	l := m.lists[id]
	if l == nil {
		return
	}
	if l.refs--; l.refs > 0 {
		return
	}
	m.ports -= len(l.rules)
	delete(m.lists, id)
	m.listNumbers.release(l.digest)
	for p := range l.rules {
		m.dropPort(l.key(p))
	}
}
