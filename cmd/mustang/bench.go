// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench: how fast pods and Services are on this machine, and the
// hidden load program that it runs.

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/samehost"
	"github.com/mustang-net/mustang/bench/stats"
)

func newBenchCmd(g *globals) *cobra.Command {
	cmd := &cobra.Command{Use: "bench", Short: "Measure pods and Services on this machine"}
	cmd.AddCommand(newBenchSamehostCmd(g), newBenchSeedCmd(g), newBenchAdviseCmd(g), newBenchCalibrateCmd(g), newBenchPathCmd(g), newBenchCNICmd(g), newBenchPolicyCmd(g),
		newBenchNodesCmd(g), newBenchServicesCmd(g), newBenchClusterCmd(g), newBenchAgentCmd(), newBenchShowCmd(g), newBenchCompareCmd(g))
	return cmd
}

// newBenchLoadCmd is the load program. Its flags are its own: it is started by
// the bench, not by people.
func newBenchLoadCmd() *cobra.Command {
	return &cobra.Command{
		Use: "bench-load", Hidden: true, DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error { return load.Main(args, os.Stdin, cmd.OutOrStdout()) },
	}
}

// benchFlags are samehost's own flags; unset ones keep the run's defaults.
type benchFlags struct {
	o      samehost.Options
	quick  bool
	json   string
	resume string
}

func (f *benchFlags) register(cmd *cobra.Command) {
	d, fl := samehost.Defaults(), cmd.Flags()
	fl.StringSliceVar(&f.o.Modes, "modes", d.Modes, fmt.Sprintf("how pods are connected: some of %v", samehost.AllModes))
	fl.StringSliceVar(&f.o.ServicesBy, "services-by", d.ServicesBy, "what implements Services; also: mustang (both, as shipped)")
	fl.IntSliceVar(&f.o.Services, "services", d.Services, "numbers of Services, each a contestant of its own: 1,1000,5000,100000")
	fl.IntVar(&f.o.Rounds, "rounds", d.Rounds, "a claim needs 15")
	fl.DurationVar(&f.o.Budget, "budget", 0, "instead of --rounds: as many as fit into this time, 5m")
	fl.DurationVar(&f.o.Duration, "duration", d.Duration, "of each sample; iperf3 rounds to seconds")
	fl.IntVar(&f.o.Turns, "turns", d.Turns, "how many turns make a sample: all contestants take turns")
	fl.StringVar(&f.o.Cores, "cores", d.Cores, "client and server on the same core, across two, or both")
	fl.Uint64Var(&f.o.Seed, "seed", d.Seed, "of the order of samples and of the bootstrap")
	fl.BoolVar(&f.o.IPv6, "ipv6", false, "over IPv6")
	fl.BoolVar(&f.o.UDP, "udp", false, "also UDP request/response")
	fl.IntVar(&f.o.TailRate, "tails", 0, "also latencies of requests at this rate, a second (20000)")
	fl.StringVar(&f.o.StreamBy, "stream-by", d.StreamBy, "iperf3, or own: the bench's load program")
	fl.StringSliceVar(&f.o.Tune, "tune", nil, "mustang's pods once more with "+strings.Join(samehost.Tunes, ", ")+", or several joined by +")
	fl.StringSliceVar(&f.o.Conflists, "conflist", nil, "also pods that these CNI configuration lists connect")
	fl.StringSliceVar(&f.o.CNIPath, "cni-path", d.CNIPath, "where their plugins are")
	fl.BoolVar(&f.quick, "quick", false, "a look in under two minutes; no claims")
	fl.StringVar(&f.json, "json", "", "write every raw round to this file, after each round")
	fl.StringVar(&f.resume, "resume", "", "go on with the run of this file; only --rounds and --budget may be given with it")
}

// options merges --quick with what was set by hand, which wins.
func (f *benchFlags) options(cmd *cobra.Command) samehost.Options {
	o := samehost.Defaults()
	if f.quick {
		o = samehost.Quick()
	}
	for name, set := range map[string]func(){
		"modes":       func() { o.Modes = f.o.Modes },
		"services-by": func() { o.ServicesBy = f.o.ServicesBy },
		"services":    func() { o.Services = f.o.Services },
		"rounds":      func() { o.Rounds = f.o.Rounds },
		"duration":    func() { o.Duration = f.o.Duration },
		"turns":       func() { o.Turns = f.o.Turns },
		"cores":       func() { o.Cores = f.o.Cores },
		"seed":        func() { o.Seed = f.o.Seed },
		"stream-by":   func() { o.StreamBy = f.o.StreamBy },
	} {
		if cmd.Flags().Changed(name) {
			set()
		}
	}
	o.Conflists, o.CNIPath = f.o.Conflists, f.o.CNIPath
	o.IPv6, o.UDP, o.Tune, o.TailRate, o.Budget = f.o.IPv6, f.o.UDP, f.o.Tune, f.o.TailRate, f.o.Budget
	return o
}

func newBenchSamehostCmd(g *globals) *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use:   "samehost",
		Short: "Pods on one host: every mode and every kind of Services beside loopback",
		Long: `Measure pods on one host: streams, request/response (RR) and a connection for
each request (CRR), by pod IP and by ClusterIP, as ratios to loopback, with CPU
time. Ctrl-C ends the run and keeps its finished rounds. See
docs/bench-samehost.md for the method and the file of --json.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd, g) },
	}
	f.register(cmd)
	return cmd
}

func newBenchCalibrateCmd(g *globals) *cobra.Command {
	o, file := samehost.Calibration(), ""
	cmd := &cobra.Command{
		Use:   "calibrate",
		Short: "Judge the bench on this machine: equal paths, and one that is 5 % slower",
		Long: `Measure loopback against itself, many times over, and against a loopback that is
made slower by 5 %. At most one in eight intervals of equal paths may exclude 1,
and the slower one must be found. Exit status is not 0 otherwise.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Calibrate < 1 {
				return usagef("--pairs: want at least 1")
			}
			if o.Rounds < stats.MinControl {
				return usagef("--rounds: %d are too few for an interval of equal paths to be judged: want at least %d", o.Rounds, stats.MinControl)
			}
			doc, err := benchRun(cmd, g, o, file)
			if err == nil && !doc.Calibrated() {
				err = errors.New("this machine, as it is now, does not give figures to trust")
			}
			return err
		},
	}
	fl := cmd.Flags()
	fl.IntVar(&o.Calibrate, "pairs", o.Calibrate, "of equal loopbacks; each gives six intervals")
	fl.IntVar(&o.Rounds, "rounds", o.Rounds, "as many as the runs to be judged have")
	fl.Uint64Var(&o.Seed, "seed", o.Seed, "of the order of turns and of the bootstrap")
	fl.StringVar(&file, "json", "", "write every raw round to this file")
	return cmd
}

func (f *benchFlags) run(cmd *cobra.Command, g *globals) error {
	o := f.options(cmd)
	if f.resume != "" {
		var err error
		if o, err = f.resumed(cmd); err != nil {
			return err
		}
		f.json = f.resume
	}
	_, err := benchRun(cmd, g, o, f.json)
	return err
}

// fixedInARun are the flags that a run that goes on has from its file.
var fixedInARun = []string{"modes", "services-by", "services", "duration", "turns", "cores", "seed", "ipv6", "udp", "tails", "stream-by", "tune", "conflist", "quick", "json"}

// resumed are the options of the file's run, with what may be changed in it.
func (f *benchFlags) resumed(cmd *cobra.Command) (samehost.Options, error) {
	doc, err := report.Read(f.resume)
	if err != nil {
		return samehost.Options{}, err
	}
	if command := doc.Settings.Command; command != "" || doc.Settings.Calibrate > 0 {
		return samehost.Options{}, fmt.Errorf("resume: %s is of mustang bench %s: run that again", f.resume, cmp.Or(command, "calibrate"))
	}
	o := samehost.Resumed(doc)
	o.CNIPath = f.o.CNIPath
	for _, name := range fixedInARun {
		if cmd.Flags().Changed(name) {
			return o, fmt.Errorf("--%s cannot be changed in a run that goes on: leave it out of --resume", name)
		}
	}
	if cmd.Flags().Changed("rounds") {
		o.Rounds = f.o.Rounds
	}
	o.Budget = f.o.Budget
	if o.Budget == 0 && doc.FinishedRounds() >= o.Rounds {
		return o, fmt.Errorf("resume: %s has %d rounds: say by --rounds or --budget how many more", f.resume, doc.FinishedRounds())
	}
	return o, nil
}

// benchRun measures, writes the file and prints the report.
func benchRun(cmd *cobra.Command, g *globals, o samehost.Options, file string) (*report.Document, error) {
	self, err := benchSelf()
	if err != nil {
		return nil, err
	}
	o.Binary, o.Self = self, benchLoad(self)
	plan, err := o.Plan()
	if err != nil {
		return nil, usageError{err}
	}
	if plan.Settings.Command = cmd.Name(); plan.Settings.Command == "samehost" {
		plan.Settings.Command = "" // as its files have always had it
	}
	doc, err := benchMeasure(cmd, plan, file)
	if doc == nil {
		return nil, err
	}
	return doc, errors.Join(benchPrint(cmd, g.Output, doc), err)
}

// benchMeasure runs a plan, and writes the file after each round and at the end.
func benchMeasure(cmd *cobra.Command, plan run.Plan, file string) (*report.Document, error) {
	if err := benchWritable("--json", file); err != nil {
		return nil, err
	}
	if file != "" {
		plan.Keep = func(d *report.Document) error { return d.Write(file) }
	}
	ctx, stop, err := benchStart(cmd)
	if err != nil {
		return nil, err
	}
	defer stop()
	doc, err := run.Run(ctx, plan, run.Log{W: cmd.ErrOrStderr(), Terminal: benchTerminal(os.Stderr)})
	if doc != nil {
		err = errors.Join(err, benchWrite(file, doc.Empty(), doc.Write))
	}
	return doc, err
}

func benchPrint(cmd *cobra.Command, output string, doc *report.Document) error {
	g := globals{Output: output}
	if g.structured() {
		return g.print(cmd.OutOrStdout(), doc, nil)
	}
	doc.Render(cmd.OutOrStdout(), benchTerminal(os.Stdout))
	return nil
}
