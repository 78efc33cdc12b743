// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// UndoError says that a change failed and could not be undone either.
type UndoError struct{ change, undo error }

func (e *UndoError) Error() string { return fmt.Sprintf("%v; and undoing it: %v", e.change, e.undo) }
func (e *UndoError) Unwrap() error { return e.change }

// flip is one frontend's value before and after; had false: it is new.
type flip struct {
	key      datapath.FrontendKey
	had      bool
	old, new datapath.Frontend
}

// inPlace changes slots of a Service that keeps its id.
type inPlace struct {
	flip
	oldSlots []uint32
	writes   []service.SlotWrite
}

// transaction is everything one change writes, in the order in which it is
// written: backends, slots, markers, frontends; then what is no longer wanted,
// frontends first.
type transaction struct {
	s           *Services
	backends    []uint32
	slotKeys    []datapath.SlotKey
	slotValues  []uint32
	markers     []datapath.Addr
	flips       []flip
	inPlace     []inPlace
	removed     []flip
	unmarked    []datapath.Addr
	deadSlots   []datapath.SlotKey
	touched     []uint32 // backends that lost a reference
	undo        []func() error
	metaChanged bool
}

// Apply makes every Service of upserts what it says there, and removes the
// frontends of removes; absent ones are no error. All take effect or, when an
// error other than CleanupError returns, none.
func (s *Services) Apply(upserts []state.Service, removes []state.Frontend) error {
	before := s.meta
	tx := &transaction{s: s}
	kept := make(map[state.Frontend]bool, len(upserts))
	for _, svc := range upserts {
		kept[svc.Frontend] = true
	}
	for _, f := range removes {
		if !kept[f] {
			tx.planRemove(datapath.KeyOf(f))
		}
	}
	for _, svc := range upserts {
		tx.planUpsert(svc)
	}
	tx.planMarkers()
	tx.metaChanged = s.meta != before
	if err := tx.write(); err != nil {
		return errors.Join(tx.revert(err), s.reload())
	}
	if err := tx.cleanup(); err != nil {
		return errors.Join(&CleanupError{err}, s.reload())
	}
	return nil
}

func (tx *transaction) planRemove(k datapath.FrontendKey) {
	s := tx.s
	f, ok := s.frontends[k]
	if !ok {
		return
	}
	tx.removed = append(tx.removed, flip{key: k, had: true, old: f.value})
	tx.dropSlots(f)
	delete(s.frontends, k)
	delete(s.numbers, f.value.Number)
	s.next = min(s.next, max(f.value.Number, 1))
	s.addresses[k.Addr]--
}

// dropSlots notes every slot of f for deletion.
func (tx *transaction) dropSlots(f frontend) {
	for i, id := range f.slots {
		tx.deadSlots = append(tx.deadSlots, datapath.SlotKey{Service: f.value.Id, Slot: uint32(i)})
		tx.unref(id)
	}
}

func (tx *transaction) unref(id uint32) {
	tx.s.refs[id]--
	tx.touched = append(tx.touched, id)
}

func (tx *transaction) planUpsert(svc state.Service) {
	s := tx.s
	k := datapath.KeyOf(svc.Frontend)
	old, had := s.frontends[k]
	want := s.backendIDs(svc.Backends, svc.Frontend.Protocol, &tx.backends)
	value := datapath.Frontend{Id: old.value.Id, Backends: uint32(len(want)), Owner: uint8(svc.Owner), Number: old.value.Number}
	plan := service.PlanSlots(old.slots, want)
	if had && !plan.Fresh && len(plan.Writes) == 0 && value == old.value {
		return
	}
	if !had {
		value.Number = s.number(svc.Number)
		s.addresses[k.Addr]++
	}
	if !had || plan.Fresh {
		value.Id = s.nextService()
		for i, id := range want {
			tx.slotKeys = append(tx.slotKeys, datapath.SlotKey{Service: value.Id, Slot: uint32(i)})
			tx.slotValues = append(tx.slotValues, id)
			s.refs[id]++
		}
		tx.flips = append(tx.flips, flip{k, had, old.value, value})
		tx.dropSlots(old)
		s.frontends[k] = frontend{value, want}
		return
	}
	for _, id := range plan.Slots {
		s.refs[id]++
	}
	for _, id := range old.slots {
		tx.unref(id)
	}
	for _, slot := range plan.Tail {
		tx.deadSlots = append(tx.deadSlots, datapath.SlotKey{Service: value.Id, Slot: slot})
	}
	tx.inPlace = append(tx.inPlace, inPlace{flip{k, true, old.value, value}, old.slots, plan.Writes})
	s.frontends[k] = frontend{value, plan.Slots}
}

// number is the wished number when it is free, else the lowest free one.
func (s *Services) number(wish uint32) uint32 {
	if wish != 0 && !s.numbers[wish] {
		s.numbers[wish] = true
		return wish
	}
	return s.freeNumber()
}

// planMarkers finds the addresses that got their first frontend or lost their
// last.
func (tx *transaction) planMarkers() {
	s := tx.s
	for _, f := range tx.flips {
		if a := f.key.Addr; !s.marked[a] {
			tx.markers = append(tx.markers, a)
			s.marked[a] = true
		}
	}
	for _, f := range tx.removed {
		if a := f.key.Addr; s.addresses[a] == 0 && s.marked[a] {
			tx.unmarked = append(tx.unmarked, a)
			delete(s.marked, a)
			delete(s.addresses, a)
		}
	}
}

// write does everything up to the point where nothing refers to the old state
// any more. Each step says how to undo it before it starts.
func (tx *transaction) write() error {
	t, s := tx.s.t, tx.s
	if tx.metaChanged {
		// Numbers are given out before they are used; a gap is no harm.
		if err := t.Meta.Put([]uint32{0}, []datapath.Meta{s.meta}); err != nil {
			return err
		}
	}
	steps := []struct{ do, undo func() error }{
		{func() error { return t.Backends.Put(tx.backends, tx.backendValues()) },
			func() error { return t.Backends.Delete(tx.backends) }},
		{func() error { return t.Slots.Put(tx.slotKeys, tx.slotValues) },
			func() error { return t.Slots.Delete(tx.slotKeys) }},
		{func() error { return s.putMarkers(tx.markers) },
			func() error { return t.Frontends.Delete(markers(tx.markers)) }},
		{func() error { return t.Frontends.Put(values(tx.flips, false)) }, tx.undoFlips},
		{tx.writeInPlace, tx.undoInPlace},
		{func() error { return t.Frontends.Delete(keys(tx.removed)) },
			func() error { return t.Frontends.Put(values(tx.removed, true)) }},
		{func() error { return t.Frontends.Delete(markers(tx.unmarked)) },
			func() error { return s.putMarkers(tx.unmarked) }},
	}
	for _, step := range steps {
		tx.undo = append(tx.undo, step.undo)
		if err := step.do(); err != nil {
			return err
		}
	}
	return nil
}

func (tx *transaction) backendValues() []datapath.Backend {
	out := make([]datapath.Backend, len(tx.backends))
	for i, id := range tx.backends {
		out[i] = tx.s.backends[id]
	}
	return out
}

func keys(flips []flip) []datapath.FrontendKey {
	out := make([]datapath.FrontendKey, len(flips))
	for i, f := range flips {
		out[i] = f.key
	}
	return out
}

func values(flips []flip, old bool) ([]datapath.FrontendKey, []datapath.Frontend) {
	out := make([]datapath.Frontend, len(flips))
	for i, f := range flips {
		out[i] = f.new
		if old {
			out[i] = f.old
		}
	}
	return keys(flips), out
}

func (tx *transaction) undoFlips() error {
	var changed, added []flip
	for _, f := range tx.flips {
		if f.had {
			changed = append(changed, f)
		} else {
			added = append(added, f)
		}
	}
	return errors.Join(tx.s.t.Frontends.Put(values(changed, true)), tx.s.t.Frontends.Delete(keys(added)))
}

// writeInPlace writes slots before the count that shows them.
func (tx *transaction) writeInPlace() error {
	for _, c := range tx.inPlace {
		for _, w := range c.writes {
			if err := tx.s.t.Slots.Put([]datapath.SlotKey{{Service: c.new.Id, Slot: w.Slot}}, []uint32{w.Backend}); err != nil {
				return err
			}
		}
		if c.new == c.old {
			continue
		}
		if err := tx.s.t.Frontends.Put(values([]flip{c.flip}, false)); err != nil {
			return err
		}
	}
	return nil
}

func (tx *transaction) undoInPlace() error {
	var errs []error
	for _, c := range tx.inPlace {
		errs = append(errs, tx.s.t.Frontends.Put(values([]flip{c.flip}, true)))
		for _, w := range c.writes {
			key := []datapath.SlotKey{{Service: c.new.Id, Slot: w.Slot}}
			if int(w.Slot) < len(c.oldSlots) {
				errs = append(errs, tx.s.t.Slots.Put(key, []uint32{c.oldSlots[w.Slot]}))
			} else {
				errs = append(errs, tx.s.t.Slots.Delete(key))
			}
		}
	}
	return errors.Join(errs...)
}

// revert undoes what was written, last first.
func (tx *transaction) revert(cause error) error {
	for _, undo := range slices.Backward(tx.undo) {
		if err := undo(); err != nil {
			return &UndoError{cause, err}
		}
	}
	return cause
}

// cleanup deletes what nothing refers to any more.
func (tx *transaction) cleanup() error {
	s := tx.s
	if err := s.t.Slots.Delete(tx.deadSlots); err != nil {
		return err
	}
	for _, f := range tx.removed {
		delete(s.services, f.old.Id)
	}
	for _, f := range tx.flips {
		if f.had {
			delete(s.services, f.old.Id)
		}
	}
	var dead []uint32
	seen := make(map[uint32]bool, len(tx.touched))
	for _, id := range tx.touched {
		if _, known := s.backends[id]; known && s.refs[id] <= 0 && !seen[id] {
			seen[id] = true
			dead = append(dead, id)
		}
	}
	if err := s.t.Backends.Delete(dead); err != nil {
		return err
	}
	for _, id := range dead {
		s.forgetBackend(id)
	}
	return nil
}
