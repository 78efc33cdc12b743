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

	"github.com/mustang-net/mustang/bench/leftover"
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
			delete(s.doc.Failures, "profile of "+c.Subject+", "+scenario)
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
	var pids []int
	if l, ok := ld.(interface{ PIDs() []int }); ok {
		pids = l.PIDs()
	}
	before, err := ticksOf(l.ClientCPU)
	if err != nil {
		return p, err
	}
	var perf *recorder
	if PerfMissing() == nil && len(pids) > 0 {
		if perf, err = record(ctx, l.ClientCPU); err != nil {
			return p, err
		}
		defer perf.remove()
	}
	if _, err := ld.Turn(ctx); err != nil {
		return p, err
	}
	after, err := ticksOf(l.ClientCPU)
	if err != nil {
		return p, err
	}
	if perf != nil {
		err = perf.stop(ctx, &p, pids)
	} else if user, system, softirq := after[0]-before[0], after[1]-before[1], after[2]-before[2]; user+system+softirq > 0 {
		all := user + system + softirq
		p.User, p.System, p.Softirq = user/all, system/all, softirq/all
	}
	if err != nil {
		return p, err
	}
	done, err := ld.Finish()
	p.Seconds, p.Busy, p.Work = done.Seconds, done.CPU+done.Softirqd, float64(done.Count)
	if what, parseErr := load.ParseScenario(c.Scenario); parseErr == nil && what.Mode == load.Stream {
		p.Work = float64(done.Bytes) / 1e9
	}
	return p, err
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

// recorder is a perf that records the load. It is told by a pipe when to begin and to
// stop, and says by another that it has: its start takes long on a busy machine.
type recorder struct {
	cmd      *exec.Cmd
	dir      string
	ctl, ack *os.File
	stderr   bytes.Buffer
}

// perfPatience bounds each answer of perf.
const perfPatience = 20 * time.Second

// record starts sampling a CPU. Whose samples count is seen afterwards.
func record(ctx context.Context, cpu int) (_ *recorder, err error) {
	dir, err := leftover.TempDir("perf")
	if err != nil {
		return nil, err
	}
	r := &recorder{dir: dir, cmd: exec.CommandContext(ctx, "perf", "record", "-q", "-g", "-F", strconv.Itoa(frequency), "-e", "cpu-clock",
		"-C", strconv.Itoa(cpu), "-o", filepath.Join(dir, "perf.data"), "-D", "-1", "--control", "fd:3,4")}
	defer func() {
		if err != nil {
			r.remove()
		}
	}()
	theirCtl, ctl, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirCtl.Close()
	r.ctl = ctl
	ack, theirAck, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirAck.Close()
	r.ack = ack
	r.cmd.ExtraFiles, r.cmd.Stderr = []*os.File{theirCtl, theirAck}, &r.stderr
	if err := r.cmd.Start(); err != nil {
		return nil, fmt.Errorf("perf record: %w", err)
	}
	return r, r.tell("enable")
}

// tell gives perf an order, and waits until it is carried out.
func (r *recorder) tell(order string) error {
	if _, err := fmt.Fprintln(r.ctl, order); err != nil {
		return fmt.Errorf("tell perf to %s: %w: %s", order, err, bytes.TrimSpace(r.stderr.Bytes()))
	}
	if err := r.ack.SetReadDeadline(time.Now().Add(perfPatience)); err != nil {
		return err
	}
	if _, err := r.ack.Read(make([]byte, 16)); err != nil {
		return fmt.Errorf("perf does not %s: %w: %s", order, err, bytes.TrimSpace(r.stderr.Bytes()))
	}
	return nil
}

// remove ends perf, if it has not ended, and removes its file.
func (r *recorder) remove() {
	for _, f := range []*os.File{r.ctl, r.ack} {
		if f != nil {
			f.Close()
		}
	}
	if r.cmd.Process != nil && r.cmd.ProcessState == nil {
		_ = r.cmd.Process.Kill()
		_ = r.cmd.Wait()
	}
	_ = os.RemoveAll(r.dir)
}

// stop ends the sampling and folds the stacks.
func (r *recorder) stop(ctx context.Context, p *report.Profile, pids []int) error {
	if err := r.tell("stop"); err != nil {
		return err
	}
	if err := r.cmd.Wait(); err != nil {
		return fmt.Errorf("perf record: %w: %s", err, bytes.TrimSpace(r.stderr.Bytes()))
	}
	out, err := exec.CommandContext(ctx, "perf", "script", "-i", filepath.Join(r.dir, "perf.data"), "-F", "comm,pid,ip,sym").Output()
	if err != nil {
		return fmt.Errorf("perf: %w: %s", err, bytes.TrimSpace(r.stderr.Bytes()))
	}
	fold(p, pids, out)
	if p.Stack == nil {
		return fmt.Errorf("perf found nothing of the load: %s", bytes.TrimSpace(r.stderr.Bytes()))
	}
	return nil
}

// fewest is the share of samples below which a function is not drawn.
const fewest = 0.002

// fold counts the stacks of the load and of ksoftirqd that perf script prints: a line with
// a process's name and number, a line a frame from the innermost on, an empty line.
func fold(p *report.Profile, pids []int, script []byte) {
	f := folder{root: &report.Frame{Name: "all"}, pids: pids}
	for lines := bufio.NewScanner(bytes.NewReader(script)); lines.Scan(); {
		line := lines.Text()
		switch {
		case line == "":
			f.flush()
		case line[0] != '\t' && !strings.HasPrefix(line, "        "):
			f.begin(line)
		default:
			if _, name, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
				f.stack = append(f.stack, name)
			}
		}
	}
	f.flush()
	all := float64(f.root.Count)
	if all == 0 {
		return
	}
	p.By, p.User, p.System, p.Softirq = "perf", f.user/all, f.system/all, f.softirq/all
	f.root.Prune(max(1, int(fewest*all)))
	p.Stack = f.root
}

// folder is a stack that is being read, and what came of those before.
type folder struct {
	root                  *report.Frame
	pids                  []int
	comm                  string // of the process, "" for a stranger's
	stack                 []string
	user, system, softirq float64
}

// begin reads a process's line.
func (f *folder) begin(line string) {
	fields := strings.Fields(line)
	f.comm = ""
	if len(fields) < 2 {
		return
	}
	pid, _ := strconv.Atoi(fields[len(fields)-1])
	switch name := strings.Join(fields[:len(fields)-1], " "); {
	case strings.HasPrefix(name, "ksoftirqd"):
		f.comm = "ksoftirqd"
	case slices.Contains(f.pids, pid):
		f.comm = "load"
	}
}

// flush counts a stack that is whole.
func (f *folder) flush() {
	stack := f.stack
	f.stack = f.stack[:0]
	if len(stack) == 0 || f.comm == "" {
		return
	}
	slices.Reverse(stack)
	kernel := func(name string) bool {
		return name == "do_syscall_64" || name == "el0_svc" || strings.HasPrefix(name, "entry_SYSCALL") || strings.HasPrefix(name, "asm_")
	}
	switch {
	case f.comm == "ksoftirqd", slices.ContainsFunc(stack, softirqFrame):
		f.softirq++
	case slices.ContainsFunc(stack, kernel):
		f.system++
	default:
		f.user++
	}
	f.root.Add(trimmed(f.comm, stack), 1)
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
