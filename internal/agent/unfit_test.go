// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/state"
)

// plainService is one that nobody serves.
func plainService(name, address string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: corev1.ServiceSpec{
		ClusterIP: address, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}}}
}

// A Service for which the tables have no room is named and tried again, and the agent is
// well: on every node it would be the same. Whatever else fails makes it ill.
func TestAServiceThatDoesNotFitMakesNoAgentIll(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer func() { w.close() }()
		s := w.agent.sync
		is := func(when string, waits int, ill bool) {
			t.Helper()
			if got := s.failed.Load() != nil; got != ill || len(s.retry) != waits || s.due.IsZero() != (waits == 0 && !ill) {
				t.Errorf("%s: %d Services are to be tried again, want %d; ill: %v, want %v; due %v", when, len(s.retry), waits, got, ill, s.due)
			}
			problems := fmt.Sprint(w.agent.problems.list())
			if full := strings.Contains(problems, "is full"); full != (w.faults.unfit.IsValid()) {
				t.Errorf("%s: the problems are %s", when, problems)
			}
		}
		w.faults.unfit = netip.MustParsePrefix("10.96.1.0/24")
		w.tellObjects([]any{plainService("unfit", "10.96.1.1"), plainService("works", "10.96.0.1")}, nil)
		w.turn()
		is("one does not fit at the start", 1, false)
		w.turn()
		is("again", 1, false)
		due := s.due
		check(t, w.agent.watch.Services.Add(plainService("unfit too", "10.96.1.2")))
		s.step(t.Context())
		is("another does not fit", 2, false)
		if !s.due.Equal(due) {
			t.Errorf("which puts off the time of the first by %v", s.due.Sub(due))
		}
		check(t, w.agent.watch.Services.Delete(plainService("unfit too", "10.96.1.2")))
		s.step(t.Context())
		is("that one is gone", 1, false)
		w.faults.about = netip.MustParsePrefix("10.96.2.0/24")
		check(t, w.agent.watch.Services.Add(plainService("fails", "10.96.2.1")))
		w.turn()
		is("another fails", 2, true)
		check(t, w.agent.watch.Services.Add(plainService("more", "10.96.0.2")))
		s.step(t.Context()) // it is not the failed ones' time
		is("something else changes", 2, true)
		check(t, w.agent.watch.Services.Delete(plainService("fails", "10.96.2.1")))
		s.step(t.Context())
		is("the other is gone", 1, false)

		journal := filepath.Join(w.config.StateDir, "journal.json") // where nothing can be written
		check(t, os.MkdirAll(filepath.Join(journal, "x"), 0o700))
		check(t, w.agent.watch.Services.Delete(plainService("more", "10.96.0.2")))
		w.turn()
		if s.failed.Load() == nil {
			t.Error("no change can be written down, and the agent is well")
		}
		check(t, os.RemoveAll(journal))
		w.turn()
		is("changes can be written down", 1, false)
		w.faults.unfit = netip.Prefix{}
		w.turn()
		is("there is room", 0, false)
	})
}

// While one waits for another try, a change is applied when it comes; so is another zone.
func TestChangesDoNotWaitForAServiceThatDoesNotFit(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer func() { w.close() }()
		s, journal := w.agent.sync, filepath.Join(w.config.StateDir, "journal.json") // where nothing can be written
		w.faults.unfit = netip.MustParsePrefix("10.96.1.0/24")
		w.tellObjects([]any{plainService("unfit", "10.96.1.1"), plainService("works", "10.96.0.1")}, nil)
		w.turn()
		zone := func(name string) {
			t.Helper()
			check(t, w.agent.watch.Nodes.Replace([]any{&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.config.Node, Labels: map[string]string{corev1.LabelTopologyZone: name}}}}, ""))
			s.step(t.Context()) // it is not the time of what does not fit
		}
		if zone("a"); s.whole {
			t.Error("another zone is not followed at once")
		}
		check(t, os.MkdirAll(filepath.Join(journal, "x"), 0o700))
		check(t, w.agent.watch.Services.Delete(plainService("works", "10.96.0.1")))
		if zone("b"); !s.whole {
			t.Error("what is gone cannot be removed, and everything is replaced")
		}
		check(t, os.RemoveAll(journal))
		check(t, w.agent.watch.Services.Add(plainService("meanwhile", "10.96.0.3")))
		s.step(t.Context())
		check(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
			list, err := e.Services()
			if err == nil && !slices.ContainsFunc(list, func(b state.Binding) bool { return b.Service.Name == "meanwhile" }) {
				t.Errorf("a change waits for what failed; in force are %v", list)
			}
			return err
		}))
		w.turn()
		if s.whole {
			t.Error("not everything is replaced")
		}
	})
}
