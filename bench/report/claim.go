// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/mustang-net/mustang/bench/stats"
)

// Verdicts on a claim.
const (
	Confirmed    = "confirmed"
	NotConfirmed = "not confirmed"
	ClaimUnclear = "not shown" // the interval straddles the limit, or too few rounds
	NotTestable  = "not testable here"
)

// Claim is what an article says, with what a run says about it.
type Claim struct {
	Text string `json:"claim"`
	// Article is the article's own figure for the ratio, 0 for none.
	Article float64        `json:"article,omitempty"`
	Ratio   stats.Estimate `json:"ratio"`
	// Limit is what the ratio's interval must pass: reach, or not exceed.
	Limit   float64 `json:"limit,omitempty"`
	AtMost  bool    `json:"at_most,omitempty"`
	Verdict string  `json:"verdict"`
	Why     string  `json:"why,omitempty"`
}

// Figures of a claim as they are printed: the article's, the measured one, the limit.
func (c Claim) columns() (article, measured, limit string) {
	article, measured = "–", "–"
	if c.Article > 0 {
		article = fmt.Sprintf("%.2f", c.Article)
	}
	if c.Ratio.N > 0 {
		measured = interval(c.Ratio)
	}
	if c.Limit > 0 {
		limit = map[bool]string{false: "≥ ", true: "≤ "}[c.AtMost] + fmt.Sprintf("%.2f", c.Limit)
	}
	return article, measured, limit
}

// RenderClaims prints claims, a sentence each.
func RenderClaims(w io.Writer, article string, claims []Claim) {
	if len(claims) == 0 {
		return
	}
	fmt.Fprintf(w, "\nSeed %s, claim by claim. Of a ratio, what counts is that its whole 95 %% interval passes the limit.\n\n", article)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "claim\tarticle\tmeasured\tlimit\tverdict")
	for _, c := range claims {
		article, measured, limit := c.columns()
		verdict := c.Verdict
		if c.Why != "" {
			verdict += ": " + c.Why
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", c.Text, article, measured, limit, verdict)
	}
	t.Flush()
	n := CountClaims(claims)
	fmt.Fprintf(w, "\n%d confirmed, %d not confirmed, %d not shown, %d not testable here\n\n", n[Confirmed], n[NotConfirmed], n[ClaimUnclear], n[NotTestable])
}

// CountClaims counts them by verdict.
func CountClaims(claims []Claim) map[string]int {
	n := map[string]int{}
	for _, c := range claims {
		n[c.Verdict]++
	}
	return n
}
