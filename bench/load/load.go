// SPDX-License-Identifier: Apache-2.0

// Package load is the bench's own small load program: request/response,
// connect/request/response and stream over TCP, and request/response over UDP.
//
// It exists because a figure is only as good as the loop that makes it: one
// locked OS thread in one namespace on one CPU, blocking system calls without
// the Go scheduler or the garbage collector in between, latencies in an
// allocation-free histogram, and a deadline on everything.
//
// It runs as a process of its own (the hidden subcommand bench-load). The client
// connects once, says that it is ready, and then loads the path for one turn for
// each line on its standard input; between turns both ends sleep, and wake for
// nothing. So the loads of many paths can be up at once and take short turns,
// which lets all of them see the same seconds of the machine. Each turn is
// answered by a line of JSON, the end of the input by the sum of all turns.
package load

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/mustang-net/mustang/bench/cpu"
)

// Mode is what the load does.
type Mode string

const (
	Stream Mode = "stream" // one connection, 128 KiB writes; what the receiver has read counts
	RR     Mode = "rr"     // 1-byte request and response on one connection
	CRR    Mode = "crr"    // a new connection for each request; the client closes first
	UDPRR  Mode = "udp-rr" // 2-byte request and response on a connected UDP socket
	Tail   Mode = "tail"   // as rr, but requests at a fixed rate: latency counts from when each was due
)

// Options describe one side of one load.
type Options struct {
	Scenario
	Server   bool
	Addr     netip.AddrPort // server: where to listen; client: where to connect
	Place    Place
	Duration time.Duration // of a turn's measured window
	Warmup   time.Duration // before the window in each turn, not counted
	Timeout  time.Duration // a socket that makes no progress for this long is an error
	CC       string        // congestion control to ask for; "" leaves the default
	CPU      cpu.Source    // read at both ends of each window
	Rate     int           // client, Tail: requests a second
	Slow     float64       // client: be slower by this share (0…1), by spinning; for calibration
}

// Turn is what one turn measured: the JSON line that answers it.
type Turn struct {
	Count    int64   `json:"count"`            // transactions, or writes of a stream
	Bytes    int64   `json:"bytes"`            // payload that the receiver has read
	Seconds  float64 `json:"seconds"`          // length of the measured window
	CPU      float64 `json:"cpu_seconds"`      // the load's control group, both sides
	Softirqd float64 `json:"softirqd_seconds"` // ksoftirqd of its CPUs
	// All counts transactions within and without the window.
	All int64 `json:"all"`
}

// add sums turns up.
func (t *Turn) add(o Turn) {
	t.Count += o.Count
	t.Bytes += o.Bytes
	t.Seconds += o.Seconds
	t.CPU += o.CPU
	t.Softirqd += o.Softirqd
	t.All += o.All
}

// Result is the JSON line that a client ends with: the sum of its turns.
type Result struct {
	Turn
	CC      string   `json:"cc,omitempty"`
	Latency *Latency `json:"latency_ns,omitempty"` // of all transactions within the windows
	// PortWaits counts how often a CRR client found no free source port and
	// napped for a millisecond; Lost counts datagrams that were sent again.
	PortWaits int64 `json:"port_waits,omitempty"`
	Lost      int64 `json:"lost,omitempty"`
}

// Latency holds quantiles of one transaction's time, in nanoseconds.
type Latency struct {
	Mean float64 `json:"mean"`
	P50  int64   `json:"p50"`
	P90  int64   `json:"p90"`
	P99  int64   `json:"p99"`
	P999 int64   `json:"p999"`
	Max  int64   `json:"max"`
}

func latencyOf(h *hdrhistogram.Histogram) *Latency {
	return &Latency{
		Mean: h.Mean(), P50: h.ValueAtQuantile(50), P90: h.ValueAtQuantile(90),
		P99: h.ValueAtQuantile(99), P999: h.ValueAtQuantile(99.9), Max: h.Max(),
	}
}

// Ready is the line that a server prints once it listens, and a client once it
// is connected.
const Ready = `{"ready":true}`

// Main runs the load program with its own command line, and returns the error to
// print. It changes the calling thread for good (namespace, CPU): the process is
// expected to end after it. The end of stdin ends either side.
func Main(args []string, stdin *os.File, stdout io.Writer) error {
	if len(args) > 0 && args[0] == "exec" {
		return mainExec(args[1:])
	}
	o, err := parse(args)
	if err != nil {
		return err
	}
	if err := o.Place.Enter(); err != nil {
		return err
	}
	if err := holdOffPreemption(); err != nil {
		return err
	}
	o.Place.tune(o.CC)
	ready := func() { fmt.Fprintln(stdout, Ready) }
	switch {
	case o.Server:
		return serve(o, int(stdin.Fd()), ready)
	case o.Flows > 1:
		return dialMany(o, stdin, stdout, ready)
	}
	return dial(o, stdin, stdout, ready)
}

func parse(args []string) (Options, error) {
	var o Options
	if len(args) == 0 || (args[0] != "server" && args[0] != "client") {
		return o, errors.New("bench-load: want server, client or exec")
	}
	o.Server = args[0] == "server"
	fs := flag.NewFlagSet("bench-load "+args[0], flag.ContinueOnError)
	fs.SetOutput(os.Stderr)
	o.Place.flags(fs)
	mode := fs.String("mode", "rr", "stream, rr, crr, udp-rr or tail; with a size, as rr:1440; with a number of connections, as rr*32")
	fs.IntVar(&o.Rate, "rate", 0, "tail: requests a second")
	addr := fs.String("addr", "", "address and port to listen on or connect to")
	fs.DurationVar(&o.Duration, "duration", time.Second, "measured window of a turn")
	fs.DurationVar(&o.Warmup, "warmup", 0, "time before the window in each turn")
	fs.DurationVar(&o.Timeout, "timeout", 3*time.Second, "no progress for this long is an error")
	fs.Float64Var(&o.Slow, "slow", 0, "share by which the client makes itself slower")
	fs.StringVar(&o.CC, "cc", "", "TCP congestion control")
	fs.StringVar(&o.CPU.Kind, "cpu-kind", "", "kind of CPU accounting")
	fs.StringVar(&o.CPU.Dir, "cpu-dir", "", "control group to read CPU time from")
	softirqd := fs.String("softirqd", "", "PIDs of ksoftirqd, comma-separated")
	if err := fs.Parse(args[1:]); err != nil {
		return o, err
	}
	var err error
	if o.Scenario, err = ParseScenario(*mode); err != nil {
		return o, fmt.Errorf("bench-load: --mode: %w", err)
	}
	if o.Mode == Tail && !o.Server && o.Rate < 1 {
		return o, errors.New("bench-load: --mode tail needs --rate, in requests a second")
	}
	if o.Addr, err = netip.ParseAddrPort(*addr); err != nil {
		return o, fmt.Errorf("bench-load: --addr: %w", err)
	}
	o.CPU.Softirqd, err = parsePIDs(*softirqd)
	return o, err
}

// Args is the command line that parse understands, without the program's name.
func (o Options) Args() []string {
	role := "client"
	if o.Server {
		role = "server"
	}
	args := []string{role, "--mode", o.Scenario.String(), "--addr", o.Addr.String(),
		"--duration", o.Duration.String(), "--warmup", o.Warmup.String(), "--timeout", o.Timeout.String()}
	args = append(args, o.Place.args()...)
	if o.Rate > 0 {
		args = append(args, "--rate", strconv.Itoa(o.Rate))
	}
	if o.Slow > 0 {
		args = append(args, "--slow", strconv.FormatFloat(o.Slow, 'g', -1, 64))
	}
	for _, f := range [][2]string{
		{"--cc", o.CC}, {"--cpu-kind", o.CPU.Kind}, {"--cpu-dir", o.CPU.Dir}, {"--softirqd", joinPIDs(o.CPU.Softirqd)},
	} {
		if f[1] != "" {
			args = append(args, f[0], f[1])
		}
	}
	return args
}

func parsePIDs(s string) ([]int, error) {
	var pids []int
	for f := range strings.SplitSeq(s, ",") {
		if f == "" {
			continue
		}
		pid, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("bench-load: --softirqd: %w", err)
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

func joinPIDs(pids []int) string {
	words := make([]string, len(pids))
	for i, p := range pids {
		words[i] = strconv.Itoa(p)
	}
	return strings.Join(words, ",")
}
