// SPDX-License-Identifier: Apache-2.0

package nodes

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"text/tabwriter"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/stats"
)

// figure is one column: a value of each sample of one scenario, and of its turns.
type figure struct {
	name     string
	scenario string
	value    func(runner.Sample) float64
	turns    func(runner.Sample) []float64
}

func rate(s runner.Sample) float64        { return s.Rate }
func turnRates(s runner.Sample) []float64 { return s.TurnRates }

// figures are a run's columns: each load's rate, and what a gigabyte of the loads' own stream costs.
func (o Options) figures() (out []figure) {
	list, _ := o.loads() // Run has checked them
	for _, l := range list {
		name := titles[l.Mode]
		if l.Size > 0 {
			name += fmt.Sprintf(" %d B", l.Size)
		}
		if l.Flows > 1 {
			name += fmt.Sprintf(" × %d", l.Flows)
		}
		out = append(out, figure{name, l.String(), rate, turnRates})
	}
	if len(o.Sizes) == 0 {
		out = append(out, figure{"CPU per GB", list[0].String(), func(s runner.Sample) float64 {
			return (s.CPU + s.Softirqd) / (float64(s.Bytes) / 1e9)
		}, func(s runner.Sample) []float64 { return s.TurnCosts }})
	}
	return out
}

var titles = map[load.Mode]string{load.Stream: "stream", load.RR: "RR", load.CRR: "CRR"}

// samples are a path's, by round.
func (r *Report) samples(path string, f figure) map[int]runner.Sample {
	out := map[int]runner.Sample{}
	for _, s := range r.Samples {
		if s.Subject == path && s.Scenario == f.scenario && s.Usable() {
			out[s.Round] = s
		}
	}
	return out
}

// ratio is a path's figure over another's, round by round: of turns that stood in
// one cycle, where the samples have them.
func (r *Report) ratio(path, over string, f figure) stats.Estimate {
	values, base := r.samples(path, f), r.samples(over, f)
	var ratios []float64
	for _, round := range slices.Sorted(maps.Keys(values)) { // in order: the bootstrap depends on it
		b, ok := base[round]
		if !ok {
			continue
		}
		v := stats.TurnRatio(f.turns(values[round]), f.turns(b))
		if math.IsNaN(v) {
			v = f.value(values[round]) / f.value(b)
		}
		ratios = append(ratios, v)
	}
	return stats.Of(ratios, r.Options.Seed)
}

// bars are over bare nodes, or of one way over another.
var bars = []struct {
	path, over, figure string
	bar, goal          float64
}{
	{"mustang direct, pod IP", Base, "RR", 0.86, 0.93},
	{"mustang direct, pod IP", Base, "CRR", 0.85, 0.93},
	{"mustang direct, pod IP", Base, "stream", 0.90, 0.97},
	{"mustang direct, ClusterIP", "mustang direct, pod IP", "RR", 0.95, 0.99},
	{"mustang direct, ClusterIP", "mustang direct, pod IP", "CRR", 0.95, 0.99},
	{"mustang direct, ClusterIP", "mustang direct, pod IP", "stream", 0.95, 0.99},
	{"mustang VXLAN, pod IP", "mustang direct, pod IP", "RR", 0.95, 0.97},
	{"mustang VXLAN, pod IP", "mustang direct, pod IP", "CRR", 0.94, 0.97},
	{"mustang VXLAN, pod IP", "mustang direct, pod IP", "stream", 0.80, 0.95},
	{"node to node, beside mustang direct", Base, "RR", 0.95, 0.99},
	{"node to node, beside mustang direct", Base, "CRR", 0.95, 0.99},
	{"node to node, beside " + edgeName, Base, "RR", 0.95, 0.99},
	{"node to node, beside " + edgeName, Base, "CRR", 0.95, 0.99},
	{"loopback, beside " + edgeName, Loopback, "RR", 0.95, 0.99},
	{"loopback, beside " + edgeName, Loopback, "CRR", 0.95, 0.99},
	{edgeName + fromOutside + "its pod", proxyName + fromOutside + "its pod", "CRR", 1.20, 1.30},
	{edgeName + fromOutside + "other node", proxyName + fromOutside + "other node", "CRR", 1.20, 1.30},
}

// Empty says whether no round is finished.
func (r *Report) Empty() bool { return len(r.Samples) == 0 }

// Render prints the tables.
func (r *Report) Render(w io.Writer) {
	family := "IPv4"
	if r.Options.IPv6 {
		family = "IPv6"
	}
	bundles := ""
	if r.Options.BigTCP > 0 {
		bundles = fmt.Sprintf(", bundles of %d bytes on the wire and in pods", r.Options.BigTCP)
	}
	fmt.Fprintf(w, "Pods (%s) on two nodes, ratios to two bare namespaces on the same wire. Linux %s, %d CPUs, %s core, %s, %s, MTU %d%s;\n"+
		"%d rounds, interleaved; medians of per-round ratios, 95 %% intervals. Load average before: %s, after: %s.\n\n",
		r.Options.Mode, r.Kernel, r.CPUs, r.Options.Cores, family, r.CC, r.Options.MTU, bundles, r.rounds(), r.Load[0], r.Load[1])
	figures := r.Options.figures()
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "path")
	for _, f := range figures {
		fmt.Fprintf(t, "\t%s\t95 %%", f.name)
	}
	fmt.Fprintln(t)
	for _, p := range r.Paths {
		fmt.Fprint(t, p)
		for _, f := range figures {
			e := r.ratio(p, Base, f)
			if len(r.samples(p, f)) == 0 {
				fmt.Fprint(t, "\t–\t")
				continue
			}
			fmt.Fprintf(t, "\t%.2f\t%.2f–%.2f", e.Median, e.Low, e.High)
		}
		fmt.Fprintln(t)
	}
	t.Flush()
	if r.Options.Cores == "same" && r.Options.BigTCP == 0 && slices.ContainsFunc(figures, func(f figure) bool { return f.name == titles[load.RR] }) {
		renderBars(w, r, figures)
	} else {
		fmt.Fprintln(w, "\nBars are for client and server on the same core, one connection, the loads' own sizes and the kernel's own bundles.")
	}
	fmt.Fprintln(w)
	for _, f := range figures {
		if says := stats.ControlSays(r.ratio(BaseAgain, Base, f)); says != "" {
			fmt.Fprintf(w, "%s: %s\n", f.name, says)
		}
	}
	if n := r.noisy(); n > 0 {
		fmt.Fprintf(w, "%d of %d samples shared their CPU with others.\n", n, len(r.Samples))
	}
}

func renderBars(w io.Writer, r *Report, figures []figure) {
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "bar\tlimit\tgoal\tratio\t95 %\tverdict")
	for _, b := range bars {
		for _, f := range figures {
			if f.name != b.figure {
				continue
			}
			e := r.ratio(b.path, b.over, f)
			fmt.Fprintf(t, "%s ÷ %s, %s\t%.2f\t%.2f\t%.3f\t%.3f–%.3f\t%s\n", b.path, b.over, b.figure, b.bar, b.goal, e.Median, e.Low, e.High, stats.AtLeast(e, b.bar))
		}
	}
	t.Flush()
}

func (r *Report) rounds() (n int) {
	for _, s := range r.Samples {
		n = max(n, s.Round)
	}
	return n
}

func (r *Report) noisy() (n int) {
	for _, s := range r.Samples {
		if s.Noisy {
			n++
		}
	}
	return n
}
