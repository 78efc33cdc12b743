// SPDX-License-Identifier: Apache-2.0

package agent

// The command line, when an agent holds the scope: it sends the call it was
// given over a socket, and the agent runs the same command with its own engine.
// So requests and sentences are the same with and without an agent, for every
// command that there is.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/cni"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/socket"
)

// Call is one call of the command line.
type Call struct {
	Args []string `json:"args"`
	// BPFFS is the scope that the call is about: one about another is refused.
	BPFFS string `json:"bpffs"`
	Dir   string `json:"dir"` // where relative paths begin
	// Files are those that the command has read, by the name that it was given;
	// "-" is standard input. The agent may not see the same file system.
	Files map[string][]byte `json:"files,omitempty"`
}

// Answer is what a call printed, and how it ended.
type Answer struct {
	Out  []byte `json:"out,omitempty"`
	Err  []byte `json:"err,omitempty"`
	Code int    `json:"code"`
	// Elsewhere: nothing was done, for the agent ends.
	Elsewhere bool `json:"elsewhere,omitempty"`
}

// ErrNoAgent says that no agent answers for the scope.
var ErrNoAgent = errors.New("no agent listens")

// toolSocket is where the agent of a scope answers the command line.
func toolSocket(stateDir string) string { return filepath.Join(stateDir, "tool.sock") }

// Files are what a killed agent leaves in the state directory.
func Files(stateDir string) []string {
	return []string{cni.SocketPath(stateDir), socket.Beside(cni.SocketPath(stateDir)), toolSocket(stateDir), socket.Beside(toolSocket(stateDir))}
}

// askNotice is how long an answer may take before whoever waits for it is told that they do, as
// with the scope's lock where there is no agent.
var askNotice = 2 * time.Second

// Ask has the agent of a scope run a call, and notifies of a long wait. ErrNoAgent: there is none.
func Ask(ctx context.Context, stateDir string, call Call, notify func(string)) (Answer, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", toolSocket(stateDir))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return Answer{}, ErrNoAgent
	}
	if errors.Is(err, fs.ErrPermission) { // of the state directory, with or without an agent
		return Answer{}, fmt.Errorf("%s is not open to this user: %w; run as root", stateDir, err)
	}
	if err != nil {
		return Answer{}, fmt.Errorf("ask the agent: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	var answer Answer
	done := make(chan error, 1)
	go func() {
		err := json.NewEncoder(conn).Encode(call)
		if err == nil {
			err = json.NewDecoder(conn).Decode(&answer)
		}
		done <- err
	}()
	select {
	case err = <-done:
	case <-time.After(askNotice):
		notify("waiting for the agent that works on " + call.BPFFS)
		err = <-done
	}
	if err != nil && ctx.Err() != nil {
		return answer, fmt.Errorf("interrupted before the agent answered, which may do it or not: %w; look, and give the command again", ctx.Err())
	}
	if err != nil {
		return answer, fmt.Errorf("the agent ended before it answered, and may have done it or not: %w; look, and give the command again", err)
	}
	if answer.Elsewhere {
		return answer, ErrNoAgent
	}
	return answer, nil
}

// listenTool makes the socket, as socket.Listen does.
func listenTool(stateDir string) (*net.UnixListener, error) {
	l, err := socket.Listen(toolSocket(stateDir))
	if err != nil {
		return nil, fmt.Errorf("listen for the command line: %w", err)
	}
	return l, nil
}

// serveTool answers until ctx ends, and returns when the last answer is given.
func (a *Agent) serveTool(ctx context.Context, l *net.UnixListener) error {
	defer os.Remove(toolSocket(a.config.StateDir))
	failed := func(err error) { a.log.Warn("a call of the command line failed", "error", err) }
	return socket.Serve(ctx, l, func(conn *net.UnixConn) {
		if err := a.answer(ctx, conn); err != nil {
			failed(err)
		}
	}, failed)
}

// callPatience is how long the other side may take to say what it wants.
const callPatience = 5 * time.Second

// lastWords is how long an answer may take that an agent gives while it ends.
const lastWords = 2 * time.Second

func (a *Agent) answer(ctx context.Context, conn *net.UnixConn) error {
	if err := conn.SetReadDeadline(time.Now().Add(callPatience)); err != nil {
		return err
	}
	var call Call
	if err := json.NewDecoder(conn).Decode(&call); err != nil {
		return fmt.Errorf("read a call: %w", err)
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	// Who asks may have been stopped, and reads no answer: the agent ends all the same.
	defer context.AfterFunc(ctx, func() { conn.SetWriteDeadline(time.Now().Add(lastWords)) })()
	if own := filepath.Clean(a.config.BPFFS); filepath.Clean(call.BPFFS) != own {
		refused := fmt.Sprintf("mustang: the agent that uses %s works on %s; give --bpffs %s\n", a.config.StateDir, own, own)
		return json.NewEncoder(conn).Encode(Answer{Err: []byte(refused), Code: 1})
	}
	var rest func() Answer
	err := a.with(ctx, func(e *engine.Engine) error {
		rest = a.command(ctx, e, call)
		return nil
	})
	out := Answer{Elsewhere: err != nil} // the call has not begun
	if err == nil {
		out = rest()
	}
	return errors.Join(err, json.NewEncoder(conn).Encode(out))
}
