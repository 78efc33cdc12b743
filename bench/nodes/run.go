// SPDX-License-Identifier: Apache-2.0

package nodes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/cpu"
	"github.com/mustang-net/mustang/bench/load"
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
	Cores    string // same or cross
	Binary   string // mustang, for the labs
	Self     []string
	Log      io.Writer `json:"-"`
	Terminal bool      `json:"-"`
}

// Defaults is a run that a claim can rest on.
func Defaults() Options {
	return Options{Mode: string(lab.Veth), Rounds: 15, Duration: 500 * time.Millisecond, Warmup: 2 * time.Millisecond,
		Seed: 1, MTU: 1500, Cores: "same"}
}

// lockFile is every bench's: two would measure each other.
const lockFile = "/run/mustang-bench.lock"

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
	if os.Getuid() != 0 {
		return nil, errors.New("the bench makes network namespaces: run it as root")
	}
	if o.Cores != "same" && o.Cores != "cross" {
		return nil, fmt.Errorf("cores %q is unknown: use same or cross", o.Cores)
	}
	unlock, err := lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	client, server, err := cpus(o.Cores)
	if err != nil {
		return nil, err
	}
	group := cpu.NewGroup(fmt.Sprintf("mustang-bench-%d", os.Getpid()), slices.Compact([]int{client, server}))
	var labs []*lab.Lab
	defer func() {
		for _, l := range slices.Backward(labs) {
			err = errors.Join(err, l.Close())
		}
		err = errors.Join(err, group.Close())
	}()
	r = &Report{Kernel: read("/proc/sys/kernel/osrelease"), CPUs: runtime.NumCPU(), CC: load.ProbeCC("cubic"), Options: o}
	r.Load[0] = read("/proc/loadavg")
	targets := map[string]runner.Target{}
	for i, c := range contestants() {
		l, paths, err := c.up(ctx, o, i, group.Env(fmt.Sprintf("e%d", i)))
		if err != nil {
			return nil, err
		}
		labs = append(labs, l)
		for _, p := range paths {
			r.Paths = append(r.Paths, p.name)
			targets[p.name] = p.target
			r.add(p, o.Cores)
		}
	}
	launcher := runner.Launcher{Self: o.Self, Group: group, ClientCPU: client, ServerCPU: server,
		Duration: o.Duration / turns, Warmup: o.Warmup, CC: r.CC}
	progress := &runner.Printer{W: o.Log, Terminal: o.Terminal, Rounds: o.Rounds}
	settings := runner.Settings{Rounds: o.Rounds, Warmup: true, Seed: o.Seed, Turns: func(string) int { return turns }}
	r.Samples, err = runner.Run(ctx, r.cases, settings, opener{launcher, targets}, progress)
	r.Complete, r.Load[1] = err == nil, read("/proc/loadavg")
	return r, errors.Join(err, runner.Failed(r.Samples))
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

var scenarios = []string{string(load.Stream), string(load.RR), string(load.CRR)}

func (r *Report) add(p path, cores string) {
	wanted := p.scenarios
	if wanted == nil {
		wanted = scenarios
	}
	for _, s := range wanted {
		r.cases = append(r.cases, runner.Case{Subject: p.name, Scenario: s, Cores: cores})
	}
}

func lock() (unlock func(), err error) {
	f, err := os.OpenFile(lockFile, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", lockFile, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, errors.New("another bench runs on this machine: two would measure each other; wait for it")
	}
	return func() { f.Close() }, nil
}

// cpus are the client's and the server's: the last that this process may use,
// or the last two.
func cpus(cores string) (client, server int, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return 0, 0, fmt.Errorf("read CPU affinity: %w", err)
	}
	var allowed []int
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			allowed = append(allowed, i)
		}
	}
	client = allowed[len(allowed)-1]
	if cores == "same" {
		return client, client, nil
	}
	if len(allowed) < 2 {
		return 0, 0, errors.New("cross-core samples need two CPUs, this process may use one: use --cores same")
	}
	return client, allowed[len(allowed)-2], nil
}

func read(file string) string {
	text, _ := os.ReadFile(file)
	return strings.TrimSpace(string(text))
}
