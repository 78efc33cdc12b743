// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/agent"
	"github.com/mustang-net/mustang/internal/engine"
)

// A flag goes before the file, the file before the environment, and that before
// the default.
func TestTheEnvironmentNamesTheScope(t *testing.T) {
	file := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(file, []byte("state-dir: /of/file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"MUSTANG_BPFFS": "/of/env", "MUSTANG_STATE_DIR": "/of/env", "MUSTANG_CGROUP_ROOT": "/of/env"}
	for _, c := range []struct {
		name        string
		env         map[string]string
		args        []string
		file        string
		tool, agent engine.Scope
	}{
		{"nobody", nil, nil, "", engine.Scope{BPFFS: engine.DefaultBPFFS, StateDir: engine.DefaultStateDir}, engine.Scope{BPFFS: engine.DefaultBPFFS, StateDir: engine.DefaultStateDir}},
		{"environment", env, nil, "", engine.Scope{BPFFS: "/of/env", StateDir: "/of/env", CgroupRoot: "/of/env"}, engine.Scope{BPFFS: "/of/env", StateDir: "/of/env", CgroupRoot: "/of/env"}},
		{"all", env, []string{"--bpffs=/of/flag"}, file, engine.Scope{BPFFS: "/of/flag", StateDir: "/of/env", CgroupRoot: "/of/env"}, engine.Scope{BPFFS: "/of/flag", StateDir: "/of/file", CgroupRoot: "/of/env"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for name := range env {
				t.Setenv(name, c.env[name])
			}
			g := &globals{}
			cmd, _, err := newRoot(g).Find([]string{"agent"})
			if err == nil {
				err = cmd.ParseFlags(c.args)
			}
			if err != nil {
				t.Fatal(err)
			}
			if g.scope() != c.tool {
				t.Errorf("the tool's scope is %+v, want %+v", g.scope(), c.tool)
			}
			got, err := agentConfig(cmd, g, agent.Config{}, c.file)
			if scope := (engine.Scope{BPFFS: got.BPFFS, StateDir: got.StateDir, CgroupRoot: got.CgroupRoot}); err != nil || scope != c.agent {
				t.Errorf("the agent's scope is %+v, %v; want %+v", scope, err, c.agent)
			}
		})
	}
}

// An agent that was told its scope by flags runs a tool's call in that, though
// the tool was told by its environment.
func TestTheScopeGoesWithACall(t *testing.T) {
	w := newTool(t)
	asked := w.standIn()
	cmd := w.command()
	cmd.Args = append(slices.DeleteFunc(cmd.Args, func(a string) bool {
		return slices.Contains([]string{"--bpffs", w.bpffs, "--state-dir", w.state}, a)
	}), "pod", "ls")
	cmd.Env = append(cmd.Env, "MUSTANG_BPFFS="+w.bpffs, "MUSTANG_STATE_DIR="+w.state)
	out, err := cmd.CombinedOutput()
	call := asked()
	g := &globals{}
	root := newRoot(g)
	sub, rest, findErr := root.Find(call.Args)
	if err != nil || findErr != nil || sub.CommandPath() != "mustang pod ls" {
		t.Fatalf("%v: %s; call %v: %v", err, out, call.Args, findErr)
	}
	if err := sub.ParseFlags(rest); err != nil || g.BPFFS != w.bpffs || g.StateDir != w.state {
		t.Errorf("call %v is about %+v, %v", call.Args, g.scope(), err)
	}
}

// standIn is an agent that is told one call, and does nothing; asked is what it was told, once
// nobody asks any more.
func (w *tool) standIn() (asked func() agent.Call) {
	w.t.Helper()
	if err := os.Mkdir(w.state, 0o700); err != nil {
		w.t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(w.state, "tool.sock"))
	if err != nil {
		w.t.Fatal(err)
	}
	calls := make(chan agent.Call, 1)
	go func() {
		defer close(calls)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		var call agent.Call
		if json.NewDecoder(conn).Decode(&call) == nil {
			calls <- call
			_ = json.NewEncoder(conn).Encode(agent.Answer{})
		}
	}()
	return func() agent.Call {
		l.Close()
		return <-calls
	}
}

// What is said of the node's status is the agent's to tell, however it is written.
func TestStatusOfTheNodeIsTheAgents(t *testing.T) {
	for flag, asks := range map[string]bool{"--cluster=false": true, "--cluster": false} {
		w := newTool(t)
		asked := w.standIn()
		w.run("", "status", "--kubeconfig", "/none/such", flag)
		if call := asked(); (len(call.Args) > 0) != asks {
			t.Errorf("%s: the agent is asked %q", flag, call.Args)
		}
	}
}

// A command with the wrong bpffs is refused by a sentence that names the right one, beside an agent and without, and
// changes nothing.
func TestTheWrongBPFFSIsRefused(t *testing.T) {
	w := newTool(t)
	w.ok("svc", "add", "--service=10.96.0.100:5201", "--backend=192.168.10.10:5201", "--affinity=1m")
	pod := fmt.Sprintf("wrong%d", os.Getpid())
	w.ok("pod", "add", pod, "--ip=10.1.0.2/32")
	before, wrong, place := w.services(), w.bpffs+"-wrong", t.TempDir()
	refused := func(when string) {
		t.Helper()
		for _, args := range [][]string{
			{"svc", "add", "--service=10.96.0.101:5201"}, {"svc", "ls"}, {"pod", "rm", pod}, {"node", "sync"}, {"reset"},
			{"uninstall", "--pods", "--bin-dir", place, "--conf-dir", place},
		} {
			out, errs, code := w.run("", append(args, "--bpffs", wrong)...)
			if code != 1 || !strings.Contains(errs, "give --bpffs "+w.bpffs) || out != "" {
				t.Errorf("%s: %v: status %d, %q, %q", when, args, code, out, errs)
			}
		}
		if _, err := os.Stat(wrong); err == nil {
			t.Errorf("%s: %s was made", when, wrong)
		}
	}
	refused("at rest")
	e, err := engine.Open(t.Context(), engine.Scope{BPFFS: w.bpffs, StateDir: w.state}, engine.Options{Notify: func(string) {}})
	if err != nil {
		t.Fatal(err)
	}
	refused("held")
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if after := w.services(); !slices.Equal(after, before) {
		t.Errorf("%v, want %v", after, before)
	}
	if out := w.ok("pod", "ls"); !strings.Contains(out, pod) {
		t.Errorf("pods: %s", out)
	}
	w.ok("pod", "rm", pod)
}
