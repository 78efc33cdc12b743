// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/state"
)

// clinging lets go of nothing, as often as it is told.
type clinging struct {
	reconcile.Table[datapath.SlotKey, uint32]
	left *int
}

func (t clinging) Delete(k []datapath.SlotKey) error {
	if len(k) > 0 && *t.left > 0 {
		*t.left--
		return errors.New("injected fault")
	}
	return t.Table.Delete(k)
}

// What cannot be cleaned up after a change, once or ever, is no failure of it, nor
// of what looks at the Services next.
func TestACleanupThatFailsLeavesTheServicesKnown(t *testing.T) {
	for name, times := range map[string]int{"once": 1, "each time": 1000} {
		for _, p := range []state.Protocol{state.UDP, state.SCTP} {
			t.Run(name+" "+p.String(), func(t *testing.T) {
				n := newNode(t)
				left := 0
				n.opts.Faults = func(s reconcile.ServiceTables) reconcile.ServiceTables {
					s.Slots = clinging{s.Slots, &left}
					return s
				}
				defer func() { n.opts.Faults = nil }()
				const front, stays, goes = "10.96.0.1:53", "10.9.0.1:53", "10.9.0.2:53"
				n.must(func(e *Engine) error {
					if err := e.AddServices(plain(p, front, stays, goes)); err != nil {
						return err
					}
					if err := e.putGather(7); err != nil { // as on a node among others
						return err
					}
					left = times
					err := e.UpsertServices([]state.Service{plain(p, front, stays)})
					if left == times {
						t.Error("nothing was to be cleaned up")
					}
					left = 0
					if on, err := e.gathers(); on != 7 || err != nil {
						t.Errorf("datagrams are put together at %d, %v, want 7", on, err)
					}
					return err
				})
				if got := n.services(); len(got) != 1 || len(got[0].Backends) != 1 {
					t.Errorf("in force is %v, want the change", got)
				}
			})
		}
	}
}
