// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench seed: the articles' tables and claims on this machine.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/seed"
)

// allSeeds stands for every article.
const allSeeds = "all"

type seedFlags struct {
	quick        bool
	budget       time.Duration
	json, html   string
	from, resume string
	only         []string
}

func newBenchSeedCmd(g *globals) *cobra.Command {
	var f seedFlags
	cmd := &cobra.Command{
		Use:       "seed " + strings.Join(seed.Names(), "|") + "|" + allSeeds,
		Short:     "The articles' tables on this machine, with a verdict on each of their claims",
		Long:      seedLong(),
		Args:      cobra.MatchAll(cobra.ExactArgs(1), func(_ *cobra.Command, args []string) error { _, err := articles(args[0]); return err }),
		ValidArgs: append(seed.Names(), allSeeds),
		RunE:      func(cmd *cobra.Command, args []string) error { return f.run(cmd, g, args[0]) },
	}
	fl := cmd.Flags()
	fl.BoolVar(&f.quick, "quick", false, "shorter samples, fewer sizes: all of them within 8 minutes")
	fl.DurationVar(&f.budget, "budget", 0, "as many rounds as fit into this time, instead of the article's own time")
	fl.StringSliceVar(&f.only, "only", nil, "measure, beside the base, only contestants with this in their names, and judge the claims that these decide")
	fl.StringVar(&f.json, "json", "", "write every raw round to this file, after each round")
	fl.StringVar(&f.html, "html", "", "write the report to this file, as one page that needs nothing else")
	fl.StringVar(&f.from, "from", "", "judge by this file of an earlier run instead of running")
	fl.StringVar(&f.resume, "resume", "", "go on with the run of this file, or add an article to it; with --budget, also more rounds to what is whole")
	cmd.MarkFlagsMutuallyExclusive("from", "resume", "json")
	cmd.MarkFlagsMutuallyExclusive("from", "quick")
	cmd.MarkFlagsMutuallyExclusive("from", "budget")
	cmd.MarkFlagsMutuallyExclusive("from", "resume", "only")
	return cmd
}

func seedLong() string {
	text := "Reproduce the tables of the articles that mustang is built from, as ratios beside\nthe articles', and judge their claims: confirmed, not confirmed, or why neither.\n"
	for _, a := range seed.Articles {
		text += fmt.Sprintf("  %s  %s (%v; --quick: %v)\n", a.Name, a.Title, a.Full, a.Quick)
	}
	return text
}

func articles(name string) ([]seed.Article, error) {
	if name == allSeeds {
		return seed.Articles, nil
	}
	a, err := seed.Find(name)
	return []seed.Article{a}, err
}

func (f seedFlags) run(cmd *cobra.Command, g *globals, name string) error {
	list, err := articles(name)
	if err != nil {
		return err
	}
	if err := errors.Join(benchWritable("--json", f.json), benchWritable("--resume", f.resume), benchWritable("--html", f.html), f.others(list)); err != nil {
		return err
	}
	b := &report.Bundle{}
	if name == allSeeds {
		b.Schema = report.BundleSchema
	}
	if path := f.from + f.resume; path != "" {
		if b, err = report.ReadAny(path); err != nil {
			return err
		}
	}
	if f.from == "" {
		err = f.measure(cmd, b, list)
	}
	b.Compute()
	for _, d := range b.Runs {
		seed.Judge(d)
	}
	return errors.Join(err, f.write(b), f.print(cmd, g, b, list))
}

// others refuses to write over rounds of articles that are not measured now.
func (f seedFlags) others(list []seed.Article) error {
	if f.json == "" {
		return nil
	}
	there, err := report.ReadAny(f.json)
	if err != nil {
		return nil // no file yet, or none of ours
	}
	for _, d := range there.Runs {
		name := d.Settings.Article
		if name != "" && !d.Empty() && !slices.ContainsFunc(list, func(a seed.Article) bool { return a.Name == name }) {
			return usagef("--json %s has rounds of seed %s, which would be lost: use --resume %[1]s to add to them, or another file", f.json, name)
		}
	}
	return nil
}

// as refuses to go on with a whole run as a quick one.
func (f seedFlags) as(old *report.Document) error {
	if !f.quick || old.Settings.Quick {
		return nil
	}
	return usagef("--quick: the run of seed %s in %s is a whole one, and goes on as that: leave --quick out, or use another file", old.Settings.Article, f.resume)
}

// file is where the rounds are kept.
func (f seedFlags) file() string { return f.json + f.resume }

// write writes what was asked for.
func (f seedFlags) write(b *report.Bundle) (err error) {
	if len(b.Runs) == 0 {
		return nil
	}
	err = benchWrite(f.file(), b.Empty(), b.Write)
	if f.html != "" {
		err = errors.Join(err, benchWrite(f.html, b.Empty(), func(file string) error { return benchFile(file, b.WriteHTML) }))
	}
	return err
}

// measure runs the articles that the file has not whole, one after the other.
func (f seedFlags) measure(cmd *cobra.Command, b *report.Bundle, list []seed.Article) error {
	self, err := benchSelf()
	if err != nil {
		return err
	}
	for _, missing := range []error{run.PerfMissing(), runner.ABTools()} {
		if missing != nil {
			fmt.Fprintln(cmd.ErrOrStderr(), missing)
		}
	}
	whole := time.Duration(0)
	for _, a := range list {
		whole += a.Full
	}
	var errs []error
	for _, a := range list {
		ask := seed.Ask{Quick: f.quick, Budget: time.Duration(float64(f.budget) * float64(a.Full) / float64(whole)), Only: f.only, Binary: self, Self: benchLoad(self)}
		plan, err := a.Plan(ask)
		if old := b.Article(a.Name); old != nil {
			if err := f.as(old); err != nil {
				return err
			}
			if old.Complete && f.budget == 0 {
				continue
			}
			plan, err = a.Resumed(old, ask)
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "seed %s: %s, %v\n", a.Name, a.Title, plan.Budget)
		if err := f.one(cmd, b, plan); err != nil {
			errs = append(errs, fmt.Errorf("seed %s: %w", a.Name, err))
			if errors.Is(err, context.Canceled) {
				break
			}
		}
	}
	return errors.Join(errs...)
}

// one runs one article, and keeps its rounds in the file.
func (f seedFlags) one(cmd *cobra.Command, b *report.Bundle, plan run.Plan) error {
	plan.Keep = func(d *report.Document) error {
		b.Put(d)
		if f.file() == "" {
			return nil
		}
		return b.Write(f.file())
	}
	doc, err := benchMeasure(cmd, plan, "")
	if doc != nil {
		b.Put(doc)
		if !doc.Empty() { // with profiles and facts, before the next article
			err = errors.Join(err, benchWrite(f.file(), b.Empty(), b.Write))
		}
	}
	return err
}

func (f seedFlags) print(cmd *cobra.Command, g *globals, b *report.Bundle, list []seed.Article) error {
	if g.structured() {
		all := map[string][]report.Claim{}
		for _, d := range b.Runs {
			all[d.Settings.Article] = d.Claims
		}
		return g.print(cmd.OutOrStdout(), all, nil)
	}
	for _, d := range b.Runs {
		if slices.ContainsFunc(list, func(a seed.Article) bool { return a.Name == d.Settings.Article }) {
			d.Render(cmd.OutOrStdout(), benchTerminal(os.Stdout))
		}
	}
	return nil
}
