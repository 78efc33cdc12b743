// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Whoever sends a sysdump knows what is not in it.
func TestASysdumpSaysWhatItLacks(t *testing.T) {
	const noAgent = `{"items": [{"metadata": {"name": "a"}}]}`
	for _, c := range []struct {
		name   string
		answer func(w http.ResponseWriter, path string, interrupt func())
		file   bool
		want   string // in the error, or else in what is told
	}{
		{"no rights", func(w http.ResponseWriter, _ string, _ func()) { w.WriteHeader(http.StatusForbidden) }, false, "nothing could be read: api/configuration.json: "},
		{"Ctrl-C", func(w http.ResponseWriter, path string, interrupt func()) {
			w.Write([]byte(noAgent))
			if path == "/api/v1/nodes" {
				interrupt()
			}
		}, false, "context canceled"},
		{"no agent", func(w http.ResponseWriter, _ string, _ func()) { w.Write([]byte(noAgent)) }, true,
			"1 of 10 parts of the sysdump could not be read, or not whole; the first: agents.txt: no agent of mustang is in this cluster"},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		var told []string
		cluster := connect(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			c.answer(w, r.URL.Path, cancel)
		}, &told)
		file := filepath.Join(t.TempDir(), "dump")
		err := cluster.Sysdump(ctx, file)
		if err != nil {
			told = append(told, err.Error())
		}
		cancel()
		_, gone := os.Stat(file)
		if said := strings.Join(told, "\n"); (err == nil) != c.file || (gone == nil) != c.file || !strings.Contains(said, c.want) {
			t.Errorf("%s: %v, a file: %v, told %q; want %q", c.name, err, gone == nil, said, c.want)
		}
	}
}

// A sysdump goes to strangers.
func TestASysdumpHasNoValuesOfEnvironments(t *testing.T) {
	const secret = "hunter2"
	text, err := withoutValues([]byte(`{"kind": "PodList", "items": [
		{"metadata": {"name": "web", "generation": 12345678901234567, "annotations": {"why": "kept",
			"kubectl.kubernetes.io/last-applied-configuration": "{\"value\":\"hunter2\"}",
			"objectset.rio.cattle.io/applied": "hunter2, packed", "example.com/as-it-was": "` + strings.Repeat(" ", 250) + `hunter2"}},
		 "spec": {"containers": [{"name": "web", "env": [{"name": "PASSWORD", "value": "hunter2"}, {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}],
		          "initContainers": [{"name": "set up", "env": [{"name": "PASSWORD", "value": "hunter2"}]}]}},
		{"spec": {"template": {"spec": {"containers": [{"env": [{"name": "PASSWORD", "value": "hunter2"}]}]}}}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), secret) {
		t.Errorf("a value of an environment is in it:\n%s", text)
	}
	for _, kept := range []string{`"PASSWORD"`, `"secretKeyRef"`, `"why":"kept"`, `"example.com/as-it-was":"left out`, "12345678901234567"} {
		if !strings.Contains(string(text), kept) {
			t.Errorf("%s is not in it:\n%s", kept, text)
		}
	}
	if _, err := withoutValues([]byte("no JSON")); err == nil {
		t.Error("what is no JSON was read")
	}
}
