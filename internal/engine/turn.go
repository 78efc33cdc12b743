// SPDX-License-Identifier: Apache-2.0

package engine

// Answers to clients outside that only the program at the NIC's egress can turn
// back: of the node's own sockets, of pods with a child of the NIC, of pods that
// the tables do not know. Where there can be none, none of the node's packets
// pay for it. It is there before the tables lead anybody to such a backend, and
// stays until an edge is set when there are none, nor have been.

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// ownAddrs tells the node's own addresses as the programs know them (of_node of bpf/lib/edge_plan.h): those that
// take node ports, those that flows wear, and those between nodes.
func (e *Engine) ownAddrs(takes []netip.Addr, edge datapath.EdgeConfig) (func(netip.Addr) bool, error) {
	n, _, err := e.dp.Node.Get(0)
	own := withAddrs(takes, edge.Ip4, edge.Ip6, n.Ip4, n.Ip6)
	return func(a netip.Addr) bool { return slices.Contains(own, a) }, err
}

// withAddrs is list and those of more that are there.
func withAddrs(list []netip.Addr, more ...datapath.Addr) []netip.Addr {
	list = slices.Clone(list)
	for _, a := range more {
		if a != (datapath.Addr{}) {
			list = append(list, datapath.ToAddr(a))
		}
	}
	return list
}

// answersLeave says whether answers of b's backends may leave by the NIC as they
// are.
func answersLeave(b state.Binding, own func(netip.Addr) bool) bool {
	// Who keeps the client's address may be led to a pod that the tables do not know.
	return b.KeepSource || slices.ContainsFunc(b.Backends, func(a netip.AddrPort) bool { return own(a.Addr()) })
}

// aboutTurns says whether op brings such a backend.
func (e *Engine) aboutTurns(op operation) (bool, error) {
	edge, _, err := e.dp.Edge.Get(bpfgen.EdgeWire)
	if err != nil {
		return false, err
	}
	own, err := e.ownAddrs(e.services.NodeAddresses(), edge)
	return err == nil && slices.ContainsFunc(op.Upserts, func(b state.Binding) bool { return answersLeave(b, own) }), err
}

// needsTurns is about all that a node with an edge has.
func (e *Engine) needsTurns(takes []netip.Addr, edge datapath.EdgeConfig) (bool, error) {
	if had, err := e.dp.HaveTurned(); had || err != nil {
		return had, err
	}
	if err := e.loadEndpoints(); err != nil {
		return false, err
	}
	for _, ep := range e.known {
		if ep.Placement == state.InPod {
			return true, nil
		}
	}
	own, err := e.ownAddrs(takes, edge)
	return err == nil && slices.ContainsFunc(e.services.List(), func(b state.Binding) bool { return answersLeave(b, own) }), err
}

// ensureTurns has answers turned back wherever clients outside come in: by the
// tunnel first, so that a NIC that has the program says that all is done.
func (e *Engine) ensureTurns() error {
	if e.turning {
		return nil
	}
	edges, err := e.dp.Edges()
	if err != nil || len(edges) == 0 {
		return err
	}
	turns, err := e.dp.Turns()
	if err != nil {
		return err
	}
	missing := slices.DeleteFunc(edges, func(i int) bool { return slices.Contains(turns, i) })
	if len(missing) > 0 {
		e.turning = true
		err = e.syncTunnelEdge()
	}
	for _, index := range missing {
		err = errors.Join(err, e.dp.AttachEdge(index, true))
	}
	e.turning = err == nil
	return err
}

// turns says whether answers are turned back, or are about to be.
func (e *Engine) turns() (bool, error) {
	if e.turning {
		return true, nil
	}
	list, err := e.dp.Turns()
	return len(list) > 0, err
}
