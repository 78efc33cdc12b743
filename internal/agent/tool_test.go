// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
)

// answering is an agent that answers calls by their own words.
func answering(t *testing.T) (stateDir string) {
	t.Helper()
	dir := t.TempDir()
	var a *Agent
	a = &Agent{config: Config{StateDir: dir, BPFFS: "/sys/fs/bpf/x"}, log: slog.New(slog.DiscardHandler), engine: &engine.Engine{}}
	a.command = func(_ context.Context, _ *engine.Engine, call Call) func() Answer {
		return func() (out Answer) {
			// What is left is done when others may have the engine again.
			err := a.with(context.Background(), func(*engine.Engine) error {
				out = Answer{Out: []byte(strings.Join(call.Args, " ") + " in " + call.Dir), Err: call.Files["-"], Code: 7}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			return out
		}
	}
	l, err := listenTool(dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.serveTool(ctx, l) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(toolSocket(dir)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket stays: %v", err)
		}
	})
	return dir
}

func TestToolAsksTheAgent(t *testing.T) {
	dir := answering(t)
	call := Call{Args: []string{"svc", "ls"}, BPFFS: "/sys/fs/bpf/x", Dir: "/home", Files: map[string][]byte{"-": []byte("input")}}
	got, err := Ask(t.Context(), dir, call, nobody)
	if err != nil || string(got.Out) != "svc ls in /home" || string(got.Err) != "input" || got.Code != 7 {
		t.Errorf("%q %q %d, %v", got.Out, got.Err, got.Code, err)
	}
	call.BPFFS = "/sys/fs/bpf/y"
	got, err = Ask(t.Context(), dir, call, nobody)
	if want := "mustang: the agent that uses " + dir + " works on /sys/fs/bpf/x; give --bpffs /sys/fs/bpf/x\n"; err != nil || got.Code != 1 || string(got.Err) != want || len(got.Out) > 0 {
		t.Errorf("about another scope: %q %q %d, %v", got.Out, got.Err, got.Code, err)
	}
}

func TestToolSocketIsItsOwnersAlone(t *testing.T) {
	dir := answering(t)
	info, err := os.Stat(toolSocket(dir))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// Without an agent the tool works by itself; so it does when a killed one left
// its socket.
func TestNoAgent(t *testing.T) {
	dir := t.TempDir()
	if _, err := Ask(t.Context(), dir, Call{}, nobody); !errors.Is(err, ErrNoAgent) {
		t.Errorf("no socket: %v", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "tool.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	if _, err := Ask(t.Context(), dir, Call{}, nobody); !errors.Is(err, ErrNoAgent) {
		t.Errorf("a dead one's socket: %v", err)
	}
}

func nobody(string) {}

// Whoever asks an agent that stands still is told for whom they wait, and what an interruption leaves open.
func TestWaitingForAnAgentIsTold(t *testing.T) {
	defer func(before time.Duration) { askNotice = before }(askNotice)
	askNotice = 10 * time.Millisecond
	for _, interrupted := range []bool{false, true} {
		dir := t.TempDir()
		l, err := listenTool(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		noticed := make(chan string, 1)
		ctx, interrupt := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			select {
			case sentence := <-noticed:
				noticed <- sentence
			case <-time.After(20 * time.Second):
			}
			if interrupted {
				interrupt()
				<-t.Context().Done()
				return
			}
			json.NewEncoder(c).Encode(Answer{Code: 7})
		}()
		a, err := Ask(ctx, dir, Call{BPFFS: "/sys/fs/bpf/x"}, func(sentence string) { noticed <- sentence })
		interrupt()
		if len(noticed) != 1 || <-noticed != "waiting for the agent that works on /sys/fs/bpf/x" {
			t.Error("nobody is told")
		}
		if interrupted && (!errors.Is(err, context.Canceled) || !strings.HasPrefix(err.Error(), "interrupted before the agent answered")) || !interrupted && (err != nil || a.Code != 7) {
			t.Errorf("interrupted: %v; %+v, %v", interrupted, a, err)
		}
		if !interrupted {
			<-done
		}
	}
}

// An agent that dies in the middle is no agent that is not there: the call may
// have been done.
func TestAgentDiesInTheMiddle(t *testing.T) {
	dir := t.TempDir()
	l, err := listenTool(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			c.Close()
		}
	}()
	if _, err := Ask(t.Context(), dir, Call{}, nobody); err == nil || errors.Is(err, ErrNoAgent) {
		t.Errorf("%v", err)
	}
}

// A call that waits while the agent is told to end has not been done: the tool does
// it by itself.
func TestACallThatAnEndingAgentDoesNotBegin(t *testing.T) {
	dir := t.TempDir()
	a := &Agent{config: Config{StateDir: dir, BPFFS: "/sys/fs/bpf/x"}, log: slog.New(slog.DiscardHandler)}
	l, err := listenTool(dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.serveTool(ctx, l) }()
	a.mu.Lock() // something else is being applied
	asked := make(chan error, 1)
	go func() {
		_, err := Ask(context.Background(), dir, Call{Args: []string{"svc", "add"}, BPFFS: "/sys/fs/bpf/x"}, nobody)
		asked <- err
	}()
	time.Sleep(200 * time.Millisecond) // it has come
	stop()
	a.mu.Unlock()
	if err := <-asked; !errors.Is(err, ErrNoAgent) {
		t.Errorf("the tool takes it for done: %v", err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Who is not root is told so, whether or not an agent runs: the state directory alone says no.
func TestWhoMayNotAskIsToldToBeRoot(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	told := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with it
		unix.Setfsuid(65534)
		_, err := Ask(context.Background(), dir, Call{}, nobody)
		told <- err
	}()
	if err := <-told; err == nil || errors.Is(err, ErrNoAgent) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "run as root") {
		t.Errorf("told: %v", err)
	}
}
