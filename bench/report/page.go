// SPDX-License-Identifier: Apache-2.0

package report

// The report as one page of HTML that needs nothing else: no script, no network.

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"slices"

	"github.com/mustang-net/mustang/bench/stats"
)

//go:embed page.html
var pageHTML string

// page is what the template shows.
type page struct {
	Doc      *Document
	Text     string // the terminal's report, with its method
	Verdicts map[string]int
	Bars     []Bar
	Absent   int
	Charts   []chart
	Curves   []curve
	Raw      []rawRow
}

// chart is ratios of one metric, one row a subject.
type chart struct {
	Title, Note string
	Rows        []chartRow
	One         float64 // where the ratio 1 stands, in percent
	Ticks       []tick
}

type tick struct {
	At   float64 // percent
	Text string
}

type chartRow struct {
	Name, Text         string
	Low, Width, Median float64 // percent of the scale
	IsMustang          bool
}

// curve is a metric over the number of Services.
type curve struct {
	Title string
	Ticks []tick // of the number, along the foot
	Marks []tick // of the ratio, up the side
	Lines []curveLine
}

type curveLine struct {
	Name   string
	Class  int
	Points string // of an SVG polyline, 0…100 by 0…100
	Dots   []dot
}

type dot struct{ X, Y, Low, High float64 }

// rawRow is a subject's samples of one scenario.
type rawRow struct {
	Subject, Scenario, Cores string
	Rates                    []string // of the rounds
}

// WriteHTML writes the page.
func (d *Document) WriteHTML(w io.Writer) error {
	t, err := template.New("page").Funcs(template.FuncMap{
		"interval": interval, "number": number, "head": head,
		"sign": func(b Bar) string { return map[bool]string{false: "≥", true: "≤"}[b.AtMost] },
	}).Parse(pageHTML)
	if err != nil {
		return fmt.Errorf("page of the report: %w", err)
	}
	if err := t.Execute(w, d.page()); err != nil {
		return fmt.Errorf("page of the report: %w", err)
	}
	return nil
}

func (d *Document) page() page {
	f := NewFigures(d)
	var text bytes.Buffer
	d.Render(&text, false)
	p := page{Doc: d, Text: text.String(), Verdicts: map[string]int{}, Raw: d.rawRows()}
	for _, b := range d.Bars {
		if b.Why == whyAbsent {
			p.Absent++
			continue
		}
		p.Bars = append(p.Bars, b)
		p.Verdicts[string(b.Verdict)]++
	}
	for _, cores := range d.Settings.Cores {
		for _, m := range d.Metrics() {
			if m.sized() {
				continue
			}
			if c, ok := d.chart(f, m, cores, d.BaseID()); ok {
				p.Charts = append(p.Charts, c)
			}
		}
		for _, m := range []Metric{StreamRate, RRRate, CRRRate} {
			if c, ok := d.clusterChart(f, m, cores); ok {
				p.Charts = append(p.Charts, c)
			}
		}
		for _, m := range []Metric{RRRate, CRRRate} {
			if c, ok := d.curve(f, m, cores); ok {
				p.Curves = append(p.Curves, c)
			}
		}
	}
	return p
}

// named is an estimate with its row's name.
type named struct {
	name string
	by   string
	e    stats.Estimate
}

func (d *Document) chart(f *Figures, m Metric, cores, base string) (chart, bool) {
	var rows []named
	for _, s := range d.Subjects {
		if e := f.Ratio(s.ID, base, m, cores).Ratio; s.ID != base && e.N > 0 {
			rows = append(rows, named{s.ID, s.By, e})
		}
	}
	note := fmt.Sprintf("%s is %s", base, absolute(f.Median(base, m, cores), m))
	if m.Tail() {
		note += " µs"
	}
	if m.Lower() {
		note += "; less is better"
	}
	return layOut(fmt.Sprintf("%s ÷ %s, %s core", head(m), base, cores), note, rows)
}

func (d *Document) clusterChart(f *Figures, m Metric, cores string) (chart, bool) {
	var rows []named
	for _, s := range d.Subjects {
		pod, ok := d.sibling(s, PodIP)
		if s.Via != ClusterIP || !ok {
			continue
		}
		if e := f.Ratio(s.ID, pod.ID, m, cores).Ratio; e.N > 0 {
			rows = append(rows, named{s.ID, s.By, e})
		}
	}
	return layOut(fmt.Sprintf("%s by ClusterIP ÷ by pod IP, %s core", head(m), cores), "what a Service costs", rows)
}

// layOut chooses a scale that holds all intervals and 1.
func layOut(title, note string, rows []named) (chart, bool) {
	if len(rows) == 0 {
		return chart{}, false
	}
	low, high := 1.0, 1.0
	for _, r := range rows {
		low, high = min(low, r.e.Low), max(high, r.e.High)
	}
	step := 0.05
	for (high-low)/step > 8 {
		step *= 2
	}
	low, high = math.Floor(low/step)*step-step/4, math.Ceil(high/step)*step+step/4
	at := func(v float64) float64 { return math.Round(1000*100*(v-low)/(high-low)) / 1000 }
	c := chart{Title: title, Note: note, One: at(1)}
	for v := math.Ceil(low/step) * step; v <= high; v += step {
		c.Ticks = append(c.Ticks, tick{at(v), fmt.Sprintf("%.2f", v)})
	}
	for _, r := range rows {
		c.Rows = append(c.Rows, chartRow{Name: r.name, Text: interval(r.e), Low: at(r.e.Low), Width: at(r.e.High) - at(r.e.Low),
			Median: at(r.e.Median), IsMustang: isMustang(r.by)})
	}
	return c, true
}

// curve draws a metric over the number of Services, when there are several.
func (d *Document) curve(f *Figures, m Metric, cores string) (curve, bool) {
	type point struct {
		n int
		e stats.Estimate
	}
	lines := map[string][]point{}
	var numbers []int
	top := 1.0
	for _, s := range d.Subjects {
		e := f.Ratio(s.ID, d.BaseID(), m, cores).Ratio
		if s.Via != ClusterIP || s.Tune != "" || e.N == 0 {
			continue
		}
		names := []string{s.Mode + " " + s.By}
		if scanned := s.By == "iptables-nft" || s.By == "iptables-legacy"; scanned {
			// One Service stands in every place.
			names = []string{s.Mode + " " + s.By + ", " + cmp.Or(s.Position, Middle)}
			if s.Position == "" {
				names = append(names, s.Mode+" "+s.By+", "+Last)
			}
		}
		for _, name := range names {
			lines[name] = append(lines[name], point{s.Services, e})
		}
		numbers = append(numbers, s.Services)
		top = max(top, e.High)
	}
	slices.Sort(numbers)
	numbers = slices.Compact(numbers)
	if len(numbers) < 2 {
		return curve{}, false
	}
	first, last := math.Log(float64(numbers[0])), math.Log(float64(numbers[len(numbers)-1]))
	x := func(n int) float64 { return 100 * (math.Log(float64(n)) - first) / (last - first) }
	y := func(v float64) float64 { return 100 - 100*v/top }
	c := curve{Title: fmt.Sprintf("%s by ClusterIP ÷ loopback over the number of Services, %s core", head(m), cores)}
	for _, n := range numbers {
		c.Ticks = append(c.Ticks, tick{x(n), fmt.Sprint(n)})
	}
	for v := 0.0; v <= top; v += 0.25 {
		c.Marks = append(c.Marks, tick{y(v), fmt.Sprintf("%.2f", v)})
	}
	for i, name := range slices.Sorted(maps.Keys(lines)) {
		l := curveLine{Name: name, Class: i % 6}
		slices.SortFunc(lines[name], func(a, b point) int { return a.n - b.n })
		for _, p := range lines[name] {
			l.Points += fmt.Sprintf("%.2f,%.2f ", x(p.n), y(p.e.Median))
			l.Dots = append(l.Dots, dot{x(p.n), y(p.e.Median), y(p.e.Low), y(p.e.High)})
		}
		c.Lines = append(c.Lines, l)
	}
	return c, true
}

func (d *Document) rawRows() (rows []rawRow) {
	index := map[string]int{}
	for _, s := range d.Samples {
		k := s.Case.String()
		i, ok := index[k]
		if !ok {
			i = len(rows)
			index[k] = i
			rows = append(rows, rawRow{Subject: s.Subject, Scenario: s.Scenario, Cores: s.Cores})
		}
		text := "–"
		if s.Usable() {
			text = fmt.Sprintf("%.4g", s.Rate)
		}
		rows[i].Rates = append(rows[i].Rates, text)
	}
	slices.SortStableFunc(rows, func(a, b rawRow) int {
		return cmp.Or(cmp.Compare(a.Scenario, b.Scenario), cmp.Compare(a.Cores, b.Cores), cmp.Compare(a.Subject, b.Subject))
	})
	return rows
}
