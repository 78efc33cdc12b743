// SPDX-License-Identifier: Apache-2.0

// Package seed holds the claims of the articles that mustang follows, and judges
// each by a run on the user's machine: confirmed, not confirmed, or why neither.
// Figures of articles are theirs, from their hardware; what is judged is the ratio
// or the order that they claim.
package seed

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/stats"
)

// Verdicts on a claim.
const (
	Confirmed    = "confirmed"
	NotConfirmed = "not confirmed"
	NotShown     = "not shown" // the interval straddles the limit, or too few rounds
	NotTestable  = "not testable here"
)

// Claim is what an article says.
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

// path selects a subject of a run.
type path struct {
	mode, by string
	services int
	via      string
	position string
}

// find returns the subject, or why there is none.
func (p path) find(d *report.Document) (string, error) {
	for _, s := range d.Subjects {
		if s.Mode == p.mode && s.By == p.by && s.Services == p.services && s.Via == p.via && s.Position == p.position && s.Tune == "" {
			if why := d.Failures[s.ID]; why != "" {
				return s.ID, errors.New(sentence(why))
			}
			return s.ID, nil
		}
	}
	for name, why := range d.Failures {
		if strings.HasPrefix(name, strings.TrimSpace(p.mode+" "+p.by)) {
			return "", errors.New(sentence(why))
		}
	}
	return "", fmt.Errorf("the run has no %s", strings.TrimSpace(p.mode+" "+p.by))
}

// sentence is what a person needs of a failure: its first line, without the
// command that said it.
func sentence(failure string) string {
	line, _, _ := strings.Cut(failure, "\n")
	if i := strings.LastIndex(line, "exit status "); i >= 0 {
		if _, said, ok := strings.Cut(line[i:], ": "); ok {
			line = said
		}
	}
	line = strings.TrimPrefix(line, "mustang: ")
	return strings.TrimSuffix(line, " ("+errors.ErrUnsupported.Error()+")")
}

// ratioClaim is a claim about one path ÷ another.
type ratioClaim struct {
	text    string
	article float64
	of, to  path
	metric  report.Metric
	limit   float64
	atMost  bool
}

func (c ratioClaim) judge(d *report.Document, f *report.Figures) Claim {
	out := Claim{Text: c.text, Article: c.article, Limit: c.limit, AtMost: c.atMost, Verdict: NotTestable}
	a, err := c.of.find(d)
	b, err2 := c.to.find(d)
	if err = cmp.Or(err, err2); err != nil {
		out.Why = err.Error()
		return out
	}
	out.Ratio = f.Ratio(a, b, c.metric, "same").Ratio
	judge := stats.AtLeast
	if c.atMost {
		judge = stats.AtMost
	}
	switch judge(out.Ratio, c.limit) {
	case stats.Pass:
		out.Verdict = Confirmed
	case stats.Fail:
		out.Verdict = NotConfirmed
	default:
		out.Verdict, out.Why = NotShown, "the interval straddles the limit"
		if out.Ratio.N < stats.MinRounds {
			out.Why = fmt.Sprintf("%d rounds, a claim needs %d", out.Ratio.N, stats.MinRounds)
		}
	}
	return out
}

// factClaim is a claim about what happens, not how fast.
type factClaim struct {
	text string
	want map[string]bool // of Document.Facts
}

func (c factClaim) judge(d *report.Document, _ *report.Figures) Claim {
	out := Claim{Text: c.text, Verdict: Confirmed}
	for name, want := range c.want {
		got, ok := d.Facts[name]
		switch {
		case !ok:
			return Claim{Text: c.text, Verdict: NotTestable, Why: cmp.Or(sentence(d.Failures[name]), "the run did not try it")}
		case got != want:
			out.Verdict, out.Why = NotConfirmed, fmt.Sprintf("%s: %v", name, got)
		}
	}
	return out
}

// Render prints the claims, a sentence each.
func Render(w io.Writer, name string, claims []Claim) {
	fmt.Fprintf(w, "\nSeed %s, claim by claim. Of a ratio, what counts is that its whole 95 %% interval passes the limit.\n\n", name)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "claim\tarticle\tmeasured\tlimit\tverdict")
	n := map[string]int{}
	for _, c := range claims {
		n[c.Verdict]++
		article, measured, limit := "–", "–", ""
		if c.Article > 0 {
			article = fmt.Sprintf("%.2f", c.Article)
		}
		if c.Ratio.N > 0 {
			measured = fmt.Sprintf("%.2f [%.2f %.2f]", c.Ratio.Median, c.Ratio.Low, c.Ratio.High)
		}
		if c.Limit > 0 {
			limit = map[bool]string{false: "≥ ", true: "≤ "}[c.AtMost] + fmt.Sprintf("%.2f", c.Limit)
		}
		verdict := c.Verdict
		if c.Why != "" {
			verdict += ": " + c.Why
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", c.Text, article, measured, limit, verdict)
	}
	t.Flush()
	fmt.Fprintf(w, "\n%d confirmed, %d not confirmed, %d not shown, %d not testable here\n", n[Confirmed], n[NotConfirmed], n[NotShown], n[NotTestable])
}
