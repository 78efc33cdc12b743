// SPDX-License-Identifier: Apache-2.0

// Package seed holds the claims of the articles that mustang follows, and judges
// each by a run on the user's machine: confirmed, not confirmed, or why neither.
// Figures of articles are theirs, from their hardware; what is judged is the ratio
// or the order that they claim.
package seed

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
)

// Ask is what a run of an article is asked for.
type Ask struct {
	Quick  bool
	Budget time.Duration // 0: the article's own
	Only   []string      // contestants with one of these in their names, beside the base; none for all
	Binary string
	Self   []string
}

// Article is one of the articles.
type Article struct {
	Name        string // a letter
	Title       string
	Full, Quick time.Duration // how long its run takes; of all, 47 and 8 minutes
	plan        func(Ask) (run.Plan, error)
	claims      []claim
}

// claim is something that an article says.
type claim interface {
	judge(*report.Document, *report.Figures) report.Claim
}

// Articles are all, in their order.
var Articles = []Article{a, b, c, d, e}

// Names are the articles' letters.
func Names() (out []string) {
	for _, a := range Articles {
		out = append(out, a.Name)
	}
	return out
}

// Find returns an article by its letter.
func Find(name string) (Article, error) {
	i := slices.IndexFunc(Articles, func(a Article) bool { return a.Name == name })
	if i < 0 {
		return Article{}, fmt.Errorf("seed %q is unknown: use one of %s, or all", name, strings.Join(Names(), ", "))
	}
	return Articles[i], nil
}

// Plan is the run that the article's claims are judged by.
func (a Article) Plan(ask Ask) (run.Plan, error) {
	p, err := a.plan(ask)
	if err != nil {
		return p, err
	}
	if p.Budget = ask.Budget; p.Budget == 0 {
		p.Budget = a.Full
		if ask.Quick {
			p.Budget = a.Quick
		}
	}
	p.Binary, p.Self = ask.Binary, ask.Self
	p.Settings.Article, p.Settings.Quick, p.Settings.Only = a.Name, ask.Quick, ask.Only
	return p, only(&p, ask.Only)
}

// only leaves out of a plan the contestants that were not asked for.
func only(p *run.Plan, names []string) error {
	if len(names) == 0 {
		return nil
	}
	base, asked := cmp.Or(p.Settings.Base, report.Base), 0
	p.Contestants = slices.DeleteFunc(p.Contestants, func(c run.Contestant) bool {
		if slices.ContainsFunc(names, func(name string) bool { return strings.Contains(c.Name(), name) }) {
			asked++
			return false
		}
		return c.Name() != base && c.Name() != report.AgainOf(base)
	})
	if asked == 0 {
		return fmt.Errorf("--only: seed %s has no contestant with %s in its name", p.Settings.Article, strings.Join(names, " or "))
	}
	return nil
}

// Resumed is the plan that made a document, to go on with its run.
func (a Article) Resumed(d *report.Document, ask Ask) (run.Plan, error) {
	ask.Quick, ask.Only = d.Settings.Quick, d.Settings.Only
	p, err := a.Plan(ask)
	p.Resume, p.Seed = d, d.Settings.Seed
	return p, err
}

// Judge puts the article's claims into a run's document.
func (a Article) Judge(d *report.Document) {
	f := report.NewFigures(d)
	d.Claims = nil
	for _, c := range a.claims {
		claim := c.judge(d, f)
		if len(d.Settings.Only) == 0 || claim.Verdict != report.NotTestable || !strings.HasPrefix(claim.Why, notInRun) {
			d.Claims = append(d.Claims, claim)
		}
	}
}

// Judge puts the claims of the document's own article into it; without one it does nothing.
func Judge(d *report.Document) {
	if a, err := Find(d.Settings.Article); err == nil {
		a.Judge(d)
	}
}

// options are how the articles' runs measure: samples of one core, by the load
// program. Quick ones are as short as a round may be, so that there are enough of them.
func options(quick bool) run.Options {
	o := run.Defaults()
	o.StreamBy = run.StreamOwn
	if run.Emulation() == report.EmulatedInstructions {
		o.Duration, o.Turns = 30*time.Millisecond, 1 // what is counted does not drift
		return o
	}
	o.Duration, o.Turns = 150*time.Millisecond, 10
	if quick {
		o.Duration, o.Turns = 45*time.Millisecond, 3
	}
	return o
}

// buildTime bounds the building of one contestant of the articles' runs.
const buildTime = 2 * time.Minute

// profileTime is how long each path is sampled for its flame graph.
func profileTime(quick bool) time.Duration {
	if quick {
		return 500 * time.Millisecond
	}
	return 1500 * time.Millisecond
}

// onlyLoads is a contestant with less to measure; an optional one stays that.
func onlyLoads(c run.Contestant, loads func(report.Subject) (scenarios []string, all bool)) run.Contestant {
	if o, ok := c.(run.Optional); ok {
		return run.Optional{Contestant: run.Some{Contestant: o.Contestant, Loads: loads}}
	}
	return run.Some{Contestant: c, Loads: loads}
}
