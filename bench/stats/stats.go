// SPDX-License-Identifier: Apache-2.0

// Package stats turns the rounds of a run into figures that may be quoted:
// medians, medians of per-round ratios, bootstrap intervals and spreads.
//
// Everything here is pure and deterministic: the same rounds and the same seed
// give the same answer, so that a published figure can be recomputed from the
// raw rounds beside it.
package stats

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Resamples is how many bootstrap resamples an interval rests on. With 2,000
// the ends of a 95 % interval move by less than the last printed digit.
const Resamples = 2000

// Estimate is a median with what is known about its certainty.
type Estimate struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`    // lower end of the bootstrap 95 % interval
	High   float64 `json:"high"`   // upper end
	Spread float64 `json:"spread"` // interquartile range ÷ median
	N      int     `json:"n"`      // values that it rests on
}

// Pair is one round's value of a contestant and of its base. NaN or a value
// that is not positive marks a sample that is missing; the pair is left out.
type Pair struct{ Value, Base float64 }

// Median returns the median of values, or NaN of none.
func Median(values []float64) float64 { return Quantile(values, 0.5) }

// Quantile returns the q-quantile (0…1) with linear interpolation between
// neighbours (type 7 of Hyndman and Fan), or NaN of no values.
func Quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	return sortedQuantile(slices.Sorted(slices.Values(values)), q)
}

func sortedQuantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// Spread returns the interquartile range as a share of the median: how much
// the rounds themselves disagree, whatever their number.
func Spread(values []float64) float64 {
	return (Quantile(values, 0.75) - Quantile(values, 0.25)) / Median(values)
}

// Ratios returns Value ÷ Base of every pair that has both.
func Ratios(pairs []Pair) []float64 {
	var out []float64
	for _, p := range pairs {
		// NaN fails both comparisons, so this also leaves out missing values.
		if p.Value > 0 && p.Base > 0 {
			out = append(out, p.Value/p.Base)
		}
	}
	return out
}

// Trim is the share of a round's turns that TurnRatio leaves out at either end.
const Trim = 0.2

// TurnRatio is the ratio of two samples that took turns: the mean of the ratios
// of turns of one cycle, on a logarithmic scale, without the lowest and highest
// fifth. Two turns of one cycle saw the same state of the machine, so their ratio
// is steadier than that of sums; and what hits a single turn (another's burst, a
// processor taken away for milliseconds) is left out, whichever side it hit.
//
// It is NaN when the two have different numbers of turns, or a turn without a value.
func TurnRatio(values, base []float64) float64 {
	if len(values) == 0 || len(values) != len(base) {
		return math.NaN()
	}
	logs := make([]float64, len(values))
	for i, v := range values {
		if !(v > 0 && base[i] > 0) {
			return math.NaN()
		}
		logs[i] = math.Log(v / base[i])
	}
	slices.Sort(logs)
	cut := int(Trim * float64(len(logs)))
	sum, kept := 0.0, logs[cut:len(logs)-cut]
	for _, l := range kept {
		sum += l
	}
	return math.Exp(sum / float64(len(kept)))
}

// Of estimates the median of values with a percentile-bootstrap interval.
func Of(values []float64, seed uint64) Estimate {
	e := Estimate{Median: Median(values), Spread: Spread(values), N: len(values)}
	e.Low, e.High = bootstrap(values, seed)
	return e
}

// OfRatios estimates the median of the per-round ratios. The ratio is taken
// inside each round first: a machine that slows down between rounds then slows
// both halves, and the ratio stays.
func OfRatios(pairs []Pair, seed uint64) Estimate { return Of(Ratios(pairs), seed) }

// bootstrap returns the ends of the 95 % percentile interval of the median. Of
// few values that interval is too narrow; it is expanded as Student's t expands
// the normal one (Hesterberg 2015, "What Teachers Should Know About the
// Bootstrap", expanded percentile intervals).
func bootstrap(values []float64, seed uint64) (low, high float64) {
	if len(values) == 0 {
		return math.NaN(), math.NaN()
	}
	medians := resampled(values, seed)
	slices.Sort(medians)
	tail := tailOf(len(values), z95)
	return sortedQuantile(medians, tail), sortedQuantile(medians, 1-tail)
}

// resampled returns the medians of resamples.
func resampled(values []float64, seed uint64) []float64 {
	rng := rand.New(rand.NewPCG(seed, uint64(len(values))))
	medians := make([]float64, Resamples)
	sample := make([]float64, len(values))
	for i := range medians {
		for j := range sample {
			sample[j] = values[rng.IntN(len(values))]
		}
		slices.Sort(sample)
		medians[i] = sortedQuantile(sample, 0.5)
	}
	return medians
}

// Change estimates by what factor the median of now differs from that of old, two
// runs that share no rounds, with a 99 % interval. N is the smaller number.
func Change(old, now []float64, seed uint64) Estimate {
	e := Estimate{N: min(len(old), len(now)), Median: Median(now) / Median(old), Spread: max(Spread(old), Spread(now))}
	if e.N == 0 {
		return Estimate{}
	}
	a, b := resampled(old, seed), resampled(now, seed+1)
	for i := range b {
		b[i] /= a[i]
	}
	slices.Sort(b)
	tail := tailOf(e.N, z99)
	e.Low, e.High = sortedQuantile(b, tail), sortedQuantile(b, 1-tail)
	return e
}

// Quantiles of a normal distribution that leave out 2.5 % and 0.5 % beyond them.
const (
	z95 = 1.959963984540054
	z99 = 2.575829303548901
)

// tailOf is the share that an interval of n values leaves out at either end: what
// a normal distribution has beyond the quantile of Student's with n-1 degrees of
// freedom. z is that quantile of many values.
func tailOf(n int, z float64) float64 {
	if n < 2 {
		return 0
	}
	z2, v := z*z, float64(n-1)
	// The quantile by its expansion in 1/v (Abramowitz and Stegun 26.7.5).
	t := z * (1 + (z2+1)/(4*v) + (5*z2*z2+16*z2+3)/(96*v*v) + (3*z2*z2*z2+19*z2*z2+17*z2-15)/(384*v*v*v))
	return math.Erfc(t/math.Sqrt2) / 2
}

// Verdict is what an estimate says about a bar.
type Verdict string

const (
	Pass     Verdict = "PASS"
	Fail     Verdict = "FAIL"
	NotShown Verdict = "not shown" // not measured, or the interval straddles the bar
)

// MinRounds is how many rounds a claim needs: below it a bar is never passed.
const MinRounds = 15

// AtLeast judges a bar that the figure must reach. It passes only when the
// interval's lower end reaches the bar, and fails only when its upper end does
// not; what lies between, or rests on fewer than MinRounds, is not shown.
func AtLeast(e Estimate, bar float64) Verdict {
	switch {
	case e.N < MinRounds || math.IsNaN(e.Low):
		return NotShown
	case e.Low >= bar:
		return Pass
	case e.High < bar:
		return Fail
	}
	return NotShown
}

// AtMost judges a bar that the figure must not exceed (CPU per GB).
func AtMost(e Estimate, bar float64) Verdict {
	switch {
	case e.N < MinRounds || math.IsNaN(e.High):
		return NotShown
	case e.High <= bar:
		return Pass
	case e.Low > bar:
		return Fail
	}
	return NotShown
}

// MinControl is how many rounds the A/A control needs: the interval of fewer
// values is their range, and half of all pairs lie on one side of 1.
const MinControl = 6

// ControlSays is what there is to say about an A/A control, "" when it holds.
func ControlSays(aa Estimate) string {
	switch {
	case aa.N < MinControl:
		return fmt.Sprintf("A/A control: not judged, %d rounds are too few (%d)", aa.N, MinControl)
	case !ControlHolds(aa):
		return fmt.Sprintf("A/A CONTROL FAILS: the base differs from itself by %.3f [%.3f %.3f]; trust no difference smaller than that", aa.Median, aa.Low, aa.High)
	}
	return ""
}

// ControlHolds reports whether an A/A control is consistent with 1: one
// contestant, listed twice, must not beat itself. With fewer rounds than MinControl it does not hold.
func ControlHolds(aa Estimate) bool {
	return aa.N >= MinControl && aa.Low <= 1 && aa.High >= 1
}
