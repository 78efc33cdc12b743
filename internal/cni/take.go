// SPDX-License-Identifier: Apache-2.0

package cni

// A whole call handed to the agent: the agent's side. The agent does what the
// plugin would, in its own process. It leaves to the plugin what needs the
// runtime's files (IPAM plugins, a namespace that only a path names), what waits
// long, and what another process began.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/record"
	"github.com/mustang-net/mustang/internal/state"
)

// agentCall is one call in an agent.
type agentCall interface {
	// do is a request to the engine.
	do(context.Context, request) (state.Endpoint, error)
	// wanted is an error when the plugin that handed the call over is gone.
	wanted() error
	// alone is of another attachment: free says that no call of it is under way, nor begins
	// before unlock.
	alone(key string) (unlock func(), free bool)
}

type taken struct {
	s *Server
	c *net.UnixConn
}

func (t taken) do(ctx context.Context, r request) (state.Endpoint, error) {
	if r.Op == opRemove { // also for who is gone: what was made of his attachment goes
		ctx = context.WithoutCancel(ctx)
	}
	return t.s.do(ctx, r)
}

func (t taken) wanted() error {
	raw, err := t.c.SyscallConn()
	if err != nil {
		return err
	}
	gone := false
	err = raw.Control(func(fd uintptr) {
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		gone = n == 0 && err == nil || err != nil && !errors.Is(err, unix.EAGAIN)
	})
	if err == nil && gone {
		err = errors.New("the plugin that asked is gone")
	}
	return err
}

// take does a call, or leaves it to the plugin.
func (s *Server) take(ctx context.Context, c *net.UnixConn, h handed, files []*os.File) (back handedBack) {
	env := h.env()
	if len(files) != 2 || s.barred.Load() || env.command != "ADD" && env.command != "DEL" {
		return handedBack{Yours: true}
	}
	p, e := prepare(env, h.Config, func(w string) { back.Warnings = append(back.Warnings, w) })
	if e != nil {
		return failed(back, e)
	}
	if !fits(p.Mode, p.IPAM.Type) || filepath.Clean(p.StateDir) != filepath.Clean(s.stateDir) {
		return handedBack{Yours: true}
	}
	if own := filepath.Clean(s.BPFFS); env.command == "ADD" && filepath.Clean(p.BPFFS) != own {
		return failed(back, codedf(types.ErrInvalidNetworkConfig, "bpffs %s: the agent that uses %s works on %s; give that one", p.BPFFS, p.StateDir, own))
	}
	var out bytes.Buffer
	p.ctx, p.out, p.by = ctx, &out, worker{record.Maker{PID: h.PID, Start: h.Start}, taken{s, c}}
	p.here = link.Here{NetNS: procFile(files[0]), Sysctls: procFile(files[1])}
	err := s.known(ctx, p)
	if err == nil {
		err = s.alone(ctx, p)
	}
	switch {
	case errors.Is(err, errYours):
		return handedBack{Yours: true}
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS):
		// All of it was undone. The plugin is not confined as the agent is.
		s.barred.Store(true)
		s.log().Warn("pods' interfaces are the plugin's to make: the agent may not", "error", err)
		return handedBack{Yours: true}
	case err != nil:
		return failed(back, coded(types.ErrInternal, s.tryAgain(ctx, err)))
	}
	back.Result = bytes.TrimSpace(out.Bytes())
	return back
}

func procFile(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

func failed(back handedBack, e *types.Error) handedBack {
	back.Code, back.Msg, back.Details = e.Code, e.Msg, e.Details
	return back
}

// fits says whether a call of such a network is one for the agent.
func fits(mode, ipamType string) bool { return link.HasHostEnd(mode) && ipamType == OwnIPAM }

// known waits until the pod's labels are, before anything is made.
func (s *Server) known(ctx context.Context, p *plugin) error {
	if p.env.command != "ADD" || s.Labels == nil {
		return nil
	}
	_, err := s.labels(ctx, p.pod())
	return err
}

// alone runs the command while no other works on the attachment in this agent.
func (s *Server) alone(ctx context.Context, p *plugin) error {
	a := p.attachment()
	unlock, err := s.calls.lock(ctx, a.file())
	if err != nil {
		return err
	}
	defer unlock()
	r, found, err := p.store.find(a)
	if err != nil {
		return err
	}
	// A record says how to undo what is there, in its own words.
	if found && (r.NetNS != a.NetNS || !fits(r.Mode, r.IPAM)) {
		return errYours
	}
	if p.env.command == "ADD" {
		select {
		case s.turn <- struct{}{}:
			defer func() { <-s.turn }()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return commands[p.env.command].run(p)
}

// keys are locks by name.
type keys struct {
	mu   sync.Mutex
	busy map[string]chan struct{} // closed when it is free
}

// lock waits until nobody has the key, or ctx ends.
func (k *keys) lock(ctx context.Context, key string) (unlock func(), err error) {
	for {
		k.mu.Lock()
		free, taken := k.busy[key]
		if !taken {
			if k.busy == nil {
				k.busy = make(map[string]chan struct{})
			}
			mine := make(chan struct{})
			k.busy[key] = mine
			k.mu.Unlock()
			return func() {
				k.mu.Lock()
				delete(k.busy, key)
				k.mu.Unlock()
				close(mine)
			}, nil
		}
		k.mu.Unlock()
		select {
		case <-free:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for another call of %s: %w", key, ctx.Err())
		}
	}
}

// receive reads the beginning of a request, and the descriptors that come with
// it, which are the caller's also with an error.
func receive(c *net.UnixConn) (io.Reader, []*os.File, error) {
	text, rights := make([]byte, 16<<10), make([]byte, unix.CmsgSpace(8*4))
	n, oobn, _, _, err := c.ReadMsgUnix(text, rights)
	var files []*os.File
	messages, _ := unix.ParseSocketControlMessage(rights[:oobn])
	for _, m := range messages {
		fds, _ := unix.ParseUnixRights(&m)
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "from the plugin"))
		}
	}
	return io.MultiReader(bytes.NewReader(text[:n]), c), files, err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
