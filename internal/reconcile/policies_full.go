// SPDX-License-Identifier: Apache-2.0

package reconcile

// A full change: the tables are compared with what they are to hold.

import (
	"cmp"
	"maps"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
)

// compare makes of everything that is to be the writes that are missing, and
// finds the endpoints whose flows may not all be allowed any more.
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
	var loosened, retold, renamed bool
	changed := map[uint64]bool{} // sets that allow some peer otherwise
	w.ports, w.portsGone, _ = differences(want.ports, ports)
	w.peers, w.peersGone, _ = differences(want.peers, peers)
	for _, k := range w.peersGone {
		changed[k.Set] = true
	}
	for _, k := range w.peers.keys {
		if _, had := peers[k]; had {
			changed[k.Set] = true
		}
	}
	w.identities, w.identitiesGone, loosened = differences(want.identities, identities)
	w.prefixes, w.prefixesGone, retold = differences(want.prefixes, prefixes)
	renamed = loosened || retold || len(w.prefixes.keys) > 0
	slices.SortFunc(w.prefixesGone, func(a, b datapath.PrefixKey) int { return cmp.Compare(a.Length, b.Length) })
	w.identities, w.late = fallBack(w.identities, identities)
	w.policies, w.policiesGone, _ = differences(want.policies, policies)
	after := maps.Clone(policies)
	for i, id := range want.policies.keys {
		after[id] = want.policies.values[i]
	}
	for id, e := range after {
		old := policies[id]
		if e.Ingress != old.Ingress || e.Egress != old.Egress || changed[e.Ingress] || changed[e.Egress] || renamed {
			w.stricter = append(w.stricter, id)
		}
	}
	return w, nil
}

// differences are the pairs of want that have is without, or has otherwise, and
// the keys of have that want is without. other: something that is there differs.
func differences[K, V comparable](want pairs[K, V], have map[K]V) (put pairs[K, V], gone []K, other bool) {
	var zero V
	wanted := make(map[K]bool, len(want.keys))
	for i, k := range want.keys {
		wanted[k] = true
		old, has := have[k]
		if has && old == want.values[i] || !has && want.values[i] == zero {
			continue
		}
		other = other || has
		put.add(k, want.values[i])
	}
	for k := range have {
		if !wanted[k] {
			gone = append(gone, k)
		}
	}
	return put, gone, other || len(gone) > 0
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
