// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/stats"
)

// bar is the least: any number of rules ÷ one.
const bar = 0.97

// samples are a contestant's, by round.
func (r *Report) samples(contestant, scenario string) map[int]runner.Sample {
	out := map[int]runner.Sample{}
	for _, s := range r.Samples {
		if s.Subject == contestant && s.Scenario == scenario && s.Usable() {
			out[s.Round] = s
		}
	}
	return out
}

// ratio is from the ratios of turns within each round.
func (r *Report) ratio(contestant, over, scenario string) stats.Estimate {
	a, b := r.samples(contestant, scenario), r.samples(over, scenario)
	var ratios []float64
	for round := 1; round <= r.Rounds; round++ {
		if v := stats.TurnRatio(a[round].TurnRates, b[round].TurnRates); !math.IsNaN(v) {
			ratios = append(ratios, v)
		}
	}
	return stats.Of(ratios, r.seed)
}

// Render prints the tables.
func (r *Report) Render(w io.Writer) {
	fmt.Fprintf(w, "NetworkPolicy between two pods of one node, client and server on one core. Linux %s, %d CPUs, load average before: %s, after: %s; %d rounds, in turns.\n\n",
		r.Kernel, r.CPUs, r.Load[0], r.Load[1], r.Rounds)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, scenario := range Scenarios {
		fmt.Fprintf(t, "%s\tper second\tspread\t÷ no policy\t95 %%\t÷ nft's same\t95 %%\t÷ its own 1\t95 %%\tbar\n", strings.ToUpper(scenario))
		for _, name := range r.Contestants {
			var values []float64
			for _, s := range r.samples(name, scenario) {
				values = append(values, s.Rate)
			}
			by, what, _ := strings.Cut(name, ", ")
			fmt.Fprintf(t, "%s\t%.0f\t%.0f %%\t%s", name, stats.Median(values), 100*stats.Spread(values), cell(r.ratio(name, by+", no policy", scenario)))
			beside := "\t\t"
			if by == "mustang" && r.has("nft, "+what) {
				beside = cell(r.ratio(name, "nft, "+what, scenario))
			}
			fmt.Fprintf(t, "\t%s\t%s\n", strings.TrimSuffix(beside, "\t"), r.scale(name, by, what, scenario))
		}
		fmt.Fprintln(t, "\t\t\t\t\t\t\t\t\t")
	}
	t.Flush()
	for _, scenario := range Scenarios {
		if says := stats.ControlSays(r.ratio(base+again, base, scenario)); says != "" {
			fmt.Fprintf(w, "%s: %s\n", strings.ToUpper(scenario), says)
		}
	}
	for name, text := range r.Failures {
		fmt.Fprintf(w, "FAILED %s: %s\n", name, text)
	}
	if n := r.noisy(); n > 0 {
		fmt.Fprintf(w, "In %d of %d samples others used more than %.0f %% of the CPU.\n", n, len(r.Samples), 100*runner.NoisyShare)
	}
}

func cell(e stats.Estimate) string {
	if e.N == 0 {
		return "\t"
	}
	return fmt.Sprintf("%.3f\t%.3f–%.3f", e.Median, e.Low, e.High)
}

// scale compares many with one of the same kind.
func (r *Report) scale(name, by, what, scenario string) string {
	number, kind, ok := strings.Cut(what, " ")
	one := fmt.Sprintf("%s, 1 %s", by, kind)
	if !ok || number == "1" || !r.has(one) {
		return "\t\t"
	}
	e := r.ratio(name, one, scenario)
	verdict := ""
	if by == "mustang" && scenario == string(load.CRR) {
		verdict = fmt.Sprintf("≥ %.2f %s", bar, stats.AtLeast(e, bar))
	}
	return cell(e) + "\t" + verdict
}

func (r *Report) has(name string) bool {
	for _, c := range r.Contestants {
		if c == name {
			return true
		}
	}
	return false
}

func (r *Report) noisy() (n int) {
	for _, s := range r.Samples {
		if s.Noisy {
			n++
		}
	}
	return n
}
