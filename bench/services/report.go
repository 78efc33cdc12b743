// SPDX-License-Identifier: Apache-2.0

package services

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/mustang-net/mustang/bench/stats"
)

// Empty says whether no contestant has been measured.
func (r *Report) Empty() bool { return len(r.Cells) == 0 }

// Render prints the table.
func (r *Report) Render(w io.Writer) {
	fmt.Fprintf(w, "Services by a real API server. Linux %s; load average before: %s, after: %s.\n", r.Kernel, r.Load[0], r.Load[len(r.Load)-1])
	fmt.Fprintln(w, "Milliseconds from sending the request to the first connection that meets the change, median / p99 / maximum;")
	fmt.Fprintln(w, "heard: until a bare watch tells of it, which nobody can be faster than; event: from there to the first connection.")
	fmt.Fprintf(w, "Each of these changes comes %v after the one before it has taken effect, so that no limit on syncs delays it.\n", apart)
	fmt.Fprintln(w, "changes/s: endpoints of many slices that are replaced at once, to the last one in force; the API server has its part in it.")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tServices\tchanges\theard\tendpoint moved\tspread\tevent\tnew Service\tcold sync, s\tchanges/s\tMB\tpeak\t")
	for _, c := range r.Cells {
		fmt.Fprintf(t, "%s\t%d × %d\t%d + %d\t%s\t%s\t%.0f %%\t%s\t%s\t%.2f\t%.0f\t%.0f\t%.0f\t\n", c.Contestant, c.Services, c.Endpoints, len(c.Moved), len(c.Added),
			three(c.Heard), three(c.Moved), 100*stats.Spread(c.Moved), three(c.Event), three(c.Added), c.Cold, c.Rate, c.Memory, c.Peak)
	}
	t.Flush()
	named := map[string]bool{}
	for _, c := range r.Cells {
		if c.Backend != "" && !named[c.Contestant] {
			named[c.Contestant] = true
			fmt.Fprintf(w, "%s: %s\n", c.Contestant, c.Backend)
		}
	}
}

func three(v []float64) string {
	return fmt.Sprintf("%.1f / %.1f / %.1f", stats.Median(v), stats.Quantile(v, .99), stats.Quantile(v, 1))
}
