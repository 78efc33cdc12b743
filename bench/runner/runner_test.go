// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

type quiet struct{}

func (quiet) Sample(int, int, int, Sample, time.Duration) {}

func cases(subjects ...string) (out []Case) {
	for _, scenario := range []string{"rr", "crr"} {
		for _, s := range subjects {
			out = append(out, Case{Subject: s, Scenario: scenario, Cores: "same"})
		}
	}
	return out
}

func good(_ context.Context, _ Case) (Sample, error) { return Sample{Rate: 1}, nil }

func orderOf(samples []Sample, round int) (out []Case) {
	for _, s := range samples {
		if s.Round == round {
			out = append(out, s.Case)
		}
	}
	return out
}

func TestEveryOtherRoundIsReversed(t *testing.T) {
	all := cases("a", "b", "c", "d")
	samples, err := Run(t.Context(), all, Settings{Rounds: 4, Warmup: true, Seed: 3}, good, quiet{})
	if err != nil {
		t.Fatal(err)
	}
	if len(samples) != 4*len(all) {
		t.Fatalf("%d samples, want %d: the warm-up must be discarded", len(samples), 4*len(all))
	}
	for _, odd := range []int{1, 3} {
		want := orderOf(samples, odd)
		slices.Reverse(want)
		if !slices.Equal(want, orderOf(samples, odd+1)) {
			t.Errorf("round %d is not round %d reversed", odd+1, odd)
		}
	}
	again, _ := Run(t.Context(), all, Settings{Rounds: 4, Warmup: true, Seed: 3}, good, quiet{})
	if !slices.Equal(orderOf(samples, 1), orderOf(again, 1)) {
		t.Error("the same seed gave another order")
	}
}

func TestComparedSamplesStayTogether(t *testing.T) {
	samples, _ := Run(t.Context(), cases("a", "b", "c"), Settings{Rounds: 1, Seed: 1}, good, quiet{})
	order := orderOf(samples, 1)
	for _, c := range order[:3] {
		if c.Scenario != order[0].Scenario {
			t.Fatalf("scenarios are mixed: %v", order)
		}
	}
}

func TestAbortedRunKeepsFinishedRoundsOnly(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("interrupted")
	n := 0
	samples, err := Run(ctx, cases("a", "b"), Settings{Rounds: 5, Seed: 1}, func(context.Context, Case) (Sample, error) {
		if n++; n == 11 { // the third sample of round 3
			cancel(stop)
		}
		return Sample{Rate: 1}, nil
	}, quiet{})
	if !errors.Is(err, stop) {
		t.Errorf("error %v, want the cause of the end", err)
	}
	if len(samples) != 8 || samples[7].Round != 2 {
		t.Errorf("%d samples, want the 8 of two rounds", len(samples))
	}
}

func TestDeadContestantIsNamedAndRetired(t *testing.T) {
	tries := 0
	samples, err := Run(t.Context(), cases("dead", "alive"), Settings{Rounds: 4, Seed: 1}, func(_ context.Context, c Case) (Sample, error) {
		if c.Subject == "dead" && c.Scenario == "crr" {
			tries++
			return Sample{}, errors.New("connect to 10.96.0.1:5201: timed out")
		}
		return Sample{Rate: 1}, nil
	}, quiet{})
	if err != nil {
		t.Fatal(err)
	}
	if tries != retireAfter {
		t.Errorf("tried %d times, want %d", tries, retireAfter)
	}
	failed := Failed(samples)
	if failed == nil || !strings.Contains(failed.Error(), "dead, crr") || strings.Contains(failed.Error(), "alive") {
		t.Errorf("the failure does not name its contestant: %v", failed)
	}
}

func TestBusyTimeCountsItsCPUsOnly(t *testing.T) {
	const stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 0 50 1000 10 5 20 25 0 0\ncpu1 900 0 0 0 0 0 0 0 0 0\n"
	if got := busyIn(stat, []int{0}); got != 2 {
		t.Errorf("busy %v s, want 2 s: idle and iowait are not busy, steal is", got)
	}
}
