// SPDX-License-Identifier: Apache-2.0

// Package path measures how long the path of a packet is: at each hook of a pod,
// and for whole transactions. On a machine it counts nanoseconds of the hooks;
// in an emulated one whose clock counts instructions (test/vm/run --icount), it
// counts those, which repeat whatever else the machine does, and holds them to a
// record.
package path

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/lab"
)

// instructionEnv is what test/vm sets where the clock counts instructions: the
// nanoseconds of one.
const instructionEnv = "MUSTANG_VM_INSTRUCTION_NS"

// InstructionNS returns what one instruction takes in this machine, and 0 in
// one whose clock counts time.
func InstructionNS() int {
	n, _ := strconv.Atoi(os.Getenv(instructionEnv))
	return n
}

// Units of a document.
const (
	Instructions = "instructions"
	Nanoseconds  = "ns"
)

// Options are what a run is asked for.
type Options struct {
	HookModes  []string      // whose hooks are measured
	Modes      []string      // whose transactions are counted; only where instructions are
	PairModes  []string      // whose transactions between two nodes are counted; only there
	ServicesBy []string      // none: pods without mustang
	Rounds     int           // samples of each transaction
	Window     time.Duration // of a sample
	Hooks      Runs          // of a packet of an established flow
	NewFlows   Runs          // of a packet that begins one

	Binary string   // mustang, for the labs
	Self   []string // command that runs the load program
	Log    io.Writer

	instructionNS int
}

// Runs is how often a packet is repeated: within a run, which gives one value,
// and how many runs their median is taken of.
type Runs struct{ Packets, Runs int }

// Defaults suit the machine. Nanoseconds need many repeats. Instructions repeat,
// but for the clock's tick, every million of them: runs are shorter than that,
// so that most have none.
//
// New flows stay in their table for a minute, and its size bounds how many there
// may be: those above it evict, which costs more. Their entries come from the
// kernel in lots of 128, so a run makes whole lots.
func Defaults() Options {
	o := Options{
		HookModes: []string{string(lab.Veth), string(lab.Macvlan)}, Rounds: 3, Window: 80 * time.Millisecond,
		ServicesBy: []string{"none", "mustang-tc", "mustang-socket"},
		Hooks:      Runs{100_000, 11}, NewFlows: Runs{256, 5}, instructionNS: InstructionNS(),
	}
	if o.instructionNS > 0 {
		o.Hooks, o.NewFlows = Runs{100, 21}, Runs{128, 15}
		o.Modes, o.PairModes = AllModes(), []string{string(lab.Veth), string(lab.Netkit)}
		o.HookModes = slices.DeleteFunc([]string{"veth", "macvlan", "netkit"}, func(m string) bool { return !slices.Contains(o.Modes, m) })
	}
	return o
}

// AllModes are those whose pods are all on one node's own interfaces.
func AllModes() (out []string) {
	for _, m := range lab.Modes {
		if m != "host-device" { // two NICs and a switch outside: not a path of ours
			out = append(out, string(m))
		}
	}
	return out
}

// cost is a duration in the document's unit.
func (o Options) cost(d time.Duration) float64 {
	return float64(d) / float64(max(1, o.instructionNS))
}

func (o Options) validate() error {
	known := AllModes()
	for _, m := range slices.Concat(o.Modes, o.HookModes, o.PairModes) {
		if !slices.Contains(known, m) {
			return fmt.Errorf("mode %q is unknown: use some of %v", m, known)
		}
	}
	for _, by := range o.ServicesBy {
		if !slices.Contains(lab.ServiceBys, lab.ServiceBy(by)) {
			return fmt.Errorf("--services-by %q is unknown: use some of %v", by, lab.ServiceBys)
		}
	}
	if o.Rounds < 1 {
		return errors.New("--rounds: want at least 1")
	}
	if o.Window <= 0 {
		return errors.New("--window: want a time, as 80ms")
	}
	return nil
}

// Schema names the document's layout; docs/bench-path.md describes it.
const Schema = "mustang.bench.path/v1"

// Document is one run.
type Document struct {
	Schema       string            `json:"schema"`
	Started      time.Time         `json:"started"`
	Emulated     bool              `json:"emulated"` // instructions were counted, in a machine without caches
	Unit         string            `json:"unit"`
	Kernel       string            `json:"kernel"`
	Go           string            `json:"go"` // of the load program
	Hooks        []Hook            `json:"hooks"`
	Transactions []Transaction     `json:"transactions,omitempty"`
	Failures     map[string]string `json:"failures,omitempty"`
}

// Run measures. The document is worth keeping even when some of it failed.
func Run(ctx context.Context, o Options) (*Document, error) {
	if err := run.Refuse(o.validate()); err != nil {
		return nil, err
	}
	unlock, err := run.Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	d := &Document{Schema: Schema, Started: time.Now().UTC(), Emulated: o.instructionNS > 0, Unit: Nanoseconds,
		Kernel: kernelRelease(), Go: runtime.Version(), Failures: map[string]string{}}
	if d.Emulated {
		d.Unit = Instructions
	}
	for _, mode := range o.HookModes {
		o.say("hooks of %s", mode)
		hooks, err := measureHooks(ctx, o, mode)
		d.Hooks = append(d.Hooks, hooks...)
		d.failed("hooks of "+mode, err)
	}
	if d.Emulated && len(o.Modes)+len(o.PairModes) > 0 {
		if err := d.transactions(ctx, o); err != nil {
			return d, err
		}
	}
	if n := len(d.Failures); n > 0 {
		return d, fmt.Errorf("%d parts failed: see FAILED in the report", n)
	}
	return d, context.Cause(ctx)
}

func (d *Document) failed(what string, err error) {
	if err != nil {
		d.Failures[what] = err.Error()
	}
}

func (o Options) say(format string, args ...any) {
	if o.Log != nil {
		fmt.Fprintf(o.Log, format+"\n", args...)
	}
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}
