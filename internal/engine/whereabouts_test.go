// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// A place alone says nothing of a living endpoint there, nor of a dead one's
// remains when somebody else has the place, too.
func TestRemovalByPlaceTakesNobodyElses(t *testing.T) {
	n := newNode(t)
	pod := n.pod(1)
	at := Whereabouts{Netns: pod, IfName: "eth0", Owner: state.OwnerCNI}
	for name, tc := range map[string]struct {
		shape      func(w *Whereabouts, id uint32)
		dies, goes bool
	}{
		"its id":                      {func(w *Whereabouts, id uint32) { w.ID, w.Shared = id, true }, false, true},
		"another id":                  {func(w *Whereabouts, id uint32) { w.ID = id + 1 }, false, false},
		"no id":                       {func(*Whereabouts, uint32) {}, false, false},
		"no id, a living one":         {func(w *Whereabouts, _ uint32) { w.Living = true }, false, true},
		"no id, shared":               {func(w *Whereabouts, _ uint32) { w.Living, w.Shared = true, true }, false, false},
		"another's owner":             {func(w *Whereabouts, id uint32) { w.ID, w.Owner = id, state.OwnerCLI }, false, false},
		"remains, another id":         {func(w *Whereabouts, id uint32) { w.ID = id + 1 }, true, true},
		"remains, no id":              {func(*Whereabouts, uint32) {}, true, true},
		"remains, another id, shared": {func(w *Whereabouts, id uint32) { w.ID, w.Shared = id+1, true }, true, false},
		"remains, no place":           {func(w *Whereabouts, _ uint32) { w.Netns = "" }, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			n.must(func(e *Engine) error {
				ep, err := e.AddEndpoint(context.Background(), EndpointSpec{Netns: pod, IfName: "eth0", Owner: state.OwnerCNI})
				if err != nil {
					return err
				}
				if tc.dies {
					n.run("ip link del h1")
				}
				w := at
				tc.shape(&w, ep.ID)
				if err := e.RemoveAt(w); err != nil {
					return err
				}
				if _, there := e.known[ep.ID]; there == tc.goes {
					t.Errorf("it is there: %v", there)
				}
				if tc.dies {
					n.connect(n.name+"-p1", 1)
				}
				if _, there := e.known[ep.ID]; there {
					err = e.RemovePod(ep.ID)
				}
				n.run("ip link set h1 up")
				return err
			})
		})
	}
}
