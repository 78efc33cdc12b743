// SPDX-License-Identifier: Apache-2.0

package cni

// What the plugin wants of a node's engine. The same requests are served by the
// agent (server.go), which holds the node while it runs, and by the plugin
// itself when no agent does.

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/state"
)

// operation is what a request asks for.
type operation string

const (
	opAdd     operation = "add"     // Spec becomes an endpoint with Ports, which is answered
	opRemove  operation = "remove"  // the endpoint at Where; absent is success
	opCollect operation = "collect" // the plugin's endpoints whose interfaces are gone, but those in Keep
	opCheck   operation = "check"   // the endpoint at Where, with Ports; each fault is a line of the error
	opStatus  operation = "status"  // the tables can be read, and their policy can be decided
	opSettle  operation = "settle"  // nobody works on the attachment Key for a plugin that was killed
)

// request is one call.
type request struct {
	Op    operation           `json:"op"`
	Spec  engine.EndpointSpec `json:"spec,omitzero"`
	Where engine.Whereabouts  `json:"where,omitzero"`
	Keep  []uint32            `json:"keep,omitempty"`
	Ports []PortMapping       `json:"ports,omitempty"` // of the endpoint
	Key   string              `json:"key,omitempty"`
	// Sweep closes host ports that lead to no endpoint any more.
	Sweep bool `json:"sweep,omitempty"`
}

// readOnly requests create no tables where there are none.
func (r request) readOnly() bool { return r.Op != opAdd }

// run does the request on an open engine.
func (r request) run(ctx context.Context, e *engine.Engine) (state.Endpoint, error) {
	var none state.Endpoint
	switch r.Op {
	case opAdd:
		return r.addEndpoint(ctx, e)
	case opRemove:
		err := e.RemoveAt(r.Where)
		if r.Sweep {
			err = errors.Join(err, e.SweepHostPorts())
		}
		return none, err
	case opCollect:
		return none, errors.Join(collectDead(e, r.Keep), e.SweepHostPorts())
	case opCheck:
		id, err := e.EndpointOf(r.Where)
		if err != nil {
			return none, err
		}
		return none, errors.Join(e.CheckEndpoint(id), r.checkPorts(e, id))
	case opStatus:
		_, err := e.Endpoints()
		return none, errors.Join(err, e.PolicyHeld())
	case opSettle:
		return none, nil // who has the engine is the only one
	}
	return none, fmt.Errorf("request %q is unknown: the plugin and the agent are of different builds; `mustang install-cni` installs this one's", r.Op)
}

func collectDead(e *engine.Engine, keep []uint32) error {
	dead, err := e.Dead(state.OwnerCNI)
	if err != nil {
		return err
	}
	var errs []error
	for _, ep := range dead {
		if !slices.Contains(keep, ep.ID) {
			errs = append(errs, e.RemovePod(ep.ID))
		}
	}
	return errors.Join(errs...)
}

// response is a request's end. An error crosses the socket as its text, the CNI
// error that it is, and the kinds of error that callers ask for.
type response struct {
	Endpoint state.Endpoint `json:"endpoint,omitzero"`
	Error    string         `json:"error,omitempty"`
	CNI      *types.Error   `json:"cni,omitempty"`
	Kinds    []string       `json:"kinds,omitempty"`
}

var kinds = map[string]error{"not found": engine.ErrNotFound, "elsewhere": engine.ErrElsewhere, "exists": engine.ErrExists, "held": engine.ErrHeld}

func responseOf(ep state.Endpoint, err error) response {
	r := response{Endpoint: ep}
	if err == nil {
		return r
	}
	r.Error = err.Error()
	errors.As(err, &r.CNI)
	for name, kind := range kinds {
		if errors.Is(err, kind) {
			r.Kinds = append(r.Kinds, name)
		}
	}
	return r
}

func (r response) err() error {
	if r.Error == "" {
		return nil
	}
	e := &remoteError{text: r.Error}
	for _, name := range r.Kinds {
		if kind := kinds[name]; kind != nil {
			e.is = append(e.is, kind)
		}
	}
	if r.CNI != nil {
		e.is = append(e.is, r.CNI)
	}
	return e
}

// remoteError is an error that the agent had.
type remoteError struct {
	text string
	is   []error
}

func (e *remoteError) Error() string   { return e.text }
func (e *remoteError) Unwrap() []error { return e.is }
