// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// world is the tables in memory, with a switch that breaks the n-th write.
type world struct {
	frontends map[datapath.FrontendKey]datapath.Frontend
	slots     map[datapath.SlotKey]uint32
	backends  map[uint32]datapath.Backend
	meta      map[uint32]datapath.Meta
	writes    int
	failAt    int  // 0: never
	dead      bool // every write after failAt fails too: the tool was killed
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
	w *world
	m map[K]V
}

func (t memTable[K, V]) Put(keys []K, values []V) error {
	for i, k := range keys {
		if err := t.w.write(); err != nil {
			return err
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
		meta:      map[uint32]datapath.Meta{},
		watch:     func() {},
	}
}

func (w *world) clone() *world {
	c := newWorld()
	c.frontends, c.slots = maps.Clone(w.frontends), maps.Clone(w.slots)
	c.backends, c.meta = maps.Clone(w.backends), maps.Clone(w.meta)
	return c
}

func (w *world) tables() ServiceTables {
	return ServiceTables{
		Frontends: memTable[datapath.FrontendKey, datapath.Frontend]{w, w.frontends},
		Slots:     memTable[datapath.SlotKey, uint32]{w, w.slots},
		Backends:  memTable[uint32, datapath.Backend]{w, w.backends},
		Meta:      memTable[uint32, datapath.Meta]{w, w.meta},
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

// view is what the programs see: frontend to sorted set of backends, by
// following the tables as they do.
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
			set[datapath.BackendAddr(b).String()] = true
		}
		out[datapath.FrontendOf(k).String()] = slices.Sorted(maps.Keys(set))
		if out[datapath.FrontendOf(k).String()] == nil {
			out[datapath.FrontendOf(k).String()] = []string{}
		}
	}
	return out
}

// clean reports entries that nothing refers to, and missing markers.
func (w *world) clean(t *testing.T) {
	t.Helper()
	used, slots, addrs := map[uint32]bool{}, 0, map[datapath.Addr]bool{}
	for k, v := range w.frontends {
		if v.Flags&bpfgen.SvcAddress != 0 {
			continue
		}
		addrs[k.Addr] = true
		for i := range v.Backends {
			used[w.slots[datapath.SlotKey{Service: v.Id, Slot: i}]] = true
			slots++
		}
	}
	if slots != len(w.slots) || len(used) != len(w.backends) {
		t.Errorf("%d slots for %d, %d backends for %d", len(w.slots), slots, len(w.backends), len(used))
	}
	for a := range addrs {
		if w.frontends[datapath.FrontendKey{Addr: a}].Flags != bpfgen.SvcAddress {
			t.Errorf("no marker for %v", datapath.ToAddr(a))
		}
	}
	if markers := len(w.frontends) - len(w.view()); markers != len(addrs) {
		t.Errorf("%d markers for %d addresses", markers, len(addrs))
	}
}

// change is a random one: some Services set, some removed.
type change struct {
	upserts []state.Service
	removes []state.Frontend
}

func randomFrontend(r *rand.Rand) state.Frontend {
	a := netip.AddrFrom4([4]byte{10, 96, 0, byte(r.IntN(3))})
	return state.Frontend{AddrPort: netip.AddrPortFrom(a, uint16(1+r.IntN(2))), Protocol: []state.Protocol{state.TCP, state.UDP}[r.IntN(2)]}
}

func randomChange(r *rand.Rand) change {
	var c change
	seen := map[state.Frontend]bool{}
	for range r.IntN(4) {
		f := randomFrontend(r)
		if seen[f] {
			continue
		}
		seen[f] = true
		s := state.Service{Owner: state.OwnerCLI, Frontend: f}
		for _, i := range r.Perm(6)[:r.IntN(6)] {
			s.Backends = append(s.Backends, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 80))
		}
		c.upserts = append(c.upserts, s)
	}
	for range r.IntN(3) {
		c.removes = append(c.removes, randomFrontend(r))
	}
	return c
}

// model is the obvious evaluator.
func (c change) model(before map[string][]string) map[string][]string {
	out := maps.Clone(before)
	for _, f := range c.removes {
		delete(out, f.String())
	}
	for _, s := range c.upserts {
		set := []string{}
		for _, b := range s.Backends {
			set = append(set, b.String())
		}
		slices.Sort(set)
		out[s.Frontend.String()] = set
	}
	return out
}

func TestApplyAgreesWithTheModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	w := newWorld()
	s := w.load(t)
	for range 3000 {
		c := randomChange(r)
		want := c.model(w.view())
		if err := s.Apply(c.upserts, c.removes); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, w.view()); d != "" {
			t.Fatal(d)
		}
		w.clean(t)
		again := w.load(t)
		if d := cmp.Diff(again.List(), s.List(), cmp.Comparer(sameService)); d != "" {
			t.Fatalf("a new tool restores another list: %s", d)
		}
	}
}

func sameService(a, b state.Service) bool {
	key := func(x, y netip.AddrPort) int { return x.Compare(y) }
	return a.Number == b.Number && a.Frontend == b.Frontend && a.Owner == b.Owner &&
		slices.Equal(slices.SortedFunc(slices.Values(a.Backends), key), slices.SortedFunc(slices.Values(b.Backends), key))
}

// At every instant a frontend that the change leaves alone is untouched, and
// one that it touches never shows a backend that is in neither state.
func TestEveryInstantIsValid(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	w := newWorld()
	for range 500 {
		c := randomChange(r)
		before := w.view()
		after := c.model(before)
		w.watch = func() {
			for f, got := range w.view() {
				for _, b := range got {
					if !slices.Contains(before[f], b) && !slices.Contains(after[f], b) {
						t.Fatalf("%s shows %s: before %v, after %v", f, b, before[f], after[f])
					}
				}
				if slices.Equal(before[f], after[f]) && !slices.Equal(got, before[f]) {
					t.Fatalf("%s is %v, which nobody asked for", f, got)
				}
			}
		}
		s := w.load(t)
		if err := s.Apply(c.upserts, c.removes); err != nil {
			t.Fatal(err)
		}
		w.watch = func() {}
	}
}

// Whichever write fails, the previous state stays in force, or, from the point
// on where the change is complete, the new one with a CleanupError.
func TestAFailedWriteLeavesThePreviousState(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	w := newWorld()
	for range 200 {
		c := randomChange(r)
		before := w.view()
		after := c.model(before)
		for n := 1; ; n++ {
			try := w.clone()
			s := try.load(t)
			try.failAt = n
			err := s.Apply(c.upserts, c.removes)
			if err == nil {
				w = try
				break
			}
			want := before
			if errors.As(err, new(*CleanupError)) {
				want = after
			} else if !errors.Is(err, errFault) {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, try.view()); d != "" {
				t.Fatalf("write %d failed (%v): %s", n, err, d)
			}
			if err := s.Prune(); err != nil {
				t.Fatal(err)
			}
			try.clean(t)
		}
		w.failAt = 0
	}
}

// Killed at any write, the next tool prunes, applies the same again, and the
// new state is complete.
func TestAKilledChangeIsRolledForward(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	w := newWorld()
	for range 200 {
		c := randomChange(r)
		after := c.model(w.view())
		for n := 1; ; n++ {
			try := w.clone()
			s := try.load(t)
			try.failAt, try.dead = n, true
			err := s.Apply(c.upserts, c.removes)
			try.failAt = 0
			next := try.load(t)
			if err := next.Prune(); err != nil {
				t.Fatal(err)
			}
			if err := next.Apply(c.upserts, c.removes); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(after, try.view()); d != "" {
				t.Fatalf("killed at write %d: %s", n, d)
			}
			try.clean(t)
			if err == nil {
				w = try
				break
			}
		}
	}
}

// One backend more or less costs the same in a Service of any size.
func TestOneBackendOfManyIsAFewWrites(t *testing.T) {
	w := newWorld()
	svc := state.Service{Owner: state.OwnerCLI, Frontend: state.Frontend{AddrPort: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: state.TCP}}
	for i := range 5000 {
		svc.Backends = append(svc.Backends, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 80))
	}
	s := w.load(t)
	if err := s.Apply([]state.Service{svc}, nil); err != nil {
		t.Fatal(err)
	}
	w.writes = 0
	svc.Backends = slices.Delete(slices.Clone(svc.Backends), 7, 8)
	if err := s.Apply([]state.Service{svc}, nil); err != nil {
		t.Fatal(err)
	}
	if w.writes > 6 {
		t.Errorf("%d writes", w.writes)
	}
}
