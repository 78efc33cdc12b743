// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"

	"github.com/mustang-net/mustang/bench/stats"
)

// CSVHead names the columns of WriteCSV.
var CSVHead = []string{"kind", "subject", "over", "metric", "cores", "median", "low", "high", "spread", "rounds", "verdict", "article"}

// WriteCSV writes all figures, one a line: kind is figure, control, bar or claim.
func (d *Document) WriteCSV(w io.Writer) error { return d.writeCSV(w, true) }

func (d *Document) writeCSV(w io.Writer, head bool) error {
	c := csv.NewWriter(w)
	var rows [][]string
	if head {
		rows = append(rows, CSVHead)
	}
	row := func(kind, subject, over, metric, cores string, e stats.Estimate, verdict string) {
		f := func(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }
		rows = append(rows, []string{kind, subject, over, metric, cores, f(e.Median), f(e.Low), f(e.High), f(e.Spread), strconv.Itoa(e.N), verdict, d.Settings.Article})
	}
	for _, f := range d.Figures {
		row("figure", f.Subject, f.Over, string(f.Metric), f.Cores, f.Ratio, "")
	}
	for _, f := range d.Control {
		row("control", f.Subject, f.Over, string(f.Metric), f.Cores, f.Ratio, "")
	}
	for _, b := range d.Bars {
		if b.Ratio.N > 0 {
			row("bar", b.Subject, b.Over, b.Name, "same", b.Ratio, string(b.Verdict))
		}
	}
	for _, claim := range d.Claims {
		row("claim", claim.Text, "", "", "same", claim.Ratio, claim.Verdict)
	}
	if err := c.WriteAll(rows); err != nil {
		return fmt.Errorf("write figures: %w", err)
	}
	return nil
}
