// SPDX-License-Identifier: Apache-2.0

package observe

// Endpoints by the names that people know them by.

import (
	"cmp"
	"maps"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/state"
)

// endpoints are the node's endpoints by id: what the tables say, with names
// and labels from the records. A record without a table entry is none.
func (n *Node) endpoints() (map[uint32]state.Endpoint, error) {
	slots, err := n.dp.Endpoints.All()
	if err != nil {
		return nil, err
	}
	records, err := n.store.LookEndpoints()
	if err != nil {
		return nil, err
	}
	out := make(map[uint32]state.Endpoint, len(slots))
	for id, slot := range slots {
		if slot.Generation == 0 {
			continue
		}
		ep, known := records[id]
		held := datapath.EndpointOf(id, slot)
		if known {
			held.Netns, held.IfName, held.HostIf, held.PodIndex = ep.Netns, ep.IfName, ep.HostIf, ep.PodIndex
			held.Labels, held.Ports, held.Pod, held.Attach = ep.Labels, ep.Ports, ep.Pod, ep.Attach
		}
		out[id] = held
	}
	return out, nil
}

// endOf is an end without its address.
func endOf(ep state.Endpoint) End {
	e := End{Endpoint: ep.ID}
	e.Namespace, e.Pod = ep.Pod.Namespace, ep.Pod.Name
	if e.Pod == "" { // a namespace alone names no pod
		e.within = cmp.Or(e.Namespace, "default") // as policies take it
		e.Namespace, e.Pod = "", podName(ep)
	}
	e.Labels = maps.Clone(ep.Labels)
	return e
}

// podName is namespace/name where Kubernetes told, else the name of the network
// namespace.
func podName(ep state.Endpoint) string {
	switch {
	case ep.Pod.Name == "":
		return netnsName(ep)
	case ep.Pod.Namespace == "":
		return ep.Pod.Name
	}
	return ep.Pod.Namespace + "/" + ep.Pod.Name
}

// netnsName is what people call a network namespace; a process's is its path.
func netnsName(ep state.Endpoint) string {
	if ep.Netns == "" || strings.HasPrefix(ep.Netns, "/proc/") {
		return ep.Netns
	}
	return filepath.Base(ep.Netns)
}

// nameCache knows endpoints for the reader of a stream: those that are gone,
// too, until another gets their id.
type nameCache struct {
	n     *Node
	mu    sync.Mutex
	known map[uint32]state.Endpoint
	read  time.Time

	model     PolicyNames
	modelRead time.Time
	unnamed   map[uint64]time.Time // sets that the model had no name for → when it was last read for them
}

// A pod's name may be asked for before its record is written, and it may change.
const (
	nameAge      = 2 * time.Second
	nameAgeGuess = 100 * time.Millisecond // of one that is not known
)

func (c *nameCache) endpoint(id uint32) (state.Endpoint, bool) {
	if id == 0 {
		return state.Endpoint{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ep, known := c.known[id]
	if age := time.Since(c.read); age < nameAgeGuess || known && age < nameAge {
		return ep, known
	}
	c.read = time.Now()
	now, err := c.n.endpoints()
	if err != nil {
		return ep, known // an old name is better than none
	}
	if c.known == nil {
		c.known = now
	}
	for id, ep := range now {
		c.known[id] = ep
	}
	ep, known = c.known[id]
	return ep, known
}
