// SPDX-License-Identifier: Apache-2.0

package nodes

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
	"github.com/mustang-net/mustang/lab"
)

// Options are how to run.
type Options struct {
	Mode     string // how pods are connected
	Rounds   int
	Duration time.Duration
	Warmup   time.Duration // before the window of each turn
	Seed     uint64
	IPv6     bool
	MTU      int
	BigTCP   int    // bytes that wires and pods send at once; 0: the kernel's 65536
	Cores    string // same or cross
	Sizes    []int  // bytes of a message, for streams and RR: a sweep. None: the loads' own, and CRR with them
	Flows    int    // connections at once, each with a thread at either end
	Binary   string // mustang, for the labs
	Self     []string
	Log      io.Writer `json:"-"`
	Terminal bool      `json:"-"`
}

// Defaults is a run that a claim can rest on.
func Defaults() Options {
	return Options{Mode: string(lab.Veth), Rounds: 15, Duration: 500 * time.Millisecond, Warmup: 2 * time.Millisecond,
		Seed: 1, MTU: 1500, Cores: "same", Flows: 1}
}

// Report is a run.
type Report struct {
	Kernel   string    `json:"kernel"`
	CPUs     int       `json:"cpus"`
	Load     [2]string `json:"load_average"` // before and after
	CC       string    `json:"congestion_control"`
	Options  Options   `json:"options"`
	Paths    []string  `json:"paths"` // in the order of the table
	cases    []runner.Case
	Samples  []runner.Sample `json:"samples"`
	Complete bool            `json:"complete"`
}

// Run measures all contestants. What is finished when ctx ends is reported;
// everything that was built is gone on return.
func Run(ctx context.Context, o Options) (r *Report, err error) {
	if err := run.Refuse(o.validate()); err != nil {
		return nil, err
	}
	unlock, err := run.Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	client, server, err := run.CPUs(o.Cores == "cross")
	if err != nil {
		return nil, err
	}
	if o.Cores == "same" {
		server = client
	}
	group := cpu.NewGroup(cpu.Name(), slices.Compact([]int{client, server}))
	var labs []*lab.Lab
	defer func() {
		for _, l := range slices.Backward(labs) {
			err = errors.Join(err, l.Close())
		}
		err = errors.Join(err, group.Close())
	}()
	r = &Report{Kernel: run.Read("/proc/sys/kernel/osrelease"), CPUs: runtime.NumCPU(), CC: load.ProbeCC("cubic"), Options: o}
	r.Load[0] = run.Read("/proc/loadavg")
	targets := map[string]runner.Target{}
	for i, c := range contestants() {
		l, paths, err := c.up(ctx, o, i, group.Env(fmt.Sprintf("e%d", i)))
		if err != nil {
			return nil, err
		}
		labs = append(labs, l)
		for _, p := range paths {
			targets[p.name] = p.target
			r.add(p, o.Cores)
		}
	}
	launcher := runner.Launcher{Self: o.Self, Group: group, ClientCPU: client, ServerCPU: server,
		Duration: o.Duration / turns, Warmup: o.Warmup, CC: r.CC}
	progress := &runner.Printer{W: o.Log, Terminal: o.Terminal, Rounds: o.Rounds}
	settings := runner.Settings{Rounds: o.Rounds, Warmup: true, Seed: o.Seed, Turns: func(string) int { return turns }}
	r.Samples, err = runner.Run(ctx, r.cases, settings, opener{launcher, targets}, progress)
	r.Complete, r.Load[1] = err == nil, run.Read("/proc/loadavg")
	return r, errors.Join(err, runner.Failed(r.Samples))
}

// validate names what cannot be.
func (o Options) validate() error {
	switch {
	case o.Rounds < 1:
		return errors.New("--rounds: want at least 1")
	case o.Duration/turns < 5*time.Millisecond:
		return fmt.Errorf("--duration: want at least %v, 5ms for each turn", 5*time.Millisecond*turns)
	case o.Cores != "same" && o.Cores != "cross":
		return fmt.Errorf("--cores %q is unknown: use same or cross", o.Cores)
	case !slices.Contains(lab.Modes, lab.Mode(o.Mode)):
		return fmt.Errorf("--mode %q is unknown: use one of %v", o.Mode, lab.Modes)
	}
	_, err := o.loads()
	return errors.Join(err, run.Once("--sizes", o.Sizes))
}

// turns of a sample: paths take them in turn, so that all see the same seconds of the machine.
const turns = 20

// opener starts the loads of this bench's paths.
type opener struct {
	runner.Launcher
	targets map[string]runner.Target
}

// Open implements runner.Opener.
func (o opener) Open(ctx context.Context, c runner.Case) (runner.Load, error) {
	return o.Launcher.Open(ctx, o.targets[c.Subject], c.Scenario)
}

// Watch implements runner.Opener.
func (o opener) Watch(runner.Case) func() float64 { return o.Launcher.Watch() }

// loads are the scenarios of a run, in the order of its tables.
func (o Options) loads() (out []load.Scenario, err error) {
	if o.Flows < 1 {
		return nil, fmt.Errorf("flows %d: want 1 or more connections", o.Flows)
	}
	add := func(mode load.Mode, size int) {
		s := load.Scenario{Mode: mode, Size: size, Flows: o.Flows}
		if _, e := load.ParseScenario(s.String()); err == nil {
			err = e
		}
		out = append(out, s)
	}
	if len(o.Sizes) == 0 {
		for _, mode := range []load.Mode{load.Stream, load.RR, load.CRR} {
			add(mode, 0)
		}
		return out, err
	}
	for _, mode := range []load.Mode{load.Stream, load.RR} {
		for _, size := range o.Sizes {
			if size < 1 {
				return nil, fmt.Errorf("size %d: want 1 or more bytes", size)
			}
			add(mode, size)
		}
	}
	return out, err
}

// add takes a path into the run, unless it has none of the loads.
func (r *Report) add(p path, cores string) {
	list, _ := r.Options.loads() // Run has checked them
	for _, s := range list {
		if p.modes == nil || slices.Contains(p.modes, s.Mode) {
			r.cases = append(r.cases, runner.Case{Subject: p.name, Scenario: s.String(), Cores: cores})
			if !slices.Contains(r.Paths, p.name) {
				r.Paths = append(r.Paths, p.name)
			}
		}
	}
}
