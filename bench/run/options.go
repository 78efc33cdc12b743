// SPDX-License-Identifier: Apache-2.0

package run

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
)

// Ways to make a stream.
const (
	StreamIperf3 = "iperf3"
	StreamOwn    = "own"
)

// Options are how to measure. Zero values are not defaults: start from Defaults.
type Options struct {
	Rounds   int
	Budget   time.Duration // instead of Rounds: as many as fit, with the building; 0 for none
	Duration time.Duration // of a sample, which is the sum of its turns
	Turns    int           // of a sample; iperf3's have one
	Warmup   time.Duration // before the window of each turn
	Cores    string        // same, cross or both
	Seed     uint64
	IPv6     bool
	TailRate int // also requests at this rate, a second; 0 for none
	StreamBy string
	MTU      int

	// Resume is an interrupted run to go on with; the options that made it must be
	// its own: see ResumedOptions. Nil for a new run.
	Resume *report.Document
	// Keep is given the document after each round; nil for nobody.
	Keep func(*report.Document) error

	Binary string   // mustang, for the labs
	Self   []string // command that runs the load program
}

// Defaults is enough rounds for a claim. Where instructions are counted, little of it
// is enough.
func Defaults() Options {
	o := Options{Rounds: 20, Duration: 300 * time.Millisecond, Turns: 20, Warmup: 2 * time.Millisecond,
		Cores: "same", Seed: 1, StreamBy: StreamIperf3, MTU: 1500}
	if Emulation() == report.EmulatedInstructions {
		o.StreamBy = StreamOwn
		o.Rounds, o.Duration, o.Turns, o.Warmup = 3, 60*time.Millisecond, 1, 30*time.Millisecond
	}
	return o
}

// Wrong is what a run was asked for and cannot be: exit status 2.
type Wrong struct{ error }

// ExitCode is the tool's exit status for it.
func (Wrong) ExitCode() int { return 2 }

// Unwrap implements errors.Is and As.
func (w Wrong) Unwrap() error { return w.error }

// Refuse makes an error, if there is one, a Wrong.
func Refuse(err error) error {
	if err == nil {
		return nil
	}
	return Wrong{err}
}

// Once refuses what is named twice: who is measured, and by what, is known by name.
func Once[T comparable](flag string, list []T) error {
	for i, x := range list {
		if slices.Contains(list[:i], x) {
			return fmt.Errorf("%s: %v is named twice; give it once", flag, x)
		}
	}
	return nil
}

// Validate names what cannot be.
func (o Options) Validate() error {
	switch {
	case o.Rounds < 1 && o.Budget == 0:
		return errors.New("--rounds: want at least 1")
	case o.Budget < 0:
		return errors.New("--budget: want a time, as 5m")
	case o.TailRate < 0 || o.TailRate > 1_000_000:
		return fmt.Errorf("--tails: %d requests a second: use 1 to 1,000,000", o.TailRate)
	case o.Duration < 30*time.Millisecond:
		return errors.New("--duration: want at least 30ms, CPU time is not exact below")
	case o.Turns < 1 || o.Duration/time.Duration(o.Turns) < 5*time.Millisecond:
		return fmt.Errorf("--turns: want 1 to %d, so that a turn of a sample of %s has 5ms", o.Duration/(5*time.Millisecond), o.Duration)
	case o.TailRate > 0 && o.Duration/time.Duration(o.Turns) < time.Second/time.Duration(o.TailRate):
		return fmt.Errorf("--tails: a turn of %s has no request at %d a second: use %d or more, or fewer --turns", o.Duration/time.Duration(o.Turns), o.TailRate, time.Second*time.Duration(o.Turns)/o.Duration+1)
	case o.AllCores() == nil:
		return fmt.Errorf("--cores %q is unknown: use same, cross or both", o.Cores)
	case o.StreamBy != StreamIperf3 && o.StreamBy != StreamOwn:
		return fmt.Errorf("--stream-by %q is unknown: use iperf3 or own", o.StreamBy)
	}
	return nil
}

// AllCores are the core settings to measure with.
func (o Options) AllCores() []string {
	return map[string][]string{"same": {"same"}, "cross": {"cross"}, "both": {"same", "cross"}}[o.Cores]
}

// planned is how many rounds there are to be: 0 for as many as fit into the budget.
func (o Options) planned() int {
	if o.Budget > 0 {
		return 0
	}
	return o.Rounds
}

// turns is how many turns a sample of a scenario has.
func (o Options) turns(scenario string) int {
	if scenario == runner.ABShort || scenario == runner.ABLong {
		return max(1, o.Turns/3) // a tenth of a second each, with a process of its own
	}
	s, err := load.ParseScenario(scenario)
	if err == nil && s.Mode == load.Stream && s.Size == 0 && o.StreamBy == StreamIperf3 {
		return 1
	}
	return o.Turns
}

// ResumedOptions are those that made a document, to go on with its run.
func ResumedOptions(d *report.Document) Options {
	o, set := Defaults(), d.Settings
	o.Rounds, o.Turns, o.Seed = set.Rounds, set.Turns, set.Seed
	o.Duration = time.Duration(set.Duration * float64(time.Second))
	o.IPv6, o.TailRate, o.StreamBy, o.MTU = set.IPv6, set.TailRate, set.StreamBy, set.MTU
	o.Cores = "both"
	if len(set.Cores) == 1 {
		o.Cores = set.Cores[0]
	}
	o.Resume = d
	return o
}

// Plan is what a run measures, and how.
type Plan struct {
	Options
	Contestants []Contestant // to build, in this order
	Scenarios   []string     // over each path that does not say its own
	Facts       []Fact
	// Profiled are scenarios of which each path gets a flame graph, after the rounds;
	// ProfileTime is how long each is sampled.
	Profiled    []string
	ProfileTime time.Duration
	BuildTime   time.Duration // for one contestant
	// Settings are recorded with the run, besides Options.
	Settings report.Settings
}

// Log is where progress goes.
type Log struct {
	W        io.Writer
	Terminal bool
}
