// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Where a stranger reaches nobody, all checks that policy denies pass: others say that it is not
// policy's doing.
func TestAStrangerWhoReachesNobodyIsNotDeniedByPolicy(t *testing.T) {
	pods := map[string]*corev1.Pod{}
	names := map[string]string{}
	for i, name := range []string{"client", "stranger", "server-here", "server-there"} {
		ip := fmt.Sprintf("10.1.0.%d", i+1)
		pods[name] = &corev1.Pod{Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: ip}}}}
		names[ip] = name
	}
	for _, cut := range []bool{false, true} {
		failed := map[string]int{}
		c := &test{world: &world{pods: pods}, ctx: t.Context(), done: func(k Check) {
			if k.Failed != "" {
				_, what, _ := strings.Cut(k.What, ", ")
				failed[what]++
			}
		}}
		c.exec = func(_ context.Context, pod string, args ...string) ([]byte, error) {
			ip, _, _ := strings.Cut(args[len(args)-1], ":")
			if pod == "stranger" && cut && !slices.Contains(args, "--in-vain") {
				return nil, errors.New("timeout")
			}
			return fmt.Appendf(nil, `{"server": %q, "client": %q}`, names[ip], c.ip(pod, true)), nil
		}
		c.eachFamily(c.unguarded)
		if cut {
			c.eachFamily(c.policy)
		}
		want := map[bool]int{true: 4}[cut]
		if failed["no policy yet"] != want || len(failed) > 1 {
			t.Errorf("cut off: %v; failed: %v", cut, failed)
		}
	}
}

// What Ctrl-C cuts short, and what comes after, has neither passed nor failed.
func TestAnInterruptedCheckIsNone(t *testing.T) {
	pods := map[string]*corev1.Pod{}
	for _, name := range []string{"client", "stranger", "server-here", "server-there"} {
		pods[name] = &corev1.Pod{Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.1.0.1"}}}}
	}
	var notes []string
	for name, stage := range map[string]func(*test){
		"checks":  func(c *test) { c.eachFamily(c.unguarded) },
		"denials": func(c *test) { c.denied(Check{}, "tcp", "10.1.0.1:80"); c.denied(Check{}, "tcp", "10.1.0.1:80") },
		"policy":  func(c *test) { c.eachFamily(c.policy) },
		"outside": func(c *test) { c.outside(nil) },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		api := connect(t, func(http.ResponseWriter, *http.Request) { cancel() }, &notes)
		asked := 0
		stage(&test{world: &world{c: api, pods: pods}, ctx: ctx,
			exec: func(ctx context.Context, _ string, _ ...string) ([]byte, error) {
				asked++
				cancel()
				return nil, context.Cause(ctx)
			},
			done: func(k Check) { t.Errorf("%s: told: %+v", name, k) }})
		if asked > 1 {
			t.Errorf("%s: asked %d times", name, asked)
		}
	}
}

// A stream to a pod that hangs is given up, whichever question it has.
func TestNoQuestionWaitsForGood(t *testing.T) {
	for name, stage := range map[string]func(*test){
		"check":  func(c *test) { c.check(Check{}, "client", "tcp", "10.1.0.1:80", nil) },
		"denied": func(c *test) { c.denied(Check{}, "tcp", "10.1.0.1:80") },
	} {
		stage(&test{ctx: t.Context(), done: func(Check) {}, exec: func(ctx context.Context, _ string, _ ...string) ([]byte, error) {
			if _, limited := ctx.Deadline(); !limited {
				t.Errorf("%s: it has no end", name)
			}
			return []byte("{}"), nil
		}})
	}
}

// A test that could ask nothing between nodes does not pass as one that did.
func TestATestBetweenNodesWantsTwo(t *testing.T) {
	for _, c := range []struct {
		ready string // each letter a node; capitals are ready
		names []string
		nodes string // that are tested
		want  string // in the error, or else in what is told
	}{
		{ready: "ABC", nodes: "AB"},
		{ready: "aBC", nodes: "BC"},
		{ready: "aBc", want: "no agent is ready on: a, c; `mustang status --cluster` tells why; --nodes B tests that node alone"},
		{ready: "ab", want: "no agent is ready on: a, b;"},
		{ready: "aBc", names: []string{"B"}, nodes: "B", want: "node B is tested alone"},
		{ready: "ABC", names: []string{"B"}, nodes: "B", want: "node B is tested alone"},
		{ready: "A", nodes: "A", want: "node A is tested alone"},
		{ready: "aBC", names: []string{"C", "a"}, want: "no agent is ready on: a;"},
		{ready: "aBC", names: []string{"C", "x"}, want: "no agent is ready on: x;"},
	} {
		var nodes []corev1.Node
		var pods []corev1.Pod
		for _, r := range c.ready {
			name, ready := string(r), corev1.ConditionFalse
			if unicode.IsUpper(r) {
				ready = corev1.ConditionTrue
			}
			nodes = append(nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
			pods = append(pods, corev1.Pod{Spec: corev1.PodSpec{NodeName: name, HostNetwork: true, Containers: []corev1.Container{{Name: container}}},
				Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}}})
		}
		var told []string
		w, err := connect(t, lists(nodes, pods), &told).newWorld(t.Context(), Options{Nodes: c.names})
		got := ""
		if err != nil {
			told = append(told, err.Error())
		} else {
			for _, n := range w.nodes {
				got += n.Name
			}
		}
		if said := strings.Join(told, "\n"); got != c.nodes || !strings.Contains(said, c.want) || (said == "") != (c.want == "") {
			t.Errorf("%s, --nodes %v: tests %q, %q; want %q, %q", c.ready, c.names, got, said, c.nodes, c.want)
		}
	}
}

// Whoever interrupts while the namespace is being made leaves none behind; one that is somebody
// else's stays.
func TestAnInterruptedNamespaceIsRemoved(t *testing.T) {
	nodes, pods := agents(1)
	pods[0].Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	for _, c := range []struct {
		name    string
		code    int // that answers its making
		made    bool
		deleted int
	}{
		{"made", http.StatusCreated, true, 1},
		{"made, and nobody heard of it", http.StatusGatewayTimeout, true, 1},
		{"somebody else's", http.StatusConflict, false, 0},
		{"forbidden", http.StatusForbidden, false, 0},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		var mu sync.Mutex
		there, deleted := "", 0
		api := connect(t, func(w http.ResponseWriter, r *http.Request) {
			if !strings.HasPrefix(r.URL.Path, "/api/v1/namespaces") {
				lists(nodes, pods)(w, r)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			mu.Lock()
			defer mu.Unlock()
			switch r.Method {
			case http.MethodPost:
				var ns corev1.Namespace
				json.NewDecoder(r.Body).Decode(&ns)
				if there != "" {
					break // something in it
				}
				cancel()
				select { // a while later it is there
				case <-r.Context().Done():
				case <-time.After(200 * time.Millisecond):
				}
				if ns.Name == "" {
					ns.Name = ns.GenerateName + "x"
				}
				if c.made {
					there = ns.Name
				}
				w.WriteHeader(c.code)
				json.NewEncoder(w).Encode(ns)
				return
			case http.MethodDelete:
				there = ""
				deleted++
			case http.MethodGet:
				if there == "" {
					w.WriteHeader(http.StatusNotFound)
				}
			}
			w.Write([]byte("{}"))
		}, new([]string))
		_, err := api.Test(ctx, Options{}, func(Check) {})
		cancel()
		if err == nil || there != "" || deleted != c.deleted {
			t.Errorf("%s: %v; it is %q, deleted %d times", c.name, err, there, deleted)
		}
	}
}
