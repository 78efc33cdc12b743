// SPDX-License-Identifier: Apache-2.0

package service

import (
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/state"
)

// Node is what the choice of backends depends on.
type Node struct {
	Name string
	Zone string // the label topology.kubernetes.io/zone
}

// Selection is which backends of a port and family this node uses.
type Selection struct {
	Cluster []netip.AddrPort // under the policy Cluster
	Local   []netip.AddrPort // under the policy Local
	// Any: some backend could serve, be it on another node. Without one the
	// Service refuses; with one, but none here, the policy Local drops.
	Any bool
}

// Select picks the backends of one port and family.
//
//   - Ready ones are used. When none is ready, those that serve while they
//     terminate are (KEP-1669), under Local looking at this node's only.
//   - Hints narrow the policy Cluster: to those for this node when every ready
//     one has hints for nodes and one has this node's (KEP-3015); else to
//     those for this zone, likewise (KEP-2433). Local ignores them, and so does
//     the fallback to terminating ones.
func Select(backends []state.ServiceBackend, v6 bool, node Node) Selection {
	all := family(backends, v6)
	ready := filter(all, func(b state.ServiceBackend) bool { return b.Ready })
	last := filter(all, func(b state.ServiceBackend) bool { return !b.Ready && b.Serving && b.Terminating })
	isLocal := func(b state.ServiceBackend) bool { return b.Local }

	s := Selection{Any: len(ready)+len(last) > 0}
	s.Cluster = addrs(near(ready, node))
	if len(ready) == 0 {
		s.Cluster = addrs(last)
	}
	s.Local = addrs(filter(ready, isLocal))
	if len(s.Local) == 0 {
		s.Local = addrs(filter(last, isLocal))
	}
	return s
}

// near is those of ready that the hints lead this node to.
func near(ready []state.ServiceBackend, node Node) []state.ServiceBackend {
	for _, hint := range []struct {
		of   func(state.ServiceBackend) []string
		mine string
	}{
		{func(b state.ServiceBackend) []string { return b.ForNodes }, node.Name},
		{func(b state.ServiceBackend) []string { return b.ForZones }, node.Zone},
	} {
		hinted := !slices.ContainsFunc(ready, func(b state.ServiceBackend) bool { return len(hint.of(b)) == 0 })
		mine := filter(ready, func(b state.ServiceBackend) bool { return slices.Contains(hint.of(b), hint.mine) })
		if hinted && hint.mine != "" && len(mine) > 0 {
			return mine
		}
	}
	return ready
}

// family is the backends of a family, each address and port once: slices may
// name an endpoint twice while it moves between them, and its best condition
// counts.
func family(backends []state.ServiceBackend, v6 bool) []state.ServiceBackend {
	out := make([]state.ServiceBackend, 0, len(backends))
	at := make(map[netip.AddrPort]int, len(backends))
	for _, b := range backends {
		if b.AddrPort.Addr().Is6() != v6 {
			continue
		}
		i, twice := at[b.AddrPort]
		if !twice {
			at[b.AddrPort] = len(out)
			out = append(out, b)
		} else if rank(b) > rank(out[i]) {
			out[i] = b
		}
	}
	return out
}

func rank(b state.ServiceBackend) int {
	switch {
	case b.Ready:
		return 2
	case b.Serving && b.Terminating:
		return 1
	}
	return 0
}

func filter(list []state.ServiceBackend, keep func(state.ServiceBackend) bool) []state.ServiceBackend {
	var out []state.ServiceBackend
	for _, b := range list {
		if keep(b) {
			out = append(out, b)
		}
	}
	return out
}

func addrs(list []state.ServiceBackend) []netip.AddrPort {
	var out []netip.AddrPort
	for _, b := range list {
		out = append(out, b.AddrPort)
	}
	return out
}
