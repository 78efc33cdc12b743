// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/mustang-net/mustang/internal/k8s"
)

// An API server that is slow to take the startup taint off holds up nothing that is applied; that it refuses is
// said until the taint is gone, whoever takes it off.
func TestTheStartupTaintHoldsUpNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	const key = "mustang.net/not-ready"
	asked, answers := make(chan string, 1), make(chan int)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.Method + " " + r.URL.Path
		w.WriteHeader(<-answers)
	}))
	defer server.Close()
	w := newScripted(t)
	defer w.close()
	client, err := k8s.Connect(k8s.Access{Kubeconfig: w.config.Kubeconfig, Server: server.URL})
	must(t, err)
	w.agent.client, w.agent.config.StartupTaint, w.agent.config.CNIConfDir = client, key, None
	node := func(taints ...string) {
		t.Helper()
		n := clusterNode("n1", "192.0.2.1", "10.1.0.0/24")
		for _, key := range taints {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule})
		}
		check(t, w.agent.watch.Nodes.Replace([]any{n}, ""))
		w.turn()
	}
	unready := func(want string) {
		t.Helper()
		if got := w.agent.sync.unready.Load(); got == nil || (*got == "") != (want == "") || !strings.Contains(*got, want) {
			t.Fatalf("unready: %v, want %q", got, want)
		}
	}
	s := w.agent.sync
	try := func(code int) {
		t.Helper()
		if got := <-asked; got != "PATCH /api/v1/nodes/n1" {
			t.Fatal(got)
		}
		if !s.taint.tried {
			t.Error("no try is under way")
		}
		answers <- code
		s.untainted(<-s.taint.ended)
	}
	w.tellObjects(nil, nil)
	node("another", key)
	unready("")                   // nobody has answered yet
	node("another", key, "third") // and nobody is asked twice
	try(http.StatusForbidden)
	node("another", key)
	unready("take the taint " + key + " off node n1")
	try(http.StatusOK)
	s.readyRetry.due = time.Now()
	node("another", key) // the watch has not told yet
	unready("")
	node("another")
	unready("")
	s.taint.off = time.Time{}
	node("another", key)
	try(http.StatusForbidden)
	node("another")
	unready("")
	if len(asked) > 0 {
		t.Errorf("asked once more: %s", <-asked)
	}
}
