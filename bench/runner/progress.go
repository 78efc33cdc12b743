// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"fmt"
	"io"
	"time"
)

// Printer shows progress: a line that rewrites itself on a terminal, one line
// a round elsewhere. Failures always get a line.
type Printer struct {
	W        io.Writer
	Terminal bool
	Rounds   int // 0: as many as fit
	round    int
}

// Sample implements Progress.
func (p *Printer) Sample(done, total, round int, s Sample, left time.Duration) {
	if s.Error != "" {
		if p.Terminal {
			fmt.Fprint(p.W, "\r\x1b[K")
		}
		fmt.Fprintln(p.W, "failed:", s.Error)
	}
	if p.Terminal {
		fmt.Fprintf(p.W, "\r\x1b[K%s: sample %d of %d, about %s left: %s", p.name(round), done, total, left.Round(time.Second), s.Case)
		if done == total {
			fmt.Fprint(p.W, "\r\x1b[K")
		}
		return
	}
	if round != p.round || done == 1 {
		p.round = round
		fmt.Fprintf(p.W, "%s: about %s left\n", p.name(round), left.Round(time.Second))
	}
}

func (p *Printer) name(round int) string {
	if round == 0 {
		return "warm-up"
	}
	if p.Rounds == 0 {
		return fmt.Sprintf("round %d", round)
	}
	return fmt.Sprintf("round %d of %d", round, p.Rounds)
}
