// SPDX-License-Identifier: Apache-2.0

// Package dptest sends packets through the real programs by BPF_PROG_TEST_RUN:
// a packet in; its verdict, the packet out, counters and table contents back.
// Tables are fresh and never pinned, so a test needs root and nothing else.
package dptest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Options say where the programs sit and how the tables are made.
type Options struct {
	InPod    bool                  // inside the pod instead of on the host's end
	FromWire bool                  // to_pod at the node's NIC
	FromEdge bool                  // to_pod behind the edge's programs
	NIC      bool                  // the edge's program at the NIC is the one for other nodes, too
	Timeouts *bpfgen.PodCtTimeouts // nil: as compiled
	// Sizes overrides the entries of a table, by its name.
	Sizes map[string]uint32
	// Types overrides the kind of a table, by its name: a plain hash table
	// refuses when it is full, where an LRU one never does.
	Types map[string]ebpf.MapType
}

// What tests carry: enough for each of them, and quickly made.
var defaultSizes = map[string]uint32{
	"mst_ct_v1":       16384,
	"mst_ct_new_v1":   16384,
	"mst_services_v2": 4096,
	"mst_slots_v1":    4096,
	"mst_backends_v1": 4096,
}

// Datapath is one loaded set of programs and tables.
type Datapath struct {
	*loaded
	InPod bool

	nextService uint32
	nextBackend uint32
	generation  uint32
	// flowGeneration stands in the table where the engine's next_generation does.
	flowGeneration uint32
	services       map[serviceID]uint32
	members        map[uint32][]uint32 // of Services with affinity
	backends       map[netip.AddrPort]map[uint8]uint32
	fragID         uint16
	out            []byte
	aged           uint32
}

func newDatapath(l *loaded, o Options) *Datapath {
	return &Datapath{
		loaded:   l,
		InPod:    o.InPod,
		services: map[serviceID]uint32{},
		members:  map[uint32][]uint32{},
		backends: map[netip.AddrPort]map[uint8]uint32{},
		out:      make([]byte, 1<<16+512),
	}
}

// New is a set for one test, as if it had just been loaded (pool.go). At the test's end
// it is no longer the test's.
func New(t testing.TB, o Options) *Datapath {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("loading programs needs root")
	}
	l, err := take(o)
	if err != nil {
		var v *ebpf.VerifierError
		if errors.As(err, &v) {
			t.Fatalf("load: %+v", v)
		}
		t.Fatal(err)
	}
	d := newDatapath(l, o)
	t.Cleanup(func() {
		d.loaded = nil
		giveBack(t, o, l)
	})
	return d
}

// Load loads a set that is the caller's until it closes it.
func Load(o Options) (*Datapath, error) {
	l, err := load(o)
	if err != nil {
		return nil, err
	}
	return newDatapath(l, o), nil
}

func load(o Options) (*loaded, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("raise the memory lock limit: %w", err)
	}
	spec, err := Spec(o)
	if err != nil {
		return nil, err
	}
	datapath.Specialize(spec)
	l := &loaded{beside: map[string]*ebpf.Collection{}}
	if err := spec.LoadAndAssign(&l.PodObjects, nil); err != nil {
		return nil, fmt.Errorf("load the pod programs: %w", err)
	}
	return l, nil
}

// Spec is the compiled programs with o applied.
func Spec(o Options) (*ebpf.CollectionSpec, error) {
	spec, err := bpfgen.LoadPod()
	if err != nil {
		return nil, err
	}
	for name, size := range defaultSizes {
		spec.Maps[name].MaxEntries = size
	}
	for name, size := range o.Sizes {
		spec.Maps[name].MaxEntries = size
	}
	for name, kind := range o.Types {
		spec.Maps[name].Type = kind
	}
	if o.InPod {
		if err := spec.Variables["in_pod"].Set(uint8(1)); err != nil {
			return nil, fmt.Errorf("set in_pod: %w", err)
		}
	}
	if o.FromWire {
		if err := spec.Variables["from_wire"].Set(uint8(1)); err != nil {
			return nil, fmt.Errorf("set from_wire: %w", err)
		}
	}
	if o.FromEdge {
		if err := spec.Variables["from_edge"].Set(uint8(1)); err != nil {
			return nil, fmt.Errorf("set from_edge: %w", err)
		}
	}
	if o.Timeouts != nil {
		if err := spec.Variables["timeouts"].Set(*o.Timeouts); err != nil {
			return nil, fmt.Errorf("set timeouts: %w", err)
		}
	}
	return spec, nil
}

// toPodAlone are the programs for a device of the node.
func toPodAlone(o Options) (*ebpf.CollectionSpec, error) {
	spec, err := Spec(o)
	if err == nil {
		delete(spec.Programs, bpfgen.PodProgFromPod)
	}
	return spec, err
}
