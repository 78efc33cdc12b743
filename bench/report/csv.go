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
var CSVHead = []string{"kind", "subject", "over", "metric", "cores", "median", "low", "high", "spread", "rounds", "verdict"}

// WriteCSV writes all figures, one a line: kind is figure, control or bar.
func (d *Document) WriteCSV(w io.Writer) error {
	c := csv.NewWriter(w)
	rows := [][]string{CSVHead}
	row := func(kind, subject, over, metric, cores string, e stats.Estimate, verdict string) {
		f := func(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }
		rows = append(rows, []string{kind, subject, over, metric, cores, f(e.Median), f(e.Low), f(e.High), f(e.Spread), strconv.Itoa(e.N), verdict})
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
	if err := c.WriteAll(rows); err != nil {
		return fmt.Errorf("write figures: %w", err)
	}
	return nil
}
