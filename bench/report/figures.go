// SPDX-License-Identifier: Apache-2.0

package report

import (
	"maps"
	"math"
	"slices"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/stats"
)

// Metric is what a figure compares.
type Metric string

const (
	StreamRate Metric = "stream"
	RRRate     Metric = "rr"
	CRRRate    Metric = "crr"
	UDPRRRate  Metric = "udp-rr"
	CPUPerGB   Metric = "cpu_per_gb"       // CPU s per 10⁹ bytes of a stream
	CPUPerRR   Metric = "cpu_per_1000_rr"  // CPU s per 1000 transactions
	CPUPerCRR  Metric = "cpu_per_1000_crr" // CPU s per 1000 connections
	TailP50    Metric = "tail_p50"         // ns, of requests at a fixed rate, from when each was due
	TailP99    Metric = "tail_p99"
	TailP999   Metric = "tail_p999"
)

// Metrics in the order of the tables' columns.
var Metrics = []Metric{StreamRate, RRRate, CRRRate, UDPRRRate, CPUPerGB, CPUPerRR, CPUPerCRR, TailP50, TailP99, TailP999}

// Lower reports whether less is better.
func (m Metric) Lower() bool {
	return m == CPUPerGB || m == CPUPerRR || m == CPUPerCRR || m.Tail()
}

// Tail reports whether the metric is a latency of the tail scenario.
func (m Metric) Tail() bool { return m == TailP50 || m == TailP99 || m == TailP999 }

func (m Metric) scenario() string {
	switch m {
	case CPUPerGB:
		return string(StreamRate)
	case CPUPerRR:
		return string(RRRate)
	case CPUPerCRR:
		return string(CRRRate)
	case TailP50, TailP99, TailP999:
		return string(load.Tail)
	}
	return string(m)
}

// of returns the metric's value in a sample, NaN for none.
func (m Metric) of(s runner.Sample) float64 {
	if !s.Usable() {
		return math.NaN()
	}
	used := s.CPU + s.Softirqd
	switch m {
	case CPUPerGB:
		return used / (float64(s.Bytes) / 1e9)
	case CPUPerRR, CPUPerCRR:
		return used / (float64(s.Count) / 1e3)
	}
	if m.Tail() {
		return m.latency(s.Latency)
	}
	return s.Rate
}

func (m Metric) latency(l *load.Latency) float64 {
	switch {
	case l == nil:
		return math.NaN()
	case m == TailP50:
		return float64(l.P50)
	case m == TailP99:
		return float64(l.P99)
	}
	return float64(l.P999)
}

// turns are the metric's values in the sample's turns.
func (m Metric) turns(s runner.Sample) []float64 {
	if !s.Usable() || m.Tail() { // quantiles are of all turns
		return nil
	}
	if m.Lower() {
		return s.TurnCosts
	}
	return s.TurnRates
}

// Figure is one metric of one subject as a ratio to another subject, from the
// ratios inside each round.
type Figure struct {
	Subject string         `json:"subject"`
	Over    string         `json:"over"`
	Metric  Metric         `json:"metric"`
	Cores   string         `json:"cores"`
	Ratio   stats.Estimate `json:"ratio"`
}

// Figures answers questions about a document's samples.
type Figures struct {
	seed   uint64
	values map[key]map[int]value // by round
}

// value is one sample's: of the whole, and of each turn.
type value struct {
	whole float64
	turns []float64
}

// over is the ratio of two values of one round. Samples that were not taken in
// turns have only the whole.
func (v value) over(base value) float64 {
	if r := stats.TurnRatio(v.turns, base.turns); !math.IsNaN(r) {
		return r
	}
	return v.whole / base.whole
}

type key struct {
	subject, cores string
	metric         Metric
}

// NewFigures indexes the document's samples.
func NewFigures(d *Document) *Figures {
	f := &Figures{seed: d.Settings.Seed, values: map[key]map[int]value{}}
	for _, s := range d.Samples {
		for _, m := range Metrics {
			if m.scenario() != s.Scenario {
				continue
			}
			k := key{s.Subject, s.Cores, m}
			if f.values[k] == nil {
				f.values[k] = map[int]value{}
			}
			f.values[k][s.Round] = value{m.of(s), m.turns(s)}
		}
	}
	return f
}

// Ratio compares subject to over, round by round. N is 0 without common rounds.
func (f *Figures) Ratio(subject, over string, m Metric, cores string) Figure {
	ratios, _ := f.ratios(subject, over, m, cores)
	out := Figure{Subject: subject, Over: over, Metric: m, Cores: cores}
	if len(ratios) > 0 { // JSON knows no NaN
		out.Ratio = stats.Of(ratios, f.seed)
	}
	return out
}

// ratios returns the ratio of each round, and the ratio of the sums of its turns.
func (f *Figures) ratios(subject, over string, m Metric, cores string) (ratios, ofSums []float64) {
	a, b := f.values[key{subject, cores, m}], f.values[key{over, cores, m}]
	for _, round := range slices.Sorted(maps.Keys(a)) { // in order: the bootstrap depends on it
		va, vb := a[round], b[round]
		// NaN, a failed sample, fails the comparisons.
		if va.whole > 0 && vb.whole > 0 {
			ratios = append(ratios, va.over(vb))
			ofSums = append(ofSums, va.whole/vb.whole)
		}
	}
	return ratios, ofSums
}

// unevenBy is by what share the sums of turns must differ from the turns' typical
// ratio before the report says so.
const unevenBy = 0.05

// Uneven says whether a subject's turns differ so much that their sum tells
// another story than the typical turn, as when a path stalls now and then. It
// returns the ratio of the sums.
func (f *Figures) Uneven(subject, over string, m Metric, cores string) (ofSums float64, uneven bool) {
	typical, sums := f.ratios(subject, over, m, cores)
	if len(sums) == 0 {
		return 0, false
	}
	ofSums = stats.Median(sums)
	return ofSums, math.Abs(ofSums/stats.Median(typical)-1) > unevenBy
}

// Median returns the median of the metric itself, NaN of none.
func (f *Figures) Median(subject string, m Metric, cores string) float64 {
	var values []float64
	for _, v := range f.values[key{subject, cores, m}] {
		if !math.IsNaN(v.whole) {
			values = append(values, v.whole)
		}
	}
	return stats.Median(values)
}

// Compute fills the document's Figures, Control and Bars from its samples.
func (d *Document) Compute() {
	f := NewFigures(d)
	d.Figures, d.Control = nil, nil
	add := func(to *[]Figure, subject, over, cores string) {
		for _, m := range Metrics {
			if fig := f.Ratio(subject, over, m, cores); fig.Ratio.N > 0 {
				*to = append(*to, fig)
			}
		}
	}
	for _, cores := range d.Settings.Cores {
		add(&d.Control, BaseAgain, Base, cores)
		for i := 1; i < d.Settings.Calibrate; i++ {
			add(&d.Control, LoopbackNumber(2*i+1), LoopbackNumber(2*i), cores)
		}
		for _, s := range d.Subjects {
			if s.ID != Base && s.ID != BaseAgain {
				add(&d.Figures, s.ID, Base, cores)
			}
			if s.Via == ClusterIP {
				if pod, ok := d.sibling(s, PodIP); ok {
					add(&d.Figures, s.ID, pod.ID, cores)
				}
			}
		}
	}
	d.Bars = evaluate(d, f)
}

// sibling is the same contestant, reached another way.
func (d *Document) sibling(s Subject, via string) (Subject, bool) {
	for _, o := range d.Subjects {
		if o.Contestant == s.Contestant && o.Via == via {
			return o, true
		}
	}
	return Subject{}, false
}

// find returns the first subject by mode, any of by in their order, number of
// Services (0: any) and way. Tuned ones are not meant.
func (d *Document) find(mode string, by []string, services int, via string) (Subject, bool) {
	return d.findTuned("", mode, by, services, via)
}

func (d *Document) findTuned(tune, mode string, by []string, services int, via string) (Subject, bool) {
	for _, b := range by {
		for _, s := range d.Subjects {
			if s.Tune == tune && s.Mode == mode && s.By == b && s.Via == via && (services == 0 || s.Services == services) {
				return s, true
			}
		}
	}
	return Subject{}, false
}

// findAt returns the subject by ClusterIP whose rule stands at a position.
func (d *Document) findAt(position, mode, by string, services int) (Subject, bool) {
	for _, s := range d.Subjects {
		if s.Position == position && s.Tune == "" && s.Mode == mode && s.By == by && s.Via == ClusterIP && s.Services == services {
			return s, true
		}
	}
	return Subject{}, false
}
