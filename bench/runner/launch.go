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
	ClientNS, ServerNS string         // paths
	Dial               netip.AddrPort // where the client connects to
	Listen             netip.AddrPort // where the server listens
	Cgroup             string         // the environment's v2 control group, "" for none
}

// Launcher takes samples by starting a server and a client, each in its
// namespace, on its CPU, in the run's control group.
type Launcher struct {
	Self      []string // command that runs the load program
	Group     *cpu.Group
	ClientCPU int
	ServerCPU int
	Duration  time.Duration
	Warmup    time.Duration
	CC        string
	Iperf3    bool // streams by iperf3, else by the load program
}

// slack is what a sample may take beyond its own time before it is ended:
// process starts on a busy machine, and one socket deadline.
const slack = 8 * time.Second

// socketDeadline is after what time without progress a load gives up. It is
// longer than two SYN retransmissions (1 s, 3 s): a lost SYN is latency, not
// an error.
const socketDeadline = 4 * time.Second

// Sample measures one scenario over a target.
func (l Launcher) Sample(ctx context.Context, t Target, scenario string) (Sample, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, l.Duration+l.Warmup+slack, errors.New("no end by its deadline"))
	defer cancel()
	s := Sample{Start: time.Now(), Load1: load1()}
	cpus := slices.Compact([]int{l.ClientCPU, l.ServerCPU})
	busy, began := busyTime(cpus), time.Now()
	before, err := l.Group.Read()
	if err != nil {
		return s, err
	}
	if scenario == string(load.Stream) && l.Iperf3 {
		err = l.iperf3(ctx, t, &s)
	} else {
		err = l.ownLoad(ctx, t, load.Mode(scenario), &s)
	}
	if err != nil {
		return s, err
	}
	after, err := l.Group.Read()
	if err != nil {
		return s, err
	}
	// The load's own share over the whole run, process starts included, is
	// what the busy time is compared with.
	own := after.Sub(before).Total().Seconds()
	wall := time.Since(began).Seconds() * float64(len(cpus))
	s.Foreign = max(0, (busyTime(cpus)-busy-own)/wall)
	if l.Group.Kind == cpu.Getrusage {
		s.Foreign = 0 // own is not known here
	}
	s.Noisy = s.Foreign > NoisyShare
	if s.Rate <= 0 {
		return s, errors.New("nothing was transferred")
	}
	return s, nil
}

func (l Launcher) places(t Target) (client, server load.Place) {
	joins := l.Group.Joins(t.Cgroup)
	return load.Place{Netns: t.ClientNS, CPU: l.ClientCPU, Cgroups: joins},
		load.Place{Netns: t.ServerNS, CPU: l.ServerCPU, Cgroups: joins}
}

func (l Launcher) ownLoad(ctx context.Context, t Target, mode load.Mode, s *Sample) error {
	o := load.Options{Mode: mode, Duration: l.Duration, Warmup: l.Warmup, Timeout: socketDeadline, CC: l.CC, CPU: l.Group.Source}
	server, client := o, o
	server.Server, server.Addr, client.Addr = true, t.Listen, t.Dial
	client.Place, server.Place = l.places(t)
	var r load.Result
	usage, err := l.pair(ctx, server.Args(), client.Args(), load.Ready, func(serverOut, clientOut []byte) error {
		out := clientOut
		if mode == load.Stream {
			out = serverOut // bytes count at the receiver
		}
		return json.Unmarshal(out, &r)
	}, mode == load.Stream)
	if err != nil {
		return err
	}
	s.Count, s.Bytes, s.Seconds, s.CC = r.Count, r.Bytes, r.Seconds, r.CC
	s.CPU, s.Softirqd, s.Latency = r.CPU, r.Softirqd, r.Latency
	s.PortWaits, s.Lost = r.PortWaits, r.Lost
	s.Rate = float64(r.Count) / r.Seconds
	if mode == load.Stream {
		s.Rate = float64(r.Bytes) * 8 / r.Seconds
	}
	if l.Group.Kind == cpu.Getrusage {
		s.CPU = usage.Seconds() // with process start: the best there is here
	}
	return nil
}

// pair runs a server until it is ready, then a client to its end, then ends
// the server: by itself when the server has a result of its own, else by
// signal. It returns the CPU time of both by getrusage.
func (l Launcher) pair(ctx context.Context, serverArgs, clientArgs []string, ready string,
	parse func(server, client []byte) error, serverEnds bool) (time.Duration, error) {
	server, err := l.start(ctx, serverArgs)
	if err != nil {
		return 0, err
	}
	defer server.kill()
	if err := server.await(ready); err != nil {
		return 0, fmt.Errorf("server: %w", err)
	}
	client, err := l.start(ctx, clientArgs)
	if err != nil {
		return 0, err
	}
	defer client.kill()
	if err := client.wait(); err != nil {
		return 0, fmt.Errorf("client: %w", describe(ctx, err))
	}
	if serverEnds {
		if err := server.wait(); err != nil {
			return 0, fmt.Errorf("server: %w", describe(ctx, err))
		}
	} else {
		server.kill()
	}
	return server.cpuTime() + client.cpuTime(), parse(server.output(), client.output())
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
	// process; a bench that is killed leaves loads that end by their deadlines.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.lines = bufio.NewReader(out)
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
			if werr := p.wait(); werr != nil {
				err = werr
			}
			return fmt.Errorf("not ready: %w", err)
		}
	}
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

func (p *process) output() []byte { return p.out }

func (p *process) cpuTime() time.Duration {
	st := p.cmd.ProcessState
	return st.SystemTime() + st.UserTime()
}
