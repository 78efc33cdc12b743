// SPDX-License-Identifier: Apache-2.0

// Package cluster measures an existing Kubernetes: pods of one node and of two, by pod IP
// and by ClusterIP, beside the nodes themselves. It asks nothing of the network but that
// pods run and the API server reaches them.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
)

// Options are how to run.
type Options struct {
	Kubeconfig string // "" is where kubectl looks
	Image      string // with mustang in its PATH; any image with HostBinary
	HostBinary string // path of mustang on the nodes, "" for the image's
	Rounds     int
	Budget     time.Duration // instead of Rounds
	Duration   time.Duration // of a sample
	Turns      int
	Seed       uint64
	Keep       func(*report.Document) error
}

// Defaults is a run that a claim can rest on. A turn is asked for by the API server, which
// takes some milliseconds: turns are longer than on one machine, and fewer.
func Defaults() Options {
	return Options{Image: "mustang", Rounds: 20, Duration: 300 * time.Millisecond, Turns: 6, Seed: 1}
}

const (
	base    = "node to node"
	warmup  = 5 * time.Millisecond
	timeout = 4 * time.Second
)

func (o Options) validate() error {
	if o.Rounds < 1 && o.Budget == 0 {
		return errors.New("--rounds: want at least 1")
	}
	if o.Duration/time.Duration(o.Turns) < 5*time.Millisecond {
		return fmt.Errorf("--duration: want at least %v, 5ms for each turn", 5*time.Millisecond*time.Duration(o.Turns))
	}
	return nil
}

// longest is more than a run can take: that of all its samples, were each to begin as
// slowly as pods may, or its budget; and an hour.
func (o Options) longest() time.Duration {
	const each, samples = 10 * time.Second, 18 // of a round, by all ways
	return time.Hour + o.Budget + time.Duration(o.Rounds+1)*samples*(o.Duration+each)
}

// Run measures. The document is worth keeping whenever it is not nil. What was made in the
// cluster is gone on return.
func Run(ctx context.Context, o Options, log run.Log) (d *report.Document, err error) {
	if err := run.Refuse(o.validate()); err != nil {
		return nil, err
	}
	w, err := build(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	ways, err := w.ways(ctx)
	if err != nil {
		return nil, err
	}
	d = &report.Document{Schema: report.Schema, Started: time.Now().UTC(), Machine: w.machine(ctx), Failures: map[string]string{}, Samples: []runner.Sample{},
		Settings: w.settings()}
	opener := opener{w: w, o: o, ways: map[string]way{}}
	var cases []runner.Case
	for _, one := range ways {
		opener.ways[one.name] = one
		contestant, _, _ := strings.Cut(one.name, ", ")
		d.Subjects = append(d.Subjects, report.Subject{ID: one.name, Contestant: contestant, Via: one.via})
		for _, mode := range []load.Mode{load.Stream, load.RR, load.CRR} {
			cases = append(cases, runner.Case{Subject: one.name, Scenario: string(mode), Cores: anyCore})
		}
	}
	set := runner.Settings{Rounds: o.Rounds, Warmup: true, Seed: o.Seed, Turns: func(string) int { return o.Turns }, Kept: func(_ int, samples []runner.Sample) error {
		d.Samples = append(d.Samples, samples...)
		for _, s := range samples {
			if s.Error != "" && d.Failures[s.Subject] == "" {
				d.Failures[s.Subject] = s.Error
			}
		}
		if o.Keep == nil {
			return nil
		}
		return o.Keep(d)
	}}
	if o.Budget > 0 {
		set.Rounds, set.Until = 0, d.Started.Add(o.Budget)
	}
	_, err = runner.Run(ctx, cases, set, opener, &runner.Printer{W: log.W, Terminal: log.Terminal, Rounds: set.Rounds})
	d.Finished, d.Complete = time.Now().UTC(), err == nil
	d.Compute()
	return d, errors.Join(err, runner.Failed(d.Samples))
}

// anyCore: where the loads run is the scheduler's choice.
const anyCore = "any"

// settings are the run's. CPU time has no source: it is not measured in a cluster.
func (w *world) settings() report.Settings {
	o := w.o
	return report.Settings{Command: "cluster", Base: base, Rounds: o.Rounds, Duration: o.Duration.Seconds(), Turns: o.Turns, Cores: []string{anyCore}, ClientCPU: -1, ServerCPU: -1, Seed: o.Seed,
		StreamBy: run.StreamOwn, IPv6: w.members[client].ip.Is6()}
}

// machine describes the first node.
func (w *world) machine(ctx context.Context) report.Machine {
	m := report.Machine{CPU: "a cluster's node", Versions: map[string]string{}, Sysctls: map[string]string{}}
	var node struct {
		Status struct {
			NodeInfo struct{ KernelVersion, Architecture, KubeletVersion, ContainerRuntimeVersion, OsImage string }
			Capacity map[string]string
		}
	}
	if w.api.do(ctx, http.MethodGet, "/api/v1/nodes/"+w.members[client].node, nil, &node) == nil {
		info := node.Status.NodeInfo
		m.Kernel, m.Arch = info.KernelVersion, info.Architecture
		m.Versions = map[string]string{"kubelet": info.KubeletVersion, "container runtime": info.ContainerRuntimeVersion, "system": info.OsImage}
		_, _ = fmt.Sscan(node.Status.Capacity["cpu"], &m.CPUs)
	}
	return m
}

// ways are the paths of the cluster; from node to node twice, the A/A control.
func (w *world) ways(ctx context.Context) ([]way, error) {
	m := w.members
	at := func(name string, port uint16) netip.AddrPort { return netip.AddrPortFrom(m[name].ip, port) }
	direct := func(name, via, from, to string, port uint16) way {
		return way{name, via, m[from], m[to], at(to, port), at(to, port)}
	}
	out := []way{direct(base, report.Loopback, hostClient, hostFar, hostPort), direct(report.AgainOf(base), report.Loopback, hostClient, hostFar, hostAgain),
		direct("same node, pod IP", report.PodIP, client, near, podPort), direct("other node, pod IP", report.PodIP, client, far, podPort)}
	for _, s := range []struct{ name, to string }{{"same node, ClusterIP", near}, {"other node, ClusterIP", far}} {
		vip, err := w.clusterIP(ctx, s.to)
		if err != nil {
			return nil, fmt.Errorf("address of Service %s: %w", s.to, err)
		}
		out = append(out, way{s.name, report.ClusterIP, m[client], m[s.to], netip.AddrPortFrom(vip, vipPort), at(s.to, backendPort)})
	}
	return out, nil
}

// opener starts loads in pods.
type opener struct {
	w    *world
	o    Options
	ways map[string]way
}

// Open implements runner.Opener.
func (o opener) Open(ctx context.Context, c runner.Case) (runner.Load, error) {
	p := o.ways[c.Subject]
	what, err := load.ParseScenario(c.Scenario)
	if err != nil {
		return nil, err
	}
	side := load.Options{Scenario: what, Duration: o.o.Duration / time.Duration(o.o.Turns), Warmup: warmup, Timeout: timeout, Place: load.Place{CPU: -1}, CC: "cubic"}
	server, from := side, side
	server.Server, server.Addr, from.Addr = true, p.listen, p.dial
	l := &clusterLoad{w: o.w, from: p.from, to: p.to, stream: what.Mode == load.Stream}
	if l.serverID, err = o.w.begin(ctx, p.to, server); err != nil {
		return nil, fmt.Errorf("server: %w", err)
	}
	if l.clientID, err = o.w.begin(ctx, p.from, from); err != nil {
		l.Kill()
		return nil, fmt.Errorf("client: %w", err)
	}
	return l, nil
}

// Watch implements runner.Opener: what else runs on the nodes is not known.
func (o opener) Watch(runner.Case) func() float64 { return func() float64 { return 0 } }

// begin starts one side. No namespace is tuned: the nodes' own is not ours to, and pods
// are compared with it.
func (w *world) begin(ctx context.Context, m *member, o load.Options) (string, error) {
	var id []byte
	if err := w.api.do(ctx, http.MethodPost, w.agent(m)+"/load", o.Args(), &id); err != nil {
		return "", err
	}
	return strings.TrimSpace(string(id)), nil
}

func (w *world) ask(ctx context.Context, m *member, id, what string, out any) error {
	ctx, cancel := context.WithTimeout(ctx, 5*timeout)
	defer cancel()
	return w.api.do(ctx, http.MethodPost, w.agent(m)+"/load/"+id+"/"+what, nil, out)
}

// Turn implements runner.Load.
func (l *clusterLoad) Turn(ctx context.Context) (runner.Turn, error) {
	var t load.Turn
	if err := l.w.ask(ctx, l.from, l.clientID, "line", &t); err != nil {
		return runner.Turn{}, fmt.Errorf("client: %w", err)
	}
	if t.Count == 0 || t.Seconds <= 0 {
		return runner.Turn{}, errors.New("nothing was transferred")
	}
	rate := float64(t.Count) / t.Seconds
	if l.stream {
		rate = 8 * float64(t.Bytes) / t.Seconds
	}
	return runner.Turn{Rate: rate}, nil
}

// Finish implements runner.Load.
func (l *clusterLoad) Finish() (s runner.Sample, err error) {
	var text []byte
	if err := l.w.ask(context.Background(), l.from, l.clientID, "end", &text); err != nil {
		return s, fmt.Errorf("client: %w", err)
	}
	if err := l.w.ask(context.Background(), l.to, l.serverID, "end", nil); err != nil {
		return s, fmt.Errorf("server: %w", err)
	}
	var r load.Result
	if err := json.Unmarshal(text, &r); err != nil {
		return s, fmt.Errorf("client's result: %w", err)
	}
	s.Count, s.Bytes, s.Seconds, s.CC, s.Latency, s.PortWaits = r.Count, r.Bytes, r.Seconds, r.CC, r.Latency, r.PortWaits
	s.Rate = float64(r.Count) / r.Seconds
	if l.stream {
		s.Rate = 8 * float64(r.Bytes) / r.Seconds
	}
	return s, nil
}

// Kill implements runner.Load.
func (l *clusterLoad) Kill() {
	if l.clientID != "" {
		_ = l.w.ask(context.Background(), l.from, l.clientID, "end", nil)
	}
	if l.serverID != "" {
		_ = l.w.ask(context.Background(), l.to, l.serverID, "end", nil)
	}
}
