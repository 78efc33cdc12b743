// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"strings"
	"testing"

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
