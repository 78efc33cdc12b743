// SPDX-License-Identifier: Apache-2.0

package reconcile

// A full change: the tables are compared with what they are to hold.

import (
	"cmp"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
)

// compare makes of everything that is to be the writes that are missing. Flows of every endpoint
// that is isolated are judged again: who wrote what is there already, a killed agent maybe, or
// a change that failed halfway, may not have come to say so.
func (p Policies) compare(want writes) (writes, error) {
	var w writes
	ports, err := p.t.Ports.All()
	if err != nil {
		return w, err
	}
	peers, err := p.t.Peers.All()
	if err != nil {
		return w, err
	}
	identities, err := p.t.Identities.All()
	if err != nil {
		return w, err
	}
	prefixes, err := p.t.Prefixes.All()
	if err != nil {
		return w, err
	}
	policies, err := p.t.Policies.All()
	if err != nil {
		return w, err
	}
	w.ports, w.portsGone = differences(want.ports, ports)
	w.peers, w.peersGone = differences(want.peers, peers)
	w.identities, w.identitiesGone = differences(want.identities, identities)
	w.prefixes, w.prefixesGone = differences(want.prefixes, prefixes)
	slices.SortFunc(w.prefixesGone, func(a, b datapath.PrefixKey) int { return cmp.Compare(a.Length, b.Length) })
	w.identities, w.late = fallBack(w.identities, identities)
	w.policies, w.policiesGone = differences(want.policies, policies)
	w.stricter = want.policies.keys
	return w, nil
}

// differences are the pairs of want that have is without, or has otherwise, and
// the keys of have that want is without.
func differences[K, V comparable](want pairs[K, V], have map[K]V) (put pairs[K, V], gone []K) {
	var zero V
	wanted := make(map[K]bool, len(want.keys))
	for i, k := range want.keys {
		wanted[k] = true
		old, has := have[k]
		if has && old == want.values[i] || !has && want.values[i] == zero {
			continue
		}
		put.add(k, want.values[i])
	}
	for k := range have {
		if !wanted[k] {
			gone = append(gone, k)
		}
	}
	return put, gone
}

// fallBack takes out the addresses whose own prefix identity ends.
func fallBack(put pairs[datapath.Addr, datapath.Identity], have map[datapath.Addr]datapath.Identity) (now, late pairs[datapath.Addr, datapath.Identity]) {
	for i, a := range put.keys {
		to := &now
		if have[a].Prefix != 0 && put.values[i].Prefix == 0 {
			to = &late
		}
		to.add(a, put.values[i])
	}
	return now, late
}
