// SPDX-License-Identifier: Apache-2.0

package engine

// A pod starts with filters, which are there at once. When the node is quiet its
// programs get links instead, which cost each packet less (attachKind).

import (
	"errors"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/state"
)

// Settling is an endpoint whose filters are to become links.
type Settling struct {
	ep    state.Endpoint
	links *datapath.Links
	err   error // of Attach
}

// Settle begins with one endpoint, when none came or went for as long as quiet.
// Between this and Settled the engine may be used for anything else.
//
// Return: nil when there is nothing to do.
func (e *Engine) Settle(quiet time.Duration) (*Settling, error) {
	if e.dp == nil || time.Since(e.moved) < quiet || e.dp.AttachKind() != datapath.AttachTCX {
		return nil, nil
	}
	if err := e.loadEndpoints(); err != nil {
		return nil, err
	}
	if e.lingers {
		if err := e.dropRules(); err != nil {
			return nil, err
		}
	}
	if err := e.endSettling(); err != nil {
		return nil, err
	}
	for _, ep := range e.known {
		if ep.Attach != datapath.AttachClsact || ep.Placement != state.HostEnd || !e.alive(ep) {
			continue
		}
		links, err := e.dp.NewLinks(ep)
		if err != nil {
			return nil, err
		}
		return &Settling{ep: ep, links: links}, nil
	}
	return nil, nil
}

// endSettling ends, once, what a process began that was killed when it had kept an endpoint's links: of others,
// whoever settles them does.
func (e *Engine) endSettling() error {
	for _, ep := range e.known {
		if ep.Attach != datapath.AttachTCX || e.settled {
			continue
		}
		if err := e.dp.Settled(ep.ID); err != nil {
			return err
		}
	}
	e.settled = true
	return nil
}

// Attach waits for two grace periods of the kernel, beside whatever the engine does.
// Settled says what came of it.
func (s *Settling) Attach() { s.err = s.links.Attach() }

// Settled ends what Settle began: the links are kept, the filters go. Where the
// endpoint has changed since, or Attach failed, its links go. Killed anywhere in
// between it leaves an endpoint that has the one or the other, and works.
func (e *Engine) Settled(s *Settling) error {
	if e.dp == nil {
		return s.links.Close()
	}
	err := e.keep(s)
	return errors.Join(err, s.links.Close(), e.dp.Settled(s.ep.ID))
}

func (e *Engine) keep(s *Settling) error {
	ep, ok := e.known[s.ep.ID]
	if !ok || ep.NetnsCookie != s.ep.NetnsCookie || ep.IfIndex != s.ep.IfIndex || ep.Attach != datapath.AttachClsact {
		return nil // and nothing has failed whose interface went meanwhile
	}
	if s.err != nil {
		return s.err
	}
	if err := e.dp.KeepLinks(s.links); err != nil {
		return err
	}
	bare := ep // its qdisc stays: to take that off, the kernel stops the interface, and drops what comes meanwhile
	bare.Qdisc = false
	if err := e.detachFilters(bare); err != nil {
		return err
	}
	ep.Attach = datapath.AttachTCX
	if err := e.store.PutEndpoint(ep); err != nil {
		return err
	}
	e.known[ep.ID] = ep
	return nil
}
