// SPDX-License-Identifier: Apache-2.0

package stats

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestQuantileOfKnownValues(t *testing.T) {
	values := []float64{4, 1, 3, 2}
	for _, c := range []struct{ q, want float64 }{{0, 1}, {0.25, 1.75}, {0.5, 2.5}, {0.75, 3.25}, {1, 4}} {
		if got := Quantile(values, c.q); got != c.want {
			t.Errorf("Quantile(%v) = %v, want %v", c.q, got, c.want)
		}
	}
	if values[0] != 4 {
		t.Error("Quantile sorted its argument in place")
	}
	if got := Median([]float64{9, 1, 5}); got != 5 {
		t.Errorf("median of an odd number = %v, want 5", got)
	}
	if !math.IsNaN(Median(nil)) {
		t.Error("median of nothing is not NaN")
	}
	if got, want := Spread(values), 1.5/2.5; got != want {
		t.Errorf("spread = %v, want %v", got, want)
	}
}

func TestRatioIsTakenInsideEachRound(t *testing.T) {
	// The machine halves its speed after each round; the ratio is always 0.8.
	// The ratio of medians would be the same here, the ratio's spread would not.
	e := OfRatios([]Pair{{80, 100}, {40, 50}, {20, 25}}, 1)
	if e.Median != 0.8 || e.Low != 0.8 || e.High != 0.8 || e.Spread != 0 || e.N != 3 {
		t.Errorf("got %+v, want exactly 0.8 without spread", e)
	}
}

func TestRatiosLeaveOutMissingSamples(t *testing.T) {
	got := Ratios([]Pair{{1, 2}, {math.NaN(), 1}, {1, math.NaN()}, {0, 1}, {1, 0}, {3, 2}})
	if len(got) != 2 || got[0] != 0.5 || got[1] != 1.5 {
		t.Errorf("got %v, want [0.5 1.5]", got)
	}
}

func TestTurnRatioBearsStolenTurns(t *testing.T) {
	// The machine's speed wanders from cycle to cycle; the ratio is 0.9. Two
	// turns of either side lost half their time to others.
	var values, base []float64
	for i := range 20 {
		speed := 1 + 0.3*math.Sin(float64(i))
		values, base = append(values, 0.9*speed), append(base, speed)
	}
	if got := TurnRatio(values, base); math.Abs(got-0.9) > 1e-12 {
		t.Errorf("ratio %v, want 0.9", got)
	}
	values[3] /= 2
	values[11] /= 2
	base[7] /= 2
	if got := TurnRatio(values, base); math.Abs(got-0.9) > 1e-12 {
		t.Errorf("ratio with stolen turns %v, want 0.9", got)
	}
	if got := TurnRatio([]float64{3}, []float64{2}); got != 1.5 {
		t.Errorf("ratio of one turn %v, want 1.5", got)
	}
	for _, bad := range [][2][]float64{{nil, nil}, {{1}, {1, 2}}, {{1, 0}, {1, 1}}, {{1, 1}, {1, math.NaN()}}} {
		if got := TurnRatio(bad[0], bad[1]); !math.IsNaN(got) {
			t.Errorf("TurnRatio%v = %v, want NaN", bad, got)
		}
	}
}

func TestBootstrapIsSeededAndCoversTheMedian(t *testing.T) {
	values := []float64{0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.00}
	a, b := Of(values, 7), Of(values, 7)
	if a != b {
		t.Errorf("the same seed gave %+v and %+v", a, b)
	}
	if a.Median != 0.95 || a.Low >= 0.95 || a.High <= 0.95 {
		t.Errorf("interval %v…%v does not enclose the median %v", a.Low, a.High, a.Median)
	}
	// The exact order-statistic interval of the median of 11 values is the 2nd
	// to the 10th value (98.8 %); the bootstrap's lies inside.
	if a.Low < 0.91 || a.High > 0.99 {
		t.Errorf("interval %v…%v is wider than the exact one", a.Low, a.High)
	}
	one := Of([]float64{2}, 1)
	if one.Low != 2 || one.High != 2 {
		t.Errorf("interval of one value = %v…%v, want 2…2", one.Low, one.High)
	}
}

func TestIntervalsAreWiderOfFewValues(t *testing.T) {
	// Tails beyond Student's quantiles, from tables: t(9) = 2.262, t(14) = 2.145.
	for n, want := range map[int]float64{10: 0.01185, 15: 0.01598, 100000: 0.025} {
		if got := tailOf(n, z95); math.Abs(got-want) > 0.0001 {
			t.Errorf("tail of %d values = %.5f, want %.5f", n, got, want)
		}
	}
}

// machine is a run of two equal contestants, one of them slowed, on a machine
// whose speed wanders within each round and jumps between rounds, and takes the
// processor away now and then.
func machine(rng *rand.Rand, rounds int, slowed float64) (ratios []float64) {
	for range rounds {
		speed := 1 + 0.3*rng.NormFloat64()
		luck := 1 + 0.008*rng.NormFloat64() // of the connections of this round
		var a, b []float64
		for range 20 {
			speed = max(0.3, speed+0.05*rng.NormFloat64())
			turn := func() float64 {
				v := speed * (1 + 0.03*rng.NormFloat64())
				if rng.IntN(15) == 0 {
					v *= 0.4 + 0.5*rng.Float64() // stolen time
				}
				return v
			}
			a, b = append(a, turn()*luck*(1-slowed)), append(b, turn())
		}
		ratios = append(ratios, TurnRatio(a, b))
	}
	return ratios
}

func TestEqualContestantsComeOutEqual(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, rounds := range []int{6, 15, 20} {
		const runs = 150
		missed := 0
		for i := range runs {
			if e := Of(machine(rng, rounds, 0), uint64(i)); !ControlHolds(e) {
				missed++
			}
		}
		if share := float64(missed) / runs; share > 0.08 {
			t.Errorf("%d rounds: %.1f %% of the 95 %% intervals exclude 1", rounds, 100*share)
		}
	}
}

func TestPlantedSlowdownIsFound(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 1))
	for i := range 100 {
		e := Of(machine(rng, MinRounds, 0.05), uint64(i))
		if e.High >= 1 || e.Low > 0.96 || e.High < 0.94 {
			t.Errorf("run %d: 0.95 came out as %.3f [%.3f %.3f]", i, e.Median, e.Low, e.High)
		}
	}
}

func TestChangeOfTwoRuns(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 1))
	missed := 0
	for i := range 60 {
		old, now := machine(rng, 15, 0), machine(rng, 15, 0.05)
		e := Change(old, now, uint64(i))
		if e.High >= 1 || e.N != 15 {
			t.Errorf("run %d: slower by 5 %% came out as %.3f [%.3f %.3f] of %d", i, e.Median, e.Low, e.High, e.N)
		}
		if same := Change(old, machine(rng, 15, 0), uint64(i)); same.Low > 1 || same.High < 1 {
			missed++
		}
	}
	if missed > 3 {
		t.Errorf("%d of 60 equal runs came out as different at 99 %%", missed)
	}
	if e := Change(nil, []float64{1}, 1); e.N != 0 {
		t.Errorf("a change from nothing: %+v", e)
	}
}

func TestVerdicts(t *testing.T) {
	est := func(low, high float64, n int) Estimate { return Estimate{Low: low, High: high, N: n} }
	for _, c := range []struct {
		name  string
		judge func(Estimate, float64) Verdict
		e     Estimate
		bar   float64
		want  Verdict
	}{
		{"lower end reaches", AtLeast, est(0.90, 0.95, 15), 0.90, Pass},
		{"straddles", AtLeast, est(0.89, 0.95, 15), 0.90, NotShown},
		{"upper end below", AtLeast, est(0.80, 0.89, 15), 0.90, Fail},
		{"too few rounds to claim", AtLeast, est(0.95, 0.99, 14), 0.90, NotShown},
		{"nothing measured", AtLeast, Of(nil, 1), 0.90, NotShown},
		{"upper end under the limit", AtMost, est(1.0, 1.2, 15), 1.2, Pass},
		{"limit inside", AtMost, est(1.1, 1.3, 15), 1.2, NotShown},
		{"lower end over the limit", AtMost, est(1.3, 1.4, 15), 1.2, Fail},
	} {
		if got := c.judge(c.e, c.bar); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
	if ControlHolds(est(1.01, 1.03, 15)) || !ControlHolds(est(0.99, 1.01, 15)) || ControlHolds(Estimate{}) || ControlHolds(est(0.9, 1.1, 5)) {
		t.Error("the A/A control must enclose 1")
	}
}
