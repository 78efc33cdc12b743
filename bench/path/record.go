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
)

// Record is what the repository keeps.
type Record struct {
	// Instructions are counted on one kernel, by a load program of one Go
	// version; on others they are other ones.
	Kernel string `json:"kernel"`
	Go     string `json:"go"`
	// Limit is the share that a figure may grow by.
	Limit float64        `json:"limit"`
	Rows  map[string]int `json:"instructions"`
}

const defaultLimit = 0.02

// NewRecord makes a record of a run.
func NewRecord(d *Document) (*Record, error) {
	if !d.Emulated {
		return nil, errors.New("a record holds instructions: run it by test/vm/run --icount")
	}
	if len(d.Failures) > 0 {
		return nil, errors.New("a record of a run that failed in parts would forget them")
	}
	return &Record{Kernel: d.Kernel, Go: d.Go, Limit: defaultLimit, Rows: d.rows()}, nil
}

// rows are the document's figures by name, without the control.
func (d *Document) rows() map[string]int {
	rows := map[string]int{}
	for _, h := range d.Hooks {
		rows[h.name()] = int(math.Round(h.Cost.Median))
	}
	for _, t := range d.Transactions {
		rows[t.name()] = int(math.Round(t.Cost.Median))
	}
	return rows
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

// Write writes the record, rows sorted by name.
func (r *Record) Write(file string) error {
	b, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	return replaceFile(file, append(b, '\n'))
}

// Check holds a run to the record, prints what changed to w, and fails when a
// figure grew by more than the limit, or is not there any more.
func (r *Record) Check(d *Document, w io.Writer) error {
	if r.Kernel != d.Kernel || r.Go != d.Go {
		return fmt.Errorf("the record is of kernel %s and %s, this run of kernel %s and %s: they count differently; make check-path UPDATE=1 makes a new one",
			r.Kernel, r.Go, d.Kernel, d.Go)
	}
	now := d.rows()
	worse := 0
	for _, name := range slices.Sorted(maps.Keys(r.Rows)) {
		was, is := r.Rows[name], now[name]
		if is == 0 {
			fmt.Fprintf(w, "MISSING  %s: was %d\n", name, was)
			worse++
			continue
		}
		change := float64(is)/float64(was) - 1
		switch {
		case change > r.Limit:
			fmt.Fprintf(w, "WORSE    %s: %d → %d (%+.1f %%)\n", name, was, is, 100*change)
			worse++
		case change < -r.Limit:
			fmt.Fprintf(w, "better   %s: %d → %d (%+.1f %%)\n", name, was, is, 100*change)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if _, known := r.Rows[name]; !known {
			fmt.Fprintf(w, "new      %s: %d\n", name, now[name])
		}
	}
	if worse > 0 {
		return fmt.Errorf("%d of %d figures are worse than recorded by more than %.0f %%; if that is worth it: make check-path UPDATE=1, and say why in the commit",
			worse, len(r.Rows), 100*r.Limit)
	}
	fmt.Fprintf(w, "%d figures are within %.0f %% of the record\n", len(r.Rows), 100*r.Limit)
	return nil
}
