// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// What programs keep of flows to other nodes says how these are reached (bpf/lib/near.h).
func TestWhatIsKeptOfFlowsIsVoidWhenANodeChanges(t *testing.T) {
	n := newNode(t)
	if _, err := n.add(n.pod(2)); err != nil {
		t.Fatal(err)
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
	} {
		before := generation()
		n.must(step.do)
		if void := generation() != before; void != step.void {
			t.Errorf("%s: void %v, want %v", step.name, void, step.void)
		}
	}
}
