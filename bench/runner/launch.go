// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/cpu"
	"github.com/mustang-net/mustang/bench/load"
	"syscall"
)

// Target is a path to measure: from a client's namespace to an address, behind
// which a server listens in its own namespace.
type Target struct {
	ClientNS, ServerNS         string         // paths
	ClientCgroup, ServerCgroup string         // v2 control groups whose programs their sockets pass; "": those of none
	Dial                       netip.AddrPort // where the client connects to
	Listen                     netip.AddrPort // where the server listens
	Slow                       float64        // load.Options.Slow
}

// Launcher starts a server and a client for each load, each in its namespace, on
// its CPU, in the run's control group.
type Launcher struct {
	Self      []string // command that runs the load program
	Group     *cpu.Group
	ClientCPU int
	ServerCPU int
	Duration  time.Duration // of a turn
	Warmup    time.Duration // before it
	CC        string
	TailRate  int  // requests a second of the tail scenario
	Iperf3    bool // streams by iperf3, else by the load program
}

// slack is what a turn may take beyond its own time before it is ended: process
// starts on a busy machine, and one socket deadline.
const slack = 8 * time.Second

// socketDeadline is after what time without progress a load gives up. It is
// longer than two SYN retransmissions (1 s, 3 s): a lost SYN is latency, not
// an error.
const socketDeadline = 4 * time.Second

var errDeadline = errors.New("no end by its deadline")

// Open starts the load of one scenario over a target.
func (l Launcher) Open(ctx context.Context, t Target, scenario string) (Load, error) {
	if scenario == ABShort || scenario == ABLong {
		return l.ab(ctx, t, scenario)
	}
	what, err := load.ParseScenario(scenario)
	if err != nil {
		return nil, err
	}
	if what.Mode == load.Stream && what.Size == 0 && l.Iperf3 {
		return &iperf3Load{l: l, t: t, flows: max(1, what.Flows)}, nil
	}
	own, err := l.own(ctx, t, what)
	if err != nil {
		return nil, err // not own: an interface that holds nil is not nil
	}
	return own, nil
}

// Sample takes one turn of one load.
func (l Launcher) Sample(ctx context.Context, t Target, scenario string) (Sample, error) {
	ld, err := l.Open(ctx, t, scenario)
	if err != nil {
		return Sample{}, err
	}
	defer ld.Kill()
	if _, err := ld.Turn(ctx); err != nil {
		return Sample{}, err
	}
	return ld.Finish()
}

// Watch returns a function that says which share of the load's CPUs others have
// used since Watch was called.
func (l Launcher) Watch() func() (foreign float64) {
	cpus := slices.Compact([]int{l.ClientCPU, l.ServerCPU})
	busy, began := busyTime(cpus), time.Now()
	before, err := l.Group.Read()
	return func() float64 {
		after, err2 := l.Group.Read()
		if err != nil || err2 != nil || l.Group.Kind == cpu.Getrusage {
			return 0 // the load's own share is not known
		}
		own := after.Sub(before).Total().Seconds()
		return max(0, (busyTime(cpus)-busy-own)/(time.Since(began).Seconds()*float64(len(cpus))))
	}
}

func (l Launcher) places(t Target) (client, server load.Place) {
	return load.Place{Netns: t.ClientNS, CPU: l.ClientCPU, Cgroups: l.Group.Joins(t.ClientCgroup)},
		load.Place{Netns: t.ServerNS, CPU: l.ServerCPU, Cgroups: l.Group.Joins(t.ServerCgroup)}
}

// ownLoad is the load program's server and client.
type ownLoad struct {
	l              Launcher
	mode           load.Mode
	server, client *process
}

func (l Launcher) own(ctx context.Context, t Target, what load.Scenario) (*ownLoad, error) {
	mode := what.Mode
	o := load.Options{Scenario: what, Duration: l.Duration, Warmup: l.Warmup, Timeout: socketDeadline, CC: l.CC, CPU: l.Group.Source}
	server, client := o, o
	server.Server, server.Addr, client.Addr, client.Slow = true, t.Listen, t.Dial, t.Slow
	if mode == load.Tail {
		client.Rate = l.TailRate
	}
	client.Place, server.Place = l.places(t)
	own := &ownLoad{l: l, mode: mode}
	start := func(o load.Options) (*process, error) {
		p, err := l.start(ctx, o.Args())
		if err != nil {
			return nil, err
		}
		if err := p.within(ctx, slack, func() error { return p.await(load.Ready) }); err != nil {
			p.kill()
			return nil, err
		}
		return p, nil
	}
	var err error
	if own.server, err = start(server); err != nil {
		return nil, fmt.Errorf("server: %w", err)
	}
	if own.client, err = start(client); err != nil {
		own.Kill()
		return nil, fmt.Errorf("client: %w", err)
	}
	return own, nil
}

// PIDs are the load's processes.
func (o *ownLoad) PIDs() []int {
	return []int{o.server.cmd.Process.Pid, o.client.cmd.Process.Pid}
}

// Turn implements Load.
func (o *ownLoad) Turn(ctx context.Context) (Turn, error) {
	var t load.Turn
	err := o.client.within(ctx, o.l.Duration+o.l.Warmup+slack, func() error {
		if _, err := io.WriteString(o.client.stdin, "\n"); err != nil {
			return o.client.failure(err)
		}
		return o.client.decode(&t)
	})
	if err != nil {
		return Turn{}, fmt.Errorf("client: %w", err)
	}
	if t.Count == 0 || t.Seconds <= 0 {
		return Turn{}, errors.New("nothing was transferred")
	}
	work := float64(t.Count)
	out := Turn{Rate: work / t.Seconds}
	if o.mode == load.Stream {
		work = float64(t.Bytes)
		out.Rate = 8 * work / t.Seconds
	}
	out.Cost = (t.CPU + t.Softirqd) / work
	return out, nil
}

// Finish implements Load.
func (o *ownLoad) Finish() (s Sample, err error) {
	var r load.Result
	err = o.client.within(context.Background(), slack, func() error {
		o.client.stdin.Close()
		if err := o.client.decode(&r); err != nil {
			return err
		}
		return o.client.wait()
	})
	if err != nil {
		return s, fmt.Errorf("client: %w", err)
	}
	// By the end of its input: the kernel may not yet have told it that the
	// client is gone.
	err = o.server.within(context.Background(), slack, func() error {
		o.server.stdin.Close()
		return o.server.wait()
	})
	if err != nil {
		return s, fmt.Errorf("server: %w", err)
	}
	s.Count, s.Bytes, s.Seconds, s.All, s.CC = r.Count, r.Bytes, r.Seconds, r.All, r.CC
	s.CPU, s.Softirqd, s.Latency = r.CPU, r.Softirqd, r.Latency
	s.PortWaits, s.Lost = r.PortWaits, r.Lost
	s.Rate = float64(r.Count) / r.Seconds
	if o.mode == load.Stream {
		s.Rate = float64(r.Bytes) * 8 / r.Seconds
	}
	if o.l.Group.Kind == cpu.Getrusage {
		s.CPU = (o.client.cpuTime() + o.server.cpuTime()).Seconds() // with process start: the best there is here
	}
	return s, nil
}

// Kill implements Load.
func (o *ownLoad) Kill() {
	if o.client != nil {
		o.client.kill()
	}
	o.server.kill()
}

// pair runs a server until it is ready, then a client to its end, then waits for
// the server's. It returns the CPU time of both by getrusage.
func (l Launcher) pair(ctx context.Context, serverArgs, clientArgs []string, ready string) (time.Duration, []byte, error) {
	server, err := l.start(ctx, serverArgs)
	if err != nil {
		return 0, nil, err
	}
	defer server.kill()
	if err := server.await(ready); err != nil {
		return 0, nil, fmt.Errorf("server: %w", err)
	}
	client, err := l.start(ctx, clientArgs)
	if err != nil {
		return 0, nil, err
	}
	defer client.kill()
	if err := client.wait(); err != nil {
		return 0, nil, fmt.Errorf("client: %w", describe(ctx, err))
	}
	if err := server.wait(); err != nil {
		return 0, nil, fmt.Errorf("server: %w", describe(ctx, err))
	}
	return server.cpuTime() + client.cpuTime(), client.out, nil
}

// describe puts the deadline's cause before the bare "signal: killed".
func describe(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%w (%w)", cause, err)
	}
	return err
}

// process is a started load with its output.
type process struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	lines  *bufio.Reader
	stderr bytes.Buffer
	out    []byte // what followed the ready line
	waited bool
	err    error
}

func (l Launcher) start(ctx context.Context, args []string) (*process, error) {
	argv := append(slices.Clone(l.Self), args...)
	p := &process{cmd: exec.CommandContext(ctx, argv[0], argv[1:]...)}
	p.cmd.WaitDelay = time.Second
	p.cmd.Stderr = &p.stderr
	// A process group of its own: the terminal's SIGINT ends the run in order,
	// not the loads under it. No PDEATHSIG: it follows the thread, not the
	// process; a bench that is killed leaves loads that end by their deadlines,
	// and nginx, which the next one ends with the control group.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.lines = bufio.NewReader(out)
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	return p, nil
}

// await reads lines until one contains text.
func (p *process) await(text string) error {
	for {
		line, err := p.lines.ReadString('\n')
		if strings.Contains(line, text) {
			return nil
		}
		if err != nil {
			return p.failure(fmt.Errorf("not ready: %w", err))
		}
	}
}

// decode reads one line of JSON.
func (p *process) decode(v any) error {
	line, err := p.lines.ReadBytes('\n')
	if err != nil {
		return p.failure(err)
	}
	return json.Unmarshal(line, v)
}

// failure waits for the end of a process that went silent and returns its own
// words, or err if it has none.
func (p *process) failure(err error) error {
	if werr := p.wait(); werr != nil {
		return werr
	}
	return err
}

// within ends the process when do has not returned in time.
func (p *process) within(ctx context.Context, limit time.Duration, do func() error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errDeadline)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = p.cmd.Process.Kill() })
	defer stop()
	if err := do(); err != nil {
		return describe(ctx, err)
	}
	return nil
}

// wait collects the output and waits for the end.
func (p *process) wait() error {
	if p.waited {
		return p.err
	}
	p.waited = true
	p.out, _ = io.ReadAll(p.lines)
	if err := p.cmd.Wait(); err != nil {
		p.err = err
		if text := strings.TrimSpace(p.stderr.String()); text != "" {
			p.err = fmt.Errorf("%s (%w)", text, err)
		}
	}
	return p.err
}

// kill ends the process, by its handle, if it has not ended yet.
func (p *process) kill() {
	if !p.waited {
		_ = p.cmd.Process.Kill()
		_ = p.wait()
	}
}

func (p *process) cpuTime() time.Duration {
	st := p.cmd.ProcessState
	return st.SystemTime() + st.UserTime()
}
