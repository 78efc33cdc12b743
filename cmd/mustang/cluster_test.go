// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/agent"
	"github.com/mustang-net/mustang/internal/cluster"
	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/engine"
)

// An agent that is ready, and of which nothing is seen, is no all-clear.
func TestANodeThatShowsNothingIsNotWell(t *testing.T) {
	well := cluster.NodeStatus{Node: "a", Ready: true, Status: &engine.Status{Present: true}}
	away := cluster.NodeStatus{Node: "b"}
	blind := cluster.NodeStatus{Node: "c", Ready: true, Status: &engine.Status{}, Problems: []string{"status: nothing is loaded"}}
	for _, c := range []struct {
		list []cluster.NodeStatus
		want string
	}{
		{[]cluster.NodeStatus{well}, ""},
		{[]cluster.NodeStatus{well, away}, "ready"},
		{[]cluster.NodeStatus{well, blind}, "shows"},
	} {
		err := clusterVerdict(c.list)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.list, err, c.want)
		}
	}
	var out bytes.Buffer
	clusterTable(&out, []cluster.NodeStatus{blind})
	if text := out.String(); strings.Contains(strings.SplitN(text, "\n\n", 2)[0], "\t0\t0") || !strings.Contains(text, "c: status: nothing is loaded") {
		t.Errorf("a node that shows nothing:\n%s", text)
	}
}

// Tables of flows keep what has ended: they are full on every node that has been used.
func TestTheFullestTableIsOneThatCanRefuse(t *testing.T) {
	n := cluster.NodeStatus{Status: &engine.Status{Tables: []datapath.TableInfo{
		{Name: "mst_ct_v1", Type: "LRUHash", Entries: 131072, Max: 131072, Memory: 1}, {Name: "mst_services_v2", Type: "Hash", Entries: 10, Max: 100, Memory: 2},
	}}}
	if memory, fullest := tableFill(n); memory != "3 B" || fullest != "services_v2 10%" {
		t.Errorf("%s, %s", memory, fullest)
	}
}

// An object's kind is in its name already.
func TestProblemsNameTheirObjectsOnce(t *testing.T) {
	var out bytes.Buffer
	clusterTable(&out, []cluster.NodeStatus{{Node: "a", Ready: true, Health: &agent.Health{Problems: map[string][]string{
		"Service shop/web": {"one", "two"}, "NetworkPolicy shop/deny": {"three"},
	}}}})
	if want := "\na: NetworkPolicy shop/deny: three\n\na: Service shop/web: one; two\n"; !strings.HasSuffix(out.String(), want) {
		t.Errorf("problems:\n%s\nwant at its end %q", out.String(), want)
	}
}

// What an agent says of itself is the same object in each form.
func TestAgentHealthIsPrintedInEachForm(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"nodeMode": "direct"}`) }))
	defer server.Close()
	config := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(config, []byte("health-address: "+server.Listener.Addr().String()), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, form := range []string{"table", "wide", "json", "yaml"} {
		var out strings.Builder
		cmd := newRootCmd()
		cmd.SetOut(&out)
		cmd.SetArgs([]string{"agent", "health", "--config", config, "-o", form})
		if err := cmd.Execute(); err != nil || !strings.Contains(out.String(), "direct") {
			t.Errorf("-o %s: %v, %q", form, err, out.String())
		}
	}
}

// A sysdump that Ctrl-C leaves nothing to read for is not written, nor called what a report needs.
func TestAnInterruptedTestClaimsNoSysdump(t *testing.T) {
	dir := t.TempDir()
	config, dump := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "dump")
	text := `{"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}], "contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := cluster.Connect(config, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var told bytes.Buffer
	err = (&globals{warnings: &told}).verdict(ctx, c, []cluster.Check{{What: "one"}, {What: "two", Failed: "timeout"}}, dump)
	if err == nil || err.Error() != "1 of 2 checks failed" || !strings.Contains(told.String(), "no sysdump is written") {
		t.Errorf("%v, %q", err, told.String())
	}
	if _, err := os.Stat(dump); !os.IsNotExist(err) {
		t.Errorf("a dump of nothing is there: %v", err)
	}
}
