// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/mustang-net/mustang/internal/engine"
)

func TestAScopeWithNothingInItIsAProblem(t *testing.T) {
	for _, c := range []struct {
		name string
		s    *engine.Status
		want string
	}{
		{"not answered", nil, ""},
		{"the agent's", &engine.Status{BPFFS: "/sys/fs/bpf/mustang", Present: true}, ""},
		{"another's", &engine.Status{BPFFS: "/sys/fs/bpf/mustang"}, "nothing is loaded in /sys/fs/bpf/mustang"},
	} {
		if got := unseen(c.s); !strings.HasPrefix(got, c.want) || (got == "") != (c.want == "") {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// An agent that hangs does not make whoever looks for it hang.
func TestAnAgentThatHangsIsAProblem(t *testing.T) {
	gone := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-gone }))
	defer s.Close()
	defer close(gone)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"clusters": [{"name": "c", "cluster": {"server": "` + s.URL + `"}}], "contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Connect(file, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer func(before time.Duration) { patience = before }(patience)
	patience = 100 * time.Millisecond
	got := make(chan NodeStatus, 1)
	go func() { got <- c.nodeStatus(t.Context(), member{agent: &corev1.Pod{}}) }()
	select {
	case n := <-got:
		if len(n.Problems) != 2 || !strings.Contains(n.Problems[0], "status: no answer within 100ms") {
			t.Errorf("problems: %q", n.Problems)
		}
	case <-time.After(20 * time.Second):
		t.Error("it hangs")
	}
}
