// SPDX-License-Identifier: Apache-2.0

package cni

// The plugin's side of a node's engine: the agent's, when one runs, else its
// own.

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/socket"
	"github.com/mustang-net/mustang/internal/state"
)

// patience is how long a call waits for an agent that starts, stops or is busy,
// and for other tools. Then the runtime is told to try again.
var patience = 30 * time.Second

// knock is how often a call that waits for the lock looks whether the agent
// that holds it answers now.
const knock = 20 * time.Millisecond

// errNoAgent says that nobody listens on the agent's socket.
var errNoAgent = errors.New("no agent listens")

// node has a request done: by the agent when there is one, else with an engine
// of its own. An agent that holds the node and does not answer is waited for.
func (p *plugin) node(r request) (state.Endpoint, error) {
	if p.by.agent != nil {
		return p.by.agent.do(p.ctx, r)
	}
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	ep, err := p.ask(ctx, r)
	if errors.Is(err, errNoAgent) {
		ep, err = p.askOrDo(ctx, r)
	}
	// The dialler's clock may strike before the context's.
	late := ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
	if cniError := (*types.Error)(nil); err != nil && late && !errors.As(err, &cniError) {
		return ep, codedf(types.ErrTryAgainLater, "the node is not available: %v; try again", err)
	}
	return ep, err
}

// askOrDo takes the node's lock when it is free. Else, and when only an agent can
// say what the pod may do, it waits; but a STATUS says at once that an ADD would.
func (p *plugin) askOrDo(ctx context.Context, r request) (state.Endpoint, error) {
	switch {
	case p.RequireAgent && r.Op == opAdd:
		return p.await(ctx, r, errNoAgent)
	case p.RequireAgent && r.Op == opStatus:
		return state.Endpoint{}, errNoAgent
	}
	e, err := p.open(ctx, r, true)
	if errors.Is(err, engine.ErrBusy) {
		return p.await(ctx, r, nil)
	}
	if err != nil {
		return state.Endpoint{}, err
	}
	ep, err := p.do(ctx, r, e)
	if err = errors.Join(err, e.Close()); r.Op == opAdd && errors.Is(err, engine.ErrHeld) {
		return p.await(ctx, r, err)
	}
	return ep, err
}

func (p *plugin) open(ctx context.Context, r request, noWait bool) (*engine.Engine, error) {
	return engine.Open(ctx, p.scope(), engine.Options{ReadOnly: r.readOnly(), NoWait: noWait, Notify: p.tell})
}

// await waits for whatever comes first: the node's lock, or an agent that
// answers. Where held says why, only an agent will do.
func (p *plugin) await(ctx context.Context, r request, held error) (state.Endpoint, error) {
	p.turn.end()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type opened struct {
		e   *engine.Engine
		err error
	}
	open := make(chan opened, 1)
	if held == nil {
		go func() {
			e, err := p.open(ctx, r, false)
			open <- opened{e, err}
		}()
	}
	again := time.NewTicker(knock)
	defer again.Stop()
	for {
		select {
		case o := <-open:
			if o.err != nil {
				return state.Endpoint{}, o.err
			}
			ep, err := p.do(ctx, r, o.e)
			if err = errors.Join(err, o.e.Close()); r.Op != opAdd || !errors.Is(err, engine.ErrHeld) {
				return ep, err
			}
			held = err
		case <-ctx.Done():
			return state.Endpoint{}, cmp.Or(held, ctx.Err())
		case <-again.C:
			ep, err := p.ask(ctx, r)
			if errors.Is(err, errNoAgent) {
				continue
			}
			cancel()
			if held != nil {
				return ep, err
			}
			if o := <-open; o.e != nil {
				err = errors.Join(err, o.e.Close())
			}
			return ep, err
		}
	}
}

// do is a request without an agent.
func (p *plugin) do(ctx context.Context, r request, e *engine.Engine) (state.Endpoint, error) {
	ep, err := r.run(ctx, e)
	if err != nil || len(r.Ports) == 0 || r.Op != opAdd {
		return ep, err
	}
	if err := p.openEdge(e); err != nil {
		return ep, errors.Join(err, e.RemovePod(ep.ID), e.SweepHostPorts())
	}
	return ep, nil
}

// ask is one exchange with the agent.
func (p *plugin) ask(ctx context.Context, r request) (state.Endpoint, error) {
	var none state.Endpoint
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", SocketPath(p.StateDir))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return none, errNoAgent
	}
	if err != nil {
		return none, fmt.Errorf("ask the agent: %w", err)
	}
	defer conn.Close()
	if err := socket.CheckPeer(conn.(*net.UnixConn)); err != nil {
		return none, err
	}
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return none, err
	}
	call := struct {
		request
		Deadline time.Time `json:"deadline"`
	}{r, deadline.Add(-answerMargin)}
	var answer response
	err = json.NewEncoder(conn).Encode(call)
	if err == nil {
		err = json.NewDecoder(conn).Decode(&answer)
	}
	if err != nil && r.Op != opAdd && died(err) {
		return none, errNoAgent // any other request can be done again
	}
	if err != nil {
		// It died, or hangs: whether the request was done, only another can tell.
		return none, codedf(types.ErrTryAgainLater, "the agent does not answer: %v; try again", err)
	}
	return answer.Endpoint, answer.err()
}

// died says that a connection's other side is gone.
func died(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
}

// answerMargin is what the agent's own "try again" has on the way.
const answerMargin = 500 * time.Millisecond
