// SPDX-License-Identifier: Apache-2.0

package policy

import "slices"

// labelIndex brings selectors and identities together by a label that the selector
// requires: where a thousand selectors meet twenty thousand pods, most of them need not
// be looked at. It holds the keys that selectors ask for, and no other.
type labelIndex struct {
	keys  map[string]*labelKey
	other map[*selector]bool // that require no value of any label
}

// labelKey is what there is of one key, by value.
type labelKey struct {
	identities map[string][]*identity
	selectors  map[string][]*selector
	asking     int
}

func newLabelIndex() labelIndex {
	return labelIndex{map[string]*labelKey{}, map[*selector]bool{}}
}

// required is the requirement of s that fewest labels fulfil; nil: it requires no value.
func (s *selector) required() *Requirement {
	var found *Requirement
	for i, r := range s.pods {
		if r.Operator == In && (found == nil || len(r.Values) < len(found.Values)) {
			found = &s.pods[i]
		}
	}
	return found
}

// addSelector returns the identities that s may select; ok is false where that may be any.
func (x *labelIndex) addSelector(s *selector, all map[uint64]*identity) (candidates []*identity, ok bool) {
	r := s.required()
	if r == nil {
		x.other[s] = true
		return nil, false
	}
	k := x.keys[r.Key]
	if k == nil {
		k = &labelKey{identities: map[string][]*identity{}, selectors: map[string][]*selector{}}
		x.keys[r.Key] = k
		for _, id := range all {
			if v, has := id.labels[r.Key]; has {
				k.identities[v] = append(k.identities[v], id)
			}
		}
	}
	k.asking++
	for _, v := range distinct(r.Values) {
		k.selectors[v] = append(k.selectors[v], s)
		candidates = append(candidates, k.identities[v]...)
	}
	return candidates, true
}

func (x *labelIndex) dropSelector(s *selector) {
	r := s.required()
	if r == nil {
		delete(x.other, s)
		return
	}
	k := x.keys[r.Key]
	if k.asking--; k.asking == 0 {
		delete(x.keys, r.Key)
		return
	}
	for _, v := range distinct(r.Values) {
		without(k.selectors, v, s)
	}
}

// addIdentity returns the selectors that may select id.
func (x *labelIndex) addIdentity(id *identity) []*selector {
	var candidates []*selector
	for s := range x.other {
		candidates = append(candidates, s)
	}
	for key, v := range id.labels {
		if k := x.keys[key]; k != nil {
			k.identities[v] = append(k.identities[v], id)
			candidates = append(candidates, k.selectors[v]...)
		}
	}
	return candidates
}

func (x *labelIndex) dropIdentity(id *identity) {
	for key, v := range id.labels {
		if k := x.keys[key]; k != nil {
			without(k.identities, v, id)
		}
	}
}

// distinct are the values, each once.
func distinct(values []string) []string { return slices.Compact(slices.Sorted(slices.Values(values))) }

// without takes e, which is there, out of the list of a value.
func without[E comparable](lists map[string][]E, value string, e E) {
	list := lists[value]
	if len(list) == 1 {
		delete(lists, value)
		return
	}
	i, last := slices.Index(list, e), len(list)-1
	list[i] = list[last]
	clear(list[last:])
	lists[value] = list[:last]
}
