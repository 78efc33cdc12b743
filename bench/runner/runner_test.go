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

// fake opens loads that log their turns.
type fake struct {
	log  []Case // of each turn, in order
	up   map[Case]bool
	turn func(Case) error // nil: all is well
	open func(Case) error
}

type fakeLoad struct {
	f *fake
	c Case
	n int
}

func (f *fake) Open(_ context.Context, c Case) (Load, error) {
	if f.open != nil {
		if err := f.open(c); err != nil {
			return nil, err
		}
	}
	if f.up == nil {
		f.up = map[Case]bool{}
	}
	f.up[c] = true
	return &fakeLoad{f: f, c: c}, nil
}

func (f *fake) Watch(Case) func() float64 { return func() float64 { return 0.5 } }

func (l *fakeLoad) Turn(context.Context) (Turn, error) {
	l.f.log = append(l.f.log, l.c)
	l.n++
	if l.f.turn != nil {
		if err := l.f.turn(l.c); err != nil {
			return Turn{}, err
		}
	}
	return Turn{Rate: float64(l.n), Cost: 2}, nil
}

func (l *fakeLoad) Finish() (Sample, error) {
	l.Kill()
	return Sample{Rate: 1, Count: int64(l.n)}, nil
}

func (l *fakeLoad) Kill() { delete(l.f.up, l.c) }

func cases(subjects ...string) (out []Case) {
	for _, scenario := range []string{"rr", "crr"} {
		for _, s := range subjects {
			out = append(out, Case{Subject: s, Scenario: scenario, Cores: "same"})
		}
	}
	return out
}

func TestAllContestantsTakeTurns(t *testing.T) {
	f := &fake{}
	all := cases("a", "b", "c")
	samples, err := Run(t.Context(), all, Settings{Rounds: 1, Seed: 3, Turns: func(string) int { return 4 }}, f, quiet{})
	if err != nil {
		t.Fatal(err)
	}
	if len(f.up) != 0 {
		t.Errorf("loads left behind: %v", f.up)
	}
	for start := 0; start < len(f.log); start += 3 {
		cycle := slices.Clone(f.log[start : start+3])
		if cycle[0].Scenario != f.log[start/12*12].Scenario {
			t.Fatalf("scenarios are mixed: %v", f.log)
		}
		if start/3%2 == 1 {
			before := slices.Clone(f.log[start-3 : start])
			slices.Reverse(before)
			if !slices.Equal(before, cycle) {
				t.Errorf("cycle %d is not the one before it reversed", start/3)
			}
		}
		slices.SortFunc(cycle, func(a, b Case) int { return strings.Compare(a.Subject, b.Subject) })
		if cycle[0].Subject != "a" || cycle[1].Subject != "b" || cycle[2].Subject != "c" {
			t.Errorf("a cycle without all contestants: %v", cycle)
		}
	}
	for _, s := range samples {
		if !slices.Equal(s.TurnRates, []float64{1, 2, 3, 4}) || len(s.TurnCosts) != 4 || s.Count != 4 || !s.Noisy || s.Round != 1 {
			t.Errorf("sample is not of its four turns: %+v", s)
		}
	}
}

// told keeps what each sample's progress said is left.
type told []time.Duration

func (l *told) Sample(_, _, _ int, _ Sample, left time.Duration) { *l = append(*l, left) }

// The samples of a scenario end together: the first of them is no measure of how long one takes.
func TestTimeLeftIsBySamplesThatAreDone(t *testing.T) {
	var left told
	if _, err := Run(t.Context(), cases("a", "b", "c", "d", "e", "f"), Settings{Rounds: 4, Seed: 3}, &fake{}, &left); err != nil {
		t.Fatal(err)
	}
	first, second := left[0], left[1] // of 48 samples
	if first == 0 || first*46 != second*47 {
		t.Errorf("%v are left, then %v: not 47 samples of one length, then 46", first, second)
	}
	if last := left[len(left)-1]; last != 0 {
		t.Errorf("%v are left at the end", last)
	}
}

// Samples of one turn, as iperf3's, are mirrored from round to round.
func TestEveryOtherRoundIsReversed(t *testing.T) {
	run := func() []Case {
		f := &fake{}
		samples, err := Run(t.Context(), cases("a", "b", "c", "d"), Settings{Rounds: 4, Warmup: true, Seed: 3}, f, quiet{})
		if err != nil || len(samples) != 32 {
			t.Fatalf("%d samples, want 32: the warm-up must be discarded; %v", len(samples), err)
		}
		return f.log[8:]
	}
	log := run()
	for _, odd := range []int{0, 2} {
		want := slices.Clone(log[8*odd : 8*odd+8])
		slices.Reverse(want)
		if !slices.Equal(want, log[8*odd+8:8*odd+16]) {
			t.Errorf("round %d is not round %d reversed", odd+2, odd+1)
		}
	}
	if !slices.Equal(log, run()) {
		t.Error("the same seed gave another order")
	}
}

func TestAbortedRunKeepsFinishedRoundsOnly(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("interrupted")
	n := 0
	f := &fake{turn: func(Case) error {
		if n++; n == 11 { // the third turn of round 3
			cancel(stop)
		}
		return nil
	}}
	samples, err := Run(ctx, cases("a", "b"), Settings{Rounds: 5, Seed: 1}, f, quiet{})
	if !errors.Is(err, stop) {
		t.Errorf("error %v, want the cause of the end", err)
	}
	if len(samples) != 8 || samples[7].Round != 2 {
		t.Errorf("%d samples, want the 8 of two rounds", len(samples))
	}
	if len(f.up) != 0 {
		t.Errorf("loads left behind: %v", f.up)
	}
}

func TestResumedRunGoesOnAsIfItHadNotStopped(t *testing.T) {
	set := Settings{Rounds: 5, Warmup: true, Seed: 7, Turns: func(string) int { return 3 }}
	whole := &fake{}
	if _, err := Run(t.Context(), cases("a", "b", "c"), set, whole, quiet{}); err != nil {
		t.Fatal(err)
	}
	set.Done = 3
	rest := &fake{}
	var rounds []int
	set.Kept = func(round int, _ []Sample) error { rounds = append(rounds, round); return nil }
	samples, err := Run(t.Context(), cases("a", "b", "c"), set, rest, quiet{})
	if err != nil || len(samples) != 2*6 || !slices.Equal(rounds, []int{4, 5}) {
		t.Fatalf("%d samples of rounds %v, want 12 of 4 and 5; %v", len(samples), rounds, err)
	}
	const round = 6 * 3
	if !slices.Equal(whole.log[4*round:], rest.log[round:]) {
		t.Errorf("the order of the last rounds differs from the uninterrupted run's")
	}
}

func TestBudgetChoosesRounds(t *testing.T) {
	turn := func(Case) error { time.Sleep(time.Millisecond); return nil }
	for _, c := range []struct {
		budget   time.Duration
		min, max int
	}{{0, 1, 1}, {300 * time.Millisecond, 3, 37}} {
		got := 0
		for range 20 { // a machine that stands still for a moment has time for fewer
			set := Settings{Until: time.Now().Add(c.budget), Warmup: true, Seed: 1, Turns: func(string) int { return 2 }}
			samples, err := Run(t.Context(), cases("a", "b"), set, &fake{turn: turn}, quiet{}) // a round takes 8 ms or more
			if err != nil {
				t.Fatal(err)
			}
			if got = len(samples) / 4; got >= c.min {
				break
			}
		}
		if got < c.min || got > c.max {
			t.Errorf("a budget of %s gave %d rounds, want %d to %d", c.budget, got, c.min, c.max)
		}
	}
}

func TestDeadContestantIsNamedAndRetired(t *testing.T) {
	dead := func(c Case) bool { return c.Subject == "dead" && c.Scenario == "crr" }
	for _, where := range []string{"open", "turn"} {
		tries := 0
		fail := func(c Case) error {
			if !dead(c) {
				return nil
			}
			tries++
			return errors.New("connect to 10.96.0.1:5201: timed out")
		}
		f := &fake{}
		if where == "open" {
			f.open = fail
		} else {
			f.turn = fail
		}
		samples, err := Run(t.Context(), cases("dead", "alive"), Settings{Rounds: 4, Seed: 1, Turns: func(string) int { return 3 }}, f, quiet{})
		if err != nil {
			t.Fatal(err)
		}
		if tries != retireAfter {
			t.Errorf("%s: tried %d times, want %d", where, tries, retireAfter)
		}
		failed := Failed(samples)
		if failed == nil || !strings.Contains(failed.Error(), "dead, crr") || strings.Contains(failed.Error(), "alive") {
			t.Errorf("%s: the failure does not name its contestant: %v", where, failed)
		}
		for _, s := range samples {
			if s.Usable() == dead(s.Case) || (s.Usable() && len(s.TurnRates) != 3) {
				t.Errorf("%s: %+v", where, s)
			}
		}
		if len(f.up) != 0 {
			t.Errorf("%s: loads left behind: %v", where, f.up)
		}
	}
}

func TestBusyTimeCountsItsCPUsOnly(t *testing.T) {
	const stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 0 50 1000 10 5 20 25 0 0\ncpu1 900 0 0 0 0 0 0 0 0 0\n"
	if got := busyIn(stat, []int{0}); got != 2 {
		t.Errorf("busy %v s, want 2 s: idle and iowait are not busy, steal is", got)
	}
}
