// SPDX-License-Identifier: Apache-2.0

package run

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/cpu"
	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
)

// session is a run while its environments are up.
type session struct {
	o     Plan
	log   Log
	doc   *report.Document
	group *cpu.Group
	envs  []Env
	paths map[string]Path // by subject
	cases []runner.Case
	// lacking are contestants that this kernel cannot have, of those that were
	// asked for where there are.
	lacking int
	// earlier are failures of the run that this one goes on from.
	earlier map[string]string
}

// Run measures and returns the document, which is worth keeping whenever it is
// not nil: an error may mean that some contestants failed, or that the run was
// interrupted after some rounds. Everything that was built is gone on return.
func Run(ctx context.Context, o Plan, log Log) (doc *report.Document, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if err := o.tools(); err != nil {
		return nil, err
	}
	unlock, err := Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	client, server, err := CPUs(slices.Contains(o.AllCores(), "cross"))
	if err != nil {
		return nil, err
	}
	loaded := []int{client}
	if slices.Contains(o.AllCores(), "cross") && client != server {
		loaded = []int{client, server}
	}
	s := &session{o: o, log: log, paths: map[string]Path{}, group: cpu.NewGroup(cpu.Name(), loaded)}
	defer func() { err = errors.Join(err, s.close()) }()
	began := time.Now()
	s.doc = s.newDocument(client, server)
	if o.Resume != nil {
		if err := sameMachine(o.Resume, s.doc); err != nil {
			return nil, err
		}
	}
	if err := s.up(ctx); err != nil {
		return nil, err
	}
	if o.Resume != nil {
		if err := s.resume(); err != nil {
			return nil, err
		}
	}
	s.facts(ctx)
	err = s.profiles(ctx)
	if err != nil {
		return s.doc, err
	}
	return s.doc, s.measure(ctx, began)
}

// tools says which program is missing, and its package.
func (o Plan) tools() error {
	if o.StreamBy == StreamIperf3 && slices.ContainsFunc(o.Scenarios, func(name string) bool { return strings.HasPrefix(name, string(load.Stream)) }) {
		if _, err := runner.Iperf3Version(); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) newDocument(client, server int) *report.Document {
	o, set := s.o, s.o.Settings
	set.Rounds, set.Duration, set.Turns, set.Cores, set.Seed = o.planned(), o.Duration.Seconds(), o.Turns, o.AllCores(), o.Seed
	set.IPv6, set.TailRate, set.MTU, set.StreamBy, set.CC = o.IPv6, o.TailRate, o.MTU, o.StreamBy, load.ProbeCC("cubic")
	set.CPUSource, set.ClientCPU, set.ServerCPU = s.group.Kind, client, server
	return &report.Document{
		Schema: report.Schema, Started: time.Now().UTC(), Machine: DescribeMachine(), Failures: map[string]string{}, Facts: map[string]bool{},
		Samples:  []runner.Sample{}, // not nil: in JSON it is a list, even when empty
		Settings: set,
	}
}

// up builds all environments. One that cannot be built is a failure of its
// contestant, not of the run; without the base there is nothing to divide by.
func (s *session) up(ctx context.Context) error {
	list := s.o.Contestants
	for i, c := range list {
		s.say("building %d of %d: %s", i+1, len(list), c.Name())
		env, err := s.build(ctx, c, s.group.Env(fmt.Sprintf("e%d", i)))
		if cause := context.Cause(ctx); cause != nil {
			if env != nil {
				s.envs = append(s.envs, env)
			}
			return cause
		}
		if err != nil {
			if c.Name() == s.doc.BaseID() {
				return err
			}
			s.doc.Failures[c.Name()] = err.Error()
			if lacking(c, err) {
				s.lacking++
				s.say("not here: %s: %v", c.Name(), err)
			} else {
				s.say("failed: %s: %v", c.Name(), err)
			}
			if s.log.Terminal {
				fmt.Fprintln(s.log.W)
			}
			continue
		}
		s.envs = append(s.envs, env)
		for _, p := range env.Paths() {
			s.add(p, env)
		}
	}
	s.say("")
	return nil
}

// build bounds the time of one environment: the kernel's firewalls take
// milliseconds a Service when there are many.
func (s *session) build(ctx context.Context, c Contestant, cgroup string) (Env, error) {
	limit := s.o.BuildTime
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not built within %s", limit))
	defer cancel()
	return c.Up(ctx, cgroup)
}

func (s *session) add(p Path, env Env) {
	p.Subject.ProgramSet = env.ProgramSet()
	s.doc.Subjects = append(s.doc.Subjects, p.Subject)
	s.paths[p.Subject.ID] = p
	for _, cores := range s.o.AllCores() {
		for _, scenario := range s.o.Scenarios {
			if p.Only == nil || slices.Contains(p.Only, scenario) {
				s.cases = append(s.cases, runner.Case{Subject: p.Subject.ID, Scenario: scenario, Cores: cores})
			}
		}
	}
}

// say shows one line of progress; on a terminal it replaces the last one.
func (s *session) say(format string, args ...any) {
	if s.log.Terminal {
		fmt.Fprint(s.log.W, "\r\x1b[K")
	}
	fmt.Fprintf(s.log.W, format, args...)
	if !s.log.Terminal && format != "" {
		fmt.Fprintln(s.log.W)
	}
}

// resume puts the earlier run's document in the place of the new one.
func (s *session) resume() error {
	old := s.o.Resume
	if err := sameSubjects(old.Subjects, s.doc.Subjects); err != nil {
		return err
	}
	s.earlier = stillFailed(old, s.doc.Subjects)
	for name, text := range s.earlier {
		if s.doc.Failures[name] == "" {
			s.doc.Failures[name] = text
		}
	}
	maps.Copy(s.doc.Facts, old.Facts)
	old.Failures, old.Facts = s.doc.Failures, s.doc.Facts
	old.Settings.Rounds = s.o.planned()
	s.doc = old
	return nil
}

// facts finds out what the plan asks, and is not known yet. What cannot be tried is a
// failure of the fact.
func (s *session) facts(ctx context.Context) {
	for i, f := range s.o.Facts {
		if _, known := s.doc.Facts[f.Name]; known {
			continue
		}
		l := s.launcher(runner.Case{Cores: "same"})
		l.Duration, l.Warmup = 20*time.Millisecond, 0
		is, err := f.Find(ctx, l, s.group.Env(fmt.Sprintf("f%d", i)))
		if err == nil {
			s.doc.Facts[f.Name] = is
			delete(s.doc.Failures, f.Name)
			continue
		}
		if ctx.Err() != nil {
			return // it was cut short: what comes next says so
		}
		if errors.Is(err, errors.ErrUnsupported) {
			s.lacking++
		}
		s.doc.Failures[f.Name] = err.Error()
	}
}

func (s *session) measure(ctx context.Context, began time.Time) error {
	set := runner.Settings{Rounds: s.o.planned(), Warmup: true, Seed: s.o.Seed, Turns: s.o.turns, Done: s.doc.FinishedRounds(), Kept: s.kept}
	if s.o.Budget > 0 {
		set.Until = began.Add(s.o.Budget)
	}
	s.doc.Complete = false
	progress := &runner.Printer{W: s.log.W, Terminal: s.log.Terminal, Rounds: set.Rounds}
	samples, err := runner.Run(ctx, s.cases, set, s, progress)
	if err != nil {
		s.say("") // the progress line
	}
	s.doc.Finished, s.doc.Complete = time.Now().UTC(), err == nil
	s.doc.Compute()
	if err != nil {
		return fmt.Errorf("the run was cut short, %d samples of finished rounds are kept: %w", len(s.doc.Samples), err)
	}
	s.say("%d samples in %s", len(samples), time.Since(began).Round(time.Second))
	if n := len(s.doc.Failures) - s.lacking; n > 0 {
		return fmt.Errorf("%d contestants failed: see FAILED in the report", n)
	}
	return nil
}

// kept adds a round to the document.
func (s *session) kept(_ int, samples []runner.Sample) error {
	s.doc.Samples = append(s.doc.Samples, samples...)
	for name, text := range s.earlier {
		if s.doc.Failures[name] == text && recovered(text, samples) {
			delete(s.doc.Failures, name)
		}
	}
	for _, sample := range samples {
		if sample.Error != "" && s.doc.Failures[sample.Subject] == "" {
			s.doc.Failures[sample.Subject] = sample.Error
		}
	}
	if s.o.Keep == nil {
		return nil
	}
	return s.o.Keep(s.doc)
}

func (s *session) launcher(c runner.Case) runner.Launcher {
	set := s.doc.Settings
	l := runner.Launcher{
		Self: s.o.Self, Group: s.group, ClientCPU: set.ClientCPU, ServerCPU: set.ClientCPU,
		Duration: s.o.Duration / time.Duration(s.o.Turns), Warmup: s.o.Warmup, CC: set.CC, TailRate: s.o.TailRate, Iperf3: s.o.StreamBy == StreamIperf3,
	}
	if c.Cores == "cross" {
		l.ServerCPU = set.ServerCPU
	}
	return l
}

// Open implements runner.Opener.
func (s *session) Open(ctx context.Context, c runner.Case) (runner.Load, error) {
	l := s.launcher(c)
	if s.o.turns(c.Scenario) == 1 {
		l.Duration = s.o.Duration
	}
	return l.Open(ctx, s.paths[c.Subject].Target, c.Scenario)
}

// Watch implements runner.Opener.
func (s *session) Watch(c runner.Case) func() float64 {
	if s.doc.Machine.Emulated == report.EmulatedInstructions {
		return func() float64 { return 0 } // others cannot lengthen a path that is counted
	}
	return s.launcher(c).Watch()
}

// close takes everything down, the last built first, whatever became of ctx.
func (s *session) close() error {
	var errs []error
	for _, env := range slices.Backward(s.envs) {
		errs = append(errs, env.Close())
	}
	return errors.Join(append(errs, s.group.Close())...)
}
