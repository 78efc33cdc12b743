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

	"github.com/mustang-net/mustang/internal/state"
)

// answersLeave says whether answers of b's backends may leave by the NIC as they
// are. own tells the node's own addresses, as far as they take node ports.
func answersLeave(b state.Binding, own func(netip.Addr) bool) bool {
	// Who keeps the client's address may be led to a pod that the tables do not know.
	return b.KeepSource || slices.ContainsFunc(b.Backends, func(a netip.AddrPort) bool { return own(a.Addr()) })
}

// aboutTurns says whether op brings such a backend.
func (e *Engine) aboutTurns(op operation) bool {
	return slices.ContainsFunc(op.Upserts, func(b state.Binding) bool { return answersLeave(b, e.services.OfNode) })
}

// needsTurns is about all that the node has, with these addresses of its own; none:
// there is no edge.
func (e *Engine) needsTurns(own []netip.Addr) (bool, error) {
	if len(own) == 0 {
		return false, nil
	}
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
	isOwn := func(a netip.Addr) bool { return slices.Contains(own, a) }
	return slices.ContainsFunc(e.services.List(), func(b state.Binding) bool { return answersLeave(b, isOwn) }), nil
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
