// SPDX-License-Identifier: Apache-2.0

// Package services measures what implements Services on a node, against a real
// etcd and API server: how long until a change reaches packets, how long until
// everything is in force after a start, and how much memory it takes. mustang
// is one contestant beside kube-proxy.
package services

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/kubeproxy"
	"github.com/mustang-net/mustang/bench/leftover"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/kube"
)

// Contestants are what can be measured.
var Contestants = []string{Mustang, string(kubeproxy.Nftables), string(kubeproxy.Iptables), string(kubeproxy.IptablesLegacy)}

// Mustang is our own.
const Mustang = "mustang"

// Options are what to measure.
type Options struct {
	Binary      string
	Contestants []string
	Services    []int // numbers of Services beside the measured one
	Endpoints   int   // of each
	Rounds      int   // changes of each kind, fewer of what takes long
	Log         io.Writer
}

// Cell is what was measured of one contestant at one number of Services.
type Cell struct {
	Contestant string `json:"contestant"`
	Backend    string `json:"backend,omitempty"` // with versions; mustang has none
	Services   int    `json:"services"`
	Endpoints  int    `json:"endpoints"`
	// Milliseconds from sending the request to the API server.
	Heard []float64 `json:"heard"` // until a bare watch of the API server tells the change: nobody can be faster
	Moved []float64 `json:"moved"` // until a new connection meets the new endpoint
	Added []float64 `json:"added"` // until a new Service answers
	// Event is Moved less Heard of the same change: from the API server's event to
	// the first connection on the new rule.
	Event []float64 `json:"event"`
	Cold  float64   `json:"cold"` // seconds from the process's start until everything is in force
	// Rate is endpoints changed in a second, when many slices change at once: from
	// the first request to the last one in force.
	Rate   float64 `json:"rate"`
	Memory float64 `json:"memory"` // MB resident, five seconds after the last change
	Peak   float64 `json:"peak"`   // MB
}

// Report is a whole run.
type Report struct {
	Kernel string   `json:"kernel"`
	Load   []string `json:"load"` // before and after
	Cells  []Cell   `json:"cells"`
}

// Run measures every contestant at every number of Services. One that fails is
// left out and named in the error; the report has the others.
func Run(ctx context.Context, o Options) (*Report, error) {
	if err := run.Refuse(o.validate()); err != nil {
		return nil, err
	}
	if missing, err := kube.MissingAPIServer(); err != nil || missing != "" {
		return nil, errors.Join(err, fmt.Errorf("not built yet: %s; to build: test/kube/kube build", missing))
	}
	unlock, err := run.Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	r := &Report{Kernel: read("/proc/sys/kernel/osrelease"), Load: []string{read("/proc/loadavg")}}
	defer func() { r.Load = append(r.Load, read("/proc/loadavg")) }()
	var failed []error
	for _, n := range o.Services {
		for _, name := range o.Contestants {
			cell, err := measure(ctx, o, name, n)
			if err != nil {
				failed = append(failed, fmt.Errorf("%s with %d Services: %w", name, n, err))
			} else {
				r.Cells = append(r.Cells, cell)
			}
			if ctx.Err() != nil {
				return r, errors.Join(failed...)
			}
		}
	}
	return r, errors.Join(failed...)
}

// validate names what cannot be.
func (o Options) validate() error {
	for _, c := range o.Contestants {
		if !slices.Contains(Contestants, c) {
			return fmt.Errorf("contestant %q is none of %s", c, strings.Join(Contestants, ", "))
		}
	}
	if len(o.Contestants) == 0 {
		return fmt.Errorf("--contestants: want some of %s", strings.Join(Contestants, ", "))
	}
	if slices.ContainsFunc(o.Services, func(n int) bool { return n < 0 || n >= measured }) || o.Endpoints < 1 || o.Rounds < 1 {
		return fmt.Errorf("--services: want numbers below %d; --endpoints, --rounds: at least 1", measured)
	}
	return nil
}

func read(path string) string {
	text, _ := os.ReadFile(path)
	return strings.TrimSpace(string(text))
}

// bench is one contestant at work.
type bench struct {
	Options
	name     string // the contestant's
	filled   int    // Services beside the measured one
	lab      *lab.Lab
	api      *kube.APIServer
	client   *lab.Pod
	servers  [2]*lab.Pod
	patience time.Duration // bounds each wait: the first one is for all Services

	// Of the contestant's process.
	start time.Time
	pid   int
	found func(ctx context.Context) string // what it has done, and does
}

// patience grows with what there is to be written: an endpoint is a chain of rules to
// kube-proxy.
func patience(services, endpoints int) time.Duration {
	return 2*time.Minute + time.Duration(services*(1+endpoints))*4*time.Millisecond
}

func measure(ctx context.Context, o Options, name string, n int) (cell Cell, err error) {
	cell = Cell{Contestant: name, Services: n, Endpoints: o.Endpoints}
	dir, err := leftover.TempDir("services")
	if err != nil {
		return cell, err
	}
	defer os.RemoveAll(dir)
	by := lab.NoServices // the contestant makes them
	if name == Mustang {
		by = lab.MustangTC
	} else {
		cell.Backend = kubeproxy.Kind(name).Backend()
	}
	b := &bench{Options: o, name: name, filled: n, patience: patience(n, o.Endpoints)}
	b.lab, err = lab.New(ctx, lab.Config{Name: fmt.Sprintf("v%d", os.Getpid()%100000), Mode: lab.Veth, Services: by, Binary: o.Binary})
	if err != nil {
		return cell, err
	}
	defer func() { err = errors.Join(err, b.lab.Close()) }()
	if b.api, err = kube.StartAPIServer(ctx, b.lab.Node().NetNS, dir); err != nil {
		return cell, err
	}
	defer b.api.Close()
	stop, err := b.pods(ctx)
	defer stop()
	if err != nil {
		return cell, err
	}
	filling, cancel := context.WithTimeoutCause(ctx, b.patience, fmt.Errorf("not done within %v", b.patience))
	defer cancel()
	if err = b.fill(filling, n); err == nil {
		err = b.put(filling, measured, b.servers[0].IPv4)
	}
	if err != nil {
		return cell, fmt.Errorf("%w; %s", err, b.api.Doing())
	}
	b.say("the API server is filled")
	b.start = time.Now()
	end, err := b.contestant(ctx, dir)
	if err != nil {
		return cell, err
	}
	defer end()
	for _, part := range []func(context.Context, *Cell) error{b.cold, b.latency, b.rate} {
		if err := part(ctx, &cell); err != nil {
			return cell, fmt.Errorf("%w; %s", err, b.found(ctx))
		}
	}
	time.Sleep(5 * time.Second)
	cell.Memory, cell.Peak = memory(b.pid)
	b.say("%.0f MB, at most %.0f", cell.Memory, cell.Peak)
	return cell, nil
}

func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.Log, "%s, %d Services: %s\n", b.name, b.filled, fmt.Sprintf(format, args...))
}

// contestant starts one in the node.
func (b *bench) contestant(ctx context.Context, dir string) (end func(), err error) {
	if b.name != Mustang {
		p, err := kubeproxy.Start(ctx, b.lab.Node(), b.api, kubeproxy.Options{Kind: kubeproxy.Kind(b.name), Node: nodeName, Dir: dir})
		if err != nil {
			return nil, err
		}
		all := []lab.Service{asked(measured)}
		for i := range b.filled {
			all = append(all, asked(i+1))
		}
		b.pid, b.found = p.PID(), func(ctx context.Context) string { return p.Found(ctx, all) }
		return p.End, nil
	}
	log, err := os.Create(filepath.Join(dir, "agent.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	argv := b.lab.MustangArgs("agent", "--kubeconfig", b.api.Kubeconfig, "--node", nodeName, "--node-mode", "none", "--devices", "none")
	cmd := b.lab.Node().Command(ctx, argv...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	b.pid, b.found = cmd.Process.Pid, func(context.Context) string { return kube.Doing("the agent", cmd.Process.Pid, log.Name()) }
	return func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
	}, nil
}

// cold waits until the measured Service answers and the contestant itself says
// that everything is in force: where both serve that, at /healthz.
func (b *bench) cold(ctx context.Context, cell *Cell) error {
	if _, err := b.untilEvery(ctx, coldEvery, b.start, vip(measured), b.servers[0].Name); err != nil {
		return err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: b.dial}, Timeout: 5 * time.Second}
	err := b.untilHealthy(ctx, func() bool {
		resp, err := client.Get("http://127.0.0.1:10256/healthz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	if err != nil {
		return err
	}
	cell.Cold = time.Since(b.start).Seconds()
	b.say("in force after %.2f s", cell.Cold)
	return nil
}

// untilHealthy asks again and again, as long as there is somebody to ask, and to be told.
func (b *bench) untilHealthy(ctx context.Context, healthy func() bool) error {
	for time.Since(b.start) < b.patience {
		if healthy() {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if kube.Ended(b.pid) {
			return fmt.Errorf("%s has ended", b.name)
		}
		time.Sleep(5 * time.Millisecond)
	}
	return fmt.Errorf("it does not call itself healthy within %v", b.patience)
}

// dial connects in the node.
func (b *bench) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = b.lab.Node().Do(func() error {
		var d net.Dialer
		conn, err = d.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// apart is how long after a change has taken effect the next one comes: longer
// than anybody waits from one sync to the next (kube-proxy: a second). What becomes
// of changes that come at once is rate's business.
const apart = 1100 * time.Millisecond

// enough bounds the changes of a kind: of what takes a minute each, a few say it.
const (
	enough = 5 * time.Minute
	fewest = 3
)

// rounds does a change for each round, or as many as there is time for.
func (b *bench) rounds(change func(i int) error) error {
	began := time.Now()
	for i := range b.Rounds {
		if i >= fewest && time.Since(began) > enough {
			return nil
		}
		time.Sleep(apart)
		if err := change(i); err != nil {
			return err
		}
	}
	return nil
}

// latency moves the measured Service's endpoint, and makes and removes new
// Services.
func (b *bench) latency(ctx context.Context, cell *Cell) error {
	watch, err := b.watch(ctx)
	if err != nil {
		return err
	}
	defer watch.close()
	if err := b.rounds(func(i int) error {
		now := b.servers[(i+1)%2]
		start := time.Now()
		heard := watch.next(start)
		failed := make(chan error, 1)
		go func() { failed <- b.put(ctx, measured, now.IPv4) }()
		took, err := b.until(ctx, start, vip(measured), now.Name)
		if err := errors.Join(err, <-failed); err != nil {
			return err
		}
		told, err := watch.told(heard)
		if err != nil {
			return err
		}
		cell.Moved, cell.Heard, cell.Event = append(cell.Moved, took), append(cell.Heard, told), append(cell.Event, took-told)
		return nil
	}); err != nil {
		return err
	}
	b.say("%d endpoints moved", len(cell.Moved))
	err = b.rounds(func(i int) error {
		n := measured + 1 + i
		start := time.Now()
		failed := make(chan error, 1)
		go func() { failed <- b.add(ctx, n, []netip.Addr{b.servers[0].IPv4}) }()
		took, err := b.until(ctx, start, vip(n), b.servers[0].Name)
		cell.Added = append(cell.Added, took)
		return errors.Join(err, <-failed)
	})
	b.say("%d Services added", len(cell.Added))
	return err
}

// Slices that change at once, and the endpoints of each: as many as a slice has by
// default. Their Services are made for it.
const (
	burst     = 40
	burstSize = 100
	bursts    = 5
)

// rate replaces all endpoints of many slices, and waits until the last one is in
// force; several times.
func (b *bench) rate(ctx context.Context, cell *Cell) error {
	first := measured + 1 + b.Rounds
	fill := func(round, i int) []netip.Addr {
		addrs := make([]netip.Addr, burstSize)
		for j := range addrs {
			k := (round*burst+i)*burstSize + j
			addrs[j] = netip.AddrFrom4([4]byte{172, 24 + byte(k>>16), byte(k >> 8), byte(k)})
		}
		return addrs
	}
	for i := range burst {
		if err := b.add(ctx, first+i, fill(0, i)); err != nil {
			return err
		}
	}
	var took time.Duration
	for round := range bursts {
		start := time.Now()
		err := each(burst, func(i int) error {
			return b.api.Do(ctx, http.MethodPut, slicesOf+"/"+nameOf(first+i), slice(first+i, fill(round+1, i)), nil)
		})
		now := b.servers[(len(cell.Moved)+1+round)%2] // the other one each time
		if err == nil {
			err = b.put(ctx, measured, now.IPv4)
		}
		if err == nil {
			_, err = b.until(ctx, start, vip(measured), now.Name)
		}
		if err != nil {
			return err
		}
		took += time.Since(start)
	}
	cell.Rate = burst * burstSize * bursts / took.Seconds()
	b.say("%.0f endpoint changes a second", cell.Rate)
	return nil
}

// memory reads a process's resident memory and its highest, in MB.
func memory(pid int) (now, peak float64) {
	for line := range strings.Lines(read(fmt.Sprintf("/proc/%d/status", pid))) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		kb, _ := strconv.ParseFloat(f[1], 64)
		switch f[0] {
		case "VmRSS:":
			now = kb * 1024 / 1e6
		case "VmHWM:":
			peak = kb * 1024 / 1e6
		}
	}
	return now, peak
}
