// SPDX-License-Identifier: Apache-2.0

package report

// Two runs beside each other: what became faster, what slower.

import (
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/mustang-net/mustang/bench/stats"
)

// Verdicts of a comparison.
const (
	Faster  = "faster"
	Slower  = "slower"
	Same    = "same"      // within SameWithin, with all its interval
	Unclear = "not shown" // too few rounds, or too wide an interval
)

// SameWithin is the share by which a figure may differ and still be the same.
const SameWithin = 0.03

// Change is one figure in two runs.
type Change struct {
	Subject string         `json:"subject"`
	Over    string         `json:"over"`
	Metric  Metric         `json:"metric"`
	Cores   string         `json:"cores"`
	Old     stats.Estimate `json:"old"`
	New     stats.Estimate `json:"new"`
	// By is new ÷ old, with a 99 % interval: there are many figures, and one in
	// twenty would be called different by chance.
	By      stats.Estimate `json:"by"`
	Verdict string         `json:"verdict"`
}

// Comparison is two runs beside each other.
type Comparison struct {
	Notes   []string `json:"notes,omitempty"` // what else differs between the runs
	Changes []Change `json:"changes"`
	OnlyOld []string `json:"only_old,omitempty"` // subjects
	OnlyNew []string `json:"only_new,omitempty"`
}

// Compare sets two documents side by side: every ratio to loopback that both
// have. Absolute figures are not compared, since the machine's speed is in them.
func Compare(old, now *Document) *Comparison {
	c := &Comparison{Notes: differences(old, now), Changes: []Change{}}
	fo, fn := NewFigures(old), NewFigures(now)
	before, after := subjectIDs(old), subjectIDs(now)
	for _, id := range before {
		if !slices.Contains(after, id) {
			c.OnlyOld = append(c.OnlyOld, id)
		}
	}
	for _, id := range after {
		if !slices.Contains(before, id) {
			c.OnlyNew = append(c.OnlyNew, id)
			continue
		}
		base := now.BaseID()
		if id == base || id == now.AgainID() {
			continue
		}
		for _, cores := range now.Settings.Cores {
			for _, m := range now.Metrics() {
				a, _ := fo.ratios(id, base, m, cores)
				b, _ := fn.ratios(id, base, m, cores)
				if len(a) == 0 || len(b) == 0 {
					continue
				}
				by := stats.Change(a, b, now.Settings.Seed)
				c.Changes = append(c.Changes, Change{Subject: id, Over: base, Metric: m, Cores: cores,
					Old: stats.Of(a, fo.seed), New: stats.Of(b, fn.seed), By: by, Verdict: judgeChange(by, m.Lower())})
			}
		}
	}
	return c
}

// CompareAll compares the runs of two files, each with that of the same article.
func CompareAll(old, now *Bundle) *Comparison {
	all := &Comparison{Changes: []Change{}}
	for _, d := range now.Runs {
		name := d.Settings.Article
		before := old.Article(name)
		if before == nil {
			all.OnlyNew = append(all.OnlyNew, "seed "+name)
			continue
		}
		c := Compare(before, d)
		prefix := ""
		if len(now.Runs) > 1 {
			prefix = "seed " + name + ": "
		}
		for i := range c.Changes {
			c.Changes[i].Subject = prefix + c.Changes[i].Subject
		}
		for _, n := range c.Notes {
			all.Notes = append(all.Notes, prefix+n)
		}
		all.Changes = append(all.Changes, c.Changes...)
		all.OnlyOld, all.OnlyNew = append(all.OnlyOld, c.OnlyOld...), append(all.OnlyNew, c.OnlyNew...)
	}
	for _, d := range old.Runs {
		if now.Article(d.Settings.Article) == nil {
			all.OnlyOld = append(all.OnlyOld, "seed "+d.Settings.Article)
		}
	}
	return all
}

func subjectIDs(d *Document) (out []string) {
	for _, s := range d.Subjects {
		out = append(out, s.ID)
	}
	return out
}

func judgeChange(by stats.Estimate, lower bool) string {
	grew, shrank := Faster, Slower
	if lower {
		grew, shrank = Slower, Faster
	}
	switch {
	case by.N < stats.MinControl:
		return Unclear
	case by.Low > 1-SameWithin && by.High < 1+SameWithin:
		return Same // also when it is shown to differ by less than matters
	case by.Low > 1:
		return grew
	case by.High < 1:
		return shrank
	}
	return Unclear
}

// differences names what makes two runs hard to compare.
func differences(old, now *Document) (notes []string) {
	differ := func(what string, a, b any) {
		if a != b {
			notes = append(notes, fmt.Sprintf("%s: %v, then %v", what, a, b))
		}
	}
	a, b := old.Machine, now.Machine
	differ("divided by", old.BaseID(), now.BaseID())
	differ("kernel", a.Kernel, b.Kernel)
	differ("CPU", a.CPU, b.CPU)
	differ("CPUs", a.CPUs, b.CPUs)
	differ("IPv6", old.Settings.IPv6, now.Settings.IPv6)
	differ("streams by", old.Settings.StreamBy, now.Settings.StreamBy)
	differ("congestion control", old.Settings.CC, now.Settings.CC)
	differ("turns of a sample", max(1, old.Settings.Turns), max(1, now.Settings.Turns))
	for _, name := range slices.Sorted(maps.Keys(b.Sysctls)) {
		if v, ok := a.Sysctls[name]; ok {
			differ(name, v, b.Sysctls[name])
		}
	}
	for _, d := range []struct {
		name string
		doc  *Document
	}{{"the old run", old}, {"the new run", now}} {
		if misses, allowed, all := d.doc.controlMisses(); misses > allowed+1 {
			notes = append(notes, fmt.Sprintf("A/A control of %s: %d of %d intervals exclude 1", d.name, misses, all))
		}
	}
	return notes
}

// Count returns how many figures have a verdict.
func (c *Comparison) Count(verdict string) (n int) {
	for _, ch := range c.Changes {
		if ch.Verdict == verdict {
			n++
		}
	}
	return n
}

// Render prints the comparison for people.
func (c *Comparison) Render(w io.Writer, color bool) {
	for _, n := range c.Notes {
		fmt.Fprintln(w, "DIFFERS:", n)
	}
	t := table{head: []string{"ratio to the base", "metric", "core", "old", "new", "new ÷ old (99 %)", ""}}
	paints := map[string]stats.Verdict{Faster: stats.Pass, Slower: stats.Fail}
	for _, ch := range c.Changes {
		verdict := ch.Verdict
		if v, ok := paints[ch.Verdict]; ok && color {
			verdict = paintAs(verdict, v)
		}
		t.rows = append(t.rows, []string{ch.Subject, head(ch.Metric), ch.Cores, interval(ch.Old), interval(ch.New), interval3(ch.By), verdict})
	}
	t.write(w)
	for _, id := range c.OnlyOld {
		fmt.Fprintln(w, "only in the old run:", id)
	}
	for _, id := range c.OnlyNew {
		fmt.Fprintln(w, "only in the new run:", id)
	}
	fmt.Fprintf(w, "\n%d faster, %d slower, %d the same within %.0f %%, %d not shown\n",
		c.Count(Faster), c.Count(Slower), c.Count(Same), 100*SameWithin, c.Count(Unclear))
}
