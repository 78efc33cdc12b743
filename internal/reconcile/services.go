// SPDX-License-Identifier: Apache-2.0

// Package reconcile turns desired objects into table entries, in an order in
// which every instant is valid: whoever looks, at whatever moment, finds the
// old state or the new. A write that fails is undone before the error returns.
package reconcile

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// Table is what a reconciler needs of one; datapath.Table is one. Tests put
// faults between.
type Table[K, V comparable] interface {
	Put([]K, []V) error
	Delete([]K) error
	All() (map[K]V, error)
}

// ServiceTables are the tables of Services.
type ServiceTables struct {
	Frontends Table[datapath.FrontendKey, datapath.Frontend]
	Slots     Table[datapath.SlotKey, uint32]
	Backends  Table[uint32, datapath.Backend]
	Sources   Table[datapath.SourceKey, uint8]
	Meta      Table[uint32, datapath.Meta]
}

// CleanupError says that the change is in force, but what it replaced could
// not all be deleted; Prune does it later.
type CleanupError struct{ err error }

func (e *CleanupError) Error() string { return "delete replaced entries: " + e.err.Error() }
func (e *CleanupError) Unwrap() error { return e.err }

// frontend is one binding as the tables hold it.
type frontend struct {
	value   datapath.Frontend
	slots   []uint32 // backend ids; 0 where a slot is missing
	members []uint32 // ids with an entry of their own, for affinity
	sources []datapath.SourceKey
}

// address is what is known of an address that has frontends, or is the node's.
type address struct {
	frontends int
	cluster   int // of those, how many are the cluster's own
	node      bool
	marked    uint16 // the flags in the table; 0: it has no entry
}

// flags are what the table should say.
func (a *address) flags() (f uint16) {
	if a.frontends > 0 || a.node {
		f |= bpfgen.SvcAddress
	}
	if a.cluster > 0 {
		f |= bpfgen.SvcRefuse
	}
	if a.node {
		f |= bpfgen.SvcNode
	}
	return f
}

// backend is one entry of the table of backends.
type backend struct {
	datapath.Backend
	refs uint32 // slots that name it
}

// Services is the tables of Services, with a mirror of them in memory. It is
// not for concurrent use: the engine's lock makes it the only writer.
type Services struct {
	t         ServiceTables
	meta      datapath.Meta
	frontends map[datapath.FrontendKey]frontend
	services  map[uint32]bool // ids of sets of slots
	addresses map[datapath.Addr]*address
	backends  map[uint32]backend
	ids       map[datapath.Backend]uint32
	sources   map[datapath.SourceKey]int // frontends that have a range; 0: nobody, but it is in the table
	numbers   map[uint32]bool
	next      uint32 // where the search for a free number starts
	orphans   []datapath.SlotKey
	misvalued []datapath.SourceKey // an earlier mustang did not know families apart
}

// LoadServices reads the tables.
func LoadServices(t ServiceTables) (*Services, error) {
	s := &Services{
		t:         t,
		frontends: make(map[datapath.FrontendKey]frontend),
		services:  make(map[uint32]bool),
		addresses: make(map[datapath.Addr]*address),
		backends:  make(map[uint32]backend),
		ids:       make(map[datapath.Backend]uint32),
		sources:   make(map[datapath.SourceKey]int),
		numbers:   make(map[uint32]bool),
		next:      1,
	}
	if err := s.readMeta(); err != nil {
		return nil, err
	}
	values, err := t.Frontends.All()
	if err != nil {
		return nil, err
	}
	slots, err := t.Slots.All()
	if err != nil {
		return nil, err
	}
	backends, err := t.Backends.All()
	if err != nil {
		return nil, err
	}
	sources, err := t.Sources.All()
	if err != nil {
		return nil, err
	}
	for id, b := range backends {
		s.backends[id], s.ids[b] = backend{Backend: b}, id
	}
	s.index(values, slots, sources)
	return s, nil
}

// readMeta reads what others write, too: endpoints have numbers of their own there.
func (s *Services) readMeta() error {
	meta, err := s.t.Meta.All()
	if err == nil {
		s.meta = meta[0]
	}
	return err
}

// index builds the mirror from the tables' contents.
func (s *Services) index(values map[datapath.FrontendKey]datapath.Frontend, slots map[datapath.SlotKey]uint32, sources map[datapath.SourceKey]uint8) {
	ranges := make(map[uint64][]datapath.SourceKey)
	for k, value := range sources {
		if s.sources[k] = 0; value != datapath.SourceValueOf(k) {
			s.misvalued = append(s.misvalued, k)
		}
		ranges[k.Group] = append(ranges[k.Group], k)
	}
	byID := make(map[uint32]datapath.FrontendKey, len(values))
	for key, v := range values {
		if v.Flags&bpfgen.SvcAddress != 0 {
			a := s.address(key.Addr)
			a.marked, a.node = v.Flags, v.Flags&bpfgen.SvcNode != 0
			continue
		}
		f := frontend{value: v, slots: make([]uint32, v.Backends)}
		if v.Flags&bpfgen.SvcRanges != 0 {
			f.sources = ranges[v.Group]
		}
		s.hold(key, f)
		s.frontends[key] = f
		s.numbers[v.Number] = true
		s.services[v.Id] = true
		byID[v.Id] = key
	}
	s.indexSlots(byID, slots)
}

func (s *Services) indexSlots(byID map[uint32]datapath.FrontendKey, slots map[datapath.SlotKey]uint32) {
	members := make(map[datapath.FrontendKey][]uint32)
	for k, id := range slots {
		owner, ok := byID[k.Service]
		f := s.frontends[owner]
		switch {
		case ok && k.Slot < bpfgen.SlotMember && int(k.Slot) < len(f.slots):
			if s.ref(id) {
				f.slots[k.Slot] = id
			}
		case ok && k.Slot >= bpfgen.SlotMember && f.value.Affinity != 0:
			members[owner] = append(members[owner], id)
		default:
			s.orphans = append(s.orphans, k)
		}
	}
	for owner, ids := range members {
		f := s.frontends[owner]
		dead := without(ids, f.slots)
		for _, id := range dead {
			s.orphans = append(s.orphans, memberKey(f.value.Id, id))
		}
		f.members = without(ids, dead)
		s.frontends[owner] = f
	}
}

func (s *Services) address(a datapath.Addr) *address {
	if s.addresses[a] == nil {
		s.addresses[a] = &address{}
	}
	return s.addresses[a]
}

// hold counts what a frontend needs of others: its address, its ranges.
func (s *Services) hold(k datapath.FrontendKey, f frontend) { s.count(k, f, 1) }

func (s *Services) release(k datapath.FrontendKey, f frontend) { s.count(k, f, -1) }

func (s *Services) count(k datapath.FrontendKey, f frontend, by int) {
	for _, key := range f.sources {
		s.sources[key] += by
	}
	if k.Scope != bpfgen.ScopeAny || f.value.Kind == bpfgen.KindNodePort {
		return // no address of its own
	}
	a := s.address(k.Addr)
	a.frontends += by
	if f.value.Kind == bpfgen.KindClusterIp {
		a.cluster += by
	}
}

// List is every binding, by number.
func (s *Services) List() []state.Binding {
	out := make([]state.Binding, 0, len(s.frontends))
	for k, f := range s.frontends {
		out = append(out, s.binding(k, f))
	}
	state.SortBindings(out)
	return out
}

// Get is the binding of k.
func (s *Services) Get(k state.BindingKey) (state.Binding, bool) {
	key := datapath.KeyOf(k)
	v, ok := s.frontends[key]
	if !ok {
		return state.Binding{}, false
	}
	return s.binding(key, v), true
}

func (s *Services) binding(k datapath.FrontendKey, f frontend) state.Binding {
	out := datapath.BindingFrom(k, f.value)
	for _, id := range distinct(f.slots) {
		if b, ok := s.backends[id]; ok {
			out.Backends = append(out.Backends, datapath.BackendAddr(b.Backend))
		}
	}
	for _, key := range f.sources {
		out.SourceRanges = append(out.SourceRanges, datapath.SourceRange(key))
	}
	return out
}

// Holds says that the tables have b as it is, whatever its number.
func (s *Services) Holds(b state.Binding) bool {
	f, ok := s.frontends[datapath.KeyOf(b.Key())]
	if !ok {
		return false
	}
	want := datapath.FrontendOf(b)
	want.Id, want.Backends, want.Number = f.value.Id, f.value.Backends, f.value.Number
	have := s.binding(datapath.KeyOf(b.Key()), f)
	return want == f.value && sameSet(have.Backends, b.Backends) && sameSet(have.SourceRanges, b.SourceRanges)
}

// distinct is ids without repetition, in their order.
func distinct(ids []uint32) []uint32 {
	seen := make(map[uint32]bool, len(ids))
	out := make([]uint32, 0, len(ids))
	for _, id := range ids {
		if !seen[id] {
			seen[id] = true
			out = append(out, id)
		}
	}
	return out
}

// backendIDs are the ids of a Service's backends; new ones get an id and are
// added to fresh.
func (s *Services) backendIDs(addrs []netip.AddrPort, p state.Protocol, fresh *[]uint32) []uint32 {
	out := make([]uint32, len(addrs))
	for i, a := range addrs {
		b := datapath.BackendOf(a, p)
		id, ok := s.ids[b]
		if !ok {
			id = s.nextBackend()
			s.ids[b], s.backends[id] = id, backend{Backend: b}
			*fresh = append(*fresh, id)
		}
		out[i] = id
	}
	return out
}

// nextBackend never hands out an id that is in use, nor one used a moment ago:
// flows remember their backend by it. The counter wraps after 2^31.
func (s *Services) nextBackend() uint32 {
	for {
		s.meta.NextBackend = (s.meta.NextBackend + 1) % bpfgen.SlotMember
		if _, used := s.backends[s.meta.NextBackend]; !used && s.meta.NextBackend != 0 {
			return s.meta.NextBackend
		}
	}
}

// nextService hands out an id for a fresh set of slots.
func (s *Services) nextService() uint32 {
	for {
		s.meta.NextService++
		if id := s.meta.NextService; id != 0 && !s.services[id] {
			s.services[id] = true
			return id
		}
	}
}

func (s *Services) freeNumber() uint32 {
	for s.numbers[s.next] {
		s.next++
	}
	s.numbers[s.next] = true
	return s.next
}

// reload reads the mirror again, after a change that was undone.
func (s *Services) reload() error {
	again, err := LoadServices(s.t)
	if err == nil {
		*s = *again
	}
	return err
}

// Prune deletes what no frontend refers to, which a killed tool left behind:
// slots, backends, source ranges; and puts the marks of addresses right.
func (s *Services) Prune() error {
	var dead []uint32
	for id, b := range s.backends {
		if b.refs == 0 {
			dead = append(dead, id)
		}
	}
	var unused []datapath.SourceKey
	for k, n := range s.sources {
		if n == 0 {
			unused = append(unused, k)
		}
	}
	var wrong []mark
	for addr, a := range s.addresses {
		if a.flags() != a.marked {
			wrong = append(wrong, mark{addr, a.marked, a.flags()})
		}
	}
	err := errors.Join(s.t.Slots.Delete(s.orphans), s.t.Backends.Delete(dead), s.putSources(s.misvalued), s.t.Sources.Delete(unused), s.writeMarks(wrong, false))
	if err != nil {
		return fmt.Errorf("prune: %w", err)
	}
	for _, id := range dead {
		s.forgetBackend(id)
	}
	for _, k := range unused {
		delete(s.sources, k)
	}
	s.orphans, s.misvalued = nil, nil
	return nil
}

func (s *Services) forgetBackend(id uint32) {
	if b := s.backends[id].Backend; s.ids[b] == id {
		delete(s.ids, b)
	}
	delete(s.backends, id)
}

// ref counts one more slot that names a backend; false: there is no such backend.
func (s *Services) ref(id uint32) bool {
	b, ok := s.backends[id]
	if ok {
		b.refs++
		s.backends[id] = b
	}
	return ok
}

func (s *Services) unref(id uint32) {
	if b, ok := s.backends[id]; ok {
		b.refs--
		s.backends[id] = b
	}
}

// mark is the entry of an address, before and after; 0: it has none.
type mark struct {
	addr     datapath.Addr
	old, new uint16
}

// writeMarks writes the entries of addresses; back: as they were.
func (s *Services) writeMarks(marks []mark, back bool) error {
	var put, gone []datapath.FrontendKey
	var values []datapath.Frontend
	for _, m := range marks {
		flags, key := m.new, datapath.FrontendKey{Addr: m.addr}
		if back {
			flags = m.old
		}
		if flags == 0 {
			gone = append(gone, key)
		} else {
			put, values = append(put, key), append(values, datapath.Frontend{Flags: flags})
		}
	}
	if err := errors.Join(s.t.Frontends.Put(put, values), s.t.Frontends.Delete(gone)); err != nil {
		return err
	}
	for _, m := range marks {
		flags := m.new
		if back {
			flags = m.old
		}
		if a := s.address(m.addr); flags == 0 && a.flags() == 0 {
			delete(s.addresses, m.addr)
		} else {
			a.marked = flags
		}
	}
	return nil
}

// SetNodeAddresses says which addresses take node ports.
func (s *Services) SetNodeAddresses(list []netip.Addr) error {
	wanted := make(map[datapath.Addr]bool, len(list))
	for _, a := range list {
		wanted[datapath.FromAddr(a)] = true
		s.address(datapath.FromAddr(a))
	}
	var marks []mark
	for addr, a := range s.addresses {
		if a.node = wanted[addr]; a.flags() != a.marked {
			marks = append(marks, mark{addr, a.marked, a.flags()})
		}
	}
	if err := s.writeMarks(marks, false); err != nil {
		return errors.Join(err, s.reload())
	}
	return nil
}

// NodeAddresses are the addresses that take node ports.
func (s *Services) NodeAddresses() []netip.Addr {
	var out []netip.Addr
	for addr, a := range s.addresses {
		if a.node {
			out = append(out, datapath.ToAddr(addr))
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// OfNode says whether an address is one of NodeAddresses.
func (s *Services) OfNode(a netip.Addr) bool {
	known := s.addresses[datapath.FromAddr(a)]
	return known != nil && known.node
}

// BindingsOf are those of a protocol that clients need not be outside for, without
// the ones of the node's loopback.
func (s *Services) BindingsOf(p state.Protocol) (out []state.Binding) {
	for k, f := range s.frontends {
		if k.Proto == uint8(p) && k.Scope == bpfgen.ScopeAny {
			out = append(out, s.binding(k, f))
		}
	}
	return out
}

// Serves says whether there is a frontend of the protocol that packets could ask for.
func (s *Services) Serves(p state.Protocol) bool {
	for k := range s.frontends {
		if k.Proto == uint8(p) && k.Scope != bpfgen.ScopeNode {
			return true
		}
	}
	return false
}
