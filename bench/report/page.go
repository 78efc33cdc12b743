// SPDX-License-Identifier: Apache-2.0

package report

// The report as one page of HTML that needs nothing else: no script, no network.

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"time"

	"github.com/mustang-net/mustang/bench/stats"
)

//go:embed page.html
var pageHTML string

// page is what the template shows.
type page struct {
	Bundle *Bundle
	First  *Document // whose machine it is
	Rows   []summary
	Runs   []section
}

// summary is a run in the page's first table.
type summary struct {
	Anchor, Title string
	Rounds        int
	Took          string
	Claims, Bars  map[string]int
	Noisy         string
	Complete      bool
	Control       string
	HasClaims     bool
}

// section is a run.
type section struct {
	Doc      *Document
	Anchor   string
	Title    string
	Text     string // the terminal's report, with its method
	Verdicts map[string]int
	Claims   []claimRow
	Bars     []Bar
	Absent   int
	Charts   []chart
	Curves   []curve
	Bills    []bill
	Splits   []split
	Flames   []flame
	Raw      []rawRow
}

// claimRow is a claim as it is printed.
type claimRow struct {
	Claim
	Figure, Measured, Asked, Class string
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

// rawRow is a subject's samples of one scenario.
type rawRow struct {
	Subject, Scenario, Cores string
	Rates                    []string // of the rounds
}

// WriteHTML writes the page of one run.
func (d *Document) WriteHTML(w io.Writer) error { return (&Bundle{Runs: []*Document{d}}).WriteHTML(w) }

// WriteHTML writes the page.
func (b *Bundle) WriteHTML(w io.Writer) error {
	if len(b.Runs) == 0 {
		return errors.New("page of the report: there is no run in it")
	}
	t, err := template.New("page").Funcs(template.FuncMap{
		"interval": interval, "number": number, "head": head, "percent": percent,
		"sign": func(b Bar) string { return map[bool]string{false: "≥", true: "≤"}[b.AtMost] },
	}).Parse(pageHTML)
	if err != nil {
		return fmt.Errorf("page of the report: %w", err)
	}
	if err := t.Execute(w, b.page()); err != nil {
		return fmt.Errorf("page of the report: %w", err)
	}
	return nil
}

func (b *Bundle) page() page {
	p := page{Bundle: b, First: b.Runs[0]}
	for _, d := range b.Runs {
		s := d.section()
		p.Runs = append(p.Runs, s)
		row := summary{Anchor: s.Anchor, Title: s.Title, Rounds: d.FinishedRounds(), Took: "–", Claims: CountClaims(d.Claims), Bars: s.Verdicts,
			Noisy: percent(d.NoisyShare()), Complete: d.Complete, HasClaims: len(d.Claims) > 0}
		if !d.Finished.IsZero() {
			row.Took = d.Finished.Sub(d.Started).Round(time.Second).String()
		}
		misses, _, all := d.controlMisses()
		if row.Control = fmt.Sprintf("%d of %d", misses, all); d.FinishedRounds() < stats.MinControl {
			row.Control = "too few rounds"
		}
		p.Rows = append(p.Rows, row)
	}
	return p
}

// title names a run for people.
func (d *Document) title() string {
	name := map[string]string{"": "Pods and Services on one host", "A": "Seed A: pods on one host, by pod IP and ClusterIP", "B": "Seed B: from node to node", "C": "Seed C: direct routing against VXLAN",
		"D": "Seed D: Services, policies and pods in number", "E": "Seed E: latency of a pod against its host's"}[d.Settings.Article]
	if d.Settings.Command == "cluster" {
		name = "A Kubernetes cluster"
	}
	return name
}

func (d *Document) section() section {
	f := NewFigures(d)
	var text bytes.Buffer
	d.Render(&text, false)
	p := section{Doc: d, Anchor: "run-" + cmp.Or(d.Settings.Article, "0"), Title: d.title(), Text: text.String(), Verdicts: map[string]int{}, Raw: d.rawRows()}
	for _, b := range d.Bars {
		if b.Why == whyAbsent {
			p.Absent++
			continue
		}
		p.Bars = append(p.Bars, b)
		p.Verdicts[string(b.Verdict)]++
	}
	for _, c := range d.Claims {
		row := claimRow{Claim: c, Class: map[string]string{Confirmed: "PASS", NotConfirmed: "FAIL"}[c.Verdict]}
		row.Figure, row.Measured, row.Asked = c.columns()
		p.Claims = append(p.Claims, row)
	}
	for _, cores := range d.Settings.Cores {
		p.draw(d, f, cores)
	}
	p.Splits, p.Flames = d.splits(), d.flames(p.Anchor)
	return p
}

// draw adds the charts of a core setting.
func (p *section) draw(d *Document, f *Figures, cores string) {
	for _, m := range d.Metrics() {
		if m.sized() {
			continue
		}
		if c, ok := d.chart(f, m, cores, d.BaseID()); ok {
			p.Charts = append(p.Charts, c)
		}
		if b, ok := d.bill(f, m, cores); ok {
			p.Bills = append(p.Bills, b)
		}
	}
	for _, m := range []Metric{StreamRate, RRRate, CRRRate, ABShort, ABLong, UDPRRRate} {
		if c, ok := d.clusterChart(f, m, cores); ok {
			p.Charts = append(p.Charts, c)
		}
	}
	for _, m := range []Metric{RRRate, CRRRate, ABShort, ABLong, UDPRRRate} {
		for _, over := range numbered {
			if c, ok := d.scaling(f, m, cores, over); ok {
				p.Curves = append(p.Curves, c)
			}
		}
	}
	for _, kind := range []Metric{StreamRate, RRRate, CPUPerGB} {
		p.Curves = append(p.Curves, d.sizeCurves(f, kind, cores)...)
	}
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
			Median: at(r.e.Median), IsMustang: IsMustang(r.by)})
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
