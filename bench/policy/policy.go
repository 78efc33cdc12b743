// SPDX-License-Identifier: Apache-2.0

// Package policy measures what NetworkPolicy costs: connections and requests
// between two pods, with few rules and with many, by mustang and by the same
// policies in nftables.
package policy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"time"

	"github.com/mustang-net/mustang/bench/cpu"
	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
)

// Options are how to run.
type Options struct {
	Binary   string   // mustang
	Self     []string // command that runs the load program
	Sizes    []int    // numbers of rules, and of addresses
	Pods     []int    // numbers of pods that have a policy each
	Rounds   int
	Duration time.Duration // of a sample
	Turns    int           // of a sample: contestants take turns, as in bench samehost
	Seed     uint64
	Log      io.Writer
}

// Defaults are a run for a claim.
func Defaults() Options {
	return Options{Sizes: []int{1, 10_000, 100_000}, Pods: []int{1, 120}, Rounds: 20, Duration: 300 * time.Millisecond, Turns: 20, Seed: 1}
}

// warmup begins each turn and does not count: of a connection that slept.
const warmup = 2 * time.Millisecond

// Scenarios of each contestant: a connection for each request meets policy with
// each of its first packets; requests on one connection meet it once.
var Scenarios = []string{string(load.CRR), string(load.RR)}

func (o Options) validate() error {
	switch {
	case o.Rounds < 1:
		return errors.New("--rounds: want at least 1")
	case o.Turns < 1 || o.Duration/time.Duration(o.Turns) < 5*time.Millisecond:
		return errors.New("--duration, --turns: want at least one turn, and 5ms for each")
	case len(o.Sizes) == 0 || slices.Min(o.Sizes) < 1 || slices.Max(o.Sizes) > 200_000:
		return errors.New("--sizes: want numbers from 1 to 200,000")
	case len(o.Pods) > 0 && (slices.Min(o.Pods) < 1 || slices.Max(o.Pods) > 250):
		return errors.New("--pods: want numbers from 1 to 250")
	}
	return errors.Join(run.Once("--sizes", o.Sizes), run.Once("--pods", o.Pods))
}

// Report is a run.
type Report struct {
	Kernel      string            `json:"kernel"`
	CPUs        int               `json:"cpus"`
	Load        [2]string         `json:"load_average"` // before and after
	Rounds      int               `json:"rounds"`
	Contestants []string          `json:"contestants"`
	Failures    map[string]string `json:"failures,omitempty"`
	Samples     []runner.Sample   `json:"samples"`
	seed        uint64
}

// Run measures all contestants, interleaved. What is finished when ctx ends is
// reported. Everything that was built is gone on return.
func Run(ctx context.Context, o Options) (r *Report, err error) {
	if err := run.Refuse(o.validate()); err != nil {
		return nil, err
	}
	unlock, err := run.Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	core, _, err := run.CPUs(false)
	if err != nil {
		return nil, err
	}
	r = &Report{Kernel: run.Read("/proc/sys/kernel/osrelease"), CPUs: runtime.NumCPU(), Rounds: o.Rounds, Failures: map[string]string{}, seed: o.Seed}
	r.Load[0] = run.Read("/proc/loadavg")
	group := cpu.NewGroup(cpu.Name(), []int{core})
	var envs []*env
	defer func() {
		for _, e := range slices.Backward(envs) {
			err = errors.Join(err, e.lab.Close())
		}
		err = errors.Join(err, group.Close())
	}()
	targets := map[string]runner.Target{}
	var cases []runner.Case
	for i, c := range contestants(o) {
		fmt.Fprintf(o.Log, "building %s\n", c.name)
		e, err := c.up(ctx, o, fmt.Sprintf("bp%d", i), group.Env(fmt.Sprintf("e%d", i)))
		if err != nil {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			r.Failures[c.name] = err.Error()
			continue
		}
		envs = append(envs, e)
		targets[c.name] = e.target
		r.Contestants = append(r.Contestants, c.name)
		for _, s := range Scenarios {
			cases = append(cases, runner.Case{Subject: c.name, Scenario: s, Cores: "same"})
		}
	}
	l := runner.Launcher{Self: o.Self, Group: group, ClientCPU: core, ServerCPU: core, Duration: o.Duration / time.Duration(o.Turns), Warmup: warmup, CC: load.ProbeCC("cubic")}
	set := runner.Settings{Rounds: o.Rounds, Warmup: true, Seed: o.Seed, Turns: func(string) int { return o.Turns }}
	r.Samples, err = runner.Run(ctx, cases, set, opener{l, targets}, &runner.Printer{W: o.Log, Rounds: o.Rounds})
	r.Rounds = 0 // of those that are finished
	for _, s := range r.Samples {
		r.Rounds = max(r.Rounds, s.Round)
	}
	r.Load[1] = run.Read("/proc/loadavg")
	return r, errors.Join(err, runner.Failed(r.Samples), r.failed())
}

// opener starts the load of a case.
type opener struct {
	l       runner.Launcher
	targets map[string]runner.Target
}

func (o opener) Open(ctx context.Context, c runner.Case) (runner.Load, error) {
	return o.l.Open(ctx, o.targets[c.Subject], c.Scenario)
}

func (o opener) Watch(runner.Case) func() float64 { return o.l.Watch() }

// Empty says whether no round is finished.
func (r *Report) Empty() bool { return len(r.Samples) == 0 }

func (r *Report) failed() error {
	var errs []error
	for name, text := range r.Failures {
		errs = append(errs, fmt.Errorf("%s: %s", name, text))
	}
	return errors.Join(errs...)
}
