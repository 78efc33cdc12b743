// SPDX-License-Identifier: Apache-2.0

package service

import (
	"hash/fnv"
	"net/netip"
	"slices"
)

// Sizes of Maglev tables: primes, at least a hundred slots for each backend up
// to the last one, so that shares differ by about a hundredth.
var maglevSizes = []int{1021, 4093, 16381, 65521}

// MaglevSize is the size of the table of n backends. It depends on nothing
// else, so that all nodes agree.
func MaglevSize(n int) int {
	if n == 0 {
		return 0
	}
	for _, m := range maglevSizes {
		if m >= 100*n {
			return m
		}
	}
	return maglevSizes[len(maglevSizes)-1]
}

// Maglev is a lookup table (Eisenbud et al., NSDI 2016, section 3.4): for each
// slot the index of a backend. Whoever has the same backends has the same
// table, and one that comes or goes moves few slots of the others.
func Maglev(backends []netip.AddrPort) []int {
	m := MaglevSize(len(backends))
	if m == 0 {
		return nil
	}
	order := make([]int, len(backends)) // of backends, by address: the caller's means nothing
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return backends[a].Compare(backends[b]) })
	offset, skip, next := make([]int, len(order)), make([]int, len(order)), make([]int, len(order))
	for i, at := range order {
		offset[i], skip[i] = maglevHashes(backends[at], m)
	}
	table := make([]int, m)
	for i := range table {
		table[i] = -1
	}
	for filled := 0; ; {
		for i, at := range order {
			slot := (offset[i] + next[i]*skip[i]) % m
			for table[slot] >= 0 {
				next[i]++
				slot = (offset[i] + next[i]*skip[i]) % m
			}
			table[slot] = at
			next[i]++
			if filled++; filled == m {
				return table
			}
		}
	}
}

// maglevHashes are where a backend's permutation of m slots starts, and its step.
func maglevHashes(b netip.AddrPort, m int) (offset, skip int) {
	text, _ := b.MarshalBinary()
	h := fnv.New64a()
	h.Write(text)
	// FNV leaves the last bytes in the low bits; spread them.
	x := h.Sum64()
	x = (x ^ x>>33) * 0xff51afd7ed558ccd
	x = (x ^ x>>33) * 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	return int(x >> 32 % uint64(m)), int(x&0xffffffff%uint64(m-1)) + 1
}
