// SPDX-License-Identifier: Apache-2.0

package reconcile

// A full change: the tables are compared with what they are to hold.

import (
	"cmp"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
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
	w.policies, w.policiesGone = differences(want.policies, policies)
	w.identities, w.late = fallBack(w.identities, identities)
	if w.replacesSets(policies) {
		w.nobodyMeanwhile(identities)
	}
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

// nobodyMeanwhile lets addresses whose pods get other identities, or none, be nobody's while
// endpoints get other sets. Who wrote what is there had other policies maybe, and asked about
// pods what is not asked now, or the other way around: no set is to meet an identity of
// another time than its own.
func (w *writes) nobodyMeanwhile(have map[datapath.Addr]datapath.Identity) {
	isPod := func(who datapath.Identity) bool { return who.Pod >= bpfgen.IdentityFirst }
	var now, late pairs[datapath.Addr, datapath.Identity]
	split := func(list, stays *pairs[datapath.Addr, datapath.Identity]) {
		for i, a := range list.keys {
			old, who := have[a], list.values[i]
			if old.Pod == who.Pod || !isPod(old) && !isPod(who) {
				stays.add(a, who)
				continue
			}
			if prefix := cmp.Or(who.Prefix, old.Prefix); prefix != 0 || isPod(old) {
				w.early.add(a, datapath.Identity{Prefix: prefix})
			}
			late.add(a, who)
		}
	}
	split(&w.identities, &now)
	split(&w.late, &late)
	for _, a := range w.identitiesGone {
		if old := have[a]; isPod(old) {
			w.early.add(a, datapath.Identity{Prefix: old.Prefix})
		}
	}
	w.identities, w.late = now, late
}

// replacesSets says that an endpoint that is isolated gets other sets.
func (w *writes) replacesSets(have map[uint32]datapath.EndpointPolicy) bool {
	return slices.ContainsFunc(w.policies.keys, func(id uint32) bool { return have[id] != datapath.EndpointPolicy{} })
}
