// SPDX-License-Identifier: Apache-2.0

package agent

// What Nodes say: where this one is, and how the pods of the others are
// reached.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

func aboutNodes(changes []k8s.Change) bool {
	return slices.ContainsFunc(changes, func(c k8s.Change) bool { return c.Kind == k8s.Nodes })
}

// place follows this node's zone, which the choice of backends depends on.
func (s *syncer) place(ctx context.Context, changes []k8s.Change) {
	if !aboutNodes(changes) {
		return
	}
	self := s.a.watch.Nodes.Get(s.a.nodeKey())
	if self == nil {
		s.a.log.Warn(fmt.Sprintf("there is no Node %q: endpoints of this node are not known as such until it is there; give its name by node", s.a.config.Node))
		return
	}
	zone := self.Zone()
	if zone == s.zone {
		return
	}
	err := s.a.with(ctx, func(e *engine.Engine) error {
		e.SetPlace(service.Node{Name: s.a.config.Node, Zone: zone})
		return nil
	})
	if err == nil {
		s.zone, s.whole, s.due = zone, true, time.Time{}
	}
}

// members gives the engine the nodes of the cluster. One that cannot be used is
// named and left out.
func (s *syncer) members(ctx context.Context, changes []k8s.Change) {
	if s.a.config.NodeMode == None {
		s.leaveMembers(ctx)
		return
	}
	if !aboutNodes(changes) && !s.membersRetry.again() && (!s.nodesBeside || s.membersRetry.rests()) {
		return
	}
	start := time.Now()
	beside, ours, most, err := s.a.nodesInForce(ctx)
	list, wrong := s.a.nodes(beside)
	if err == nil {
		var unfit []string
		list, unfit = fitting(list, ours, s.a.config.Node, most-len(beside))
		wrong = append(wrong, unfit...)
	}
	s.nodesBeside = len(beside) > 0
	for _, sentence := range wrong {
		if !slices.Contains(s.nodeProblems, sentence) {
			s.a.log.Warn("a Node is not used", "problem", sentence)
		}
	}
	s.nodeProblems = wrong
	same := func(a, b state.Node) bool { return a.Equal(b) }
	if err == nil && s.membersKnown && !s.membersRetry.fails() && slices.EqualFunc(list, s.nodeList, same) {
		return // a heartbeat, or a label
	}
	if err == nil {
		err = s.a.with(ctx, func(e *engine.Engine) error { return s.applyNodes(e, list) })
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		s.membersRetry.wait(start)
		s.a.metrics.failures.Inc()
		s.a.log.Error("the nodes could not be brought into force; they stay as they were, and are tried again", "nodes", len(list), "error", err)
		return
	}
	s.membersRetry.succeeded()
	s.nodeList, s.membersKnown = list, true
	s.a.log.Info("nodes are in force", "nodes", len(list), "mode", s.a.config.NodeMode)
}

// applyNodes makes list the nodes of Kubernetes; at the agent's start, this node's settings
// what the agent's say: from then on somebody may try others by `mustang node set`. A pod that cannot be told its MTU is told
// by who follows the devices: it is no reason to call the nodes' way not in force.
func (s *syncer) applyNodes(e *engine.Engine, list []state.Node) error {
	var settings node.SettingsSpec
	if !s.membersKnown && s.a.config.NodeMode != None {
		settings = s.a.config.settings()
	}
	err := e.ApplyNodes(state.OwnerKubernetes, list, settings)
	if errors.Is(err, engine.ErrUntold) {
		s.a.log.Warn("the nodes are in force, and a pod keeps an MTU of before", "error", err)
		return nil
	}
	return err
}

// leaveMembers takes away, once, what an agent with another node-mode has left:
// nobody else may.
func (s *syncer) leaveMembers(ctx context.Context) {
	if s.membersKnown || s.membersRetry.rests() {
		return
	}
	left, start := false, time.Now()
	err := s.a.with(ctx, func(e *engine.Engine) error {
		list, _, err := e.Nodes()
		left = slices.ContainsFunc(list, func(n state.Node) bool { return n.Owner == state.OwnerKubernetes })
		if err != nil || !left {
			return err
		}
		return s.applyNodes(e, nil)
	})
	if ctx.Err() != nil {
		return
	}
	if s.membersKnown = err == nil; s.membersKnown {
		s.membersRetry.succeeded()
	}
	switch {
	case err != nil:
		s.membersRetry.wait(start)
		s.a.metrics.failures.Inc()
		s.a.log.Error("the nodes that another node-mode has left could not be taken away; it is tried again", "error", err)
	case left:
		s.a.log.Info("the nodes that another node-mode has left are gone")
	}
}

// followDevices keeps what depends on this node's devices up to date.
func (a *Agent) followDevices(ctx context.Context) error {
	return node.Follow(ctx, func() error {
		err := a.lookAtDevices(ctx)
		select {
		case a.sync.devices <- struct{}{}:
		default: // it will look anyway
		}
		return err
	})
}

// lookAtDevices has the ways to other nodes be as this node's devices ask. Nobody tells of programs that somebody
// has taken off.
func (a *Agent) lookAtDevices(ctx context.Context) error {
	err := a.with(ctx, func(e *engine.Engine) error {
		changed, err := e.FollowDevices()
		if changed && err == nil {
			a.log.Info("the ways to other nodes follow this node's devices")
		}
		return err
	})
	switch {
	case ctx.Err() != nil:
	case errors.Is(err, engine.ErrUntold):
		a.log.Warn("a pod keeps an MTU of before; it is told again", "error", err)
		a.kept.devices.failed.Store(nil)
	default:
		a.keeps(&a.kept.devices, err, "the ways to other nodes do not follow this node's devices; it is tried again")
	}
	return err
}

// oneOfEach is the first address of each family: a node may have more.
func oneOfEach(list []netip.Addr) []netip.Addr {
	var out []netip.Addr
	for _, a := range list {
		if !slices.ContainsFunc(out, func(o netip.Addr) bool { return o.Is4() == a.Is4() }) {
			out = append(out, a)
		}
	}
	return out
}

// hasFamilyOf says whether some address could be the next hop to p. A node without
// any is named for that.
func hasFamilyOf(p netip.Prefix, addrs []netip.Addr) bool {
	return len(addrs) == 0 || slices.ContainsFunc(addrs, func(a netip.Addr) bool { return a.Is4() == p.Addr().Is4() })
}

// nodesInForce are the nodes that are not Kubernetes's, which stay, and when they go, nobody
// tells; those that are; and how many there may be of both.
func (a *Agent) nodesInForce(ctx context.Context) (beside, ours []state.Node, most int, err error) {
	err = a.with(ctx, func(e *engine.Engine) error {
		list, _, err := e.Nodes()
		if err != nil {
			return err
		}
		for _, n := range list {
			if n.Owner == state.OwnerKubernetes {
				ours = append(ours, n)
			} else {
				beside = append(beside, n)
			}
		}
		most, err = e.MaxNodes()
		return err
	})
	return beside, ours, most, err
}

// fitting leaves out, and names, the nodes that are too many: this one comes first, then
// those in force, then the others. list is by name.
func fitting(list, inForce []state.Node, self string, room int) (out []state.Node, wrong []string) {
	if len(list) <= room {
		return list, nil
	}
	place := map[string]int{}
	for _, n := range inForce {
		place[n.Name] = -1
	}
	place[self] = -2
	out = slices.Clone(list)
	slices.SortStableFunc(out, func(a, b state.Node) int { return place[a.Name] - place[b.Name] })
	for _, n := range out[max(room, 0):] {
		wrong = append(wrong, fmt.Sprintf("node %s: the table of nodes is full, so it is left out until another is gone", n.Name))
	}
	out = out[:max(room, 0)]
	slices.SortFunc(out, byName)
	return out, wrong
}

func byName(a, b state.Node) int { return strings.Compare(a.Name, b.Name) }

// nodes are the cluster's nodes that can be used beside these, by name, and what is
// wrong with the others.
func (a *Agent) nodes(beside []state.Node) (list []state.Node, wrong []string) {
	born := map[string]int64{}
	for key, n := range a.watch.Nodes.All() {
		born[key.Name] = n.Created
		spec := node.Spec{Name: key.Name, Mode: a.config.NodeMode}
		for _, addr := range oneOfEach(n.Addrs) {
			spec.Address = append(spec.Address, addr.String())
		}
		for _, cidr := range n.PodCIDRs {
			if a.config.NodeMode == string(state.NodeDirect) && !hasFamilyOf(cidr, n.Addrs) {
				wrong = append(wrong, fmt.Sprintf("node %s: it has no address of the family of its pod CIDR %s, which is left out; give it one (the kubelet's --node-ip), or use node-mode vxlan", key.Name, cidr))
				continue
			}
			spec.PodCIDRs = append(spec.PodCIDRs, cidr.String())
		}
		for _, p := range n.Problems {
			wrong = append(wrong, "node "+key.Name+": "+p)
		}
		one, err := node.Parse(spec)
		if err != nil {
			wrong = append(wrong, err.Error())
			continue
		}
		one.Owner = state.OwnerKubernetes
		list = append(list, one)
	}
	born[a.config.Node] = math.MaxInt64
	// Who claims what this node has, or a younger one, is a Node from before, of the same machine.
	slices.SortFunc(list, func(x, y state.Node) int {
		return cmp.Or(cmp.Compare(born[y.Name], born[x.Name]), byName(x, y))
	})
	used, others, set := list[:0], node.SetOf(beside), node.Set{}
	for _, n := range list {
		if err := others.Conflict(n); err != nil {
			wrong = append(wrong, fmt.Sprintf("%v (what is there is the command line's: mustang node rm)", err))
			continue
		}
		if err := set.Add(n); err != nil {
			wrong = append(wrong, err.Error())
			continue
		}
		used = append(used, n)
	}
	used, apart := a.tunnelled(used, beside)
	wrong = append(wrong, apart...)
	slices.SortFunc(used, byName)
	slices.Sort(wrong)
	return used, wrong
}

// tunnelled leaves out the nodes that no tunnel can lead to, and says so: they have
// no address of a family that this one has.
func (a *Agent) tunnelled(list, beside []state.Node) (out []state.Node, apart []string) {
	all := slices.Concat(list, beside)
	i := slices.IndexFunc(all, func(n state.Node) bool { return n.Name == a.config.Node })
	if i < 0 {
		return list, nil
	}
	self := all[i]
	for _, n := range list {
		if n.Mode == state.NodeVXLAN && !n.Underlay(self).IsValid() {
			apart = append(apart, fmt.Sprintf("node %s: %s has no address of the family of %v, so no tunnel leads there; give both nodes one of the same", n.Name, self.Name, n.Addrs))
			continue
		}
		out = append(out, n)
	}
	return out, apart
}
