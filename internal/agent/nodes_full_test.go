// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/state"
)

func TestWhichNodesFit(t *testing.T) {
	list := func(names string) (out []state.Node) {
		for _, name := range strings.Fields(names) {
			out = append(out, state.Node{Name: name})
		}
		return out
	}
	for _, tc := range []struct {
		list, inForce string
		room          int
		want, left    string
	}{
		{"a b c self", "", 4, "a b c self", ""},
		{"a b c self", "", 2, "a self", "b c"},
		{"a b c self", "b c gone", 3, "b c self", "a"},
		{"a b c self", "a b c self", 3, "a b self", "c"},
		{"a b c", "c", 2, "a c", "b"},
		{"a self", "a", 0, "", "self a"},
		{"a self", "a", -1, "", "self a"},
	} {
		got, wrong := fitting(list(tc.list), list(tc.inForce), "self", tc.room)
		var names, left []string
		for _, n := range got {
			names = append(names, n.Name)
		}
		for _, sentence := range wrong {
			name, _, _ := strings.Cut(strings.TrimPrefix(sentence, "node "), ":")
			left = append(left, name)
		}
		if strings.Join(names, " ") != tc.want || strings.Join(left, " ") != tc.left {
			t.Errorf("of %q with %q in force and room for %d: %q, without %q; want %q, %q", tc.list, tc.inForce, tc.room, names, left, tc.want, tc.left)
		}
	}
}

// With more nodes than there may be, those that are too many are left out, and changes of
// the others are brought into force.
func TestMoreNodesThanThereMayBe(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		onNIC(t, "172.16.0.1/12")
		w := newScripted(t)
		defer func() { w.close() }()
		w.agent.config.NodeMode = "direct"
		var most int
		must(t, w.agent.with(t.Context(), func(e *engine.Engine) (err error) { most, err = e.MaxNodes(); return err }))
		node := func(name string, i int) any {
			return clusterNode(name, fmt.Sprintf("172.16.%d.%d", i>>8, byte(i)), fmt.Sprintf("10.%d.%d.0/24", i>>8, byte(i)))
		}
		nodes := []any{node(w.config.Node, 1)}
		for i := 2; i <= most; i++ {
			nodes = append(nodes, node(fmt.Sprintf("m%04d", i), i))
		}
		is := func(when string, without ...string) {
			t.Helper()
			w.tellObjects(nil, nil)
			check(t, w.agent.watch.Nodes.Replace(slices.Clone(nodes), ""))
			w.turn()
			known := map[string]bool{}
			must(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
				list, _, err := e.Nodes()
				for _, n := range list {
					known[n.Name] = true
				}
				return err
			}))
			if len(known) != min(most, len(nodes)) || w.agent.sync.membersRetry.fails() || slices.ContainsFunc(without, func(name string) bool { return known[name] }) {
				t.Errorf("%s: %d nodes of %d are in force, it fails: %v", when, len(known), len(nodes), w.agent.sync.membersRetry.fails())
			}
			if got := w.agent.sync.nodeProblems; len(got) != len(without) || len(got) > 0 && !strings.HasPrefix(got[0], "node "+without[0]+": ") {
				t.Errorf("%s: wrong is %q, want %q", when, got, without)
			}
		}
		is("as many as there may be")
		nodes = append(nodes, node("a", most+1))
		is("one more", "a")
		w.close()
		w.open()
		w.agent.config.NodeMode = "direct"
		is("another agent", "a")
		nodes = slices.Delete(nodes, 1, 2)
		is("one goes")
	})
}
