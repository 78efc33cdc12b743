// SPDX-License-Identifier: Apache-2.0

package report

// Two runs beside each other: what became faster, what slower.

import (
	"cmp"
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
	Gone    = "gone"      // the new run has no sample of it
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
	Failure string         `json:"failure,omitempty"` // why it is gone, where the new run says so
}

// Comparison is two runs beside each other.
type Comparison struct {
	Notes   []string `json:"notes,omitempty"` // what else differs between the runs
	Changes []Change `json:"changes"`
	OnlyOld []string `json:"only_old,omitempty"` // subjects
	OnlyNew []string `json:"only_new,omitempty"`
}

// Compare sets two documents side by side: every ratio to loopback that the old one
// has. Absolute figures are not compared, since the machine's speed is in them.
func Compare(old, now *Document) *Comparison {
	c := &Comparison{Notes: differences(old, now), Changes: []Change{}}
	before, after := subjectIDs(old), subjectIDs(now)
	for _, id := range after {
		if !slices.Contains(before, id) {
			c.OnlyNew = append(c.OnlyNew, id)
		}
	}
	fo, fn := NewFigures(old), NewFigures(now)
	for _, s := range old.Subjects {
		if !slices.Contains(after, s.ID) && now.failure(s) == "" {
			c.OnlyOld = append(c.OnlyOld, s.ID) // it was not asked for
			continue
		}
		if s.ID == now.BaseID() || s.ID == now.AgainID() {
			continue
		}
		for _, cores := range union(now.Settings.Cores, old.Settings.Cores) {
			for _, m := range union(now.Metrics(), old.Metrics()) {
				change := Change{Subject: s.ID, Over: now.BaseID(), Metric: m, Cores: cores, Failure: now.failure(s)}
				if change.judge(fo, fn) {
					c.Changes = append(c.Changes, change)
				}
			}
		}
	}
	return c
}

// judge compares what both runs have of a figure; false when the old one has nothing.
func (c *Change) judge(old, now *Figures) bool {
	a, _ := old.ratios(c.Subject, c.Over, c.Metric, c.Cores)
	b, _ := now.ratios(c.Subject, c.Over, c.Metric, c.Cores)
	if len(a) == 0 {
		return false
	}
	c.Old = stats.Of(a, old.seed)
	if len(b) == 0 {
		c.Verdict = Gone
		return true
	}
	c.New, c.By, c.Failure = stats.Of(b, now.seed), stats.Change(a, b, now.seed), ""
	c.Verdict = judgeChange(c.By, c.Metric.Lower())
	return true
}

// failure is what a run says of a subject that failed, or of its contestant.
func (d *Document) failure(s Subject) string {
	return cmp.Or(d.Failures[s.ID], d.Failures[s.Contestant])
}

// union is a with what only b has behind it.
func union[T comparable](a, b []T) []T {
	out := slices.Clone(a)
	for _, x := range b {
		if !slices.Contains(a, x) {
			out = append(out, x)
		}
	}
	return out
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
	differ("emulated", cmp.Or(a.Emulated, "no"), cmp.Or(b.Emulated, "no"))
	differ("IPv6", old.Settings.IPv6, now.Settings.IPv6)
	differ("streams by", old.Settings.StreamBy, now.Settings.StreamBy)
	differ("congestion control", old.Settings.CC, now.Settings.CC)
	differ("CPU time from", old.Settings.CPUSource, now.Settings.CPUSource)
	differ("MTU", old.Settings.MTU, now.Settings.MTU)
	differ("requests a second of tails", old.Settings.TailRate, now.Settings.TailRate)
	differ("seconds of a sample", old.Settings.Duration, now.Settings.Duration)
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
	paints := map[string]stats.Verdict{Faster: stats.Pass, Slower: stats.Fail, Gone: stats.Fail}
	for _, ch := range c.Changes {
		verdict := ch.Verdict
		if v, ok := paints[ch.Verdict]; ok && color {
			verdict = paintAs(verdict, v)
		}
		by := "–"
		if ch.Verdict != Gone {
			by = interval3(ch.By)
		}
		t.rows = append(t.rows, []string{ch.Subject, head(ch.Metric), ch.Cores, interval(ch.Old), interval(ch.New), by, verdict})
	}
	t.write(w)
	why := map[string]string{} // of what is gone
	for _, ch := range c.Changes {
		if ch.Failure != "" {
			why[ch.Subject] = ch.Failure
		}
	}
	for _, name := range slices.Sorted(maps.Keys(why)) {
		fmt.Fprintf(w, "FAILED in the new run: %s: %s\n", name, why[name])
	}
	for _, id := range c.OnlyOld {
		fmt.Fprintln(w, "only in the old run:", id)
	}
	for _, id := range c.OnlyNew {
		fmt.Fprintln(w, "only in the new run:", id)
	}
	fmt.Fprintf(w, "\n%d faster, %d slower, %d the same within %.0f %%, %d not shown, %d gone\n",
		c.Count(Faster), c.Count(Slower), c.Count(Same), 100*SameWithin, c.Count(Unclear), c.Count(Gone))
}
