// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// change is a random one: some bindings set, some removed.
type change struct {
	upserts []state.Binding
	removes []state.BindingKey
}

func randomKey(r *rand.Rand) state.BindingKey {
	a := netip.AddrFrom4([4]byte{10, 96, 0, byte(r.IntN(3))})
	f := state.Frontend{AddrPort: netip.AddrPortFrom(a, uint16(1+r.IntN(2))), Protocol: []state.Protocol{state.TCP, state.UDP}[r.IntN(2)]}
	return state.BindingKey{Frontend: f, Outside: r.IntN(4) == 0}
}

// randomBinding has properties now and then; maglev: its algorithm, too, which
// takes a thousand writes.
func randomBinding(r *rand.Rand, k state.BindingKey, maglev bool) state.Binding {
	b := state.Binding{
		Owner: state.OwnerCLI, Frontend: k.Frontend, Outside: k.Outside, KeepSource: k.Outside,
		Group: uint64(r.IntN(2)), Kind: state.FrontendKind(r.IntN(4)), SplitOutside: r.IntN(4) == 0,
	}
	if r.IntN(2) == 0 {
		b.Affinity = time.Duration(1+r.IntN(2)) * time.Hour
	}
	if maglev && r.IntN(8) == 0 {
		b.Algorithm = state.Maglev
	}
	if r.IntN(3) == 0 {
		b.Group = uint64(10 + k.Frontend.AddrPort.Port())
		b.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}
	}
	for _, i := range r.Perm(6)[:r.IntN(6)] {
		b.Backends = append(b.Backends, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 80))
	}
	b.Drop = len(b.Backends) == 0
	return b
}

func randomChange(r *rand.Rand, maglev bool) change {
	var c change
	seen := map[state.BindingKey]bool{}
	for range r.IntN(4) {
		k := randomKey(r)
		if !seen[k] {
			seen[k] = true
			c.upserts = append(c.upserts, randomBinding(r, k, maglev))
		}
	}
	for range r.IntN(3) {
		c.removes = append(c.removes, randomKey(r))
	}
	return c
}

// model is the obvious evaluator.
func (c change) model(before map[string][]string) map[string][]string {
	out := maps.Clone(before)
	for _, k := range c.removes {
		delete(out, name(k))
	}
	for _, b := range c.upserts {
		set := properties(b)
		for _, a := range b.Backends {
			set = append(set, a.String())
		}
		for _, p := range b.SourceRanges {
			set = append(set, "from "+p.String())
		}
		slices.Sort(set)
		out[name(b.Key())] = set
	}
	return out
}

func TestApplyAgreesWithTheModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	w := newWorld()
	s := w.load(t)
	for range 1000 {
		c := randomChange(r, true)
		want := c.model(w.view())
		if err := s.Apply(c.upserts, c.removes); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, w.view()); d != "" {
			t.Fatal(d)
		}
		w.clean(t)
		again := w.load(t)
		if d := cmp.Diff(again.List(), s.List(), cmp.Comparer(sameBinding)); d != "" {
			t.Fatalf("a new tool restores another list: %s", d)
		}
	}
}

func sameBinding(a, b state.Binding) bool {
	return a.Number == b.Number && a.Key() == b.Key() && a.Owner == b.Owner && sameSet(properties(a), properties(b)) &&
		sameSet(a.Backends, b.Backends) && sameSet(a.SourceRanges, b.SourceRanges)
}

// At every instant a frontend that the change leaves alone is untouched, and
// one that it touches never shows a backend that is in neither state.
func TestEveryInstantIsValid(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	w := newWorld()
	for range 500 {
		c := randomChange(r, false)
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

// A frontend that leads clients outside elsewhere does so only while there is such.
func TestClientsOutsideAreLedSomewhereAtEveryInstant(t *testing.T) {
	w := newWorld()
	s := w.load(t)
	r := rand.New(rand.NewPCG(5, 6))
	key := randomKey(r)
	key.Outside = false
	all := randomBinding(r, key, false)
	outside := key
	outside.Outside = true
	all.SplitOutside = false
	w.watch = func() {
		for k, v := range w.frontends {
			if _, led := w.frontends[datapath.KeyOf(outside)]; k == datapath.KeyOf(key) && v.Flags&bpfgen.SvcSplit != 0 && !led {
				t.Fatal("clients outside are led nowhere")
			}
		}
	}
	for i := range 20 {
		var err error
		if all.SplitOutside = i%2 == 1; all.SplitOutside {
			all.Affinity = time.Duration(i/2%2) * time.Hour // fresh slots now and then
			err = s.Apply([]state.Binding{all, randomBinding(r, outside, false)}, nil)
		} else {
			err = s.Apply([]state.Binding{all}, []state.BindingKey{outside})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Whichever write fails, the previous state stays in force, or, from the point
// on where the change is complete, the new one with a CleanupError.
func TestAFailedWriteLeavesThePreviousState(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	w := newWorld()
	for range 200 {
		c := randomChange(r, false)
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
		c := randomChange(r, false)
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
	svc := state.Binding{Owner: state.OwnerCLI, Affinity: time.Hour, Frontend: state.Frontend{AddrPort: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: state.TCP}}
	for i := range 5000 {
		svc.Backends = append(svc.Backends, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 80))
	}
	s := w.load(t)
	if err := s.Apply([]state.Binding{svc}, nil); err != nil {
		t.Fatal(err)
	}
	w.writes = 0
	svc.Backends = slices.Delete(slices.Clone(svc.Backends), 7, 8)
	if err := s.Apply([]state.Binding{svc}, nil); err != nil {
		t.Fatal(err)
	}
	if w.writes > 7 {
		t.Errorf("%d writes", w.writes)
	}
}

// A range that is given up lets nobody in any more, whichever write fails: it is gone, or the
// change is not in force, and whoever made it knows.
func TestARangeThatIsGivenUpIsGone(t *testing.T) {
	b := state.Binding{Owner: state.OwnerKubernetes, Kind: state.LoadBalancer, Group: 7,
		Frontend: state.Frontend{AddrPort: netip.MustParseAddrPort("203.0.113.1:80"), Protocol: state.TCP}}
	ranges := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8::/32")}
	b.Backends = []netip.AddrPort{netip.MustParseAddrPort("10.1.0.1:80")}
	before, after := b, b
	before.Affinity, before.SourceRanges = time.Hour, ranges
	after.SourceRanges = ranges[:1]
	for _, slots := range []bool{false, true} { // whether slots are cleaned up, too
		if after.Affinity = before.Affinity; slots {
			after.Affinity = 0
		}
		for n, done := 1, false; !done; n++ {
			w := newWorld()
			s := w.load(t)
			if err := s.Apply([]state.Binding{before}, nil); err != nil {
				t.Fatal(err)
			}
			w.writes, w.failAt = 0, n
			err := s.Apply([]state.Binding{after}, nil)
			want := ranges[:1]
			if done = err == nil; !done && !errors.As(err, new(*CleanupError)) {
				want = ranges
			}
			if err := s.Prune(); err != nil {
				t.Fatal(err)
			}
			for _, s := range []*Services{s, w.load(t)} {
				if got, _ := s.Get(after.Key()); !sameSet(got.SourceRanges, want) || len(w.sources) != len(want) {
					t.Errorf("write %d failed (%v): the ranges are %v, want %v", n, err, got.SourceRanges, want)
				}
			}
		}
	}
}

// An earlier mustang let all of IPv4 in where ::/0 is.
func TestASourceRangeOfAnEarlierMustangIsPutRight(t *testing.T) {
	w := newWorld()
	s, err := LoadServices(w.tables())
	if err != nil {
		t.Fatal(err)
	}
	front := netip.MustParseAddrPort("203.0.113.1:80")
	b := state.Binding{Owner: state.OwnerKubernetes, Kind: state.LoadBalancer, Group: 7,
		Frontend: state.Frontend{AddrPort: front, Protocol: state.TCP}, SourceRanges: []netip.Prefix{netip.MustParsePrefix("::/0")}}
	if err := s.Apply([]state.Binding{b}, nil); err != nil {
		t.Fatal(err)
	}
	want := maps.Clone(w.sources)
	for k := range w.sources {
		w.sources[k] = 0
	}
	if s, err = LoadServices(w.tables()); err == nil {
		err = s.Prune()
	}
	if err != nil || !maps.Equal(w.sources, want) {
		t.Errorf("%v, want %v (%v)", w.sources, want, err)
	}
}

// The programs pick a slot by the flow's addresses: that every backend has one is not
// enough, each slot is the table's. And what is written again under fresh slots, or goes,
// gives its id and its number back.
func TestMaglevsSlotsAreItsTable(t *testing.T) {
	w := newWorld()
	s := w.load(t)
	svc := state.Binding{Owner: state.OwnerCLI, Algorithm: state.Maglev, Frontend: state.Frontend{AddrPort: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: state.TCP}}
	for i := range 5 {
		svc.Backends = append(svc.Backends, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}), 80))
	}
	whole := svc.Backends
	for _, n := range []int{5, 4, 5, 1} {
		svc.Backends = whole[:n]
		if err := s.Apply([]state.Binding{svc}, nil); err != nil {
			t.Fatal(err)
		}
		f := w.frontends[datapath.KeyOf(svc.Key())]
		table := service.Maglev(svc.Backends)
		if int(f.Backends) != len(table) {
			t.Fatalf("%d backends: %d slots, and the table has %d", n, f.Backends, len(table))
		}
		for i, b := range table {
			id := w.slots[datapath.SlotKey{Service: f.Id, Slot: uint32(i)}]
			if got := datapath.BackendAddr(w.backends[id]); got != svc.Backends[b] {
				t.Fatalf("%d backends: slot %d leads to %v, want %v", n, i, got, svc.Backends[b])
			}
		}
	}
	number := w.frontends[datapath.KeyOf(svc.Key())].Number
	for range 3 {
		if err := s.Apply(nil, []state.BindingKey{svc.Key()}); err != nil {
			t.Fatal(err)
		}
		if len(s.services) != 0 {
			t.Fatalf("nothing is in force, and ids %v are kept", s.services)
		}
		if err := s.Apply([]state.Binding{svc}, nil); err != nil {
			t.Fatal(err)
		}
		svc.Affinity += time.Hour // takes fresh slots the first time
		if err := s.Apply([]state.Binding{svc}, nil); err != nil {
			t.Fatal(err)
		}
		if got := w.frontends[datapath.KeyOf(svc.Key())].Number; got != number || len(s.services) != 1 {
			t.Fatalf("its number is %d, and was %d; ids in use are %v", got, number, s.services)
		}
	}
}
