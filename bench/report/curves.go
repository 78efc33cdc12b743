// SPDX-License-Identifier: Apache-2.0

package report

// Curves of the page: over the size of messages, and over how many Services, policies or
// pods there are.

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/bench/stats"
)

// curve is a figure over a number, which grows by its logarithm.
type curve struct {
	Title, Note string
	Foot        string // what the number is
	Ticks       []tick // of the number, along the foot
	Marks       []tick // of the figure, up the side
	Lines       []curveLine
}

type curveLine struct {
	Name   string
	Class  int
	Dash   string
	Points string // of an SVG polyline, 0…100 by 0…100
	Dots   []dot
	Text   string // for who does not see it
}

type dot struct{ X, Y, Low, High float64 }

// point is one value of a line.
type point struct {
	n int
	e stats.Estimate
}

// classes is how many colours there are; lines beyond are dashed.
const classes = 6

// plot draws lines, false where there are not two numbers.
func plot(title, note, foot, format string, lines map[string][]point) (curve, bool) {
	var numbers []int
	top := 0.0
	for _, l := range lines {
		for _, p := range l {
			numbers = append(numbers, p.n)
			top = max(top, p.e.High, p.e.Median)
		}
	}
	slices.Sort(numbers)
	numbers = slices.Compact(numbers)
	if len(numbers) < 2 || !(top > 0) {
		return curve{}, false
	}
	first, last := math.Log(float64(numbers[0])), math.Log(float64(numbers[len(numbers)-1]))
	x := func(n int) float64 { return 100 * (math.Log(float64(n)) - first) / (last - first) }
	step := niceStep(top)
	top = math.Ceil(top/step) * step
	y := func(v float64) float64 { return 100 - 100*v/top }
	c := curve{Title: title, Note: note, Foot: foot}
	for _, n := range numbers {
		// What would stand on its neighbour is left out.
		if k := len(c.Ticks); k == 0 || x(n)-c.Ticks[k-1].At > 7 {
			c.Ticks = append(c.Ticks, tick{x(n), fmt.Sprint(n)})
		}
	}
	for v := 0.0; v <= top*1.0001; v += step {
		c.Marks = append(c.Marks, tick{y(v), fmt.Sprintf(format, v)})
	}
	for i, name := range slices.Sorted(maps.Keys(lines)) {
		l := curveLine{Name: name, Class: i % classes, Dash: []string{"", "6 4", "2 3"}[i/classes%3]}
		slices.SortFunc(lines[name], func(a, b point) int { return a.n - b.n })
		for _, p := range lines[name] {
			l.Points += fmt.Sprintf("%.2f,%.2f ", x(p.n), y(p.e.Median))
			l.Dots = append(l.Dots, dot{x(p.n), y(p.e.Median), y(p.e.Low), y(p.e.High)})
			l.Text += fmt.Sprintf("%d: "+format+"  ", p.n, p.e.Median)
		}
		c.Lines = append(c.Lines, l)
	}
	return c, true
}

// niceStep divides a scale into four to eight.
func niceStep(top float64) float64 {
	step := math.Pow(10, math.Floor(math.Log10(top)))
	for _, f := range []float64{1, .5, .25, .2, .1} {
		if top/(step*f) >= 4 {
			return step * f
		}
	}
	return step / 10
}

// over is something that there can be many of.
type over struct {
	name   string
	of     func(Subject) int
	ways   []string // that it says something of
	others func(Subject) bool
}

var numbered = []over{
	{"Services", func(s Subject) int { return s.Services }, []string{ClusterIP}, func(s Subject) bool { return s.Pods > 0 || s.Policies > 0 }},
	{"policies", func(s Subject) int { return s.Policies }, []string{PodIP}, func(Subject) bool { return false }},
	{"pods on the node", func(s Subject) int { return s.Pods }, []string{PodIP}, func(s Subject) bool { return s.Policies > 0 }},
}

// scaling draws a metric over how many there are, when there are several numbers.
func (d *Document) scaling(f *Figures, m Metric, cores string, o over) (curve, bool) {
	lines := map[string][]point{}
	for _, s := range d.Subjects {
		e := f.Ratio(s.ID, d.BaseID(), m, cores).Ratio
		if !slices.Contains(o.ways, s.Via) || s.Tune != "" || e.N == 0 || o.of(s) == 0 || o.others(s) {
			continue
		}
		for _, name := range lineNames(s) {
			lines[name] = append(lines[name], point{o.of(s), e})
		}
	}
	maps.DeleteFunc(lines, func(_ string, l []point) bool { return o.name != "Services" && len(l) < 2 })
	return plot(fmt.Sprintf("%s ÷ %s over the number of %s, %s core", head(m), d.BaseID(), o.name, cores), "", o.name, "%.2f", lines)
}

// lineNames are the lines that a subject is a point of. One Service stands in every
// place of rules that are scanned.
func lineNames(s Subject) []string {
	name := s.Mode + " " + s.By
	if s.Via != ClusterIP || !strings.Contains(s.By, "iptables") {
		return []string{name}
	}
	names := []string{name + ", " + cmp.Or(s.Position, Middle)}
	if s.Position == "" {
		names = append(names, name+", "+Last)
	}
	return names
}

// sizeCurves draws a kind over the size of messages: as ratios, and as it was measured.
func (d *Document) sizeCurves(f *Figures, kind Metric, cores string) (out []curve) {
	sizes := d.sizes(kind)
	ratios, values := map[string][]point{}, map[string][]point{}
	for _, s := range d.Subjects {
		if s.ID == d.AgainID() {
			continue
		}
		for _, n := range sizes {
			m := ofSize(kind, n)
			v := f.Median(s.ID, m, cores)
			if math.IsNaN(v) {
				continue
			}
			if kind == StreamRate {
				v /= 1e9
			}
			values[s.ID] = append(values[s.ID], point{n, stats.Estimate{Median: v, Low: v, High: v}})
			if e := f.Ratio(s.ID, d.BaseID(), m, cores).Ratio; s.ID != d.BaseID() && e.N > 0 {
				ratios[s.ID] = append(ratios[s.ID], point{n, e})
			}
		}
	}
	note := ""
	if kind.Lower() {
		note = "less is better"
	}
	foot := "bytes of a message"
	if c, ok := plot(fmt.Sprintf("%s ÷ %s, %s core", kindHeads[kind], d.BaseID(), cores), note, foot, "%.2f", ratios); ok {
		out = append(out, c)
	}
	unit := map[Metric]string{StreamRate: "Gbit/s", RRRate: "requests/s", CPUPerGB: "CPU s/GB"}[kind]
	format := map[Metric]string{StreamRate: "%.0f", RRRate: "%.0f", CPUPerGB: "%.2f"}[kind]
	if c, ok := plot(fmt.Sprintf("%s, %s, %s core", kindHeads[kind], unit, cores), note, foot, format, values); ok {
		out = append(out, c)
	}
	return out
}
