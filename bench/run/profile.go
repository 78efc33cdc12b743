// SPDX-License-Identifier: Apache-2.0

package run

// Flame graphs: what runs on the load's CPU while one path is loaded, by perf where it
// is installed, else only how much is user, system and softirq, by the kernel's tick.

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
)

// frequency of samples a second: no multiple of the tick's, or the two would beat.
const frequency = 1999

// PerfMissing names perf's package when it cannot be used, nil when it can.
func PerfMissing() error {
	if _, err := exec.LookPath("perf"); err != nil {
		return errors.New("no perf, so no flame graphs: install the package linux-perf (linux-tools elsewhere)")
	}
	return nil
}

// profiles samples each path that has none yet, under each of the plan's scenarios.
func (s *session) profiles(ctx context.Context) error {
	for _, scenario := range s.o.Profiled {
		for _, c := range s.cases {
			if c.Scenario != scenario || c.Cores != "same" || c.Subject == s.doc.AgainID() || s.profiled(c) {
				continue
			}
			s.say("sampling %s, %s", c.Subject, scenario)
			p, err := s.profile(ctx, c)
			if cause := context.Cause(ctx); cause != nil {
				return cause
			}
			if err != nil {
				s.doc.Failures["profile of "+c.Subject+", "+scenario] = err.Error()
				continue
			}
			s.doc.Profiles = append(s.doc.Profiles, p)
		}
	}
	return nil
}

func (s *session) profiled(c runner.Case) bool {
	return slices.ContainsFunc(s.doc.Profiles, func(p report.Profile) bool { return p.Subject == c.Subject && p.Scenario == c.Scenario })
}

// profile loads a path for one long turn, and samples the CPU within it.
func (s *session) profile(ctx context.Context, c runner.Case) (p report.Profile, err error) {
	p = report.Profile{Subject: c.Subject, Scenario: c.Scenario, By: "tick"}
	l := s.launcher(c)
	l.Iperf3 = false // the load program's stacks are alike in all scenarios
	l.Duration, l.Warmup = s.o.ProfileTime, 100*time.Millisecond
	ld, err := l.Open(ctx, s.paths[c.Subject].Target, c.Scenario)
	if err != nil {
		return p, err
	}
	defer ld.Kill()
	sampled := make(chan error, 1)
	go func() {
		time.Sleep(l.Warmup + 20*time.Millisecond)
		sampled <- sample(ctx, &p, l.ClientCPU, s.o.ProfileTime-200*time.Millisecond)
	}()
	_, err = ld.Turn(ctx)
	if err = errors.Join(err, <-sampled); err != nil {
		return p, err
	}
	done, err := ld.Finish()
	p.Seconds, p.Busy, p.Work = done.Seconds, done.CPU+done.Softirqd, float64(done.Count)
	if what, parseErr := load.ParseScenario(c.Scenario); parseErr == nil && what.Mode == load.Stream {
		p.Work = float64(done.Bytes) / 1e9
	}
	return p, err
}

// sample fills a profile's shares and stacks, from one CPU, for a time.
func sample(ctx context.Context, p *report.Profile, cpu int, long time.Duration) error {
	before, err := ticksOf(cpu)
	if err != nil {
		return err
	}
	if PerfMissing() == nil {
		err = perf(ctx, p, cpu, long)
	} else {
		time.Sleep(long)
	}
	after, err2 := ticksOf(cpu)
	if err = errors.Join(err, err2); err != nil || p.Stack != nil {
		return err
	}
	user, system, softirq := after[0]-before[0], after[1]-before[1], after[2]-before[2]
	if all := user + system + softirq; all > 0 {
		p.User, p.System, p.Softirq = user/all, system/all, softirq/all
	}
	return nil
}

// ticksOf are a CPU's user, system and softirq ticks.
func ticksOf(cpu int) (t [3]float64, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return t, err
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 8 || f[0] != fmt.Sprintf("cpu%d", cpu) {
			continue
		}
		for i, columns := range [][]int{{1, 2}, {3}, {6, 7}} {
			for _, at := range columns {
				n, _ := strconv.ParseFloat(f[at], 64)
				t[i] += n
			}
		}
		return t, nil
	}
	return t, fmt.Errorf("/proc/stat has no cpu%d", cpu)
}

// perf records and folds the stacks of one CPU.
func perf(ctx context.Context, p *report.Profile, cpu int, long time.Duration) error {
	dir, err := os.MkdirTemp("", "mustang-bench-perf")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "perf.data")
	record := exec.CommandContext(ctx, "perf", "record", "-q", "-g", "-F", strconv.Itoa(frequency), "-e", "cpu-clock", "-C", strconv.Itoa(cpu), "-o", file,
		"--", "sleep", strconv.FormatFloat(long.Seconds(), 'f', 3, 64))
	if out, err := record.CombinedOutput(); err != nil {
		return fmt.Errorf("perf record: %w: %s", err, bytes.TrimSpace(out))
	}
	out, err := exec.CommandContext(ctx, "perf", "script", "-i", file, "-F", "comm,ip,sym").Output()
	if err != nil {
		return fmt.Errorf("perf script: %w", err)
	}
	fold(p, out)
	if p.Stack == nil {
		return errors.New("perf found nothing on the load's CPU")
	}
	return nil
}

// fewest is the share of samples below which a function is not drawn.
const fewest = 0.002

// fold counts the stacks that perf script prints: a line with the process's name, a
// line a frame from the innermost on, an empty line.
func fold(p *report.Profile, script []byte) {
	root := &report.Frame{Name: "all"}
	var stack []string
	var comm string
	kernel := func(name string) bool {
		return name == "do_syscall_64" || strings.HasPrefix(name, "entry_SYSCALL") || name == "el0_svc"
	}
	var user, system, softirq float64
	flush := func() {
		if len(stack) == 0 || comm == "" || strings.HasPrefix(comm, "swapper") {
			stack = stack[:0]
			return
		}
		slices.Reverse(stack)
		switch {
		case slices.ContainsFunc(stack, softirqFrame):
			softirq++
		case slices.ContainsFunc(stack, kernel) || strings.HasPrefix(comm, "ksoftirqd"):
			system++
		default:
			user++
		}
		root.Add(trimmed(comm, stack), 1)
		stack = stack[:0]
	}
	for lines := bufio.NewScanner(bytes.NewReader(script)); lines.Scan(); {
		line := lines.Text()
		switch {
		case line == "":
			flush()
		case line[0] != '\t' && line[0] != ' ':
			comm = strings.TrimSpace(line)
		default:
			if _, name, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
				stack = append(stack, name)
			}
		}
	}
	flush()
	if root.Count == 0 {
		return
	}
	all := user + system + softirq
	p.By, p.User, p.System, p.Softirq = "perf", user/all, system/all, softirq/all
	root.Prune(max(1, int(fewest*float64(root.Count))))
	p.Stack = root
}

func softirqFrame(name string) bool {
	return name == "__do_softirq" || name == "handle_softirqs" || name == "do_softirq" || name == "__softirqentry_text_start"
}

// trimmed is a stack without the frames of the load program, which is the same for all:
// the flame graph begins where the kernel does. Tags of BPF programs go too.
func trimmed(comm string, stack []string) []string {
	from := slices.IndexFunc(stack, func(name string) bool {
		return strings.HasPrefix(name, "entry_SYSCALL") || name == "do_syscall_64" || strings.HasPrefix(name, "asm_") || strings.HasPrefix(name, "ret_from_fork")
	})
	out := []string{comm}
	if from < 0 {
		return append(out, "user code")
	}
	for _, name := range stack[from:] {
		if strings.HasPrefix(name, "entry_SYSCALL") || name == "do_syscall_64" {
			continue
		}
		if rest, ok := strings.CutPrefix(name, "bpf_prog_"); ok {
			if tag, called, ok := strings.Cut(rest, "_"); ok && len(tag) == 16 {
				name = "bpf:" + called
			}
		}
		out = append(out, name)
	}
	return out
}
