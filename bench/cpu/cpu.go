// SPDX-License-Identifier: Apache-2.0

// Package cpu accounts the processor time of a load by a control group of its
// own, so that whatever else runs on the machine stays out of the figure.
//
// Work done in softirq context on behalf of the load is charged to whichever
// task was interrupted, which is the load itself while it is alone on its CPU;
// what overflows to ksoftirqd is read apart and added.
package cpu

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/leftover"
	"golang.org/x/sys/unix"
)

// Kinds of source, from the best to the last resort.
const (
	Cpuacct   = "cgroup v1 cpuacct"
	CPUStat   = "cgroup v2 cpu.stat"
	Getrusage = "getrusage of the load's processes (no usable control group)"
)

// Source says where a load's CPU time is read.
type Source struct {
	Kind     string `json:"kind"`
	Dir      string `json:"dir,omitempty"`      // the control group; empty for Getrusage
	Softirqd []int  `json:"softirqd,omitempty"` // PIDs of the ksoftirqd of the load's CPUs
}

// Usage is CPU time used up to now.
type Usage struct {
	Load     time.Duration // by the load's own processes
	Softirqd time.Duration // by ksoftirqd of the load's CPUs
}

// Sub returns the usage since an earlier reading.
func (u Usage) Sub(earlier Usage) Usage {
	return Usage{u.Load - earlier.Load, u.Softirqd - earlier.Softirqd}
}

// Total is the load's and ksoftirqd's time together.
func (u Usage) Total() time.Duration { return u.Load + u.Softirqd }

// Read reads the counters. With Kind Getrusage, Load stays 0: the launcher
// takes it from the processes when they end.
func (s Source) Read() (Usage, error) {
	var u Usage
	var err error
	switch s.Kind {
	case Cpuacct:
		u.Load, err = readCpuacct(filepath.Join(s.Dir, "cpuacct.usage"))
	case CPUStat:
		u.Load, err = readCPUStat(filepath.Join(s.Dir, "cpu.stat"))
	}
	if err != nil {
		return u, fmt.Errorf("read CPU time of the load: %w", err)
	}
	for _, pid := range s.Softirqd {
		d, err := readSchedstat(pid)
		if err != nil {
			return u, fmt.Errorf("read CPU time of ksoftirqd: %w", err)
		}
		u.Softirqd += d
	}
	return u, nil
}

func readCpuacct(path string) (time.Duration, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	ns, err := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
	return time.Duration(ns), err
}

func readCPUStat(path string) (time.Duration, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "usage_usec "); ok {
			us, err := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
			return time.Duration(us) * time.Microsecond, err
		}
	}
	return 0, fmt.Errorf("%s has no usage_usec", path)
}

// readSchedstat returns the first field of /proc/PID/schedstat: nanoseconds
// on the CPU. /proc/PID/stat would round to clock ticks of 10 ms.
func readSchedstat(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(b), " ")
	ns, err := strconv.ParseInt(first, 10, 64)
	return time.Duration(ns), err
}

// Group is the control group of one bench run. Beside accounting, it has a
// group of the v2 hierarchy for each environment, because socket programs are
// attached to groups: the load of one contestant must not run through the
// programs of another.
type Group struct {
	Source
	v2 string // the run's directory in the v2 hierarchy; "" without one
}

// NewGroup makes control groups called name where this machine has them. It
// never fails for want of accounting: it falls back to Getrusage, and Kind
// says so. What runs of dead processes have left goes.
func NewGroup(name string, cpus []int) *Group {
	g := &Group{Source: Source{Kind: Getrusage, Softirqd: softirqd(cpus)}}
	v1, v2 := mounts()
	removeDead(v1)
	removeDead(v2)
	if v2 != "" {
		g.v2 = makeGroup(filepath.Join(v2, name), "cgroup.procs")
	}
	if v1 != "" {
		if dir := makeGroup(filepath.Join(v1, name), "cpuacct.usage"); dir != "" {
			g.Kind, g.Dir = Cpuacct, dir
			return g
		}
	}
	if g.v2 != "" {
		if _, err := os.Stat(filepath.Join(g.v2, "cpu.stat")); err == nil {
			g.Kind, g.Dir = CPUStat, g.v2
		}
	}
	return g
}

// Name is what the group of this process's run is called.
func Name() string { return namePrefix + strconv.Itoa(os.Getpid()) }

const namePrefix = "mustang-bench-"

// removeDead removes the groups of killed runs from a hierarchy, with what still runs in
// them: a server of the load's own ends by itself, nginx never.
func removeDead(hierarchy string) {
	if hierarchy == "" {
		return
	}
	for _, dir := range leftover.Of(hierarchy, namePrefix) {
		for _, each := range append(children(dir), dir) {
			endAll(each)
			_ = removeGroup(each)
		}
	}
}

// endAll kills a group's processes. Each is held by a descriptor before it is seen in the
// group, so that a reused number cannot put another in its place.
func endAll(dir string) {
	for _, pid := range members(dir) {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // gone
		}
		if slices.Contains(members(dir), pid) {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
		unix.Close(fd)
	}
}

// members are the processes of a group, as far as they are seen from here.
func members(dir string) (pids []int) {
	text, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	for line := range strings.Lines(string(text)) {
		if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// children are the groups in a group.
func children(dir string) []string {
	dirs, _ := filepath.Glob(filepath.Join(dir, "*", "cgroup.procs"))
	for i := range dirs {
		dirs[i] = filepath.Dir(dirs[i])
	}
	return dirs
}

// makeGroup makes a group that must have file, and returns "" if it cannot.
func makeGroup(dir, file string) string {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return ""
	}
	if _, err := os.Stat(filepath.Join(dir, file)); err != nil {
		_ = os.Remove(dir)
		return ""
	}
	return dir
}

// Env makes the v2 group of one environment and returns its directory, "" on a
// machine without the v2 hierarchy.
func (g *Group) Env(name string) string {
	if g.v2 == "" {
		return ""
	}
	return makeGroup(filepath.Join(g.v2, name), "cgroup.procs")
}

// Joins returns the groups that a load of an environment joins. Where
// accounting is by v2 itself, the run's group counts its children.
func (g *Group) Joins(env string) []string {
	var dirs []string
	if g.Kind == Cpuacct {
		dirs = append(dirs, g.Dir)
	}
	if env == "" {
		env = g.v2
	}
	if env != "" {
		dirs = append(dirs, env)
	}
	return dirs
}

// Close removes the groups. A process that was just killed may stay in one for
// a moment, so removal is tried until a deadline.
func (g *Group) Close() error {
	var dirs []string
	if g.v2 != "" {
		dirs = append(children(g.v2), g.v2)
	}
	if g.Kind == Cpuacct {
		dirs = append(dirs, g.Dir)
	}
	var errs []error
	for _, dir := range dirs {
		errs = append(errs, removeGroup(dir))
	}
	return errors.Join(errs...)
}

func removeGroup(dir string) error {
	for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		// Not os.Remove: a group that is gone or busy is told apart by errno.
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return fmt.Errorf("remove control group %s: %w", dir, err)
		}
	}
}

// Join moves the calling process into the control group dir.
func Join(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0); err != nil {
		return fmt.Errorf("join control group: %w", err)
	}
	return nil
}

// mounts returns where the v1 cpuacct hierarchy and the v2 hierarchy are
// mounted, "" for none.
func mounts() (v1, v2 string) {
	f, err := os.Open("/proc/self/mounts")
	if err != nil {
		return "", ""
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		fields := strings.Fields(sc.Text())
		switch {
		case len(fields) < 4:
		case fields[2] == "cgroup" && hasOption(fields[3], "cpuacct"):
			v1 = fields[1]
		case fields[2] == "cgroup2":
			v2 = fields[1]
		}
	}
	return v1, v2
}

func hasOption(options, want string) bool {
	for o := range strings.SplitSeq(options, ",") {
		if o == want {
			return true
		}
	}
	return false
}

// softirqd returns the PIDs of ksoftirqd on cpus; fewer where /proc hides
// kernel threads (a container's PID namespace).
func softirqd(cpus []int) []int {
	want := map[string]bool{}
	for _, c := range cpus {
		want[fmt.Sprintf("ksoftirqd/%d", c)] = true
	}
	comms, _ := filepath.Glob("/proc/[0-9]*/comm")
	var pids []int
	for _, path := range comms {
		b, err := os.ReadFile(path)
		if err != nil || !want[strings.TrimSpace(string(b))] {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}
