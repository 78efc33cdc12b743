// SPDX-License-Identifier: Apache-2.0

// Package cluster looks at mustang on all nodes of a cluster, for a person with
// a kubeconfig: status, a test of connectivity, a dump for a report. What it
// makes in the cluster it removes.
package cluster

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/mustang-net/mustang/internal/k8s"
)

// selector finds the agents, container is theirs.
const (
	selector  = "app.kubernetes.io/name=mustang"
	container = "agent"
)

// Cluster is one, seen with a person's rights.
type Cluster struct {
	api  *k8s.Admin
	note func(string) // progress, a sentence each
}

// Connect reads the kubeconfig: "" is the one that kubectl would take.
func Connect(kubeconfig string, note func(string)) (*Cluster, error) {
	api, err := k8s.ConnectAdmin(kubeconfig)
	if err != nil {
		return nil, err
	}
	return &Cluster{api, note}, nil
}

// member is a node and its agent's pod, if there is one.
type member struct {
	node  corev1.Node
	agent *corev1.Pod
}

// members are all nodes, by name.
func (c *Cluster) members(ctx context.Context) ([]member, error) {
	var nodes corev1.NodeList
	var pods corev1.PodList
	if err := c.api.Get(ctx, "/api/v1/nodes", &nodes); err != nil {
		return nil, err
	}
	if err := c.api.Get(ctx, "/api/v1/pods?labelSelector="+url.QueryEscape(selector), &pods); err != nil {
		return nil, err
	}
	agents := map[string]*corev1.Pod{}
	for i := range pods.Items {
		p := &pods.Items[i]
		isAgent := slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return c.Name == container })
		// Labels are anybody's. What is taken for an agent has its commands run and its image
		// started on nodes: it is one that its namespace lets be in a node's network.
		isAgent = isAgent && p.Spec.HostNetwork
		// While an agent is replaced there are two: the one that stays counts.
		if isAgent && (agents[p.Spec.NodeName] == nil || p.DeletionTimestamp == nil) {
			agents[p.Spec.NodeName] = p
		}
	}
	var out []member
	for _, n := range nodes.Items {
		out = append(out, member{n, agents[n.Name]})
	}
	slices.SortFunc(out, func(a, b member) int { return cmp.Compare(a.node.Name, b.node.Name) })
	if len(agents) == 0 {
		return out, fmt.Errorf("no agent of mustang is in this cluster (%s): no pod has the label %s; install it: `kubectl apply -f deploy/mustang.yaml`", c.api.Server(), selector)
	}
	return out, nil
}

// patience is how long a command in an agent may take, and its log. One that hangs is
// what somebody may be looking for.
var patience = time.Minute

// run runs mustang in a member's agent.
func (c *Cluster) run(ctx context.Context, m member, args ...string) ([]byte, error) {
	if m.agent == nil {
		return nil, errors.New("no agent runs on this node")
	}
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	text, err := c.api.Exec(within, m.agent.Namespace, m.agent.Name, container, append([]string{"/bin/mustang"}, args...)...)
	if late(ctx, within, err) {
		err = fmt.Errorf("no answer within %v; see the agent's log and its node", patience)
	}
	return text, err
}

// log is a member's agent's log, or what has come of it.
func (c *Cluster) log(ctx context.Context, m member, previous bool) ([]byte, error) {
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var text bytes.Buffer
	err := c.api.Log(within, m.agent.Namespace, m.agent.Name, container, previous, &text)
	if err != nil && late(ctx, within, err) {
		err = fmt.Errorf("the log did not come whole within %v; see the node", patience)
	}
	return text.Bytes(), err
}

// late says that what was to be done within a part of ctx's time was not. The connection's
// clock may strike before the context's.
func late(ctx, within context.Context, err error) bool {
	return ctx.Err() == nil && (within.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded))
}

func isReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// addressesOf are a node's internal addresses.
func addressesOf(n corev1.Node) (out []netip.Addr) {
	for _, a := range n.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
			out = append(out, addr)
		}
	}
	return out
}
