// SPDX-License-Identifier: Apache-2.0

package run

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/mustang-net/mustang/bench/cpu"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
)

// sample is one of pod's requests, lost or not.
func sample(subject string, round int, lost bool) runner.Sample {
	s := runner.Sample{Case: runner.Case{Subject: subject, Scenario: "rr", Cores: "same"}, Round: round, Rate: 1}
	if lost {
		s.Rate, s.Error = 0, s.Case.String()+": no end by its deadline"
	}
	return s
}

// A run that goes on tells of what fails still, and of what fails anew.
func TestResumeHealsFailures(t *testing.T) {
	lost := sample("", 1, true).Error
	of := func(subject string) string { return subject + lost }
	old := &report.Document{
		Subjects: []report.Subject{{ID: "a, pod IP", Contestant: "a"}, {ID: "b, pod IP", Contestant: "b"}, {ID: "c, pod IP", Contestant: "c"}, {ID: "e", Contestant: "e"}},
		Samples:  []runner.Sample{sample("a, pod IP", 1, true), sample("b, pod IP", 1, true), sample("a, pod IP", 2, false), sample("b, pod IP", 2, true)},
		Failures: map[string]string{"a, pod IP": of("a, pod IP"), "b, pod IP": of("b, pod IP"), "c": "not built within 2m", "d": "no IPsec here", "e": of("e")},
		Facts:    map[string]bool{},
	}
	s := &session{o: Plan{Options: Options{Resume: old}}, doc: &report.Document{Subjects: old.Subjects, Failures: map[string]string{}, Facts: map[string]bool{}}}
	if err := s.resume(); err != nil {
		t.Fatal(err)
	}
	want := func(when string, names ...string) {
		t.Helper()
		if got := slices.Sorted(maps.Keys(s.doc.Failures)); !slices.Equal(got, names) {
			t.Errorf("%s: failures of %v, want %v", when, got, names)
		}
	}
	want("resumed", "b, pod IP", "d", "e")
	for round, lost := range []bool{true, false, true, false} {
		if err := s.kept(3+round, []runner.Sample{sample("b, pod IP", 3+round, false), sample("c, pod IP", 3+round, lost)}); err != nil {
			t.Fatal(err)
		}
	}
	want("after more rounds", "c, pod IP", "d", "e")
}

func TestFactsThatAreFoundHaveNotFailed(t *testing.T) {
	s := &session{group: &cpu.Group{}, doc: &report.Document{Facts: map[string]bool{}, Failures: map[string]string{"rain": "no sky"}}}
	s.o.Turns = 1
	ctx, stop := context.WithCancel(t.Context())
	s.o.Facts = []Fact{
		{Name: "rain", Find: func(context.Context, runner.Launcher, string) (bool, error) { return true, nil }},
		{Name: "snow", Find: func(context.Context, runner.Launcher, string) (bool, error) { return false, errors.New("no winter") }},
		{Name: "hail", Find: func(context.Context, runner.Launcher, string) (bool, error) { stop(); return false, context.Canceled }},
	}
	s.facts(ctx)
	if !s.doc.Facts["rain"] || !maps.Equal(s.doc.Failures, map[string]string{"snow": "no winter"}) {
		t.Errorf("%v, failures %v", s.doc.Facts, s.doc.Failures)
	}
}
