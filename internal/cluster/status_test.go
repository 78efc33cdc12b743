// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"net/http"
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
	c := connect(t, func(http.ResponseWriter, *http.Request) { <-gone }, new([]string))
	defer close(gone)
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
