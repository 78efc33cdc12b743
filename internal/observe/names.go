// SPDX-License-Identifier: Apache-2.0

package observe

// Endpoints by the names that people know them by.

import (
	"path/filepath"
	"strings"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/state"
)

// Labels that a pod carries its Kubernetes name in, as container runtimes write
// them.
const (
	LabelPodName      = "io.kubernetes.pod.name"
	LabelPodNamespace = "io.kubernetes.pod.namespace"
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
		ep := datapath.EndpointOf(id, slot)
		r := records[id]
		ep.Netns, ep.IfName, ep.HostIf, ep.PodIndex, ep.Labels, ep.Attach = r.Netns, r.IfName, r.HostIf, r.PodIndex, r.Labels, r.Attach
		out[id] = ep
	}
	return out, nil
}

// podName is namespace/name where the labels tell it, else the name of the
// network namespace.
func podName(ep state.Endpoint) string {
	if name := ep.Labels[LabelPodName]; name != "" {
		if ns := ep.Labels[LabelPodNamespace]; ns != "" {
			return ns + "/" + name
		}
		return name
	}
	if ep.Netns == "" {
		return ""
	}
	if dir, last := filepath.Split(ep.Netns); last == "net" && strings.HasPrefix(dir, "/proc/") {
		return ep.Netns
	}
	return filepath.Base(ep.Netns)
}
