// SPDX-License-Identifier: Apache-2.0

package cni

// What CHECK and STATUS say while nobody can tell, and while no ADD can work.

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/policy"
	kept "github.com/mustang-net/mustang/internal/store"
)

func TestCHECKIsToBeTriedAgainWhileTheAgentDoesNotAnswer(t *testing.T) {
	w := newWorld(t)
	w.ok(w.call("ADD", nil, podArgs...))
	prev := map[string]any{"prevResult": json.RawMessage(w.said)}
	for _, conduct := range []string{"hangs", "holds"} {
		enough := w.patience
		w.patience = "1s"
		stop := w.agent(conduct)
		w.tryAgain(w.call("CHECK", prev))
		stop()
		w.patience = enough
		w.ok(w.call("CHECK", prev))
	}
	w.ok(w.call("DEL", nil))
}

// saysAtOnce is a STATUS that is no wait.
func (w *world) saysAtOnce(more map[string]any, part string) {
	w.t.Helper()
	start := time.Now()
	e := w.call("STATUS", more)
	if e == nil || e.Code != errUnavailable || !strings.Contains(e.Details, part) {
		w.t.Errorf("STATUS: %v, want code 50 and %q", e, part)
	}
	if took := time.Since(start); took > 20*time.Second {
		w.t.Errorf("STATUS took %s", took)
	}
}

func TestSTATUSSaysThatADDWouldWaitForAnAgent(t *testing.T) {
	w := newWorld(t)
	needed := map[string]any{"requireAgent": true}
	w.saysAtOnce(needed, "requireAgent is set, and no agent listens")
	stop := w.agent("serves")
	w.ok(w.call("STATUS", needed))
	w.ok(w.call("ADD", needed, podArgs...))
	stop()
	w.saysAtOnce(needed, "requireAgent is set, and no agent listens") // which the pod does not suffer from
	w.ok(w.call("STATUS", nil))
	w.ok(w.call("DEL", needed))
	w.ok(w.call("STATUS", nil))

	// Once an agent has put policy into the tables, only one can add to it.
	if err := kept.At(w.state()).WriteNames(policy.Names{}); err != nil {
		t.Fatal(err)
	}
	w.saysAtOnce(nil, "its agent's, which does not run")
	stop = w.agent("knows nothing yet")
	w.saysAtOnce(nil, "has not heard everything")
	stop()
}
