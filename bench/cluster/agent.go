// SPDX-License-Identifier: Apache-2.0

package cluster

// The agent: what runs in the pods, and starts loads there when it is asked.

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"sync"

	"github.com/mustang-net/mustang/bench/load"
)

// agent has the loads of its pod.
type agent struct {
	self []string // command that runs the load program
	mu   sync.Mutex
	next int
	all  map[int]*agentLoad
}

// agentLoad is one side of a load.
type agentLoad struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	lines  *bufio.Reader
	stderr strings.Builder
}

// SecretVariable is the environment's name for what a request to the agent begins with:
// its port is open to whoever reaches the pod or, of some, the node.
const SecretVariable = "MUSTANG_BENCH_SECRET"

// Serve answers who knows the secret at addr until ctx ends. self is the command that runs
// the load program.
func Serve(ctx context.Context, addr, secret string, self []string) error {
	if secret == "" {
		return errors.New("serve the bench: " + SecretVariable + " is empty")
	}
	a := &agent{self: self, all: map[int]*agentLoad{}}
	s := &http.Server{Addr: addr, Handler: http.StripPrefix("/"+secret, a.handler())}
	context.AfterFunc(ctx, func() { s.Close() })
	defer a.killAll()
	if err := s.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the bench: %w", err)
	}
	return nil
}

func (a *agent) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ready") })
	mux.HandleFunc("POST /load", a.start)
	mux.HandleFunc("POST /load/{id}/line", a.line)
	mux.HandleFunc("POST /load/{id}/end", a.end)
	return mux
}

func (a *agent) killAll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, l := range a.all {
		_ = l.cmd.Process.Kill()
		_ = l.cmd.Wait()
	}
}

// start starts the load program with the arguments of the request, and answers its number
// once it is ready.
func (a *agent) start(w http.ResponseWriter, r *http.Request) {
	var args []string
	if err := json.NewDecoder(r.Body).Decode(&args); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	argv := append(append([]string{}, a.self...), args...)
	l := &agentLoad{cmd: exec.Command(argv[0], argv[1:]...)}
	l.cmd.Stderr = &l.stderr
	out, err := l.cmd.StdoutPipe()
	if err == nil {
		l.stdin, err = l.cmd.StdinPipe()
	}
	if err == nil {
		err = l.cmd.Start()
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	l.lines = bufio.NewReader(out)
	if line, err := l.lines.ReadString('\n'); err != nil || strings.TrimSpace(line) != load.Ready {
		_ = l.cmd.Wait()
		http.Error(w, "not ready: "+strings.TrimSpace(line+l.stderr.String()), http.StatusInternalServerError)
		return
	}
	a.mu.Lock()
	a.next++
	id := a.next
	a.all[id] = l
	a.mu.Unlock()
	fmt.Fprintln(w, id)
}

// take finds a load; gone also forgets it.
func (a *agent) take(r *http.Request, gone bool) *agentLoad {
	id, _ := strconv.Atoi(r.PathValue("id"))
	a.mu.Lock()
	defer a.mu.Unlock()
	l := a.all[id]
	if gone {
		delete(a.all, id)
	}
	return l
}

// line asks for a turn, and answers what the load says of it.
func (a *agent) line(w http.ResponseWriter, r *http.Request) {
	l := a.take(r, false)
	if l == nil {
		http.Error(w, "no such load", http.StatusNotFound)
		return
	}
	_, err := fmt.Fprintln(l.stdin)
	var line string
	if err == nil {
		line, err = l.lines.ReadString('\n')
	}
	if err != nil {
		http.Error(w, strings.TrimSpace(l.stderr.String()+" "+err.Error()), http.StatusInternalServerError)
		return
	}
	fmt.Fprint(w, line)
}

// end ends a load, and answers its last words.
func (a *agent) end(w http.ResponseWriter, r *http.Request) {
	l := a.take(r, true)
	if l == nil {
		return // ended before
	}
	l.stdin.Close()
	out, _ := io.ReadAll(l.lines)
	if err := l.cmd.Wait(); err != nil {
		http.Error(w, strings.TrimSpace(l.stderr.String()+" "+err.Error()), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(out)
}
