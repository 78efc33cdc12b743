// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// hungry is an API server that lets nobody make a pod.
type hungry struct {
	pods, removed chan struct{}
	stays         bool // the namespace, though it was deleted
}

func (h *hungry) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	type object = map[string]any
	ready := object{"conditions": []object{{"type": "Ready", "status": "True"}}}
	var nodes, agents []object
	for _, name := range []string{"a", "b"} {
		nodes = append(nodes, object{"metadata": object{"name": name}, "status": ready})
		agents = append(agents, object{"metadata": object{"name": "mustang-" + name}, "status": ready,
			"spec": object{"nodeName": name, "hostNetwork": true, "containers": []object{{"name": "agent", "image": "mustang"}}}})
	}
	code, answer := http.StatusOK, object{"metadata": object{"name": "made"}}
	of := strings.HasPrefix(r.URL.Path, "/api/v1/namespaces/") && strings.Count(r.URL.Path, "/") == 4 // a namespace itself
	switch path := r.URL.Path; {
	case r.Method == http.MethodGet && path == "/api/v1/nodes":
		answer = object{"items": nodes}
	case r.Method == http.MethodGet && path == "/api/v1/pods":
		answer = object{"items": agents}
	case r.Method == http.MethodPost && strings.HasSuffix(path, "/pods"):
		code, answer = http.StatusForbidden, object{"kind": "Status", "message": "error looking up service account"}
		select {
		case h.pods <- struct{}{}:
		default:
		}
	case r.Method == http.MethodDelete && of:
		close(h.removed)
	case r.Method == http.MethodGet && of && !h.stays:
		code, answer = http.StatusNotFound, object{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(answer)
}

// start starts the tool on that cluster. wait waits for what happens while it runs.
func (h *hungry) start(t *testing.T, args ...string) (tool *os.Process, ended chan error, wait func(what string, happened <-chan struct{})) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	config := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{"clusters": [{"name": "c", "cluster": {"server": %q}}], "contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`, s.URL)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	// Also where the tests run under nohup, or in the background.
	cmd := exec.Command("env", append(append([]string{"--default-signal=HUP,INT", self}, args...), "--kubeconfig", config)...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), beTool+"=1"), &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended = make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd.Process, ended, func(what string, happened <-chan struct{}) {
		t.Helper()
		select {
		case <-happened:
		case err := <-ended:
			t.Fatalf("it ended before %s: %v: %s", what, err, out.String())
		case <-time.After(time.Minute):
			t.Fatalf("a minute without %s", what)
		}
	}
}

// Whoever closes the terminal leaves nothing in the cluster.
func TestWhatIsMadeInAClusterGoesWithTheTerminal(t *testing.T) {
	for _, args := range [][]string{{"bench", "cluster"}, {"connectivity", "test", "--sysdump", "none"}} {
		t.Run(args[0], func(t *testing.T) {
			h := &hungry{pods: make(chan struct{}, 1), removed: make(chan struct{})}
			tool, ended, wait := h.start(t, args...)
			wait("its first pod", h.pods)
			if err := tool.Signal(unix.SIGHUP); err != nil {
				t.Fatal(err)
			}
			wait("the namespace's removal", h.removed)
			if err := <-ended; err == nil {
				t.Error("a run that was cut short is a success")
			}
		})
	}
}

// A namespace may take minutes to go: who interrupts again does not wait for it.
func TestASecondInterruptEndsTheRemoval(t *testing.T) {
	h := &hungry{pods: make(chan struct{}, 1), removed: make(chan struct{}), stays: true}
	tool, ended, wait := h.start(t, "connectivity", "test")
	wait("its first pod", h.pods)
	if err := tool.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	wait("the namespace's removal", h.removed)
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		_ = tool.Signal(unix.SIGINT)
		select {
		case <-ended:
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
	t.Error("it goes on waiting")
}
