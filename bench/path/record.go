// SPDX-License-Identifier: Apache-2.0

package path

// The record: instructions that the repository holds the datapath to.

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/bench/report"
)

// Record is what the repository keeps.
type Record struct {
	// Instructions are counted on one kernel; those of transactions by a load
	// program of one Go version, too. On others they are other ones.
	Kernel string `json:"kernel"`
	Go     string `json:"go"`
	// Limit is the share that a figure may grow by.
	Limit float64 `json:"limit"`
	// Parts are what a run can be asked for one by one: the hooks of a mode, the
	// transactions of a contestant. Each has its figures by name.
	Parts map[string]figures `json:"instructions"`
}

type figures map[string]int

const defaultLimit = 0.02

// NewRecord makes a record of a run.
func NewRecord(d *Document) (*Record, error) {
	if !d.Emulated {
		return nil, errors.New("a record holds instructions: run it by test/vm/run --icount")
	}
	if len(d.Failures) > 0 {
		return nil, errors.New("a record of a run that failed in parts would forget them")
	}
	return &Record{Kernel: d.Kernel, Go: d.Go, Limit: defaultLimit, Parts: d.parts()}, nil
}

const hooksOf = "hooks of "

// parts are the document's figures.
func (d *Document) parts() map[string]figures {
	parts := map[string]figures{}
	put := func(part, name string, cost float64) {
		if parts[part] == nil {
			parts[part] = figures{}
		}
		parts[part][name] = int(math.Round(cost))
	}
	for _, h := range d.Hooks {
		// Of new flows the median moves by a percent between boots, with the chains
		// of the tables; the interval's low end by a thousandth.
		put(hooksOf+h.Mode, h.name(), h.Cost.Low)
	}
	for _, t := range d.Transactions {
		if t.Subject != report.BaseAgain { // the control
			put(t.Contestant, t.name(), t.Cost.Median)
		}
	}
	return parts
}

// ReadRecord reads a record that Write wrote.
func ReadRecord(file string) (*Record, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read record: %w", err)
	}
	r := &Record{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("read record %s: %w", file, err)
	}
	return r, nil
}

// Keep takes over from an older record the parts that this one has not run, where both compare.
func (r *Record) Keep(old *Record) {
	for part, f := range old.Parts {
		if r.Parts[part] == nil && old.Kernel == r.Kernel && (old.Go == r.Go || strings.HasPrefix(part, hooksOf)) {
			r.Parts[part] = f
		}
	}
}

// Write writes the record, rows sorted by name.
func (r *Record) Write(file string) error {
	b, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	return report.WriteWhole(file, append(b, '\n'))
}

// Check holds the parts that were run to the record, prints what changed to w,
// and fails when a figure grew by more than the limit, or is not there any more.
func (r *Record) Check(d *Document, w io.Writer) error {
	if !d.Emulated {
		return errors.New("a record holds instructions, this run has nanoseconds: run it by test/vm/run --icount")
	}
	if r.Kernel != d.Kernel {
		return fmt.Errorf("the record is of kernel %s, this run of kernel %s: they count differently; make check-path UPDATE=1 makes a new one", r.Kernel, d.Kernel)
	}
	held, worse := 0, 0
	now := d.parts()
	for _, part := range slices.Sorted(maps.Keys(now)) {
		if r.Go != d.Go && !strings.HasPrefix(part, hooksOf) {
			fmt.Fprintf(w, "not compared: %s, because the load program is of %s here, and of %s in the record\n", part, d.Go, r.Go)
			continue
		}
		held += len(r.Parts[part])
		worse += r.checkPart(part, now[part], w)
	}
	if worse > 0 {
		return fmt.Errorf("%d of %d figures are worse than recorded by more than %.0f %%; if that is worth it: make check-path UPDATE=1, and say why in the commit",
			worse, held, 100*r.Limit)
	}
	if held == 0 {
		return errors.New("nothing of this run is in the record; make check-path UPDATE=1 makes a new one")
	}
	fmt.Fprintf(w, "%d figures are within %.0f %% of the record\n", held, 100*r.Limit)
	return nil
}

func (r *Record) checkPart(part string, now figures, w io.Writer) (worse int) {
	for _, name := range slices.Sorted(maps.Keys(r.Parts[part])) {
		was, is := r.Parts[part][name], now[name]
		if is == 0 {
			fmt.Fprintf(w, "MISSING  %s: %s: was %d\n", part, name, was)
			worse++
			continue
		}
		change, limit := float64(is)/float64(was)-1, r.Limit*float64(was)
		switch {
		case float64(is-was) > limit:
			fmt.Fprintf(w, "WORSE    %s: %s: %d → %d (%+.1f %%)\n", part, name, was, is, 100*change)
			worse++
		case float64(was-is) > limit:
			fmt.Fprintf(w, "better   %s: %s: %d → %d (%+.1f %%)\n", part, name, was, is, 100*change)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if _, known := r.Parts[part][name]; !known {
			fmt.Fprintf(w, "new      %s: %s: %d\n", part, name, now[name])
		}
	}
	return worse
}
