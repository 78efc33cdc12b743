// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/mustang-net/mustang/bench/stats"
)

// bars are in milliseconds, for ADD.
var bars = map[string]struct {
	quantile float64
	limit    float64
}{
	"one": {0.5, 10}, "10 at once": {0.5, 40}, "30 at once": {0.5, 120}, "110 pods, 10 at once": {0.99, 250},
}

// Base is the contestant that ratios are to.
const Base = "bridge + host-local"

// values pools a contestant's latencies, and has those of ADD by round.
func (r *Report) values(contestant, cell string) (add, del []float64, rounds map[int][]float64) {
	rounds = make(map[int][]float64)
	for _, s := range r.Samples {
		if s.Contestant == contestant && s.Cell == cell {
			add, del = append(add, s.Add...), append(del, s.Del...)
			rounds[s.Round] = append(rounds[s.Round], s.Add...)
		}
	}
	return add, del, rounds
}

// ratios are of the medians of each round.
func ratios(rounds, base map[int][]float64) stats.Estimate {
	var pairs []stats.Pair
	for _, round := range slices.Sorted(maps.Keys(rounds)) { // in order: the bootstrap depends on it
		pairs = append(pairs, stats.Pair{Value: stats.Median(rounds[round]), Base: stats.Median(base[round])})
	}
	return stats.OfRatios(pairs, 1)
}

// Empty says whether no round is finished.
func (r *Report) Empty() bool { return r.Rounds == 0 }

// Render prints the table.
func (r *Report) Render(w io.Writer) {
	fmt.Fprintf(w, "CNI plugins, milliseconds. Linux %s, %d CPUs, load average before: %s, after: %s; %d rounds, interleaved.\n\n", r.Kernel, r.CPUs, r.Load[0], r.Load[1], r.Rounds)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, cell := range Cells {
		_, _, base := r.values(Base, cell.Name)
		if len(base) == 0 {
			continue
		}
		fmt.Fprintf(t, "%s\tADD p50\tp99\tmax\tspread\tDEL p50\tp99\tADD ÷ %s\t95 %%\tbar\t\n", cell.Name, Base)
		for _, name := range Names() {
			if !slices.ContainsFunc(r.Samples, func(s Sample) bool { return s.Contestant == name }) {
				continue
			}
			add, del, rounds := r.values(name, cell.Name)
			e := ratios(rounds, base)
			fmt.Fprintf(t, "%s\t%.1f\t%.1f\t%.1f\t%.0f %%\t%.1f\t%.1f\t%.2f\t%.2f–%.2f\t%s\t\n", name, stats.Median(add), stats.Quantile(add, .99), stats.Quantile(add, 1),
				100*stats.Spread(add), stats.Median(del), stats.Quantile(del, .99), e.Median, e.Low, e.High, verdict(name, cell.Name, rounds))
		}
		fmt.Fprintln(t, "\t\t\t\t\t\t\t\t\t\t")
	}
	t.Flush()
	fmt.Fprintln(w, "Bars are for an idle machine; on a busy one, trust the ratios.")
}

// verdict judges a bar by its quantile in each round: by the whole interval, and as many
// rounds of this cell as a claim needs.
func verdict(name, cell string, rounds map[int][]float64) string {
	bar, ok := bars[cell]
	if !ok || !strings.HasPrefix(name, "mustang") {
		return ""
	}
	var quantiles []float64
	for _, round := range slices.Sorted(maps.Keys(rounds)) {
		quantiles = append(quantiles, stats.Quantile(rounds[round], bar.quantile))
	}
	word := map[stats.Verdict]string{stats.Pass: "passed", stats.Fail: "missed", stats.NotShown: "not shown"}[stats.AtMost(stats.Of(quantiles, 1), bar.limit)]
	return fmt.Sprintf("p%.0f ≤ %.0f %s", 100*bar.quantile, bar.limit, word)
}
