// SPDX-License-Identifier: Apache-2.0

// Package reconcile turns desired objects into table entries, in an order in
// which every instant is valid: whoever looks, at whatever moment, finds the
// old state or the new. A write that fails is undone before the error returns.
package reconcile

import (
	"errors"
	"fmt"
	"net/netip"

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
	Meta      Table[uint32, datapath.Meta]
}

// CleanupError says that the change is in force, but what it replaced could
// not all be deleted; Prune does it later.
type CleanupError struct{ err error }

func (e *CleanupError) Error() string { return "delete replaced entries: " + e.err.Error() }
func (e *CleanupError) Unwrap() error { return e.err }

// frontend is one Service as the tables hold it.
type frontend struct {
	value datapath.Frontend
	slots []uint32 // backend ids; 0 where a slot is missing
}

// Services is the tables of Services, with a mirror of them in memory. It is
// not for concurrent use: the engine's lock makes it the only writer.
type Services struct {
	t         ServiceTables
	meta      datapath.Meta
	frontends map[datapath.FrontendKey]frontend
	services  map[uint32]bool       // ids of sets of slots
	addresses map[datapath.Addr]int // frontends of an address
	marked    map[datapath.Addr]bool
	backends  map[uint32]datapath.Backend
	ids       map[datapath.Backend]uint32
	refs      map[uint32]int // slots that name a backend
	numbers   map[uint32]bool
	next      uint32 // where the search for a free number starts
	orphans   []datapath.SlotKey
}

// LoadServices reads the tables.
func LoadServices(t ServiceTables) (*Services, error) {
	s := &Services{
		t:         t,
		frontends: make(map[datapath.FrontendKey]frontend),
		services:  make(map[uint32]bool),
		addresses: make(map[datapath.Addr]int),
		marked:    make(map[datapath.Addr]bool),
		ids:       make(map[datapath.Backend]uint32),
		refs:      make(map[uint32]int),
		numbers:   make(map[uint32]bool),
		next:      1,
	}
	meta, err := t.Meta.All()
	if err != nil {
		return nil, err
	}
	s.meta = meta[0]
	values, err := t.Frontends.All()
	if err != nil {
		return nil, err
	}
	slots, err := t.Slots.All()
	if err != nil {
		return nil, err
	}
	if s.backends, err = t.Backends.All(); err != nil {
		return nil, err
	}
	s.index(values, slots)
	return s, nil
}

// index builds the mirror from the tables' contents.
func (s *Services) index(values map[datapath.FrontendKey]datapath.Frontend, slots map[datapath.SlotKey]uint32) {
	byID := make(map[uint32]datapath.FrontendKey, len(values))
	for key, v := range values {
		if v.Flags&bpfgen.SvcAddress != 0 {
			s.marked[key.Addr] = true
			continue
		}
		s.addresses[key.Addr]++
		s.frontends[key] = frontend{v, make([]uint32, v.Backends)}
		s.numbers[v.Number] = true
		s.services[v.Id] = true
		byID[v.Id] = key
	}
	for k, id := range slots {
		owner, ok := byID[k.Service]
		if f := s.frontends[owner]; ok && int(k.Slot) < len(f.slots) {
			f.slots[k.Slot] = id
			s.refs[id]++
			continue
		}
		s.orphans = append(s.orphans, k)
	}
	for id, b := range s.backends {
		s.ids[b] = id
	}
}

// List is every Service, by number.
func (s *Services) List() []state.Service {
	out := make([]state.Service, 0, len(s.frontends))
	for k, f := range s.frontends {
		out = append(out, s.service(k, f))
	}
	state.SortServices(out)
	return out
}

// Get is the Service of a frontend.
func (s *Services) Get(f state.Frontend) (state.Service, bool) {
	k := datapath.KeyOf(f)
	v, ok := s.frontends[k]
	if !ok {
		return state.Service{}, false
	}
	return s.service(k, v), true
}

func (s *Services) service(k datapath.FrontendKey, f frontend) state.Service {
	out := state.Service{Number: f.value.Number, Owner: state.Owner(f.value.Owner), Frontend: datapath.FrontendOf(k)}
	seen := make(map[uint32]bool, len(f.slots))
	for _, id := range f.slots {
		if b, ok := s.backends[id]; ok && !seen[id] {
			seen[id] = true
			out.Backends = append(out.Backends, datapath.BackendAddr(b))
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
			s.ids[b], s.backends[id] = id, b
			*fresh = append(*fresh, id)
		}
		out[i] = id
	}
	return out
}

// nextBackend never hands out an id that is in use, nor one used a moment ago:
// flows remember their backend by it. The counter wraps after 2^32.
func (s *Services) nextBackend() uint32 {
	for {
		s.meta.NextBackend++
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
// slots, backends, and address markers; and puts back markers that are missing.
func (s *Services) Prune() error {
	var dead []uint32
	for id := range s.backends {
		if s.refs[id] == 0 {
			dead = append(dead, id)
		}
	}
	var unused, missing []datapath.Addr
	for addr := range s.marked {
		if s.addresses[addr] == 0 {
			unused = append(unused, addr)
		}
	}
	for addr := range s.addresses {
		if !s.marked[addr] {
			missing = append(missing, addr)
		}
	}
	err := errors.Join(s.t.Slots.Delete(s.orphans), s.t.Backends.Delete(dead), s.t.Frontends.Delete(markers(unused)), s.putMarkers(missing))
	if err != nil {
		return fmt.Errorf("prune: %w", err)
	}
	for _, id := range dead {
		s.forgetBackend(id)
	}
	for _, addr := range unused {
		delete(s.marked, addr)
	}
	for _, addr := range missing {
		s.marked[addr] = true
	}
	s.orphans = nil
	return nil
}

func (s *Services) forgetBackend(id uint32) {
	if b := s.backends[id]; s.ids[b] == id {
		delete(s.ids, b)
	}
	delete(s.backends, id)
	delete(s.refs, id)
}

// markers are the keys that mark addresses as Services'.
func markers(addrs []datapath.Addr) []datapath.FrontendKey {
	out := make([]datapath.FrontendKey, len(addrs))
	for i, a := range addrs {
		out[i] = datapath.FrontendKey{Addr: a}
	}
	return out
}

func (s *Services) putMarkers(addrs []datapath.Addr) error {
	values := make([]datapath.Frontend, len(addrs))
	for i := range values {
		values[i].Flags = bpfgen.SvcAddress
	}
	return s.t.Frontends.Put(markers(addrs), values)
}
