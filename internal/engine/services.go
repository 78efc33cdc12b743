// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"

	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/state"
)

// loadServices reads the Services from the tables at their first use, and
// prunes what belongs to none.
func (e *Engine) loadServices() error {
	if e.services != nil || e.dp == nil {
		return nil
	}
	t := reconcile.ServiceTables{Frontends: e.dp.Frontends, Slots: e.dp.Slots, Backends: e.dp.Backends, Meta: e.dp.Meta}
	if e.opts.faults != nil {
		t = e.opts.faults(t)
	}
	s, err := reconcile.LoadServices(t)
	if err != nil {
		return fmt.Errorf("restore Services: %w", err)
	}
	if err := s.Prune(); err != nil {
		return err
	}
	e.services = s
	return nil
}

// errReadOnly is a mistake of the caller's: a write to a scope that was opened
// for reading, and that does not exist.
var errReadOnly = errors.New("the scope was opened for reading")

// Services are all Services, by number.
func (e *Engine) Services() ([]state.Service, error) {
	if err := e.loadServices(); err != nil || e.services == nil {
		return nil, err
	}
	return e.services.List(), nil
}

// AddServices adds Services that must not exist yet. All take effect or none.
func (e *Engine) AddServices(list ...state.Service) error {
	if err := e.loadServices(); err != nil {
		return err
	}
	if e.services == nil {
		return errReadOnly
	}
	for _, s := range list {
		if _, exists := e.services.Get(s.Frontend); exists {
			return fmt.Errorf("duplicate service %s exists already; give --replace to change its backends, or remove it first", s.Frontend)
		}
	}
	return e.change(operation{Kind: opServices, Upserts: list})
}

// UpsertServices gives each Service the backends that it names, adding those
// that do not exist; other Services stay. All take effect or none.
func (e *Engine) UpsertServices(list []state.Service) error {
	if err := e.loadServices(); err != nil {
		return err
	}
	return e.change(operation{Kind: opServices, Upserts: list})
}

// RemoveServices removes Services; ErrNotFound when one of them does not
// exist, and then none is removed.
func (e *Engine) RemoveServices(list ...state.Frontend) error {
	if err := e.loadServices(); err != nil {
		return err
	}
	for _, f := range list {
		if e.services == nil {
			return fmt.Errorf("service %s: %w; `mustang svc ls` lists those that exist", f, ErrNotFound)
		}
		if _, ok := e.services.Get(f); !ok {
			return fmt.Errorf("service %s: %w; `mustang svc ls` lists those that exist", f, ErrNotFound)
		}
	}
	return e.change(operation{Kind: opServices, Removes: list})
}

// change journals and applies op.
func (e *Engine) change(op operation) error {
	if e.services == nil {
		return errReadOnly
	}
	if err := e.checkOwners(op.Upserts); err != nil {
		return err
	}
	op.Departures = e.departing(op)
	if err := e.store.WriteJournal(op); err != nil {
		return err
	}
	e.prepare(op.Departures)
	inverse := e.inverse(op)
	err := e.applyServices(op)
	if err == nil {
		e.settle(op.Departures)
	}
	if undo := (*reconcile.UndoError)(nil); errors.As(err, &undo) {
		// The next tool brings the old state back.
		return errors.Join(err, e.store.WriteJournal(inverse))
	}
	return errors.Join(err, e.store.ClearJournal())
}

// applyServices applies op. What could not be cleaned up after it is no
// failure of it: the next tool prunes.
func (e *Engine) applyServices(op operation) error {
	if err := e.loadServices(); err != nil {
		return err
	}
	err := e.services.Apply(op.Upserts, op.Removes)
	if cleanup := (*reconcile.CleanupError)(nil); errors.As(err, &cleanup) {
		e.services = nil
		e.opts.Notify("the change is in force, but " + cleanup.Error() + "; the next change tries again")
		return nil
	}
	return err
}

func (e *Engine) checkOwners(list []state.Service) error {
	for _, s := range list {
		if old, ok := e.services.Get(s.Frontend); ok && old.Owner != s.Owner {
			return fmt.Errorf("service %s belongs to %s, and only it may change the Service", s.Frontend, old.Owner)
		}
	}
	return nil
}

// inverse is the operation that undoes op.
func (e *Engine) inverse(op operation) operation {
	inv := operation{Kind: opServices, Departures: e.undeparting(op)}
	for _, s := range op.Upserts {
		if old, ok := e.services.Get(s.Frontend); ok {
			inv.Upserts = append(inv.Upserts, old)
		} else {
			inv.Removes = append(inv.Removes, s.Frontend)
		}
	}
	for _, f := range op.Removes {
		if old, ok := e.services.Get(f); ok {
			inv.Upserts = append(inv.Upserts, old)
		}
	}
	return inv
}
