// SPDX-License-Identifier: Apache-2.0

package report

// Tables over the size of messages, CPU at a fixed rate, and where it goes.

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/mustang-net/mustang/bench/load"
)

// sizes are of the messages of a kind that the run measured.
func (d *Document) sizes(kind Metric) (out []int) {
	for _, m := range d.Metrics() {
		if k, of := m.split(); k == kind && m.sized() {
			if n, err := strconv.Atoi(of[1:]); err == nil {
				out = append(out, n)
			}
		}
	}
	return out
}

func ofSize(kind Metric, size int) Metric { return kind.Of(":" + strconv.Itoa(size)) }

// renderSizes prints a table a kind: a row a subject, a column a size.
func (d *Document) renderSizes(w io.Writer, f *Figures, cores string) {
	for _, kind := range []Metric{StreamRate, RRRate, CPUPerGB} {
		sizes := d.sizes(kind)
		if len(sizes) == 0 {
			continue
		}
		t := table{head: []string{fmt.Sprintf("%s ÷ %s by bytes of a message, %s core", kindHeads[kind], d.BaseID(), cores)}}
		for _, size := range sizes {
			t.head = append(t.head, strconv.Itoa(size))
		}
		row := []string{d.BaseID() + " itself"}
		for _, size := range sizes {
			row = append(row, absolute(f.Median(d.BaseID(), ofSize(kind, size), cores), kind))
		}
		t.rows = append(t.rows, row)
		for _, s := range d.Subjects {
			if s.ID == d.BaseID() {
				continue
			}
			row := []string{s.ID}
			for _, size := range sizes {
				e := f.Ratio(s.ID, d.BaseID(), ofSize(kind, size), cores).Ratio
				text := "–"
				if e.N > 0 {
					text = fmt.Sprintf("%.2f", e.Median)
				}
				row = append(row, text)
			}
			t.rows = append(t.rows, row)
		}
		t.write(w)
	}
}

// renderScaled prints CPU at a fixed rate, for articles' runs: what a rate costs.
func (d *Document) renderScaled(w io.Writer, f *Figures, cores string) {
	if d.Settings.Article == "" {
		return
	}
	var metrics []Metric
	t := table{head: []string{"CPUs that a fixed rate takes, both ends, " + cores + " core"}}
	for _, m := range d.Metrics() {
		if s, ok := scaled[m.kind()]; ok && !m.sized() {
			metrics = append(metrics, m)
			t.head = append(t.head, s.of+strings.TrimPrefix(head(m), kindHeads[m.kind()]))
		}
	}
	for _, s := range d.Subjects {
		row := []string{s.ID}
		for _, m := range metrics {
			v := f.Median(s.ID, m, cores) * scaled[m.kind()].by
			if math.IsNaN(v) {
				v = 0
			}
			row = append(row, number(v))
		}
		t.rows = append(t.rows, row)
	}
	if len(metrics) > 0 {
		t.write(w)
	}
}

// renderSplit prints where the CPU time of profiled paths went.
func (d *Document) renderSplit(w io.Writer) {
	t := table{head: []string{"where the CPU is", "load", "usr", "sys", "softirq", "softirq a unit of work", "by"}}
	for _, p := range d.Profiles {
		unit := "µs a transaction"
		per := 1e6
		if s, err := load.ParseScenario(p.Scenario); err == nil && s.Mode == load.Stream {
			unit, per = "s a GB", 1
		}
		cost := "–"
		if p.Work > 0 {
			cost = fmt.Sprintf("%.3g %s", p.Softirq*p.Busy/p.Work*per, unit)
		}
		t.rows = append(t.rows, []string{p.Subject, head(Metric(p.Scenario)), percent(p.User), percent(p.System), percent(p.Softirq), cost, p.By})
	}
	slices.SortStableFunc(t.rows, func(a, b []string) int { return strings.Compare(a[1], b[1]) })
	t.write(w)
}

func percent(v float64) string { return fmt.Sprintf("%.0f %%", 100*v) }
