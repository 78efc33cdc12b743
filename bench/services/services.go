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

	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/kube"
)

// Contestants are what can be measured.
var Contestants = []string{Mustang, "kube-proxy-nftables", "kube-proxy-iptables"}

// Mustang is our own.
const Mustang = "mustang"

// Options are what to measure.
type Options struct {
	Binary      string
	Contestants []string
	Services    []int // numbers of Services beside the measured one
	Endpoints   int   // of each
	Rounds      int   // changes of each kind
	Log         io.Writer
}

// Cell is what was measured of one contestant at one number of Services.
type Cell struct {
	Contestant string `json:"contestant"`
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
	for _, c := range o.Contestants {
		if !slices.Contains(Contestants, c) {
			return nil, fmt.Errorf("contestant %q is none of %s", c, strings.Join(Contestants, ", "))
		}
	}
	if slices.ContainsFunc(o.Services, func(n int) bool { return n < 0 || n >= measured }) || o.Endpoints < 1 || o.Rounds < 1 {
		return nil, fmt.Errorf("--services: want numbers below %d; --endpoints, --rounds: at least 1", measured)
	}
	if missing, err := kube.MissingAPIServer(); err != nil || missing != "" {
		return nil, errors.Join(err, fmt.Errorf("not built yet: %s; to build: test/kube/kube build", missing))
	}
	r := &Report{Kernel: read("/proc/sys/kernel/osrelease"), Load: []string{read("/proc/loadavg")}}
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
	r.Load = append(r.Load, read("/proc/loadavg"))
	return r, errors.Join(failed...)
}

func read(path string) string {
	text, _ := os.ReadFile(path)
	return strings.TrimSpace(string(text))
}

// bench is one contestant at work.
type bench struct {
	Options
	lab     *lab.Lab
	api     *kube.APIServer
	client  *lab.Pod
	servers [2]*lab.Pod
	log     string
}

func measure(ctx context.Context, o Options, name string, n int) (cell Cell, err error) {
	say := func(format string, args ...any) {
		fmt.Fprintf(o.Log, "%s, %d Services: %s\n", name, n, fmt.Sprintf(format, args...))
	}
	cell = Cell{Contestant: name, Services: n, Endpoints: o.Endpoints}
	dir, err := os.MkdirTemp("", "mustang-bench-services-")
	if err != nil {
		return cell, err
	}
	defer os.RemoveAll(dir)
	by := lab.NoServices // the contestant makes them
	if name == Mustang {
		by = lab.MustangTC
	}
	b := &bench{Options: o, log: filepath.Join(dir, "contestant.log")}
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
	if err := b.fill(ctx, n); err != nil {
		return cell, err
	}
	say("the API server is filled")
	if err := b.put(ctx, measured, b.servers[0].IPv4); err != nil {
		return cell, err
	}
	start := time.Now()
	run, end, err := b.contestant(ctx, name, dir)
	if err != nil {
		return cell, err
	}
	defer end()
	if cell.Cold, err = b.cold(ctx, start); err != nil {
		return cell, fmt.Errorf("%w\n%s", err, lastLines(b.log))
	}
	say("in force after %.2f s", cell.Cold)
	if err := b.latency(ctx, &cell); err != nil {
		return cell, fmt.Errorf("%w\n%s", err, lastLines(b.log))
	}
	if cell.Rate, err = b.rate(ctx); err != nil {
		return cell, fmt.Errorf("%w\n%s", err, lastLines(b.log))
	}
	say("%.0f endpoint changes a second", cell.Rate)
	time.Sleep(5 * time.Second)
	cell.Memory, cell.Peak = memory(run.Process.Pid)
	say("%.0f MB, at most %.0f", cell.Memory, cell.Peak)
	return cell, nil
}

func lastLines(path string) string {
	text := read(path)
	return text[max(0, len(text)-2000):]
}

// contestant starts one in the node.
func (b *bench) contestant(ctx context.Context, name, dir string) (*lab.Cmd, func(), error) {
	argv := b.lab.MustangArgs("agent", "--kubeconfig", b.api.Kubeconfig, "--node", nodeName, "--node-mode", "none", "--devices", "none")
	if mode, ok := strings.CutPrefix(name, "kube-proxy-"); ok {
		config := filepath.Join(dir, "kube-proxy.yaml")
		// nf_conntrack_max cannot be set in a network namespace: 0 leaves it alone.
		text := fmt.Sprintf("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nclientConnection: {kubeconfig: %s}\n"+
			"mode: %s\nclusterCIDR: %s\nhostnameOverride: %s\noomScoreAdj: 0\nconntrack: {maxPerCore: 0, min: 0}\n",
			b.api.Kubeconfig, mode, lab.PodCIDR4, nodeName)
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			return nil, nil, err
		}
		argv = []string{filepath.Join(b.api.Programs, "kube-proxy"), "--config", config}
	}
	log, err := os.Create(b.log)
	if err != nil {
		return nil, nil, err
	}
	defer log.Close()
	cmd := b.lab.Node().Command(ctx, argv...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	return cmd, func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
	}, nil
}

// cold waits until the measured Service answers and the contestant itself says
// that everything is in force: where both serve that, at /healthz.
func (b *bench) cold(ctx context.Context, start time.Time) (float64, error) {
	if _, err := b.until(ctx, start, vip(measured), b.servers[0].Name); err != nil {
		return 0, err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: b.dial}, Timeout: 5 * time.Second}
	for time.Since(start) < patience {
		resp, err := client.Get("http://127.0.0.1:10256/healthz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return time.Since(start).Seconds(), nil
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
	return 0, fmt.Errorf("it does not call itself healthy within %v", patience)
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

// latency moves the measured Service's endpoint, and makes and removes new
// Services.
func (b *bench) latency(ctx context.Context, cell *Cell) error {
	watch, err := b.watch(ctx)
	if err != nil {
		return err
	}
	defer watch.close()
	for i := range b.Rounds {
		now := b.servers[(i+1)%2]
		time.Sleep(apart)
		start := time.Now()
		heard := watch.next(start)
		failed := make(chan error, 1)
		go func() { failed <- b.put(ctx, measured, now.IPv4) }()
		took, err := b.until(ctx, start, vip(measured), now.Name)
		if err := errors.Join(err, <-failed); err != nil {
			return err
		}
		told := <-heard
		cell.Moved, cell.Heard, cell.Event = append(cell.Moved, took), append(cell.Heard, told), append(cell.Event, took-told)
	}
	for i := range b.Rounds {
		n := measured + 1 + i
		time.Sleep(apart)
		start := time.Now()
		failed := make(chan error, 1)
		go func() { failed <- b.add(ctx, n, []netip.Addr{b.servers[0].IPv4}) }()
		took, err := b.until(ctx, start, vip(n), b.servers[0].Name)
		if err := errors.Join(err, <-failed); err != nil {
			return err
		}
		cell.Added = append(cell.Added, took)
	}
	return nil
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
func (b *bench) rate(ctx context.Context) (float64, error) {
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
			return 0, err
		}
	}
	var took time.Duration
	for round := range bursts {
		start := time.Now()
		err := each(burst, func(i int) error {
			return b.api.Do(ctx, http.MethodPut, slicesOf+"/"+nameOf(first+i), slice(first+i, fill(round+1, i)), nil)
		})
		now := b.servers[(b.Rounds+1+round)%2] // the other one each time
		if err == nil {
			err = b.put(ctx, measured, now.IPv4)
		}
		if err == nil {
			_, err = b.until(ctx, start, vip(measured), now.Name)
		}
		if err != nil {
			return 0, err
		}
		took += time.Since(start)
	}
	return burst * burstSize * bursts / took.Seconds(), nil
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
			now = kb / 1024
		case "VmHWM:":
			peak = kb / 1024
		}
	}
	return now, peak
}
