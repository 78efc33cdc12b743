// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
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
	entrySpec   = sync.OnceValues(bpfgen.LoadEntry)
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
var tableNames = []string{
	bpfgen.PodMapMstAffinityV1,
	bpfgen.PodMapMstBackendsV1,
	bpfgen.PodMapMstBackendsV1Now,
	bpfgen.PodMapMstChildrenV1,
	bpfgen.PodMapMstCtNewV1,
	bpfgen.PodMapMstCtNearV1,
	bpfgen.PodMapMstPairsV1,
	bpfgen.PodMapMstCtV1,
	bpfgen.PodMapMstDropsV1,
	bpfgen.PodMapMstEdgeV2,
	bpfgen.PodMapMstEndpointAddrsV1,
	bpfgen.NetdevMapMstEndpointBitsV1,
	bpfgen.PodMapMstEndpointCountersV1,
	bpfgen.PodMapMstEndpointsV1,
	bpfgen.PodMapMstEventRatesV1,
	bpfgen.PodMapMstEventRoomV1,
	bpfgen.PodMapMstEventsV1,
	bpfgen.PodMapMstFactsV1,
	bpfgen.PodMapMstCreditV1,
	bpfgen.PodMapMstFastFrontV1,
	bpfgen.PodMapMstFastV1,
	bpfgen.PodMapMstFastGenerationsV1,
	bpfgen.PodMapMstFragsV1,
	bpfgen.PodMapMstIdentitiesV1,
	bpfgen.PodMapMstIdentitiesV1Now,
	bpfgen.EdgeMapMstFrontendPortsV1,
	bpfgen.PodMapMstJudgmentV1,
	bpfgen.PodMapMstMetaV1,
	bpfgen.PodMapMstNetnsV1,
	bpfgen.EdgeMapMstNobodyV1,
	bpfgen.NetdevMapMstNodeProgramsV1,
	bpfgen.PodMapMstNodeV1,
	bpfgen.PodMapMstParentsV1,
	bpfgen.PodMapMstPeersV1,
	bpfgen.PodMapMstPeersV1Now,
	bpfgen.PodMapMstPoliciesV1,
	bpfgen.PodMapMstPortsV1,
	bpfgen.PodMapMstPortsV1Now,
	bpfgen.PodMapMstPrefixesV1,
	bpfgen.PodMapMstProgramsV1,
	bpfgen.PodMapMstReadersV1,
	bpfgen.PodMapMstRefusalsV1,
	bpfgen.PodMapMstRemoteNetsV1,
	bpfgen.PodMapMstRemotesV1,
	bpfgen.PodMapMstServicesV2,
	bpfgen.PodMapMstServicesV2Now,
	bpfgen.PodMapMstSlotsV1,
	bpfgen.PodMapMstSlotsV1Now,
	bpfgen.PodMapMstSockFlowsV1,
	bpfgen.PodMapMstSockPeersV1,
	bpfgen.PodMapMstSockSlotsV1,
	bpfgen.PodMapMstSourcesV1,
	bpfgen.PodMapMstStoppedV1,
	bpfgen.PodMapMstTunnelPeersV1,
	bpfgen.PodMapMstVoucherV1,
}
