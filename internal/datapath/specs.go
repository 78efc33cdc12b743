// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"weak"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// The compiled objects, each parsed at its first use: what opens a node that is
// set up needs none of them, and what adds a pod to it the entry program alone,
// which stays. Of the others, what is parsed goes with the next collection of
// garbage: it is large, and an agent that runs for weeks needs it at its start.
var (
	podSpec     = passing(bpfgen.LoadPod)
	sockSpec    = passing(bpfgen.LoadSock)
	entrySpec   = sync.OnceValues(loadEntrySpec)
	parentSpec  = passing(bpfgen.LoadParent)
	netdevSpec  = passing(bpfgen.LoadNetdev)
	overlaySpec = passing(bpfgen.LoadOverlay)
	edgeSpec    = passing(bpfgen.LoadEdge)
)

// passing answers what load has answered before for as long as it is in memory.
func passing(load func() (*ebpf.CollectionSpec, error)) func() (*ebpf.CollectionSpec, error) {
	var mu sync.Mutex
	var last weak.Pointer[ebpf.CollectionSpec]
	return func() (*ebpf.CollectionSpec, error) {
		mu.Lock()
		defer mu.Unlock()
		if spec := last.Value(); spec != nil {
			return spec, nil
		}
		spec, err := load()
		last = weak.Make(spec)
		return spec, err
	}
}

// tableSpecs are the specs of every pinned map, by name.
func tableSpecs() (map[string]*ebpf.MapSpec, error) {
	out := make(map[string]*ebpf.MapSpec)
	for _, load := range []func() (*ebpf.CollectionSpec, error){podSpec, sockSpec, entrySpec, parentSpec, netdevSpec, overlaySpec, edgeSpec} {
		c, err := load()
		if err != nil {
			return nil, fmt.Errorf("read the compiled programs: %w", err)
		}
		for name, m := range c.Maps {
			if strings.HasPrefix(name, "mst_") {
				out[name] = m
			}
		}
	}
	return out, nil
}

// tableNames are the keys of tableSpecs, known without parsing anything.
var tableNames = slices.Concat(scratchTables, sharedTables)
