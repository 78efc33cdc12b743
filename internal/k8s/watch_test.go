// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"errors"
	"log/slog"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
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

// What comes of a Service's slices does not depend on which of them was heard of first, as
// after a restart.
func TestSlicesCountInTheOrderOfTheirNames(t *testing.T) {
	web := parse[corev1.Service](t, spec(plainSpec))
	var slices []any
	for _, name := range []string{"a", "b"} {
		s := parse[discoveryv1.EndpointSlice](t, of(plainSlice+"endpoints: [{addresses: [10.1.0.1], nodeName: on-"+name+"}]"))
		s.Name = name
		slices = append(slices, s)
	}
	for _, first := range []int{0, 1} {
		w := (&Client{}).NewWatch(slog.New(slog.DiscardHandler), Services, Slices)
		for _, err := range []error{w.Services.Add(web), w.Slices.Add(slices[first]), w.Slices.Add(slices[1-first])} {
			if err != nil {
				t.Fatal(err)
			}
		}
		tr := NewTranslator(w, node)
		tr.Affected(w.Take())
		got, _, _ := tr.Service(Key{"shop", "web"})
		if b := got.Ports[0].Backends; len(b) != 1 || b[0].Node != "on-a" {
			t.Errorf("heard of number %d first: the backends are %+v", first, b)
		}
	}
}
