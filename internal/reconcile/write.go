// SPDX-License-Identifier: Apache-2.0

package reconcile

// What a transaction writes, step by step, and how each is undone.

import (
	"errors"
	"fmt"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
)

// UndoError says that a change failed and could not be undone either.
type UndoError struct{ change, undo error }

func (e *UndoError) Error() string { return fmt.Sprintf("%v; and undoing it: %v", e.change, e.undo) }
func (e *UndoError) Unwrap() error { return e.change }

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
		{func() error { return s.putSources(tx.newSources) },
			func() error { return t.Sources.Delete(tx.newSources) }},
		{func() error { return s.writeMarks(tx.gained, false) },
			func() error { return s.writeMarks(tx.gained, true) }},
		{func() error { return t.Frontends.Put(flipValues(tx.flips, false)) }, tx.undoFlips},
		{tx.writeInPlace, tx.undoInPlace},
		{func() error { return t.Frontends.Delete(keys(tx.removed)) },
			func() error { return t.Frontends.Put(flipValues(tx.removed, true)) }},
		{func() error { return s.writeMarks(tx.lost, false) },
			func() error { return s.writeMarks(tx.lost, true) }},
		// Whom a range lets in is part of the change: it is found by its group, whatever frontends say.
		{func() error { return t.Sources.Delete(tx.deadSources) },
			func() error { return s.putSources(tx.deadSources) }},
	}
	for _, step := range steps {
		tx.undo = append(tx.undo, step.undo)
		if err := step.do(); err != nil {
			return err
		}
	}
	return nil
}

func (s *Services) putSources(keys []datapath.SourceKey) error {
	values := make([]uint8, len(keys))
	for i, k := range keys {
		values[i] = datapath.SourceValueOf(k)
	}
	return s.t.Sources.Put(keys, values)
}

func (tx *transaction) backendValues() []datapath.Backend {
	out := make([]datapath.Backend, len(tx.backends))
	for i, id := range tx.backends {
		out[i] = tx.s.backends[id].Backend
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

func flipValues(flips []flip, old bool) ([]datapath.FrontendKey, []datapath.Frontend) {
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
	return errors.Join(tx.s.t.Frontends.Put(flipValues(changed, true)), tx.s.t.Frontends.Delete(keys(added)))
}

// writeInPlace writes slots before the count that shows them.
func (tx *transaction) writeInPlace() error {
	for _, c := range tx.inPlace {
		keys, values := make([]datapath.SlotKey, len(c.writes)), make([]uint32, len(c.writes))
		for i, w := range c.writes {
			keys[i], values[i] = datapath.SlotKey{Service: c.new.Id, Slot: w.Slot}, w.Backend
		}
		if err := tx.s.t.Slots.Put(keys, values); err != nil {
			return err
		}
		if c.new == c.old {
			continue
		}
		if err := tx.s.t.Frontends.Put(flipValues([]flip{c.flip}, false)); err != nil {
			return err
		}
	}
	return nil
}

func (tx *transaction) undoInPlace() error {
	var errs []error
	for _, c := range tx.inPlace {
		errs = append(errs, tx.s.t.Frontends.Put(flipValues([]flip{c.flip}, true)))
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
	for _, key := range tx.deadSources {
		delete(s.sources, key)
	}
	for _, f := range tx.removed {
		delete(s.services, f.old.Id)
	}
	for _, f := range tx.flips {
		if f.had {
			delete(s.services, f.old.Id)
		}
	}
	if err := s.t.Backends.Delete(tx.freed); err != nil {
		return err
	}
	for _, id := range tx.freed {
		s.forgetBackend(id)
	}
	return nil
}

// unnamed are the backends that no slot names any more, each once.
func (tx *transaction) unnamed() (dead []uint32) {
	seen := make(map[uint32]bool, len(tx.touched))
	for _, id := range tx.touched {
		if b, known := tx.s.backends[id]; known && b.refs == 0 && !seen[id] {
			seen[id] = true
			dead = append(dead, id)
		}
	}
	return dead
}
