// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/mustang-net/mustang/internal/agent"
	"github.com/mustang-net/mustang/internal/engine"
)

// NodeStatus is mustang on one node.
type NodeStatus struct {
	Node     string         `json:"node"`
	Pod      string         `json:"pod,omitempty"`
	Image    string         `json:"image,omitempty"`
	Ready    bool           `json:"ready"`
	Restarts int32          `json:"restarts"`
	Health   *agent.Health  `json:"health,omitempty"`
	Status   *engine.Status `json:"status,omitempty"`
	Problems []string       `json:"problems,omitempty"` // why there is no more to see
}

// Status asks all nodes at once.
func (c *Cluster) Status(ctx context.Context) ([]NodeStatus, error) {
	members, err := c.members(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]NodeStatus, len(members))
	var wg sync.WaitGroup
	for i, m := range members {
		wg.Go(func() { out[i] = c.nodeStatus(ctx, m) })
	}
	wg.Wait()
	return out, ctx.Err()
}

func (c *Cluster) nodeStatus(ctx context.Context, m member) NodeStatus {
	s := NodeStatus{Node: m.node.Name}
	if m.agent == nil {
		s.Problems = append(s.Problems, "no agent runs there")
		return s
	}
	s.Pod, s.Ready = m.agent.Namespace+"/"+m.agent.Name, isReady(m.agent)
	for _, status := range m.agent.Status.ContainerStatuses {
		if status.Name == container {
			s.Restarts, s.Image = status.RestartCount, status.Image
		}
	}
	ask := func(what string, into any, args ...string) {
		text, err := c.run(ctx, m, args...)
		if len(text) > 0 {
			err = json.Unmarshal(text, into)
		}
		if err != nil {
			s.Problems = append(s.Problems, fmt.Sprintf("%s: %v", what, err))
		}
	}
	ask("status", &s.Status, "status", "-o", "json")
	if because := unseen(s.Status); because != "" {
		s.Problems = append(s.Problems, "status: "+because)
	}
	ask("health", &s.Health, "agent", "health", "--config", "/etc/mustang/agent.yaml")
	return s
}

// unseen is why an agent's status says nothing of it; "" if it does. A tool that
// looks into another scope than the agent's finds nothing amiss there.
func unseen(s *engine.Status) string {
	if s == nil || s.Present {
		return ""
	}
	return fmt.Sprintf("nothing is loaded in %s, though an agent runs: it has not begun yet, or has another bpffs, which MUSTANG_BPFFS is to name in its container", s.BPFFS)
}
