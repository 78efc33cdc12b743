// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/state"
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
		{"the tunnel has another port", func(e *Engine) error { return e.putConfig(datapath.NodeConfig{Overlay: 7, Port: 1}) }, true},
		{"and keeps it", func(e *Engine) error { return e.putConfig(datapath.NodeConfig{Overlay: 7, Port: 1}) }, false},
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

// What a node was called by in a change that was undone is nobody else's: flows may
// have begun in the meantime.
func TestARefThatWasUndoneIsNotGivenAgain(t *testing.T) {
	if !datapath.Probe().TCX {
		t.Skip("this kernel has no tcx")
	}
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	w.wire(0, 1)
	w.wire(1, 2)
	add := func(name, addr string) error {
		return n.do(func(e *Engine) error {
			return e.AddNode(state.Node{Name: name, Owner: state.OwnerCLI, Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Mode: state.NodeDirect})
		})
	}
	lastRef := func() (last uint32) {
		n.must(func(e *Engine) error {
			all, err := e.store.Nodes()
			last = all.LastRef
			return err
		})
		return last
	}
	for name, addr := range map[string]string{"n1": "198.51.100.1", "n2": "198.51.100.9"} {
		if err := add(name, addr); err != nil {
			t.Fatal(err)
		}
	}
	before := lastRef()
	fillIngress(t, "w1")
	if err := add("n3", "198.51.101.9"); err == nil {
		t.Fatal("a node is there, and no program where it comes in")
	}
	if err := add("n4", "198.51.100.8"); err != nil {
		t.Fatal(err)
	}
	n.must(func(e *Engine) error {
		ref, _, err := e.dp.Peers.Get(datapath.FromAddr(netip.MustParseAddr("198.51.100.8")))
		if undone := before + 1; ref>>16 == undone {
			t.Errorf("n4 is %#x, as n3 was", ref)
		}
		return err
	})
}

// fillIngress leaves room for nobody's program at an interface, until the test ends.
func fillIngress(t *testing.T, ifname string) {
	t.Helper()
	l, err := netlink.LinkByName(ifname)
	if err != nil {
		t.Fatal(err)
	}
	for range 64 { // BPF_MPROG_MAX
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type:         ebpf.SchedCLS,
			Instructions: asm.Instructions{asm.LoadImm(asm.R0, -1, asm.DWord), asm.Return()},
			License:      "MIT",
		})
		if err != nil {
			t.Fatal(err)
		}
		held, err := link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: p, Attach: ebpf.AttachTCXIngress})
		p.Close()
		if err != nil {
			return // there is none
		}
		t.Cleanup(func() { held.Close() })
	}
}
