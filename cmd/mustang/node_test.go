// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// Where the node is, and how to print, is no setting of the node's.
func TestNodeSetShowsTheSettings(t *testing.T) {
	w := newTool(t)
	w.ok("node", "set", "--vni", "7")
	var set state.NodeSettings
	if err := json.Unmarshal([]byte(w.ok("node", "set", "-o", "json")), &set); err != nil || set.VNI != 7 {
		t.Errorf("%+v, %v", set, err)
	}
}

// Comments before the list, in a document of their own, do not make it an empty one, which
// would take all nodes away.
func TestNodesBehindADocumentOfComments(t *testing.T) {
	const list = "nodes: [{name: a, addresses: [192.0.2.1], podCIDRs: [10.1.0.0/24]}]\n"
	for _, before := range []string{"", "---\n", "# ours\n---\n", "---\n# ours\n---\n", "---\n---\n"} {
		f, err := readNodes(&globals{}, "-", strings.NewReader(before+list))
		if err != nil || len(f.Nodes) != 1 {
			t.Errorf("behind %q: %v, %v", before, f.Nodes, err)
		}
	}
	f, err := readNodes(&globals{}, "-", strings.NewReader("--- {nodes: [{name: a, addresses: [192.0.2.1], podCIDRs: [10.1.0.0/24]}]}\n"))
	if err != nil || len(f.Nodes) != 1 {
		t.Errorf("beside the line: %v, %v", f.Nodes, err)
	}
}

// What is cut short, as by a generator that died, removes no node.
func TestAFileWithoutNodesIsRefused(t *testing.T) {
	for text, ok := range map[string]bool{"": false, "# ours\n": false, "settings: {vni: 2}\n": false, "nodes:\n": false, "nodes: []\n": true} {
		if _, err := readNodes(&globals{}, "-", strings.NewReader(text)); (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
}
