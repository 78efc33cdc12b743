// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/state"
)

// RemoveEndpoint gives endpoint id back to plain kernel networking.
func (e *Engine) RemoveEndpoint(id uint32) error {
	if err := e.loadEndpoints(); err != nil {
		return err
	}
	ep, ok := e.known[id]
	if !ok {
		return fmt.Errorf("endpoint %d: %w; `mustang ep ls` lists those that exist", id, ErrNotFound)
	}
	return e.remove(ep, false)
}

// RemovePod is RemoveEndpoint for a pod that is gone, or about to be: the
// connections through Services to its addresses end, too, and no flow of its own
// is left to the next pod that has them.
func (e *Engine) RemovePod(id uint32) error {
	if err := e.loadEndpoints(); err != nil {
		return err
	}
	ep, ok := e.known[id]
	if !ok {
		return fmt.Errorf("endpoint %d: %w; `mustang ep ls` lists those that exist", id, ErrNotFound)
	}
	return e.remove(ep, true)
}

// remove removes ep; gone: its pod, too, will not be there any more.
func (e *Engine) remove(ep state.Endpoint, gone bool) error {
	e.moved = time.Now()
	op := e.removal(ep, gone)
	if err := e.begin(op); err != nil {
		return err
	}
	if gone {
		e.shut(ep)
	}
	if err := e.uninstall(ep); err != nil {
		// The journal stays: the next tool goes on from here.
		return err
	}
	delete(e.known, ep.ID)
	e.leftMasquerade(ep)
	e.settle(op.Departures)
	return e.completed()
}

// removal is what remove journals.
func (e *Engine) removal(ep state.Endpoint, gone bool) operation {
	op := operation{Kind: opRemoveEndpoint, Endpoint: &ep}
	if gone || !e.alive(ep) {
		op.Departures.Pods = ep.Addrs()
	}
	return op
}

// shut takes the interface of a pod that goes down, for without its programs
// it would carry what policy denies. It may be gone already, and its number
// another's.
func (e *Engine) shut(ep state.Endpoint) {
	name := ep.HostIf
	if ep.Placement == state.InPod {
		name = ep.IfName
	}
	_ = e.atHook(ep, func() error {
		l, err := netlink.LinkByIndex(ep.IfIndex)
		if err != nil || l.Attrs().Name != name {
			return err
		}
		return netlink.LinkSetDown(l)
	})
}

func (e *Engine) finishRemove(ep state.Endpoint) error {
	known, err := e.endpointTables().List()
	if err != nil {
		return err
	}
	e.known = known
	err = e.uninstall(ep)
	e.known = nil
	if err == nil {
		e.leftMasquerade(ep)
	}
	return err
}

// uninstall removes ep everywhere; doing it again is harmless. The programs go
// first: they drop the packets of an interface that the tables do not know. From there on
// it goes past errors: a record that stays would be restored.
func (e *Engine) uninstall(ep state.Endpoint) error {
	if err := errors.Join(e.dp.Detach(ep.ID), e.detachFilters(ep)); err != nil {
		return err
	}
	if err := errors.Join(e.releaseParent(ep), e.endpointTables().Delete(ep, e.known)); err != nil {
		return err
	}
	return errors.Join(e.unisolate(ep), e.unmasquerade(ep), e.dp.Counters.Zero(ep.ID), e.store.DeleteEndpoint(ep.ID))
}

// detachFilters also takes off the qdisc that was made for them, if they have become links
// since (settle.go).
func (e *Engine) detachFilters(ep state.Endpoint) error {
	if ep.Attach != datapath.AttachClsact && !ep.Qdisc {
		return nil
	}
	return e.atHook(ep, func() error { return datapath.DetachFilters(ep) })
}
