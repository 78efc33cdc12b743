// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// world is the tables in memory, with a switch that breaks the n-th write.
type world struct {
	frontends map[datapath.FrontendKey]datapath.Frontend
	slots     map[datapath.SlotKey]uint32
	backends  map[uint32]datapath.Backend
	sources   map[datapath.SourceKey]uint8
	meta      map[uint32]datapath.Meta
	writes    int
	failAt    int  // 0: never
	dead      bool // every write after failAt fails too: the tool was killed
	room      int  // slots that the table of slots has; 0: as many as are asked for
	watch     func()
}

var errFault = errors.New("injected fault")

func (w *world) write() error {
	w.writes++
	if w.failAt != 0 && (w.writes == w.failAt || w.dead && w.writes > w.failAt) {
		return errFault
	}
	return nil
}

// memTable writes one pair at a time, as a batch that is interrupted does.
type memTable[K, V comparable] struct {
	w    *world
	m    map[K]V
	room int
}

func (t memTable[K, V]) Put(keys []K, values []V) error {
	for i, k := range keys {
		if err := t.w.write(); err != nil {
			return err
		}
		if _, has := t.m[k]; !has && t.room > 0 && len(t.m) >= t.room {
			return &datapath.FullError{Table: "a test's", Max: uint32(t.room)}
		}
		t.m[k] = values[i]
		t.w.watch()
	}
	return nil
}

func (t memTable[K, V]) Delete(keys []K) error {
	for _, k := range keys {
		if err := t.w.write(); err != nil {
			return err
		}
		delete(t.m, k)
		t.w.watch()
	}
	return nil
}

func (t memTable[K, V]) All() (map[K]V, error) { return maps.Clone(t.m), nil }

func newWorld() *world {
	return &world{
		frontends: map[datapath.FrontendKey]datapath.Frontend{},
		slots:     map[datapath.SlotKey]uint32{},
		backends:  map[uint32]datapath.Backend{},
		sources:   map[datapath.SourceKey]uint8{},
		meta:      map[uint32]datapath.Meta{},
		watch:     func() {},
	}
}

func (w *world) clone() *world {
	c := newWorld()
	c.frontends, c.slots = maps.Clone(w.frontends), maps.Clone(w.slots)
	c.backends, c.meta, c.sources = maps.Clone(w.backends), maps.Clone(w.meta), maps.Clone(w.sources)
	c.room = w.room
	return c
}

func (w *world) tables() ServiceTables {
	return ServiceTables{
		Frontends: memTable[datapath.FrontendKey, datapath.Frontend]{w, w.frontends, 0},
		Slots:     memTable[datapath.SlotKey, uint32]{w, w.slots, w.room},
		Backends:  memTable[uint32, datapath.Backend]{w, w.backends, 0},
		Sources:   memTable[datapath.SourceKey, uint8]{w, w.sources, 0},
		Meta:      memTable[uint32, datapath.Meta]{w, w.meta, 0},
	}
}

func (w *world) load(t *testing.T) *Services {
	t.Helper()
	s, err := LoadServices(w.tables())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// view is what the programs see: each binding's sorted backends and properties,
// by following the tables as they do.
func (w *world) view() map[string][]string {
	out := map[string][]string{}
	for k, v := range w.frontends {
		if v.Flags&bpfgen.SvcAddress != 0 {
			continue
		}
		set := map[string]bool{}
		for i := range v.Backends {
			id, ok := w.slots[datapath.SlotKey{Service: v.Id, Slot: i}]
			b, known := w.backends[id]
			if !ok || !known {
				set[fmt.Sprintf("BROKEN slot %d", i)] = true
				continue
			}
			if _, member := w.slots[memberKey(v.Id, id)]; v.Affinity != 0 && !member {
				set[fmt.Sprintf("BROKEN member %d", id)] = true
			}
			set[datapath.BackendAddr(b).String()] = true
		}
		for _, p := range properties(datapath.BindingFrom(k, v)) {
			set[p] = true
		}
		for key := range w.sources {
			if v.Flags&bpfgen.SvcRanges != 0 && key.Group == v.Group {
				set["from "+datapath.SourceRange(key).String()] = true
			}
		}
		out[name(datapath.KeyFrom(k))] = slices.Sorted(maps.Keys(set))
	}
	return out
}

func name(k state.BindingKey) string { return fmt.Sprint(k.Frontend, " ", k.Outside) }

// properties are what a binding says beside its backends.
func properties(b state.Binding) []string {
	return []string{fmt.Sprintf("kind %v split %v drop %v keep %v", b.Kind, b.SplitOutside, b.Drop, b.KeepSource),
		fmt.Sprintf("affinity %v", b.Affinity), fmt.Sprintf("picks %v", b.Algorithm), fmt.Sprintf("group %d", b.Group)}
}

// clean reports entries that nothing refers to, and wrong marks of addresses.
func (w *world) clean(t *testing.T) {
	t.Helper()
	used, slots, marks, groups := map[uint32]bool{}, 0, map[datapath.Addr]uint16{}, map[uint64]bool{}
	for k, v := range w.frontends {
		if v.Flags&bpfgen.SvcAddress != 0 {
			continue
		}
		if v.Kind != bpfgen.KindNodePort && k.Scope == bpfgen.ScopeAny {
			marks[k.Addr] |= bpfgen.SvcAddress
			if v.Kind == bpfgen.KindClusterIp {
				marks[k.Addr] |= bpfgen.SvcRefuse
			}
		}
		groups[v.Group] = groups[v.Group] || v.Flags&bpfgen.SvcRanges != 0
		members := map[uint32]bool{}
		for i := range v.Backends {
			id := w.slots[datapath.SlotKey{Service: v.Id, Slot: i}]
			used[id], members[id] = true, true
			slots++
		}
		if v.Affinity != 0 {
			slots += len(members)
		}
	}
	if slots != len(w.slots) || len(used) != len(w.backends) {
		t.Errorf("%d slots for %d, %d backends for %d", len(w.slots), slots, len(w.backends), len(used))
	}
	for key := range w.sources {
		if !groups[key.Group] {
			t.Errorf("nobody has the range %v", datapath.SourceRange(key))
		}
	}
	for k, v := range w.frontends {
		if v.Flags&bpfgen.SvcAddress == 0 {
			continue
		}
		if v.Flags != marks[k.Addr] {
			t.Errorf("mark of %v is %d, want %d", datapath.ToAddr(k.Addr), v.Flags, marks[k.Addr])
		}
		delete(marks, k.Addr)
	}
	for a := range marks {
		t.Errorf("no mark of %v", datapath.ToAddr(a))
	}
}
