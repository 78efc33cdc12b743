// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// enterNear enters flows where those between pods lie, each half at a place of its own.
func (n *node) enterNear(flows ...flow) {
	n.t.Helper()
	n.must(func(e *Engine) error {
		place := uint32(1)
		for _, f := range flows {
			keys, values := f.halves()
			for i := range keys {
				var p bpfgen.PodNearPlace
				p.Flows[1].Key, p.Flows[1].E = keys[i], values[i]
				if err := e.dp.Map(bpfgen.PodMapMstCtNearV1).Put(place, p); err != nil {
					return err
				}
				place++
			}
		}
		return nil
	})
}

// leftNear are those of the halves that enterNear entered whose next SYN picks anew.
func (n *node) leftNear(flows ...flow) (left []bool) {
	n.t.Helper()
	n.must(func(e *Engine) error {
		place := uint32(1)
		for _, f := range flows {
			keys, _ := f.halves()
			for _, k := range keys {
				var p bpfgen.PodNearPlace
				if err := e.dp.Map(bpfgen.PodMapMstCtNearV1).Lookup(place, &p); err != nil {
					return err
				}
				if p.Flows[1].Key != k || p.Flows[1].E.Expires != 1<<30 {
					n.t.Errorf("%v: a half of it has ended", f)
				}
				left = append(left, p.Flows[1].E.Backend == bpfgen.BackendLeft)
				place++
			}
		}
		return nil
	})
	return left
}

// As Kubernetes has it: a backend leaves one Service, nothing is reset, and another Service still has it.
func TestRemovedBackendMovesHalfOpenFlowsThatLieNear(t *testing.T) {
	n := newNode(t)
	const front, other, back = "10.96.0.1:80", "10.96.0.2:80", "10.9.0.2:80"
	n.must(func(e *Engine) error { return e.AddServices(svc(front, back), svc(other, back)) })
	flows := []flow{
		{state.TCP, "10.9.0.1:4000", front, back, inPlace},
		{state.TCP, "10.9.0.1:4001", front, back, answered},
		{state.TCP, "10.9.0.1:4002", other, back, inPlace},
	}
	n.enterNear(flows...)
	n.must(func(e *Engine) error { return e.UpsertServices([]state.Service{svc(front, "10.9.0.3:80")}) })
	for i, left := range n.leftNear(flows...) {
		if want := i == 0; left != want {
			t.Errorf("half %d of %v: picks anew: %v, want %v", i%2, flows[i/2], left, want)
		}
	}
}
