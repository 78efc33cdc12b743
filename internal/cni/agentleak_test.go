// SPDX-License-Identifier: Apache-2.0

package cni

// What an agent that runs for months must not collect: descriptors, and threads
// that stayed in a pod's namespace, which would keep it.

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// holds are what a process has open, by kind, and the namespaces that its threads
// are in.
func holds(t *testing.T, pid int) map[string]int {
	t.Helper()
	out := make(map[string]int)
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil || len(links) == 0 {
		t.Fatalf("process %d: %v, no descriptors", pid, err)
	}
	spaces, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/ns/net", pid))
	for _, link := range append(links, spaces...) {
		to, err := os.Readlink(link)
		if err != nil {
			continue // closed since
		}
		if kind, _, ok := strings.Cut(to, ":["); ok && kind != "net" {
			to = kind // a socket's or pipe's number says nothing
		}
		if strings.HasSuffix(link, "/ns/net") {
			out["a thread in "+to] = 1 // however many
			continue
		}
		out[to]++
	}
	return out
}

// holdsAsBefore wants an agent to hold no more than it did, soon: it learns a
// moment later that a peer is gone.
func (w *world) holdsAsBefore(before map[string]int) {
	w.t.Helper()
	var more map[string]int
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		more = make(map[string]int)
		for what, n := range holds(w.t, w.agentPID) {
			if n > before[what] {
				more[what] = n - before[what]
			}
		}
		if len(more) == 0 {
			return
		}
	}
	w.t.Errorf("the agent holds more than before:\n%s", cmp.Diff(map[string]int{}, more))
}

func TestAgentHoldsNoMoreAfterAnyRequest(t *testing.T) {
	for _, mode := range []string{"veth", "bridge", "macvlan"} { // programs on a host's end, held by filters, and in the pod, by links
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t)
			w.ip("-n", w.node, "link", "add", "up0", "type", "veth", "peer", "name", "up1")
			for _, dev := range []string{"up0", "up1"} {
				w.ip("-n", w.node, "link", "set", dev, "up")
			}
			w.agent("serves")
			conf := map[string]any{"mode": mode}
			if mode == "macvlan" {
				conf["uplink"] = "up0"
			}
			round := func() {
				w.ok(w.call("ADD", conf, podArgs...))
				conf["prevResult"] = json.RawMessage(w.said)
				w.ok(w.call("CHECK", conf))
				delete(conf, "prevResult")
				w.ok(w.call("STATUS", conf))
				if e := w.call("ADD", conf, podArgs...); e == nil || e.Code != errExists {
					t.Errorf("a second ADD: %v", e)
				}
				w.ok(w.call("DEL", conf))
				w.ok(w.call("DEL", conf))
				w.ok(w.call("ADD", conf, podArgs...))
				conf["cni.dev/valid-attachments"] = []any{}
				w.ok(w.call("GC", conf))
				delete(conf, "cni.dev/valid-attachments")
			}
			round() // tables are opened at their first use
			before := holds(t, w.agentPID)
			for i := range 3 {
				round()
				w.killed(conf, time.Duration(i+1)*10*time.Millisecond)
				w.rude()
			}
			w.holdsAsBefore(before)
			w.nothingLeft()
		})
	}
}

// killed is an ADD whose plugin is killed on its way, and the DEL after it.
func (w *world) killed(conf map[string]any, after time.Duration) {
	w.t.Helper()
	cmd := w.plugin("ADD", w.config(conf), podArgs...)
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	time.Sleep(after)
	cmd.Process.Kill()
	cmd.Wait()
	w.ok(w.call("DEL", conf))
}

// rude are peers that say nothing, half of something, and nonsense.
func (w *world) rude() {
	w.t.Helper()
	for _, text := range []string{"", `{"op":"status"`, "nonsense\n", `{"op":"frobnicate","deadline":"2100-01-01T00:00:00Z"}`} {
		c, err := net.Dial("unix", SocketPath(w.state()))
		if err != nil {
			w.t.Fatal(err)
		}
		c.Write([]byte(text))
		c.Close()
	}
}
