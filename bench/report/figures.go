// SPDX-License-Identifier: Apache-2.0

package report

import (
	"maps"
	"math"
	"slices"

	"github.com/mustang-net/mustang/bench/stats"
)

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
	metrics := d.Metrics()
	for _, s := range d.Samples {
		for _, m := range metrics {
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
	metrics, base, again := d.Metrics(), d.BaseID(), d.AgainID()
	add := func(to *[]Figure, subject, over, cores string) {
		for _, m := range metrics {
			if fig := f.Ratio(subject, over, m, cores); fig.Ratio.N > 0 {
				*to = append(*to, fig)
			}
		}
	}
	for _, cores := range d.Settings.Cores {
		add(&d.Control, again, base, cores)
		for i := 1; i < d.Settings.Calibrate; i++ {
			add(&d.Control, LoopbackNumber(2*i+1), LoopbackNumber(2*i), cores)
		}
		for _, s := range d.Subjects {
			if s.ID != base && s.ID != again {
				add(&d.Figures, s.ID, base, cores)
			}
			if s.Via == ClusterIP {
				if pod, ok := d.sibling(s, PodIP); ok {
					add(&d.Figures, s.ID, pod.ID, cores)
				}
			}
		}
	}
	if d.Bars = nil; base == Base && (d.Settings.Article == "" || d.Settings.Article == "A") {
		d.Bars = evaluate(d, f)
	}
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
