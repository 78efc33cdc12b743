// SPDX-License-Identifier: Apache-2.0

package path

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/stats"
)

// Render prints the document for people.
func (d *Document) Render(w io.Writer) {
	fmt.Fprintf(w, "mustang bench path: kernel %s", d.Kernel)
	if d.Emulated {
		fmt.Fprint(w, ", EMULATED: instructions, counted; no cache, no waiting for memory")
	}
	fmt.Fprintln(w)
	d.renderHooks(w)
	d.renderTransactions(w)
	d.renderShares(w)
	for _, what := range slices.Sorted(maps.Keys(d.Failures)) {
		fmt.Fprintf(w, "FAILED: %s: %s\n", what, d.Failures[what])
	}
}

func (d *Document) renderHooks(w io.Writer) {
	if len(d.Hooks) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintf(t, "%s of a packet\thook\tpacket\tIPv4\tIPv6\n", d.Unit)
	type row struct{ mode, place, hook, packet string }
	var order []row
	cells := map[row]map[string]string{}
	for _, h := range d.Hooks {
		r := row{h.Mode, h.Place, h.Hook, h.Packet}
		if cells[r] == nil {
			order, cells[r] = append(order, r), map[string]string{}
		}
		cells[r][h.Family] = d.estimate(h.Cost)
	}
	for _, r := range order {
		fmt.Fprintf(t, "%s, %s\t%s\t%s\t%s\t%s\n", r.mode, r.place, r.hook, r.packet, cells[r]["v4"], cells[r]["v6"])
	}
	t.Flush()
}

// estimate prints a figure; its interval only where repeats differ by more than
// the last digit.
func (d *Document) estimate(e stats.Estimate) string {
	if e.High-e.Low < 1 {
		return fmt.Sprintf("%.0f", e.Median)
	}
	return fmt.Sprintf("%.0f [%.0f %.0f]", e.Median, e.Low, e.High)
}

// renderTransactions prints a table for each subject that others are compared with.
func (d *Document) renderTransactions(w io.Writer) {
	var bases []string
	for _, x := range d.Transactions {
		if !slices.Contains(bases, x.Over) {
			bases = append(bases, x.Over)
		}
	}
	for _, base := range bases {
		d.renderOver(w, base)
	}
	if len(bases) > 0 {
		fmt.Fprintln(w, "Spread: of the samples, end to end. ÷: the ratio of rates; more is better.")
	}
}

func (d *Document) renderOver(w io.Writer, base string) {
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintf(t, "%s of a transaction\tRR\tspread\t÷ %s\tCRR\tspread\t÷ %[2]s\n", d.Unit, base)
	var order []string
	cells := map[string]map[string]string{}
	for _, x := range d.Transactions {
		if x.Over != base {
			continue
		}
		if cells[x.Subject] == nil {
			order, cells[x.Subject] = append(order, x.Subject), map[string]string{}
		}
		cells[x.Subject][x.Scenario] = fmt.Sprintf("%.0f\t%.1f %%\t%.3f", x.Cost.Median, 100*(x.Cost.High-x.Cost.Low)/x.Cost.Median, x.Ratio)
	}
	for _, s := range order {
		fmt.Fprintf(t, "%s\t%s\t%s\n", s, cmp.Or(cells[s]["rr"], "–\t\t"), cmp.Or(cells[s]["crr"], "–\t\t"))
	}
	t.Flush()
}

func (d *Document) renderShares(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	head := false
	for _, x := range d.Transactions {
		for _, p := range x.Programs {
			if !head {
				fmt.Fprintf(w, "\n")
				fmt.Fprintf(t, "of which in programs\tscenario\tprogram\truns\t%s\tof the whole\n", d.Unit)
				head = true
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%.1f\t%.0f\t%.1f %%\n", x.Subject, x.Scenario, p.Program, p.Runs, p.Cost, 100*p.Cost/x.Cost.Median)
		}
	}
	t.Flush()
}

// Encode writes the document as JSON.
func (d *Document) Encode(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(d)
}

// Empty says that nothing of it is finished.
func (d *Document) Empty() bool { return len(d.Hooks)+len(d.Transactions) == 0 }

// Write writes the document beside file and renames it.
func (d *Document) Write(file string) error {
	var b bytes.Buffer
	if err := d.Encode(&b); err != nil {
		return fmt.Errorf("encode bench document: %w", err)
	}
	return report.WriteWhole(file, b.Bytes())
}
