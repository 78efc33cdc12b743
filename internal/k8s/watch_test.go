// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"errors"
	"log/slog"
	"testing"
)

// A pod may be newer than what decides about it while pods are followed, and that is not.
func TestWhatDecidesAboutPodsMayBeBehind(t *testing.T) {
	w := (&Client{}).NewWatch(slog.New(slog.DiscardHandler), Pods, Namespaces, Policies)
	away := errors.New("away")
	for _, c := range []struct {
		pods, namespaces, policies error
		behind                     bool
	}{
		{nil, nil, nil, false},
		{nil, nil, away, true},
		{nil, away, nil, true},
		{away, away, away, false},
		{away, nil, nil, false},
	} {
		w.connected(Pods, c.pods)
		w.connected(Namespaces, c.namespaces)
		w.connected(Policies, c.policies)
		if got := w.Behind(); got != c.behind {
			t.Errorf("pods %v, namespaces %v, policies %v: behind %v, want %v", c.pods, c.namespaces, c.policies, got, c.behind)
		}
	}
}
