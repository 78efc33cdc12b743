// SPDX-License-Identifier: Apache-2.0

package seed

// Kinds of claims, and how a run judges them.

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/stats"
)

// subject selects one of a run.
type subject interface {
	// find returns its name, or why there is none. What it failed in is not asked: it may
	// have done the rest.
	find(*report.Document) (string, error)
}

// path selects a subject by what it is.
type path struct {
	mode, by string
	services int
	via      string
	position string
	pods     int
}

func (p path) find(d *report.Document) (string, error) {
	for _, s := range d.Subjects {
		if s.Mode == p.mode && s.By == p.by && s.Services == p.services && s.Via == p.via && s.Position == p.position && s.Pods == p.pods && s.Tune == "" {
			return s.ID, nil
		}
	}
	return "", absent(d, strings.TrimSpace(p.mode+" "+p.by))
}

// id selects a subject by its name, whose beginning is its contestant's.
type id string

func (i id) find(d *report.Document) (string, error) {
	if slices.ContainsFunc(d.Subjects, func(s report.Subject) bool { return s.ID == string(i) }) {
		return string(i), nil
	}
	name, _, _ := strings.Cut(string(i), ", ")
	return "", absent(d, name)
}

// notInRun begins the reason of a claim whose contestant nobody tried.
const notInRun = "the run has no "

// absent says why a contestant is not in a run.
func absent(d *report.Document, contestant string) error {
	for name, why := range d.Failures {
		if strings.HasPrefix(name, contestant) {
			return errors.New(sentence(why))
		}
	}
	return errors.New(notInRun + contestant)
}

// sentence is what a person needs of a failure: its first line, without the
// command that said it.
func sentence(failure string) string {
	line, _, _ := strings.Cut(failure, "\n")
	if i := strings.LastIndex(line, "exit status "); i >= 0 {
		if _, said, ok := strings.Cut(line[i:], ": "); ok {
			line = said
		}
	}
	line = strings.TrimPrefix(line, "mustang: ")
	return strings.TrimSuffix(line, " ("+errors.ErrUnsupported.Error()+")")
}

// ratioClaim is a claim about one path ÷ another.
type ratioClaim struct {
	text    string
	article float64
	of, to  subject
	metric  report.Metric
	limit   float64
	atMost  bool
}

func (c ratioClaim) judge(d *report.Document, f *report.Figures) report.Claim {
	out := report.Claim{Text: c.text, Article: c.article, Limit: c.limit, AtMost: c.atMost, Verdict: report.NotTestable}
	a, err := c.of.find(d)
	b, err2 := c.to.find(d)
	if err != nil || err2 != nil {
		out.Why = strings.ReplaceAll(errors.Join(err, err2).Error(), "\n", "; ")
		return out
	}
	out.Ratio = f.Ratio(a, b, c.metric, "same").Ratio
	judge := stats.AtLeast
	if c.atMost {
		judge = stats.AtMost
	}
	switch judge(out.Ratio, c.limit) {
	case stats.Pass:
		out.Verdict = report.Confirmed
	case stats.Fail:
		out.Verdict = report.NotConfirmed
	default:
		out.Verdict, out.Why = report.ClaimUnclear, "the interval straddles the limit"
		switch {
		case out.Ratio.N == 0:
			out.Verdict, out.Why = report.NotTestable, cmp.Or(sentence(d.Failures[a]), sentence(d.Failures[b]), "not measured")
		case out.Ratio.N < stats.MinRounds:
			out.Why = fmt.Sprintf("%s, a claim needs %d", count(out.Ratio.N, "round"), stats.MinRounds)
		}
	}
	return out
}

// factClaim is a claim about what happens, not how fast.
type factClaim struct {
	text string
	want map[string]bool // of Document.Facts
}

func (c factClaim) judge(d *report.Document, _ *report.Figures) report.Claim {
	out := report.Claim{Text: c.text, Verdict: report.Confirmed}
	for name, want := range c.want {
		got, ok := d.Facts[name]
		switch {
		case !ok:
			return report.Claim{Text: c.text, Verdict: report.NotTestable, Why: cmp.Or(sentence(d.Failures[name]), "the run did not try it")}
		case got != want:
			out.Verdict, out.Why = report.NotConfirmed, fmt.Sprintf("%s: %v", name, got)
		}
	}
	return out
}

// profileClaim is a claim about where the CPU time goes: more in one path's load than in
// another's, for the same work. One profile has no interval: the limit is far from 1.
type profileClaim struct {
	text     string
	of, to   subject
	scenario string
	what     string                         // that is spent
	spent    func(p report.Profile) float64 // CPU seconds, of Busy
	stacks   bool                           // it takes stacks
	limit    float64                        // at least
}

func (c profileClaim) judge(d *report.Document, _ *report.Figures) report.Claim {
	out := report.Claim{Text: c.text, Verdict: report.NotTestable}
	var spent [2]float64
	for i, s := range []subject{c.of, c.to} {
		name, err := s.find(d)
		if err != nil {
			out.Why = err.Error()
			return out
		}
		at := slices.IndexFunc(d.Profiles, func(p report.Profile) bool { return p.Subject == name && p.Scenario == c.scenario })
		if at < 0 || d.Profiles[at].Work == 0 {
			out.Why = cmp.Or(sentence(d.Failures["profile of "+name+", "+c.scenario]), sentence(d.Failures[name]), "the run sampled no profile of "+name)
			return out
		}
		if c.stacks && d.Profiles[at].Stack == nil {
			out.Why = "no perf here to sample stacks: install the package linux-perf"
			return out
		}
		spent[i] = c.spent(d.Profiles[at]) / d.Profiles[at].Work
	}
	if spent[1] == 0 {
		out.Why = "too few samples of it"
		return out
	}
	ratio := spent[0] / spent[1]
	out.Verdict, out.Why = report.Confirmed, fmt.Sprintf("%.2f times as much CPU time %s, by the profiles", ratio, c.what)
	if ratio < c.limit {
		out.Verdict = report.NotConfirmed
	}
	return out
}

// oneCPU is a claim about CPU time that is not all the load's own: where the machine has one CPU,
// what it carries tells; elsewhere why says what is in the way.
type oneCPU struct {
	ratioClaim
	why string
}

func (c oneCPU) judge(d *report.Document, f *report.Figures) report.Claim {
	out := c.ratioClaim.judge(d, f)
	if d.Machine.CPUs != 1 && out.Verdict != report.NotTestable {
		return report.Claim{Text: c.text, Verdict: report.NotTestable, Why: c.why}
	}
	return out
}

// count is so many things.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
