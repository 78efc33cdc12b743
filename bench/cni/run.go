// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/vishvananda/netns"

	"github.com/mustang-net/mustang/bench/leftover"
	"github.com/mustang-net/mustang/bench/run"
)

// Options are how to run.
type Options struct {
	Plugin    string // mustang-cni
	Binary    string // mustang, for the labs
	Reference string // directory of the reference plugins
	// Contestants are some of Names; none: all.
	Contestants []string
	Rounds      int
	Full        int // rounds that fill a node with 110 pods
	Seed        uint64
	Log         io.Writer
}

// FullNode is the kubelet's default number of pods, added ten at once.
const FullNode = 110

// Cell is one way of calling.
type Cell struct {
	Name  string
	pods  int
	width int // at once
}

// Cells are all ways.
var Cells = []Cell{{"one", 5, 1}, {"10 at once", 10, 10}, {"30 at once", 30, 30}, {"110 pods, 10 at once", FullNode, 10}}

// Sample is one contestant's latencies in one cell of one round, in
// milliseconds.
type Sample struct {
	Round      int       `json:"round"`
	Contestant string    `json:"contestant"`
	Cell       string    `json:"cell"`
	Add        []float64 `json:"add_ms"`
	Del        []float64 `json:"del_ms"`
}

// Report is a run.
type Report struct {
	Kernel  string    `json:"kernel"`
	CPUs    int       `json:"cpus"`
	Load    [2]string `json:"load_average"` // before and after
	Rounds  int       `json:"rounds"`       // that are finished
	Samples []Sample  `json:"samples"`
}

// space is a container's network namespace.
type space struct{ id, path string }

// Run measures all contestants. What is finished when ctx ends is reported.
func Run(ctx context.Context, o Options) (r *Report, err error) {
	if o.Rounds < 1 {
		return nil, run.Refuse(errors.New("--rounds: want at least 1"))
	}
	list, err := chosen(o)
	if err != nil {
		return nil, run.Refuse(err)
	}
	unlock, err := run.Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	r = &Report{Kernel: read("/proc/sys/kernel/osrelease"), CPUs: runtime.NumCPU()}
	r.Load[0] = read("/proc/loadavg")
	if err := removeDead(); err != nil {
		return nil, err
	}
	spaces, err := makeSpaces(FullNode)
	defer func() { err = errors.Join(err, removeSpaces(spaces)) }()
	if err != nil {
		return nil, err
	}
	var envs []*env
	defer func() {
		for _, e := range envs {
			err = errors.Join(err, e.close())
		}
	}()
	for i, c := range list {
		if _, err := os.Stat(c.plugin); err != nil {
			return nil, fmt.Errorf("contestant %s: %w; Debian's package containernetworking-plugins has the reference plugins", c.name, err)
		}
		e, err := c.up(ctx, o, i)
		if errors.Is(err, errors.ErrUnsupported) {
			fmt.Fprintf(o.Log, "not here: %s: %v\n", c.name, err)
			continue
		}
		if err != nil {
			return nil, err
		}
		envs = append(envs, e)
		if _, err := e.fill(ctx, Cells[0], spaces); err != nil { // warm-up: what a node pays once
			return nil, err
		}
	}
	defer func() { r.Load[1] = read("/proc/loadavg") }()
	random := rand.New(rand.NewPCG(o.Seed, 0))
	for round := range o.Rounds {
		fmt.Fprintf(o.Log, "round %d of %d\n", round+1, o.Rounds)
		for _, cell := range Cells {
			if cell.pods == FullNode && round >= o.Full {
				continue
			}
			random.Shuffle(len(envs), func(i, j int) { envs[i], envs[j] = envs[j], envs[i] })
			for _, e := range envs {
				s, err := e.fill(ctx, cell, spaces)
				if err != nil {
					if ctx.Err() != nil {
						return r, ctx.Err()
					}
					return r, err
				}
				s.Round = round
				r.Samples = append(r.Samples, s)
			}
		}
		r.Rounds++
	}
	return r, nil
}

// fill adds a cell's pods and removes them again.
func (e *env) fill(ctx context.Context, cell Cell, spaces []space) (Sample, error) {
	s := Sample{Contestant: e.name, Cell: cell.Name}
	var err error
	if s.Add, err = e.all(ctx, "ADD", cell, spaces); err != nil {
		return s, err
	}
	s.Del, err = e.all(ctx, "DEL", cell, spaces)
	return s, err
}

func (e *env) all(ctx context.Context, command string, cell Cell, spaces []space) ([]float64, error) {
	out := make([]float64, cell.pods)
	errs := make([]error, cell.pods)
	next := make(chan int)
	var wg sync.WaitGroup
	for range cell.width {
		wg.Go(func() {
			for i := range next {
				took, err := e.call(ctx, command, spaces[i])
				out[i], errs[i] = float64(took.Microseconds())/1000, err
			}
		})
	}
	for i := range cell.pods {
		next <- i
	}
	close(next)
	wg.Wait()
	return out, errors.Join(errs...)
}

const (
	netnsDir    = "/var/run/netns" // iproute2's place
	spacePrefix = "mstbench"
)

func spaceName(i int) string { return fmt.Sprintf("%s%d-%d", spacePrefix, os.Getpid(), i) }

// removeDead removes the namespaces of killed runs.
func removeDead() error {
	var errs []error
	for _, path := range leftover.Of(netnsDir, spacePrefix) {
		errs = append(errs, netns.DeleteNamed(filepath.Base(path)))
	}
	return errors.Join(errs...)
}

// makeSpaces makes named namespaces; those that it made are answered also with
// an error.
func makeSpaces(n int) (out []space, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := netns.Get()
	if err != nil {
		return nil, err
	}
	defer home.Close()
	defer func() { err = errors.Join(err, netns.Set(home)) }()
	for i := range n {
		name := spaceName(i)
		h, err := netns.NewNamed(name)
		if err != nil {
			return out, fmt.Errorf("make network namespace %s: %w", name, err)
		}
		h.Close()
		out = append(out, space{fmt.Sprintf("bench-%d", i), filepath.Join(netnsDir, name)})
	}
	return out, nil
}

func removeSpaces(list []space) error {
	var errs []error
	for i := range list {
		errs = append(errs, netns.DeleteNamed(spaceName(i)))
	}
	return errors.Join(errs...)
}

func read(file string) string {
	text, _ := os.ReadFile(file)
	return strings.TrimSpace(string(text))
}
