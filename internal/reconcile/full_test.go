// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/state"
)

// Where there is no room for fresh slots, a large change is made in place: endpoints that
// are gone are in no Service any more. Whichever write fails, the previous state stays.
func TestALargeChangeInAFullTable(t *testing.T) {
	binding := func(front string, from, to byte) state.Binding {
		b := state.Binding{Owner: state.OwnerCLI, Frontend: state.Frontend{AddrPort: netip.MustParseAddrPort(front), Protocol: state.TCP}}
		for i := from; i <= to; i++ {
			b.Backends = append(b.Backends, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), 80))
		}
		b.Drop = len(b.Backends) == 0
		return b
	}
	sticky := func(b state.Binding) state.Binding { // which takes as many entries again, none of them in place
		b.Affinity = time.Hour
		return b
	}
	second := []state.BindingKey{binding("10.96.0.2:80", 1, 4).Key()}
	for name, tc := range map[string]struct {
		to      []state.Binding
		removes []state.BindingKey
		fails   bool
	}{
		"by affinity":      {to: []state.Binding{sticky(binding("10.96.0.1:80", 1, 3))}},
		"one inherits":     {to: []state.Binding{sticky(binding("10.96.0.1:80", 11, 15))}, removes: second},
		"one goes":         {to: []state.Binding{binding("10.96.0.3:80", 1, 4)}, removes: second},
		"too much by that": {to: []state.Binding{sticky(binding("10.96.0.1:80", 11, 14))}, fails: true},
		"others":           {to: []state.Binding{binding("10.96.0.1:80", 11, 16)}},
		"some others":      {to: []state.Binding{binding("10.96.0.1:80", 3, 8)}},
		"fewer":            {to: []state.Binding{binding("10.96.0.1:80", 2, 2)}},
		"none":             {to: []state.Binding{binding("10.96.0.1:80", 1, 0)}},
		"of two":           {to: []state.Binding{binding("10.96.0.1:80", 11, 16), binding("10.96.0.2:80", 4, 7)}},
		"more than fit":    {to: []state.Binding{binding("10.96.0.1:80", 11, 19)}, fails: true},
		"beside a new one": {to: []state.Binding{binding("10.96.0.1:80", 11, 16), binding("10.96.0.3:80", 1, 1)}, fails: true},
	} {
		full := newWorld()
		full.room = 10
		if err := full.load(t).Apply([]state.Binding{binding("10.96.0.1:80", 1, 6), binding("10.96.0.2:80", 1, 4)}, nil); err != nil {
			t.Fatal(err)
		}
		before := full.view()
		after := change{upserts: tc.to, removes: tc.removes}.model(before)
		for n := 0; ; n++ { // 0: none fails
			w := full.clone()
			s := w.load(t)
			w.failAt = n
			w.watch = func() {
				for f, got := range w.view() {
					for _, b := range got {
						if !slices.Contains(before[f], b) && !slices.Contains(after[f], b) && before[f] != nil {
							t.Fatalf("%s: %s shows %s: before %v, after %v", name, f, b, before[f], after[f])
						}
					}
				}
			}
			err := s.Apply(tc.to, tc.removes)
			w.watch = func() {}
			if errors.As(err, new(*UndoError)) {
				continue // the write was one of the first try's way back
			}
			want := before
			if err == nil || errors.As(err, new(*CleanupError)) {
				want = after
			}
			if d := cmp.Diff(want, w.view()); d != "" {
				t.Fatalf("%s: write %d failed (%v): %s", name, n, err, d)
			}
			if got := errors.As(err, new(*datapath.FullError)); n == 0 && got != tc.fails {
				t.Errorf("%s: %v", name, err)
			}
			if err := s.Prune(); err != nil {
				t.Fatal(err)
			}
			w.clean(t)
			if n > 0 && w.writes < n {
				break // there is none of that number
			}
		}
	}
}
