// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
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
