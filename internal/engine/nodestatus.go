// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"slices"

	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// NodesStatus is this node among others.
type NodesStatus struct {
	Self        string            `json:"self"` // this node's name; "" when the list has none of its addresses
	HostRouting state.HostRouting `json:"host_routing"`
	Direct      int               `json:"direct"` // other nodes, by how their pods are reached
	VXLAN       int               `json:"vxlan"`
	Devices     []string          `json:"devices"`           // that carry the NIC's program
	PodMTU      int               `json:"pod_mtu,omitempty"` // of what pods send to other nodes
	Wire        []peers.Probe     `json:"wire"`              // what came of asking each node: AskNodes

	remotes []state.Node
}

// AskNodes sends echoes to all other nodes, and waits for those that do not answer. It
// needs no engine: whoever has one should let others have it meanwhile.
func (s *Status) AskNodes() {
	if s.Nodes == nil {
		return
	}
	s.Nodes.Wire = peers.ProbeWire(s.Nodes.remotes)
	for _, p := range s.Nodes.Wire {
		if p.Fault != "" {
			s.Warnings = append(s.Warnings, fmt.Sprintf("node %s at %s %s", p.Node, p.Address, p.Fault))
		}
	}
}

// nodesStatus is nil when this node knows of no other.
func (e *Engine) nodesStatus() (*NodesStatus, []string, error) {
	n, err := e.store.Nodes()
	if err != nil || len(n.Nodes) == 0 {
		return nil, nil, err
	}
	self, remotes, err := remotesOf(n)
	if err != nil {
		return nil, nil, err
	}
	set, bare, err := routingOf(n, remotes)
	if err != nil {
		return nil, nil, err
	}
	s := &NodesStatus{Self: self.Name, HostRouting: set.HostRouting, PodMTU: n.ToldMTU(), Devices: []string{}, Wire: []peers.Probe{}, remotes: remotes}
	for _, r := range remotes {
		if r.Mode == state.NodeVXLAN {
			s.VXLAN++
		} else {
			s.Direct++
		}
	}
	warnings := []string{}
	if bare != "" {
		warnings = append(warnings, fmt.Sprintf("nodes are reached by %s, which carries IP without a link header: programs see nothing of what comes there, so host routing is legacy (node mode vxlan has eBPF forward)", bare))
	}
	if s.Self == "" {
		warnings = append(warnings, "no node of the list has an address of this machine: `mustang node add` this node, too")
	}
	if current, err := e.selfCurrent(self, remotes); err == nil && !current && s.Self != "" {
		warnings = append(warnings, fmt.Sprintf("this node has got the address of %s since the list came, and is taken for another; `mustang node sync` tells the programs", s.Self))
	}
	devices, err := peers.Devices(set.Devices, self, remotes)
	if err = errors.Join(err, peers.CheckDevices(set.Devices)); err != nil {
		warnings = append(warnings, err.Error())
	}
	attached := e.dp.WireDevices()
	for _, d := range devices {
		if slices.Contains(attached, d.Index) {
			s.Devices = append(s.Devices, d.Name)
		} else if set.HostRouting == state.RoutingEBPF && len(remotes) > 0 {
			warnings = append(warnings, fmt.Sprintf("device %s leads to other nodes and does not carry mustang's program, so the host's stack forwards what comes by it; `mustang node sync` attaches it", d.Name))
		}
	}
	if mtu, _, err := podMTU(n); err == nil && mtu != n.ToldMTU() {
		warnings = append(warnings, fmt.Sprintf("the devices to other nodes leave pods %d bytes, and pods were told %d; `mustang node sync` tells them anew", mtu, n.ToldMTU()))
	} else if len(n.Telling) > 0 {
		warnings = append(warnings, fmt.Sprintf("not all pods could be told that they send other nodes up to %d bytes; `mustang node sync` tries again, and says what is in the way", n.ToldMTU()))
	}
	if set.HostRouting == state.RoutingEBPF && len(remotes) > 0 {
		unseen, err := peers.UnseenMTUs(devices)
		if err != nil {
			warnings = append(warnings, err.Error())
		}
		for _, route := range unseen {
			warnings = append(warnings, fmt.Sprintf("the route to %s, and programs send longer packets there, for the kernel tells them no MTU that is not locked: write `mtu lock`", route))
		}
	}
	return s, warnings, nil
}
