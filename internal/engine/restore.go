// SPDX-License-Identifier: Apache-2.0

package engine

// What is lost of a scope's two halves, the pins and the store, comes from the other as
// far as it can. A store without tables is what a bpffs leaves that was unmounted.

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/state"
)

// isLost says that ep's record went with the store: nobody knows its pod's path, nor
// whose it is, but what an agent has found out since.
func isLost(ep state.Endpoint) bool { return ep.Netns == "" }

// isAsRecorded says that the interface that r is about is still there.
func (e *Engine) isAsRecorded(r state.Endpoint) bool {
	if isLost(r) || !e.alive(r) || e.checkMAC(r) != nil {
		return false
	}
	if r.Placement == state.InPod {
		return true
	}
	l, err := netlink.LinkByIndex(r.IfIndex)
	return err == nil && l.Attrs().Name == r.HostIf
}

// restore makes endpoints again of pods that are there, and that the tables do not know:
// nothing holds them to their policies any more. It goes on past errors, and the
// records of those that it cannot restore stay.
func (e *Engine) restore(records map[uint32]state.Endpoint) {
	for id, r := range records {
		if _, ok := e.known[id]; ok || !e.isAsRecorded(r) {
			continue
		}
		what := "and is restored"
		if err := e.restoreOne(r); err != nil {
			what = fmt.Sprintf("and cannot be restored: %v; make its pod anew", err)
		}
		e.opts.Notify(fmt.Sprintf("endpoint %d (%s in %s) was lost with the tables, %s", id, r.IfName, r.Netns, what))
	}
}

// restoreOne attaches the programs first, which drop what the tables do not know: who is
// killed in between leaves an endpoint that is closed, and restored by the next opening.
func (e *Engine) restoreOne(ep state.Endpoint) error {
	err := e.ensurePrograms(ep)
	if err == nil {
		ep.Generation, err = e.dp.ComingGeneration()
	}
	if err == nil {
		err = e.atHook(ep, func() error { return e.dp.Attach(ep) })
	}
	if err != nil {
		return err
	}
	if err := e.install(ep); err != nil {
		return errors.Join(err, e.endpointTables().Delete(ep, e.known))
	}
	e.known[ep.ID] = ep
	return nil
}
