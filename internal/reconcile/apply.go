// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"errors"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

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
// written: backends, slots, source ranges, marks of addresses, frontends; then
// what is no longer wanted, frontends first. What of it nothing leads to is cleaned up last.
type transaction struct {
	s           *Services
	backends    []uint32
	slotKeys    []datapath.SlotKey
	slotValues  []uint32
	newSources  []datapath.SourceKey
	gained      []mark
	flips       []flip
	inPlace     []inPlace
	removed     []flip
	lost        []mark
	deadSlots   []datapath.SlotKey
	deadSources []datapath.SourceKey
	touched     []uint32 // backends that lost a reference
	freed       []uint32 // those that have none any more
	addresses   map[datapath.Addr]bool
	sources     map[datapath.SourceKey]bool // true: it is in the table
	undo        []func() error
	metaChanged bool
	cramped     bool // all that can be is done in place
	large       bool // something could be, and is not
	undone      bool // it failed, and left no trace
}

// Apply makes every binding of upserts what it says there, and removes those of
// removes; absent ones are no error. All take effect or, when an error other
// than CleanupError returns, none. Where fresh slots find no room beside the old ones,
// a moment of a mixture is better than backends that are gone; and where nothing does, a
// moment without is better than a Service that was removed.
func (s *Services) Apply(upserts []state.Binding, removes []state.BindingKey) error {
	tx, err := s.apply(upserts, removes, false)
	if full(err) && tx.undone && tx.large {
		tx, err = s.apply(upserts, removes, true)
	}
	if full(err) && tx.undone && tx.fits() {
		err = s.replace(upserts, removes)
	}
	return err
}

func full(err error) bool { return errors.As(err, new(*datapath.FullError)) }

// apply is one try.
func (s *Services) apply(upserts []state.Binding, removes []state.BindingKey, cramped bool) (*transaction, error) {
	tx := &transaction{s: s, cramped: cramped, addresses: make(map[datapath.Addr]bool), sources: make(map[datapath.SourceKey]bool)}
	if err := s.readMeta(); err != nil {
		return tx, err
	}
	before := s.meta
	kept := make(map[state.BindingKey]bool, len(upserts))
	for _, b := range upserts {
		kept[b.Key()] = true
	}
	for _, k := range removes {
		if !kept[k] {
			tx.planRemove(datapath.KeyOf(k))
		}
	}
	for _, b := range upserts {
		tx.planUpsert(b)
	}
	// What clients outside are led to is there before its frontend says that it is.
	slices.SortStableFunc(tx.flips, func(a, b flip) int { return cmp.Compare(b.key.Scope, a.key.Scope) })
	tx.planShared()
	tx.metaChanged = s.meta != before
	tx.freed = tx.unnamed()
	if err := tx.write(); err != nil {
		err, again := tx.revert(err), s.reload()
		tx.undone = again == nil && !errors.As(err, new(*UndoError))
		return tx, errors.Join(err, again)
	}
	if err := tx.cleanup(); err != nil {
		return tx, errors.Join(&CleanupError{err}, s.reload())
	}
	return tx, nil
}

// fits says that there is room for what the change makes once what it takes away is gone.
func (tx *transaction) fits() bool {
	more := -len(tx.removed) // frontends and addresses
	for _, f := range tx.flips {
		if !f.had {
			more++
		}
	}
	for _, m := range tx.gained {
		if m.old == 0 {
			more++
		}
	}
	for _, m := range tx.lost {
		if m.new == 0 {
			more--
		}
	}
	return more <= 0 && len(tx.slotKeys) <= len(tx.deadSlots) && len(tx.backends) <= len(tx.freed) && len(tx.newSources) <= len(tx.deadSources)
}

// replace is Apply of a change that fits, where it finds no room beside what it takes away:
// that goes first. What then fails brings it back.
func (s *Services) replace(upserts []state.Binding, removes []state.BindingKey) error {
	var before []state.Binding
	var gone []state.BindingKey
	for _, b := range upserts {
		removes = append(slices.Clip(removes), b.Key())
	}
	for _, k := range removes {
		if b, ok := s.Get(k); ok && !slices.Contains(gone, k) {
			before, gone = append(before, b), append(gone, k)
		}
	}
	if _, err := s.apply(nil, gone, false); err != nil && !errors.As(err, new(*CleanupError)) {
		return err
	}
	_, err := s.apply(upserts, nil, false)
	if err == nil || errors.As(err, new(*CleanupError)) || errors.As(err, new(*UndoError)) {
		return err
	}
	// Those for clients outside have the number of the ones beside them.
	slices.SortStableFunc(before, func(a, b state.Binding) int {
		return cmp.Compare(datapath.KeyOf(a.Key()).Scope, datapath.KeyOf(b.Key()).Scope)
	})
	if _, undo := s.apply(before, nil, false); undo != nil && !errors.As(undo, new(*CleanupError)) {
		return &UndoError{err, undo}
	}
	return err
}

// touch notes what k shares with others, for planShared.
func (tx *transaction) touch(k datapath.FrontendKey, f frontend) {
	tx.addresses[k.Addr] = true
	for _, key := range f.sources {
		if _, noted := tx.sources[key]; !noted {
			_, tx.sources[key] = tx.s.sources[key]
		}
	}
}

func (tx *transaction) planRemove(k datapath.FrontendKey) {
	s := tx.s
	f, ok := s.frontends[k]
	if !ok {
		return
	}
	tx.removed = append(tx.removed, flip{key: k, had: true, old: f.value})
	tx.touch(k, f)
	tx.dropSlots(f)
	s.release(k, f)
	delete(s.frontends, k)
	if k.Scope == bpfgen.ScopeOutside {
		return // it only shared its number
	}
	delete(s.numbers, f.value.Number)
	s.next = min(s.next, max(f.value.Number, 1))
}

// dropSlots notes every slot of f for deletion.
func (tx *transaction) dropSlots(f frontend) {
	for i, id := range f.slots {
		tx.deadSlots = append(tx.deadSlots, datapath.SlotKey{Service: f.value.Id, Slot: uint32(i)})
		tx.unref(id)
	}
	for _, id := range f.members {
		tx.deadSlots = append(tx.deadSlots, memberKey(f.value.Id, id))
	}
}

func memberKey(service, backend uint32) datapath.SlotKey {
	return datapath.SlotKey{Service: service, Slot: bpfgen.SlotMember | backend}
}

func (tx *transaction) unref(id uint32) {
	tx.s.unref(id)
	tx.touched = append(tx.touched, id)
}

func (tx *transaction) planUpsert(b state.Binding) {
	s := tx.s
	k := datapath.KeyOf(b.Key())
	old, had := s.frontends[k]
	f := frontend{value: datapath.FrontendOf(b)}
	f.value.Id, f.value.Number = old.value.Id, old.value.Number
	for _, r := range b.SourceRanges {
		f.sources = append(f.sources, datapath.SourceKeyOf(b.Group, r))
	}
	ids := s.backendIDs(b.Backends, b.Frontend.Protocol, &tx.backends)
	if b.Affinity > 0 {
		f.members = ids
	}
	plan := tx.planSlots(old, f, b, ids)
	tx.large = tx.large || had && plan.Large
	f.slots, f.value.Backends = plan.Slots, uint32(len(plan.Slots))
	if had && !plan.Fresh && len(plan.Writes) == 0 && f.value == old.value && sameSet(f.sources, old.sources) {
		return
	}
	if !had {
		f.value.Number = tx.numberOf(k, b.Number)
	}
	tx.touch(k, old)
	tx.touch(k, f)
	if had {
		s.release(k, old)
	}
	s.hold(k, f)
	if !had || plan.Fresh {
		tx.planFresh(k, had, old, &f)
	} else {
		tx.planInPlace(k, old, f, plan)
	}
	s.frontends[k] = f
}

// planSlots turns the slots of old into those that b needs.
func (tx *transaction) planSlots(old, f frontend, b state.Binding, ids []uint32) service.Plan {
	var plan service.Plan
	switch {
	case b.Algorithm == state.Maglev:
		table := make([]uint32, 0, service.MaglevSize(len(ids)))
		for _, i := range service.Maglev(b.Backends) {
			table = append(table, ids[i])
		}
		plan = service.PlanTable(old.slots, table)
	case tx.cramped:
		plan = service.PlanInPlace(old.slots, ids)
	default:
		plan = service.PlanSlots(old.slots, ids)
	}
	// Slots that would be read in another way, and entries of members that a killed
	// tool did not write, take fresh ones.
	unlike := (old.value.Affinity == 0) != (f.value.Affinity == 0)
	missing := len(f.members) > 0 && !sameSet(distinct(old.slots), old.members)
	if unlike || missing || (old.value.Flags^f.value.Flags)&bpfgen.SvcMaglev != 0 {
		plan.Fresh, plan.Large = true, false
	}
	return plan
}

// sameSet compares lists without repetitions.
func sameSet[T comparable](a, b []T) bool {
	if len(a) != len(b) {
		return false
	}
	return len(without(a, b)) == 0
}

// without is those of a that are not in b.
func without[T comparable](a, b []T) (out []T) {
	in := make(map[T]bool, len(b))
	for _, v := range b {
		in[v] = true
	}
	for _, v := range a {
		if !in[v] {
			out = append(out, v)
		}
	}
	return out
}

// planFresh writes all slots under a fresh id, so that one write of the
// frontend leads to all of them.
func (tx *transaction) planFresh(k datapath.FrontendKey, had bool, old frontend, f *frontend) {
	f.value.Id = tx.s.nextService()
	for i, id := range f.slots {
		tx.putSlot(datapath.SlotKey{Service: f.value.Id, Slot: uint32(i)}, id)
		tx.s.ref(id)
	}
	for _, id := range f.members {
		tx.putSlot(memberKey(f.value.Id, id), id)
	}
	tx.flips = append(tx.flips, flip{k, had, old.value, f.value})
	tx.dropSlots(old)
}

func (tx *transaction) putSlot(k datapath.SlotKey, backend uint32) {
	tx.slotKeys, tx.slotValues = append(tx.slotKeys, k), append(tx.slotValues, backend)
}

func (tx *transaction) planInPlace(k datapath.FrontendKey, old, f frontend, plan service.Plan) {
	for _, id := range f.slots {
		tx.s.ref(id)
	}
	for _, id := range old.slots {
		tx.unref(id)
	}
	for _, slot := range plan.Tail {
		tx.deadSlots = append(tx.deadSlots, datapath.SlotKey{Service: f.value.Id, Slot: slot})
	}
	for _, id := range without(f.members, old.members) {
		tx.putSlot(memberKey(f.value.Id, id), id)
	}
	for _, id := range without(old.members, f.members) {
		tx.deadSlots = append(tx.deadSlots, memberKey(f.value.Id, id))
	}
	tx.inPlace = append(tx.inPlace, inPlace{flip{k, true, old.value, f.value}, old.slots, plan.Writes})
}

// numberOf is a new binding's number: what is for clients from outside has that
// of the binding beside it.
func (tx *transaction) numberOf(k datapath.FrontendKey, wish uint32) uint32 {
	if k.Scope == bpfgen.ScopeOutside {
		beside := datapath.KeyFrom(k)
		beside.Outside = false // in the scope of its address
		return tx.s.frontends[datapath.KeyOf(beside)].value.Number
	}
	return tx.s.number(wish)
}

// number is the wished number when it is free, else the lowest free one.
func (s *Services) number(wish uint32) uint32 {
	if wish != 0 && !s.numbers[wish] {
		s.numbers[wish] = true
		return wish
	}
	return s.freeNumber()
}

// planShared finds out what becomes of the addresses and source ranges that
// frontends have in common. An address has its new flags before it loses old
// ones.
func (tx *transaction) planShared() {
	s := tx.s
	for addr := range tx.addresses {
		a := s.addresses[addr]
		if a == nil {
			continue
		}
		both := a.marked | a.flags()
		if both != a.marked {
			tx.gained = append(tx.gained, mark{addr, a.marked, both})
		}
		if both != a.flags() {
			tx.lost = append(tx.lost, mark{addr, both, a.flags()})
		}
		if both == 0 {
			delete(s.addresses, addr)
		}
	}
	for key, present := range tx.sources {
		switch wanted := s.sources[key] > 0; {
		case wanted && !present:
			tx.newSources = append(tx.newSources, key)
		case !wanted && present:
			tx.deadSources = append(tx.deadSources, key)
		case !wanted:
			delete(s.sources, key)
		}
	}
}
