// SPDX-License-Identifier: Apache-2.0

package cni

// The agent's side: it holds the node's lock, so the plugin asks it for what
// needs the engine. One connection carries one request and its response, each a
// JSON value. docs/cni.md describes it.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/socket"
	"github.com/mustang-net/mustang/internal/state"
)

// SocketPath is where the agent of a scope listens.
func SocketPath(stateDir string) string { return filepath.Join(stateDir, "agent.sock") }

// Server answers the plugin's requests in an agent.
type Server struct {
	// Engine runs fn with the node's engine, while nobody else uses it.
	Engine func(ctx context.Context, fn func(*engine.Engine) error) error
	// Labels answers a pod's labels, and waits until the agent can say what policy
	// the pod has, or ctx ends. A pod without a name has the labels that the runtime
	// tells. nil: so has every pod.
	Labels func(ctx context.Context, pod state.PodRef) (map[string]string, error)
	// Added, when given, hears how long a pod took to become an endpoint, from when
	// its labels were known.
	Added func(time.Duration)
	Log   *slog.Logger // nil: silent
	// BPFFS is the engine's. An ADD that is configured for another is refused: without an agent it would not work.
	BPFFS string

	stateDir string // of Serve's socket
	calls    keys   // attachments under way
	turn     chan struct{}
	barred   atomic.Bool // from the runtime's sysctls, by whatever confines the agent
}

// Listen makes the scope's socket, as socket.Listen does.
func Listen(stateDir string) (*net.UnixListener, error) {
	l, err := socket.Listen(SocketPath(stateDir))
	if err != nil {
		return nil, fmt.Errorf("listen for the CNI plugin: %w", err)
	}
	return l, nil
}

// Serve answers requests on l until ctx ends, and returns when the last one is
// answered. l is closed; who listened removes its path, so that the plugin does
// not ask nobody.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener) error {
	s.turn = make(chan struct{}, turns())
	s.stateDir = filepath.Dir(l.Addr().String())
	failed := func(err error) { s.log().Warn("CNI request failed", "error", err) }
	return socket.Serve(ctx, l, func(c *net.UnixConn) {
		if err := s.serve(ctx, c); err != nil {
			failed(err)
		}
	}, failed)
}

func (s *Server) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}

// readPatience is how long a peer may take to send its request.
const readPatience = 5 * time.Second

// serve answers one connection.
func (s *Server) serve(ctx context.Context, c *net.UnixConn) error {
	if err := c.SetReadDeadline(time.Now().Add(readPatience)); err != nil {
		return err
	}
	var call struct {
		request
		Call     *handed   `json:"call"`
		Deadline time.Time `json:"deadline"`
	}
	in, files, err := receive(c)
	defer closeAll(files)
	if err == nil {
		err = json.NewDecoder(in).Decode(&call)
	}
	if err != nil {
		return fmt.Errorf("read a request: %w", err)
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	ctx, cancel := context.WithDeadline(ctx, call.Deadline)
	defer cancel()
	go func() { // a peer that is gone waits for nothing
		io.Copy(io.Discard, c) // the request's newline may be left
		cancel()
	}()
	if call.Call != nil {
		return json.NewEncoder(c).Encode(s.take(ctx, c, *call.Call, files))
	}
	ep, err := s.do(ctx, call.request)
	return errors.Join(err, json.NewEncoder(c).Encode(responseOf(ep, err)))
}

func (s *Server) do(ctx context.Context, r request) (ep state.Endpoint, err error) {
	if r.Op == opSettle {
		unlock, err := s.calls.lock(ctx, r.Key)
		if err == nil {
			unlock()
		}
		return ep, s.tryAgain(ctx, err)
	}
	if r.Op == opAdd && s.Labels != nil {
		labels, err := s.labels(ctx, r.Spec.Pod)
		if err != nil {
			return ep, s.tryAgain(ctx, err)
		}
		if r.Spec.Pod.Name != "" {
			r.Spec.Labels = labels
		}
	}
	start := time.Now()
	err = s.Engine(ctx, func(e *engine.Engine) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		ep, err = r.run(ctx, e)
		return err
	})
	if err == nil && r.Op == opAdd && s.Added != nil {
		s.Added(time.Since(start))
	}
	return ep, s.tryAgain(ctx, err)
}

func (s *Server) labels(ctx context.Context, pod state.PodRef) (map[string]string, error) {
	labels, err := s.Labels(ctx, pod)
	if err != nil {
		return nil, fmt.Errorf("learn the labels of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return labels, nil
}

// tryAgain makes the end of the caller's patience, or of the agent, an error
// that runtimes try again after.
func (s *Server) tryAgain(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return codedf(types.ErrTryAgainLater, "%v; try again", err)
	}
	return err
}
