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
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
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

	stateDir string // of Serve's socket
	calls    keys   // attachments under way
	turn     chan struct{}
	barred   atomic.Bool // from the runtime's sysctls, by whatever confines the agent
}

// Listen makes the scope's socket, which only its owner may use, in place of
// one that a killed agent left. The caller holds the scope's lock: so no living
// agent's is taken away.
func Listen(stateDir string) (*net.UnixListener, error) {
	if err := os.MkdirAll(stateDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	path := SocketPath(stateDir)
	// Bound beside and renamed: at its path the socket has its permissions
	// from the first instant.
	beside := path + ".new"
	for _, p := range []string{beside, path} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove an old socket: %w", err)
		}
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: beside, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen for the CNI plugin: %w", err)
	}
	l.SetUnlinkOnClose(false) // it would unlink the other name
	if err := errors.Join(os.Chmod(beside, 0o600), os.Rename(beside, path)); err != nil {
		return nil, errors.Join(fmt.Errorf("listen for the CNI plugin: %w", err), l.Close())
	}
	return l, nil
}

// Serve answers requests on l until ctx ends, and returns when the last one is
// answered. l is closed, and its path removed, so that the plugin does not ask
// nobody.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener) error {
	s.turn = make(chan struct{}, turns())
	s.stateDir = filepath.Dir(l.Addr().String())
	var calls sync.WaitGroup
	defer calls.Wait()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	for {
		c, err := l.AcceptUnix()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept the CNI plugin: %w", err)
		}
		calls.Go(func() {
			defer c.Close()
			if err := s.serve(ctx, c); err != nil {
				s.log().Warn("CNI request failed", "error", err)
			}
		})
	}
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
	if err := checkConn(c); err != nil {
		return err
	}
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

func checkConn(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var refused error
	err = raw.Control(func(fd uintptr) { refused = checkPeer(int(fd)) })
	return errors.Join(err, refused)
}

// checkPeer wants the other side to be root, or this process's own user.
func checkPeer(fd int) error {
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return fmt.Errorf("ask who is on the other side of the agent's socket: %w", err)
	}
	if cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("process %d of user %d is on the other side of the agent's socket, and only root may be", cred.Pid, cred.Uid)
	}
	return nil
}
