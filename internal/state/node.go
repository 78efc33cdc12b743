// SPDX-License-Identifier: Apache-2.0

package state

import (
	"net/netip"
	"slices"
)

// NodeMode says how the pods of a node are reached.
type NodeMode string

const (
	NodeDirect NodeMode = "direct" // routed as they are: a shared link, or a network that knows the pods
	NodeVXLAN  NodeMode = "vxlan"  // in a tunnel
)

// HostRouting says who forwards between a pod and the wire.
type HostRouting string

const (
	RoutingEBPF   HostRouting = "ebpf"   // programs, past the host's stack and firewall
	RoutingLegacy HostRouting = "legacy" // the host's stack
)

// Node is one node of the cluster as this one knows it; its own entry is the
// one that has an address of this machine.
type Node struct {
	Name     string         `json:"name"`
	Owner    Owner          `json:"owner"`
	Addrs    []netip.Addr   `json:"addresses"` // on the wire between nodes; at most one of each family
	PodCIDRs []netip.Prefix `json:"pod_cidrs"`
	Mode     NodeMode       `json:"mode"`
	// Ref is what flows' entries call it by: its slot in the table of nodes, and
	// in the upper half a number that tells it from others that had the slot.
	Ref uint32 `json:"ref,omitempty"`
}

// Addr is the node's address of a family; invalid when it has none.
func (n Node) Addr(is4 bool) netip.Addr {
	for _, a := range n.Addrs {
		if a.Is4() == is4 {
			return a
		}
	}
	return netip.Addr{}
}

// Underlay is where a tunnel to n ends: of the two families the one that this
// node, too, has an address of; IPv4 first.
func (n Node) Underlay(self Node) netip.Addr {
	for _, is4 := range []bool{true, false} {
		if a := n.Addr(is4); a.IsValid() && self.Addr(is4).IsValid() {
			return a
		}
	}
	return netip.Addr{}
}

// Equal compares all but Ref.
func (n Node) Equal(m Node) bool {
	return n.Name == m.Name && n.Owner == m.Owner && n.Mode == m.Mode &&
		slices.Equal(n.Addrs, m.Addrs) && slices.Equal(n.PodCIDRs, m.PodCIDRs)
}

// NodeSettings are this node's own.
type NodeSettings struct {
	HostRouting HostRouting `json:"host_routing"`
	Devices     []string    `json:"devices,omitempty"` // to the other nodes; none: found by routes and addresses
	VNI         uint32      `json:"vni"`               // of the tunnel
	Port        uint16      `json:"port"`              // UDP, of the tunnel
}
