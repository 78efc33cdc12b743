// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/mustang-net/mustang/bench/stats"
)

// Render prints the run for people. color asks for colours (a terminal).
func (d *Document) Render(w io.Writer, color bool) {
	f := NewFigures(d)
	d.renderHead(w)
	if d.FinishedRounds() == 0 {
		fmt.Fprintln(w, "no round was finished: there is nothing to show")
		d.renderFailures(w)
		return
	}
	if d.Settings.Calibrate > 0 {
		d.renderCalibration(w, color)
		d.renderFailures(w)
		return
	}
	for _, cores := range d.Settings.Cores {
		d.renderRatios(w, f, cores)
		d.renderScaled(w, f, cores)
		d.renderSizes(w, f, cores)
		d.renderCluster(w, f, cores)
		d.renderTails(w, f, cores)
		d.renderSeed(w, f, cores)
	}
	d.renderSplit(w)
	d.renderBars(w, color)
	RenderClaims(w, d.Settings.Article, d.Claims)
	d.renderFoot(w, f)
}

func (d *Document) renderHead(w io.Writer) {
	s := d.Settings
	command := cmp.Or(s.Command, "samehost")
	switch {
	case s.Article != "":
		command = "seed " + s.Article
	case s.Calibrate > 0:
		command = "calibrate"
	}
	if s.Quick {
		command += " --quick"
	}
	fmt.Fprintf(w, "mustang bench %s: kernel %s, %d CPUs (%s)\n", command, d.Machine.Kernel, d.Machine.CPUs, d.Machine.CPU)
	family := "IPv4"
	if s.IPv6 {
		family = "IPv6"
	}
	cpu := "CPU time not measured"
	if s.CPUSource != "" {
		cpu = "CPU time from " + s.CPUSource
	}
	fmt.Fprintf(w, "%d rounds of %g s samples in %d turns, %s, %s, streams by %s, %s, seed %d\n",
		d.FinishedRounds(), s.Duration, max(1, s.Turns), family, cmp.Or(s.CC, "default congestion control"), s.StreamBy, cpu, s.Seed)
	switch d.Machine.Emulated {
	case EmulatedInstructions:
		fmt.Fprintln(w, "EMULATED: the clock counts instructions, 4 ns each. Ratios are those of instructions: no cache, no cost of")
		fmt.Fprintln(w, "copying, so no streams, and no claim about time. Bars are for real machines and are shown to compare with.")
	case EmulatedTime:
		fmt.Fprintln(w, "EMULATED, without counting instructions: these figures mean nothing (test/vm/run --icount)")
	}
	if !d.Complete {
		more := ""
		if s.Command == "" && s.Calibrate == 0 {
			more = "; --resume goes on"
		}
		fmt.Fprintf(w, "INTERRUPTED after %d rounds%s\n", d.FinishedRounds(), more)
	}
	if n := d.NoisyShare(); n > tooNoisy {
		fmt.Fprintf(w, "NOISY: others used the load's CPUs in %.0f %% of the samples\n", n*100)
	}
}

// tooNoisy is the share of noisy samples above which the report says so.
const tooNoisy = 0.2

// present returns the metrics that the run measured: of CPU time that nobody took,
// the base has nothing, and no ratio to it.
func (d *Document) present(f *Figures, cores string) []Metric {
	var out []Metric
	for _, m := range d.Metrics() {
		if !m.Tail() && !m.sized() && f.Median(d.BaseID(), m, cores) > 0 {
			out = append(out, m)
		}
	}
	return out
}

func (d *Document) renderRatios(w io.Writer, f *Figures, cores string) {
	metrics := d.present(f, cores)
	t := table{head: []string{"ratio to " + d.BaseID() + ", " + cores + " core"}}
	base := []string{d.BaseID() + " itself"}
	for _, m := range metrics {
		t.head = append(t.head, head(m))
		base = append(base, absolute(f.Median(d.BaseID(), m, cores), m))
	}
	t.rows = append(t.rows, base)
	for _, s := range d.Subjects {
		if s.ID == d.BaseID() {
			continue
		}
		row := []string{s.ID}
		for _, m := range metrics {
			row = append(row, interval(f.Ratio(s.ID, d.BaseID(), m, cores).Ratio))
		}
		t.rows = append(t.rows, row)
	}
	t.write(w)
}

func (d *Document) renderCluster(w io.Writer, f *Figures, cores string) {
	metrics := d.present(f, cores)
	t := table{head: []string{"ClusterIP ÷ pod IP, " + cores + " core"}}
	for _, m := range metrics {
		t.head = append(t.head, head(m))
	}
	for _, s := range d.Subjects {
		pod, ok := d.sibling(s, PodIP)
		if s.Via != ClusterIP || !ok {
			continue
		}
		row := []string{s.Contestant}
		for _, m := range metrics {
			row = append(row, interval(f.Ratio(s.ID, pod.ID, m, cores).Ratio))
		}
		t.rows = append(t.rows, row)
	}
	t.write(w)
}

// renderTails prints latencies of the open loop, and their ratios to loopback's.
func (d *Document) renderTails(w io.Writer, f *Figures, cores string) {
	if math.IsNaN(f.Median(d.BaseID(), TailP50, cores)) {
		return
	}
	t := table{head: []string{fmt.Sprintf("%d requests/s, µs from when due, %s core", d.Settings.TailRate, cores),
		"p50", "p99", "p99.9", "p50 ÷ base", "p99 ÷ base", "p99.9 ÷ base"}}
	for _, s := range d.Subjects {
		var own, ratios []string
		for _, m := range []Metric{TailP50, TailP99, TailP999} {
			own = append(own, absolute(f.Median(s.ID, m, cores), m))
			if s.ID != d.BaseID() {
				ratios = append(ratios, interval(f.Ratio(s.ID, d.BaseID(), m, cores).Ratio))
			}
		}
		if math.IsNaN(f.Median(s.ID, TailP50, cores)) {
			continue
		}
		row := append([]string{s.ID}, append(own, ratios...)...)
		t.rows = append(t.rows, row)
	}
	t.write(w)
}

// renderSeed puts the streams beside article A's. Both are divided by the same
// thing: a plain veth (iptables) reached by pod IP.
func (d *Document) renderSeed(w io.Writer, f *Figures, cores string) {
	if d.BaseID() != Base || len(d.Metrics()) > 0 && !slices.Contains(d.Metrics(), StreamRate) {
		return
	}
	base, ok := d.find(Veth, []string{"iptables-nft", "iptables-legacy", "nft", "none"}, 0, PodIP)
	t := table{head: []string{"stream beside the article, " + cores + " core",
		"÷ plain veth pod IP", "article", "ClusterIP ÷ pod IP", "article", "article's mode"}}
	for _, s := range d.Subjects {
		seed, has := seedFor(s)
		if !has {
			continue
		}
		over, loss, seedLoss := "–", "", ""
		if ok {
			over = interval(f.Ratio(s.ID, base.ID, StreamRate, cores).Ratio)
		}
		if pod, isSvc := d.sibling(s, PodIP); isSvc && s.Via == ClusterIP {
			loss = interval(f.Ratio(s.ID, pod.ID, StreamRate, cores).Ratio)
			seedLoss = number(seed.byLoss())
		}
		t.rows = append(t.rows, []string{s.ID, over, number(seed.overVeth(s.Via)), loss, seedLoss, seed.name})
	}
	t.write(w)
}

func (d *Document) renderBars(w io.Writer, color bool) {
	t := table{head: []string{"mustang's bar (one core)", "measured", "bar", "", "goal", "", "why"}}
	absent := 0
	for _, b := range d.Bars {
		if b.Why == whyAbsent {
			absent++
			continue
		}
		sign := "≥ "
		if b.AtMost {
			sign = "≤ "
		}
		t.rows = append(t.rows, []string{b.Name, interval(b.Ratio), sign + number(b.Bar), paint(b.Verdict, color),
			sign + number(b.Goal), paint(b.GoalVerdict, color), b.Why})
	}
	t.write(w)
	if absent > 0 {
		fmt.Fprintf(w, "\nnot shown: %d more bars, whose contestants are not in this run (the JSON file names them)\n", absent)
	}
}

func (d *Document) renderFoot(w io.Writer, f *Figures) {
	fmt.Fprintln(w)
	d.renderControl(w)
	d.renderUneven(w, f)
	fmt.Fprintln(w, "Figures are medians of per-round ratios with a bootstrap 95 % interval. A bar passes when the interval")
	fmt.Fprintf(w, "passes it as a whole, over at least %d rounds. CPU: less is better.\n", stats.MinRounds)
	seen := map[string]bool{}
	for _, s := range d.Subjects {
		who := cmp.Or(s.By, s.ID)
		if foreign := strings.HasPrefix(s.Mode, "cni "); foreign { // whose plugins the backend names, too
			who = s.Contestant
		}
		if s.Backend != "" && !seen[who] {
			seen[who] = true
			fmt.Fprintf(w, "%s: %s\n", who, s.Backend)
		}
		if len(s.ProgramSet) > 0 && !seen[s.By+" programs"] {
			seen[s.By+" programs"] = true
			fmt.Fprintf(w, "%s program set: %s\n", s.By, programs(s.ProgramSet))
		}
	}
	var waits int64
	for _, s := range d.Samples {
		waits += s.PortWaits
	}
	if waits > 0 {
		fmt.Fprintf(w, "CRR clients waited %d times for a free source port: their rates are too low\n", waits)
	}
	d.renderFailures(w)
}

// Implementation names what is behind a subject: its programs, or its backend.
func (s Subject) Implementation() string {
	if len(s.ProgramSet) > 0 {
		return programs(s.ProgramSet)
	}
	return cmp.Or(s.Backend, s.Contestant)
}

// programs is one line of what `mustang status -o json` says about the loaded
// programs: their names and build, or the text itself when it is something else.
// Files from before there was a build have the tag of each.
func programs(status json.RawMessage) string {
	var st struct {
		Build    string
		Programs []struct{ Name, Tag string }
	}
	if err := json.Unmarshal(status, &st); err != nil || len(st.Programs) == 0 {
		return string(status)
	}
	var out []string
	for _, p := range st.Programs {
		if st.Build != "" {
			p.Tag = ""
		}
		out = append(out, strings.TrimSpace(p.Name+" "+p.Tag))
	}
	if st.Build != "" {
		out = append(out, "build "+st.Build)
	}
	return strings.Join(out, ", ") + " (conntrack and counters on)"
}

func (d *Document) renderFailures(w io.Writer) {
	for _, name := range slices.Sorted(maps.Keys(d.Failures)) {
		fmt.Fprintf(w, "FAILED: %s: %s\n", name, d.Failures[name])
	}
}

// renderControl says when loopback differs from itself: then the machine, not
// the contestants, makes differences of that size.
func (d *Document) renderControl(w io.Writer) {
	if n := d.FinishedRounds(); n < stats.MinControl {
		fmt.Fprintf(w, "A/A control: not judged, %d rounds are too few (%d)\n", n, stats.MinControl)
		return
	}
	for _, c := range d.Control {
		if !stats.ControlHolds(c.Ratio) {
			fmt.Fprintf(w, "A/A CONTROL FAILS: %s, %s core: the base differs from itself by %s; trust no difference smaller than that\n",
				head(c.Metric), c.Cores, interval3(c.Ratio))
		}
	}
}

// renderUneven names what the typical turn hides.
func (d *Document) renderUneven(w io.Writer, f *Figures) {
	if d.NoisyShare() > tooNoisy {
		return // others' doing, and said already
	}
	for _, cores := range d.Settings.Cores {
		for _, s := range d.Subjects {
			for _, m := range []Metric{StreamRate, RRRate, CRRRate, UDPRRRate} {
				if sums, uneven := f.Uneven(s.ID, d.BaseID(), m, cores); uneven {
					fmt.Fprintf(w, "UNEVEN: %s, %s, %s core: some turns differ much from the others; by the sum of all turns the ratio is %.2f\n",
						s.ID, head(m), cores, sums)
				}
			}
		}
	}
}

// absolute prints the base's own value with its unit.
func absolute(v float64, m Metric) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case m.kind() == StreamRate:
		return fmt.Sprintf("%.1f Gbit/s", v/1e9)
	case m.kind() == CPUPerGB:
		return fmt.Sprintf("%.3f s", v)
	case m.Tail():
		return fmt.Sprintf("%.0f", v/1e3)
	case m.Lower():
		return fmt.Sprintf("%.1f ms", v*1e3)
	}
	return fmt.Sprintf("%.0f /s", v)
}

// interval prints a ratio and its 95 % interval.
func interval(e stats.Estimate) string {
	if e.N == 0 || math.IsNaN(e.Median) {
		return "–"
	}
	if e.N == 1 {
		return fmt.Sprintf("%.2f (1 round)", e.Median)
	}
	return fmt.Sprintf("%.2f [%.2f %.2f]", e.Median, e.Low, e.High)
}

func number(v float64) string {
	if v == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f", v)
}

func paint(v stats.Verdict, color bool) string {
	if !color {
		return string(v)
	}
	return paintAs(string(v), v)
}

// paintAs gives text the colour of a verdict.
func paintAs(text string, v stats.Verdict) string {
	code := map[stats.Verdict]string{stats.Pass: "32", stats.Fail: "31"}[v]
	if code == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// table aligns columns by what is seen: not bytes, and not colour codes, which
// text/tabwriter would count.
type table struct {
	head []string
	rows [][]string
}

func (t table) write(w io.Writer) {
	if len(t.rows) == 0 {
		return
	}
	all := append([][]string{t.head}, t.rows...)
	widths := make([]int, len(t.head))
	for _, row := range all {
		for i, cell := range row {
			widths[i] = max(widths[i], visible(cell))
		}
	}
	fmt.Fprintln(w)
	for _, row := range all {
		var b strings.Builder
		for i, cell := range row {
			b.WriteString(cell)
			b.WriteString(strings.Repeat(" ", widths[i]-visible(cell)+2))
		}
		fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	}
}

func visible(s string) int {
	n := utf8.RuneCountInString(s)
	for rest := s; ; {
		i := strings.Index(rest, "\x1b[")
		if i < 0 {
			return n
		}
		end := strings.IndexByte(rest[i:], 'm')
		if end < 0 {
			return n
		}
		n -= end + 1
		rest = rest[i+end+1:]
	}
}
