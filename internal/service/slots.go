// SPDX-License-Identifier: Apache-2.0

package service

import "slices"

// MaxInPlace is how many slots may change before a Service is written under
// fresh slots instead. Up to here, every instant of the in-place order is a
// valid Service; beyond, clients would see a mixture of two.
const MaxInPlace = 2

// SlotWrite sets one slot to one backend.
type SlotWrite struct {
	Slot    uint32
	Backend uint32
}

// Plan says how to turn the slots `old` of a Service into those of `want`.
type Plan struct {
	Fresh  bool        // write all of Slots under a fresh id, then flip the frontend
	Large  bool        // only because in place it is more than MaxInPlace
	Writes []SlotWrite // in place: before the count changes
	Tail   []uint32    // in place: slots to delete after the count changed
	Slots  []uint32    // backend ids, in slot order, when done
}

// PlanSlots turns the backend ids old, in slot order, into the set want. Kept
// backends keep their slots; a hole is filled by a new backend or by the last.
func PlanSlots(old, want []uint32) Plan {
	p := PlanInPlace(old, want)
	if len(p.Writes) > MaxInPlace || len(p.Tail) > MaxInPlace {
		return Plan{Fresh: true, Large: true, Slots: want}
	}
	return p
}

// PlanInPlace is PlanSlots for who has no room for fresh slots, however many change.
func PlanInPlace(old, want []uint32) Plan {
	wanted := make(map[uint32]bool, len(want))
	for _, id := range want {
		wanted[id] = true
	}
	have := make(map[uint32]bool, len(old))
	for _, id := range old {
		if have[id] {
			// A killed tool left a backend in two slots.
			return Plan{Fresh: true, Slots: want}
		}
		have[id] = true
	}
	var added []uint32
	for _, id := range want {
		if !have[id] {
			added = append(added, id)
		}
	}
	p := fillSlots(slices.Clone(old), wanted, added)
	for i := len(p.Slots); i < len(old); i++ {
		p.Tail = append(p.Tail, uint32(i))
	}
	return p
}

// PlanTable turns the slots old into want, where each has its meaning: a flow
// only ever looks at one of them, so every instant is valid however many change.
func PlanTable(old, want []uint32) Plan {
	if len(old) != len(want) {
		return Plan{Fresh: true, Slots: want}
	}
	p := Plan{Slots: want}
	for i, id := range want {
		if old[i] != id {
			p.Writes = append(p.Writes, SlotWrite{uint32(i), id})
		}
	}
	return p
}

// fillSlots replaces the unwanted of slots by added ones, and what is left of
// either by moving the tail forward or by appending.
func fillSlots(slots []uint32, wanted map[uint32]bool, added []uint32) Plan {
	var p Plan
	for i := 0; i < len(slots); i++ {
		if wanted[slots[i]] {
			continue
		}
		if len(added) > 0 {
			slots[i], added = added[0], added[1:]
			p.Writes = append(p.Writes, SlotWrite{uint32(i), slots[i]})
			continue
		}
		for len(slots) > i && !wanted[slots[len(slots)-1]] {
			slots = slots[:len(slots)-1]
		}
		if len(slots) > i {
			slots[i] = slots[len(slots)-1]
			slots = slots[:len(slots)-1]
			p.Writes = append(p.Writes, SlotWrite{uint32(i), slots[i]})
		}
	}
	for _, id := range added {
		p.Writes = append(p.Writes, SlotWrite{uint32(len(slots)), id})
		slots = append(slots, id)
	}
	p.Slots = slots
	return p
}
