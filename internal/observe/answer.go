// SPDX-License-Identifier: Apache-2.0

package observe

// What `why` answers.

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Verdicts of an answer beyond those of a flow.
const (
	Mixed     = "mixed"     // it depends on the backend
	NoRoute   = "noroute"   // a kernel has no way for it
	Undecided = "undecided" // no program of this node has a say
)

// Answer says what would become of a flow's first packet, of one family.
type Answer struct {
	Source      End      `json:"source"`
	Destination End      `json:"destination"`
	Protocol    string   `json:"protocol"`
	Verdict     string   `json:"verdict"` // forwarded, dropped, refused, noroute, undecided, mixed
	Sentence    string   `json:"sentence"`
	Mend        string   `json:"mend,omitempty"` // the smallest change that would let it pass
	Service     *Chosen  `json:"service,omitempty"`
	Ways        []Way    `json:"ways"` // one for each backend, or one
	Warnings    []string `json:"warnings"`
}

// Chosen is the Service that the destination is.
type Chosen struct {
	Frontend netip.AddrPort   `json:"frontend"`
	Number   uint32           `json:"number"`
	At       string           `json:"at"` // "socket" or "packet": where the backend is chosen
	Backends []netip.AddrPort `json:"backends"`
}

// Way is the way of one packet.
type Way struct {
	Backend  *End     `json:"backend,omitempty"`
	Verdict  string   `json:"verdict"`
	Steps    []Step   `json:"steps"`
	Reason   string   `json:"reason,omitempty"`
	Sentence string   `json:"sentence"`
	Mend     string   `json:"mend,omitempty"`
	Policy   []Judged `json:"policy,omitempty"` // of one that is stopped: each end that is isolated
}

// Step is one place on the way, and what it decided.
type Step struct {
	At      string `json:"at"`
	By      string `json:"by"` // program, tables, or kernel
	Verdict string `json:"verdict"`
	Detail  string `json:"detail"`
}

func (w *Way) step(at, by, verdict, detail string) {
	w.Steps = append(w.Steps, Step{at, by, verdict, detail})
}

// end ends the way.
func (w *Way) end(verdict, sentence, mend string) {
	w.Verdict, w.Sentence, w.Mend = verdict, sentence, mend
}

// conclude sums up the ways.
func (a *Answer) conclude() {
	if len(a.Ways) == 0 {
		return
	}
	first := a.Ways[0]
	a.Verdict, a.Sentence, a.Mend = first.Verdict, first.Sentence, first.Mend
	passing := 0
	for _, w := range a.Ways {
		if w.Verdict == Forwarded {
			passing++
		}
		if w.Verdict != a.Verdict {
			a.Verdict = Mixed
		}
	}
	switch {
	case len(a.Ways) == 1:
	case a.Verdict == Forwarded:
		a.Sentence = fmt.Sprintf("it passes, to any of the %d backends", len(a.Ways))
	case a.Verdict == Mixed:
		bad := a.Ways[slices.IndexFunc(a.Ways, func(w Way) bool { return w.Verdict != Forwarded })]
		a.Sentence = fmt.Sprintf("it depends on the backend that is picked: to %d of %d it passes; to %s, %s",
			passing, len(a.Ways), bad.Backend, bad.Sentence)
		a.Mend = bad.Mend
	default:
		a.Sentence = fmt.Sprintf("whichever of the %d backends is picked, %s", len(a.Ways), first.Sentence)
	}
}

// Text is the answer for people, with its steps.
func (a Answer) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s → %s: %s\n", a.Protocol, a.Source, a.Destination, strings.ToUpper(a.Verdict))
	fmt.Fprintf(&b, "  %s.\n", a.Sentence)
	if s := a.Service; s != nil {
		var list []string
		for _, backend := range s.Backends {
			list = append(list, backend.String())
		}
		fmt.Fprintf(&b, "  Service %d (%s), chosen at the %s; backends: %s\n", s.Number, s.Frontend, s.At, strings.Join(list, ", "))
	}
	for _, w := range a.Ways {
		indent := "  "
		if len(a.Ways) > 1 {
			fmt.Fprintf(&b, "  to %s: %s\n", w.Backend, w.Verdict)
			indent = "    "
		}
		for i, s := range w.Steps {
			fmt.Fprintf(&b, "%s%d. %s: %s (%s)\n", indent, i+1, s.At, s.Detail, s.By)
		}
	}
	if a.Mend != "" {
		fmt.Fprintf(&b, "  To let it pass: %s.\n", a.Mend)
	}
	for _, w := range a.Warnings {
		fmt.Fprintf(&b, "  Note: %s.\n", w)
	}
	return b.String()
}
