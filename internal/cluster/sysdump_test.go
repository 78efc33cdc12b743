// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
		{"no rights", func(w http.ResponseWriter, _ string, _ func()) { w.WriteHeader(http.StatusForbidden) }, false, "nothing could be read: api/daemonsets.json: "},
		{"Ctrl-C", func(w http.ResponseWriter, path string, interrupt func()) {
			w.Write([]byte(noAgent))
			if path == "/api/v1/nodes" {
				interrupt()
			}
		}, false, "context canceled"},
		{"no agent", func(w http.ResponseWriter, _ string, _ func()) { w.Write([]byte(noAgent)) }, true,
			"1 of 9 parts of the sysdump could not be read, or not whole; the first: agents.txt: no agent of mustang is in this cluster"},
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

// Nodes that hang cost a sysdump no more than its patience, a few of them at a time, and what
// has come of their logs is in it.
func TestASysdumpIsNotKeptByNodesThatHang(t *testing.T) {
	defer func(before time.Duration) { patience = before }(patience)
	patience = 2 * time.Second
	nodes, pods := agents(atOnce + 1)
	var mu sync.Mutex
	reading, most := 0, 0
	c := connect(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/exec"):
			w.WriteHeader(http.StatusForbidden)
		case !strings.HasSuffix(r.URL.Path, "/log"):
			lists(nodes, pods)(w, r)
		case r.URL.Query().Get("previous") == "true":
			w.WriteHeader(http.StatusBadRequest)
		default:
			fmt.Fprintf(w, "of %s\n", r.URL.Path)
			w.(http.Flusher).Flush()
			mu.Lock()
			reading++
			most = max(most, reading)
			mu.Unlock()
			<-r.Context().Done()
			mu.Lock()
			reading--
			mu.Unlock()
		}
	}, new([]string))
	var logs []part
	done := make(chan error, 1)
	go func() {
		done <- c.parts(t.Context(), func(p part) error {
			if strings.HasSuffix(p.name, ".log") {
				logs = append(logs, p)
			}
			return nil
		})
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("it waits")
	}
	mu.Lock()
	if most != atOnce {
		t.Errorf("%d nodes are asked at a time, want %d", most, atOnce)
	}
	mu.Unlock()
	if len(logs) != len(nodes) {
		t.Fatalf("%d logs of %d nodes", len(logs), len(nodes))
	}
	for i, p := range logs {
		if p.name != "nodes/"+nodes[i].Name+"/agent.log" || !strings.Contains(string(p.text), pods[i].Name) || p.problem == nil || !strings.Contains(p.problem.Error(), "did not come whole within 2s") {
			t.Errorf("%s: %q, %v", p.name, p.text, p.problem)
		}
	}
}

// A disk that is full is no reason to ask hundreds of nodes.
func TestASysdumpThatCannotBeWrittenAsksNoFurther(t *testing.T) {
	nodes, pods := agents(3 * atOnce)
	var mu sync.Mutex
	asked, configurations := map[string]bool{}, []string{}
	c := connect(t, func(w http.ResponseWriter, r *http.Request) {
		if _, of, some := strings.Cut(r.URL.Path, "/namespaces/"); some {
			mu.Lock()
			if object := strings.Split(of, "/"); object[1] == "configmaps" {
				configurations = append(configurations, of)
			} else {
				asked[object[2]] = true
			}
			mu.Unlock()
			w.WriteHeader(http.StatusForbidden)
			return
		}
		lists(nodes, pods)(w, r)
	}, new([]string))
	full := errors.New("no space left")
	err := c.parts(t.Context(), func(p part) error {
		if strings.HasPrefix(p.name, "nodes/") {
			return full
		}
		return nil
	})
	if !errors.Is(err, full) || len(asked) != atOnce {
		t.Errorf("%v; %d nodes were asked", err, len(asked))
	}
	if want := []string{"kube-system/configmaps/mustang"}; !slices.Equal(configurations, want) { // a tenant's may have that name
		t.Errorf("the configuration is read of %q, want %q", configurations, want)
	}
}

// agents are nodes, each with its agent.
func agents(n int) (nodes []corev1.Node, pods []corev1.Pod) {
	for i := range n {
		name := fmt.Sprintf("n%02d", i)
		nodes = append(nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		pods = append(pods, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "mustang-" + name},
			Spec: corev1.PodSpec{NodeName: name, HostNetwork: true, Containers: []corev1.Container{{Name: container}}}})
	}
	return nodes, pods
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
