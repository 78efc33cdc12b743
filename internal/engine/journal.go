// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/state"
	"github.com/mustang-net/mustang/internal/store"
)

// Kinds of operations.
const (
	opServices       = "services"
	opAddEndpoint    = "add endpoint"
	opRemoveEndpoint = "remove endpoint"
	opReset          = "reset"
	opGone           = "end connections"
	opPolicies       = "policies"
	opNodes          = "nodes"
	opEdge           = "edge"
)

// operation is what the journal holds while a change is under way: enough to
// do it again from its beginning, whatever of it was done.
type operation struct {
	Kind     string
	Upserts  []state.Binding    `json:",omitempty"`
	Removes  []state.BindingKey `json:",omitempty"`
	Records  []state.Service    `json:",omitempty"` // to write
	Forget   []state.ServiceID  `json:",omitempty"` // records to remove
	Endpoint *state.Endpoint    `json:",omitempty"`
	// What the policies are to be afterwards.
	Policies *storedPolicies `json:",omitempty"`
	// What the change takes away.
	Departures departures `json:",omitzero"`
	// The list of nodes that is to be, and the one that was.
	Nodes       *store.Nodes `json:",omitempty"`
	NodesBefore *store.Nodes `json:",omitempty"`
	// The edge that is to be, and the one that was.
	Edge       *Edge `json:",omitempty"`
	EdgeBefore *Edge `json:",omitempty"`
	// A change of Services of before, which is to be undone yet.
	Undo *operation `json:",omitempty"`
}

// begin journals op before its first effect, beside what is to be undone yet.
func (e *Engine) begin(op operation) error {
	op.Undo = e.undo
	return e.store.WriteJournal(op)
}

// done ends the journal, but for what is to be undone yet.
func (e *Engine) done() error {
	if e.undo != nil {
		return e.store.WriteJournal(*e.undo)
	}
	return e.store.ClearJournal()
}

// MarshalJSON writes an operation on an endpoint without the rest: the CNI plugin
// does one in each of its lives, and to learn the shape of all the others would
// take it a millisecond.
func (op operation) MarshalJSON() ([]byte, error) {
	d := op.Departures
	if op.Endpoint != nil && op.Undo == nil && len(d.Left)+len(d.Gone) == 0 && !d.Reset {
		type gone struct{ Pods []netip.Addr }
		return json.Marshal(struct {
			Kind       string
			Endpoint   *state.Endpoint
			Departures gone
		}{op.Kind, op.Endpoint, gone{d.Pods}})
	}
	type whole operation
	return json.Marshal(whole(op))
}

// pending reads the operation that a killed tool left.
func (e *Engine) pending() (op operation, pending bool, err error) {
	pending, err = e.store.ReadJournal(&op)
	if err != nil {
		return op, false, fmt.Errorf("read the journal: %w", err)
	}
	return op, pending, nil
}

// recover finishes a killed tool's operation. One that cannot be finished is
// undone and reported: it must not keep the scope closed.
func (e *Engine) recover(op operation) error {
	e.undo = op.Undo
	var err error
	switch op.Kind {
	case opServices:
		err = e.applyServices(op)
	case opAddEndpoint:
		err = e.finishAdd(*op.Endpoint)
	case opRemoveEndpoint:
		err = e.finishRemove(*op.Endpoint)
	case opPolicies:
		err = e.finishPolicies(*op.Policies)
	case opGone:
	case opNodes:
		if err = e.applyNodes(op); errors.Is(err, ErrUntold) {
			err = nil // the list is in force, and says so itself
		}
	case opEdge:
		err = e.applyEdge(op)
	default:
		return fmt.Errorf("the journal in %s holds a %q operation, which this mustang does not know; use the version that wrote it", e.scope.StateDir, op.Kind)
	}
	if undo := (*reconcile.UndoError)(nil); errors.As(err, &undo) {
		return err
	}
	if err != nil {
		e.opts.Notify(fmt.Sprintf("an interrupted operation (%s) could not be finished and was undone: %v", op.Kind, err))
	} else {
		e.settle(op.Departures)
	}
	if op.Endpoint != nil {
		err = e.completed()
	} else {
		err = e.done()
	}
	if e.undo == nil || err != nil {
		return err
	}
	return e.recover(*e.undo)
}
