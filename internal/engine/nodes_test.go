// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/policy"
)

// What programs keep of flows to other nodes says how these are reached (bpf/lib/near.h).
func TestWhatIsKeptOfFlowsIsVoidWhenANodeOrAnEndpointChanges(t *testing.T) {
	n := newNode(t)
	ep, err := n.add(n.pod(2))
	if err != nil {
		t.Fatal(err)
	}
	slot := func(e *Engine) datapath.EndpointSlot {
		s, _, err := e.dp.Endpoints.Get(ep.ID)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	generation := func() (g uint32) {
		n.must(func(e *Engine) error {
			m, err := e.dp.GetMeta()
			g = m.NextGeneration
			return err
		})
		return g
	}
	one := map[uint32]datapath.Remote{5: {Ref: 1<<16 | 5}}
	tunnelled := map[uint32]datapath.Remote{5: {Ref: 1<<16 | 5, Flags: bpfgen.RemoteTunnel}}
	for _, step := range []struct {
		name string
		do   func(e *Engine) error
		void bool
	}{
		{"a node comes", func(e *Engine) error { return e.putRemotes(one) }, true},
		{"nothing changes", func(e *Engine) error { return e.putRemotes(one) }, false},
		{"the outside is reached by programs", func(e *Engine) error { return e.putOutside(true) }, true},
		{"and still is", func(e *Engine) error { return e.putOutside(true) }, false},
		{"and no more", func(e *Engine) error { return e.putOutside(false) }, true},
		{"the node is there as before", func(e *Engine) error { return e.putRemotes(one) }, false},
		{"it is reached by the tunnel", func(e *Engine) error { return e.putRemotes(tunnelled) }, true},
		{"it goes", func(e *Engine) error { return e.putRemotes(nil) }, true},
		{"an endpoint is looked at", func(e *Engine) error { slot(e); return nil }, false},
		{"an endpoint is written", func(e *Engine) error {
			return e.dp.Endpoints.Put([]uint32{ep.ID}, []datapath.EndpointSlot{slot(e)})
		}, true},
		{"policy closes on it", func(e *Engine) error {
			_, err := e.policyTables().Apply(policy.Change{Stricter: []uint32{ep.ID}})
			return err
		}, true},
		{"policy changes, for nobody the worse", func(e *Engine) error {
			_, err := e.policyTables().Apply(policy.Change{})
			return err
		}, false},
		{"it goes", func(e *Engine) error { return e.dp.Endpoints.Delete([]uint32{ep.ID}) }, true},
	} {
		before := generation()
		n.must(step.do)
		if void := generation() != before; void != step.void {
			t.Errorf("%s: void %v, want %v", step.name, void, step.void)
		}
	}
}
