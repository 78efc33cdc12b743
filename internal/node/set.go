// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/state"
)

// Set is nodes that agree with each other. To ask whether one more does costs no look at each:
// of thousands, all are asked about whenever one of them changes.
type Set struct {
	names map[string]bool
	owner map[netip.Addr]string
	addrs []netip.Addr // sorted
	pods  []podCIDR    // sorted; none overlaps another
}

// podCIDR is one of a node's.
type podCIDR struct {
	netip.Prefix
	node   string
	tunnel bool // leads there
}

// SetOf is a set of nodes that have been found to agree.
func SetOf(list []state.Node) *Set {
	s := &Set{}
	for _, n := range list {
		_ = s.Add(n)
	}
	return s
}

// Add adds n, if that agrees.
func (s *Set) Add(n state.Node) error {
	if err := s.Conflict(n); err != nil {
		return err
	}
	if s.names == nil {
		s.names, s.owner = map[string]bool{}, map[netip.Addr]string{}
	}
	s.names[n.Name] = true
	for _, a := range n.Addrs {
		s.owner[a] = n.Name
		s.addrs = slices.Insert(s.addrs, s.addressFrom(a), a)
	}
	for _, p := range n.PodCIDRs {
		s.pods = slices.Insert(s.pods, s.podsFrom(p.Addr()), podCIDR{p, n.Name, n.Mode == state.NodeVXLAN})
	}
	return nil
}

// Conflict refuses n when a node of the set has its name, an address or a part of
// its pods' networks, or when a tunnel would be led into itself.
func (s *Set) Conflict(n state.Node) error {
	if s.names[n.Name] {
		return fmt.Errorf("node %s is there twice: remove one", n.Name)
	}
	for _, a := range n.Addrs {
		if o, taken := s.owner[a]; taken {
			return fmt.Errorf("node %s: address %s is node %s's: give each its own", n.Name, a, o)
		}
	}
	for _, p := range n.PodCIDRs {
		if q, overlaps := s.overlapping(p); overlaps {
			return fmt.Errorf("node %s: pod CIDR %s overlaps %s of node %s: give each its own", n.Name, p, q.Prefix, q.node)
		}
		if n.Mode != state.NodeVXLAN {
			continue
		}
		if i := slices.IndexFunc(n.Addrs, p.Contains); i >= 0 {
			return intoTheTunnel(n.Name, p, n.Addrs[i], n.Name)
		}
		if i := s.addressFrom(p.Addr()); i < len(s.addrs) && p.Contains(s.addrs[i]) {
			return intoTheTunnel(n.Name, p, s.addrs[i], s.owner[s.addrs[i]])
		}
	}
	for _, a := range n.Addrs {
		if q, has := s.overlapping(netip.PrefixFrom(a, a.BitLen())); has && q.tunnel {
			return intoTheTunnel(q.node, q.Prefix, a, n.Name)
		}
	}
	return nil
}

// intoTheTunnel is about pods' networks with an address of the node o, when a tunnel
// leads to them: what the tunnel sends to o would be sent into the tunnel.
func intoTheTunnel(name string, p netip.Prefix, a netip.Addr, o string) error {
	return fmt.Errorf("node %s: pod CIDR %s has the address %s of node %s, to which the tunnel itself must find: give pods another", name, p, a, o)
}

// addressFrom is where the first address lies that is a or comes after it.
func (s *Set) addressFrom(a netip.Addr) int {
	i, _ := slices.BinarySearchFunc(s.addrs, a, netip.Addr.Compare)
	return i
}

// podsFrom is the same of pods' networks, by their first addresses.
func (s *Set) podsFrom(a netip.Addr) int {
	i, _ := slices.BinarySearchFunc(s.pods, a, func(q podCIDR, a netip.Addr) int { return q.Addr().Compare(a) })
	return i
}

// overlapping is a network of pods that shares an address with p: the last that begins
// before p, or the first that does not.
func (s *Set) overlapping(p netip.Prefix) (podCIDR, bool) {
	i := s.podsFrom(p.Addr())
	for _, q := range s.pods[max(i-1, 0):min(i+1, len(s.pods))] {
		if q.Overlaps(p) {
			return q, true
		}
	}
	return podCIDR{}, false
}
