// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// loadServices reads the Services from the tables and the store at their first
// use, and prunes what belongs to none.
func (e *Engine) loadServices() error {
	if e.services != nil || e.dp == nil {
		return nil
	}
	t := reconcile.ServiceTables{Frontends: e.dp.Frontends, Slots: e.dp.Slots, Backends: e.dp.Backends, Sources: e.dp.Sources, Meta: e.dp.Meta}
	if e.opts.Faults != nil {
		t = e.opts.Faults(t)
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

// loadCatalog reads the Services whole, at the first use.
func (e *Engine) loadCatalog() error {
	if err := e.loadServices(); err != nil || e.catalog != nil || e.services == nil {
		return err
	}
	records, err := e.store.Services()
	if err != nil {
		return err
	}
	if err := e.locate(records); err != nil {
		return err
	}
	e.catalog = service.NewCatalog(e.opts.Node, e.services.List(), records)
	return nil
}

// locate says of backends without a node whether they are on this one: those at
// an endpoint's address are, and those at one of the node's own.
func (e *Engine) locate(list []state.Service) error {
	if !slices.ContainsFunc(list, func(s state.Service) bool { return s.Owner == state.OwnerCLI }) {
		return nil
	}
	if err := e.loadEndpoints(); err != nil {
		return err
	}
	own, err := nodeAddrs()
	if err != nil {
		return err
	}
	here := make(map[netip.Addr]bool)
	for _, a := range own {
		here[a] = true
	}
	for _, ep := range e.known {
		for _, a := range ep.Addrs() {
			here[a] = true
		}
	}
	for i, s := range list {
		if s.Owner != state.OwnerCLI {
			continue
		}
		list[i].Ports = slices.Clone(s.Ports)
		for j, p := range list[i].Ports {
			backends := slices.Clone(p.Backends)
			for k := range backends {
				backends[k].Local = here[backends[k].AddrPort.Addr()]
			}
			list[i].Ports[j].Backends = backends
		}
	}
	return nil
}

// errReadOnly is a mistake of the caller's: a write to a scope that was opened
// for reading, and that does not exist.
var errReadOnly = errors.New("the scope was opened for reading")

// Services are all bindings of frontends, by number, with the Services that they
// belong to, as far as those are known.
func (e *Engine) Services() ([]state.Binding, error) {
	if err := e.loadCatalog(); err != nil || e.services == nil {
		return nil, err
	}
	list := e.services.List()
	for i, b := range list {
		list[i].Service, _ = e.catalog.Holder(b.Frontend)
	}
	return list, nil
}

// Service is a Service as its owner gave it; false where it is known by its frontends
// alone, as a plain one is, and another's whom nobody has told of since the start.
func (e *Engine) Service(id state.ServiceID) (state.Service, bool) {
	if e.loadCatalog() != nil || e.catalog == nil {
		return state.Service{}, false
	}
	return e.catalog.Service(id)
}

// ChangeServices sets and removes single Services of an owner; others stay. Only
// what differs is written. Of two that claim one frontend, the first has it. A
// Service that is to be removed and does not exist is no error.
//
// What of a Service cannot be brought into force is a Problem, and the rest of
// it is in force; the list is of all of owner's problems as they now are. An
// error is about the whole: then nothing has changed.
func (e *Engine) ChangeServices(owner state.Owner, upserts []state.Service, removes []state.ServiceID) ([]service.Problem, error) {
	return e.replan(owner, func() (service.Change, error) {
		for _, s := range upserts {
			if s.Owner != owner {
				return service.Change{}, fmt.Errorf("service %s belongs to %v, not to %v", s, s.Owner, owner)
			}
		}
		for _, id := range removes {
			if id.Owner != owner {
				return service.Change{}, fmt.Errorf("service %s belongs to %v, not to %v", id, id.Owner, owner)
			}
		}
		return e.catalog.Plan(upserts, removes), nil
	})
}

// RetainServices removes the Services of owner that are not among list, those of
// a process before this one, too. A frontend that passes from one Service to
// another is never away. Problems and errors are as with ChangeServices.
func (e *Engine) RetainServices(owner state.Owner, list []state.ServiceID) ([]service.Problem, error) {
	return e.replan(owner, func() (service.Change, error) {
		return e.catalog.Retain(owner, list), nil
	})
}

func (e *Engine) replan(owner state.Owner, plan func() (service.Change, error)) ([]service.Problem, error) {
	if err := e.loadCatalog(); err != nil {
		return nil, err
	}
	if e.services == nil {
		return nil, errReadOnly
	}
	change, err := plan()
	if err != nil {
		return nil, err
	}
	if err := e.change(change, operation{}); err != nil {
		return nil, err
	}
	return e.catalog.Problems(owner), nil
}

// AddServices adds Services of the command line, which must not exist yet. All
// take effect or none.
func (e *Engine) AddServices(list ...state.Service) error {
	if err := e.loadCatalog(); err != nil {
		return err
	}
	if e.services == nil {
		return errReadOnly
	}
	for _, s := range list {
		if e.catalog.Has(s.ServiceID) {
			return fmt.Errorf("duplicate service %s exists already; give --replace to change it, or remove it first", s.Name)
		}
	}
	return e.UpsertServices(list)
}

// UpsertServices makes each Service of the command line what it says there,
// adding those that do not exist; other Services stay. All take effect or none.
func (e *Engine) UpsertServices(list []state.Service) error {
	if err := e.loadCatalog(); err != nil {
		return err
	}
	if e.services == nil {
		return errReadOnly
	}
	list = slices.Clone(list)
	if err := e.locate(list); err != nil {
		return err
	}
	change := e.catalog.Plan(list, nil)
	if err := change.Refused(); err != nil {
		return err
	}
	var op operation
	for _, s := range list {
		if service.Plain(s) {
			if _, recorded := e.catalog.Service(s.ServiceID); recorded {
				op.Forget = append(op.Forget, s.ServiceID)
			}
		} else {
			op.Records = append(op.Records, s)
		}
	}
	return e.change(change, op)
}

// RemoveServices removes the Services that have these frontends, whole;
// ErrNotFound when one of them does not exist, and then none is removed.
func (e *Engine) RemoveServices(list ...state.Frontend) error {
	if err := e.loadCatalog(); err != nil {
		return err
	}
	var op operation
	seen := make(map[state.ServiceID]bool, len(list))
	var ids []state.ServiceID
	for _, f := range list {
		id, ok := state.ServiceID{}, false
		if e.services != nil {
			id, ok = e.catalog.Holder(f)
		}
		if !ok {
			return fmt.Errorf("service %s: %w; `mustang svc ls` lists those that exist", f, ErrNotFound)
		}
		if id.Owner != state.OwnerCLI {
			return fmt.Errorf("service %s belongs to %s, and only it may remove the Service", f, id.Owner)
		}
		if seen[id] {
			continue
		}
		seen[id] = true
		ids = append(ids, id)
		if _, recorded := e.catalog.Service(id); recorded {
			op.Forget = append(op.Forget, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	return e.change(e.catalog.Plan(nil, ids), op)
}

// change journals and applies ch, and what op says of records.
func (e *Engine) change(ch service.Change, op operation) error {
	if err := e.undoFirst(); err != nil {
		return err
	}
	op.Kind, op.Removes = opServices, ch.Removes
	for _, b := range ch.Upserts {
		if !e.services.Holds(b) {
			op.Upserts = append(op.Upserts, b)
		}
	}
	if len(op.Upserts)+len(op.Removes)+len(op.Records)+len(op.Forget) == 0 {
		e.catalog.Commit(ch)
		return nil
	}
	op.Departures = e.departing(op)
	if err := e.store.WriteJournal(op); err != nil {
		return err
	}
	e.prepare(op.Departures)
	inverse := e.inverse(op)
	err := e.applyServices(op)
	if err == nil {
		e.catalog.Commit(ch)
		e.settle(op.Departures)
	}
	undo := (*reconcile.UndoError)(nil)
	if errors.As(err, &undo) || err != nil && e.applyServices(inverse) != nil {
		// The next change, or the next tool, brings the old state back.
		e.undo, e.services = &inverse, nil
		return errors.Join(err, e.store.WriteJournal(inverse))
	}
	return errors.Join(err, e.store.ClearJournal())
}

// undoFirst undoes a change of before that failed, and could not be undone then. Its error
// is told in words alone: whoever asks for another change does not cause it.
func (e *Engine) undoFirst() error {
	if e.undo == nil {
		return nil
	}
	undo := *e.undo
	err := e.store.WriteJournal(undo)
	if err == nil {
		err = e.applyServices(undo)
	}
	if err != nil {
		e.services = nil
		return fmt.Errorf("a change before this one failed, and can still not be undone: %v", err)
	}
	e.undo = nil
	e.settle(undo.Departures)
	return errors.Join(e.store.ClearJournal(), e.loadServices())
}

// applyServices applies op. What could not be cleaned up after it is no
// failure of it: the next tool prunes.
func (e *Engine) applyServices(op operation) error {
	if err := e.loadServices(); err != nil {
		return err
	}
	turns, err := e.aboutTurns(op)
	if err == nil && turns {
		err = e.ensureTurns()
	}
	if err != nil {
		return err
	}
	for _, s := range op.Records { // for which there may be no room
		if err := e.store.PutService(s); err != nil {
			return err
		}
	}
	err = e.services.Apply(op.Upserts, op.Removes)
	if cleanup := (*reconcile.CleanupError)(nil); errors.As(err, &cleanup) {
		e.services = nil
		e.opts.Notify("the change is in force, but " + cleanup.Error() + "; the next change tries again")
		err = nil
	}
	if err != nil {
		return err
	}
	for _, id := range op.Forget {
		if err := e.store.DeleteService(id); err != nil {
			return err
		}
	}
	if aboutDoor(op) {
		e.tryDoor()
	}
	if e.aboutGather(op) {
		e.tryGather()
	}
	return nil
}

// inverse is the operation that undoes op.
func (e *Engine) inverse(op operation) operation {
	inv := operation{Kind: opServices, Departures: e.undeparting(op)}
	for _, b := range op.Upserts {
		if old, ok := e.services.Get(b.Key()); ok {
			inv.Upserts = append(inv.Upserts, old)
		} else {
			inv.Removes = append(inv.Removes, b.Key())
		}
	}
	for _, k := range op.Removes {
		if old, ok := e.services.Get(k); ok {
			inv.Upserts = append(inv.Upserts, old)
		}
	}
	changed := slices.Clone(op.Forget)
	for _, s := range op.Records {
		changed = append(changed, s.ServiceID)
	}
	for _, id := range changed {
		if old, known := e.catalog.Service(id); known && !service.Plain(old) {
			inv.Records = append(inv.Records, old)
		} else {
			inv.Forget = append(inv.Forget, id)
		}
	}
	return inv
}

// completed ends the journal of an endpoint that came or went, when the Services
// have followed it: who is killed in between is finished by the next tool.
func (e *Engine) completed() error {
	e.relocate()
	return e.done()
}

// relocate plans the Services of the command line anew, after endpoints came or
// went: which backends are local may have changed. The endpoint's change is in
// force whatever becomes of this.
func (e *Engine) relocate() {
	records, err := e.store.Services()
	records = slices.DeleteFunc(records, func(s state.Service) bool {
		return s.Internal != state.PolicyLocal && s.External != state.PolicyLocal
	})
	if err == nil && len(records) > 0 {
		err = e.UpsertServices(records)
	}
	if err != nil {
		e.opts.Notify("Services with the traffic policy Local may still lead as before: " + err.Error())
	}
}
