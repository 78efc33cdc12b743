// SPDX-License-Identifier: Apache-2.0

package service

import (
	"slices"
	"testing"
)

// A change of two slots is made in place, where flows are; a larger one under fresh slots.
func TestSmallChangesAreMadeInPlace(t *testing.T) {
	for name, tc := range map[string]struct {
		old, want []uint32
		fresh     bool
		slots     []uint32
		tail      []uint32
	}{
		"nothing":                {[]uint32{1, 2}, []uint32{2, 1}, false, []uint32{1, 2}, nil},
		"one more":               {[]uint32{1, 2}, []uint32{1, 2, 3}, false, []uint32{1, 2, 3}, nil},
		"two more":               {[]uint32{1}, []uint32{1, 2, 3}, false, []uint32{1, 2, 3}, nil},
		"three more":             {[]uint32{1}, []uint32{1, 2, 3, 4}, true, []uint32{1, 2, 3, 4}, nil},
		"one for another":        {[]uint32{1, 2, 3}, []uint32{1, 4, 3}, false, []uint32{1, 4, 3}, nil},
		"a hole gets the last":   {[]uint32{1, 2, 3}, []uint32{2, 3}, false, []uint32{3, 2}, []uint32{2}},
		"two fewer":              {[]uint32{1, 2, 3}, []uint32{1}, false, []uint32{1}, []uint32{1, 2}},
		"three fewer":            {[]uint32{1, 2, 3, 4}, []uint32{1}, true, []uint32{1}, nil},
		"one is there twice":     {[]uint32{1, 2, 1}, []uint32{1, 2}, true, []uint32{1, 2}, nil},
		"two for two and a tail": {[]uint32{1, 2, 3, 4}, []uint32{3, 5, 6}, false, []uint32{5, 6, 3}, []uint32{3}},
	} {
		p := PlanSlots(tc.old, tc.want)
		if p.Fresh != tc.fresh || !slices.Equal(p.Slots, tc.slots) || !slices.Equal(p.Tail, tc.tail) {
			t.Errorf("%s: %v to %v is %+v; want fresh %v, slots %v, tail %v", name, tc.old, tc.want, p, tc.fresh, tc.slots, tc.tail)
		}
	}
}
