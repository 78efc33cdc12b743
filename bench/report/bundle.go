// SPDX-License-Identifier: Apache-2.0

package report

// Several runs in one file: the articles one after the other.

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
)

// BundleSchema names the layout of a file with several runs.
const BundleSchema = "mustang.bench.seeds/v1"

// Bundle is several runs.
type Bundle struct {
	Schema string      `json:"schema"`
	Runs   []*Document `json:"runs"`
}

// Put adds a run, or takes the place of the same article's.
func (b *Bundle) Put(d *Document) {
	i := slices.IndexFunc(b.Runs, func(o *Document) bool { return o.Settings.Article == d.Settings.Article })
	if i < 0 {
		b.Runs = append(b.Runs, d)
		return
	}
	b.Runs[i] = d
}

// Article returns the run of an article, nil for none.
func (b *Bundle) Article(name string) *Document {
	for _, d := range b.Runs {
		if d.Settings.Article == name {
			return d
		}
	}
	return nil
}

// Compute computes all runs.
func (b *Bundle) Compute() {
	for _, d := range b.Runs {
		d.Compute()
	}
}

// Empty says whether no round of any run is finished.
func (b *Bundle) Empty() bool {
	return !slices.ContainsFunc(b.Runs, func(d *Document) bool { return !d.Empty() })
}

// Took is how long the runs took together.
func (b *Bundle) Took() (sum time.Duration) {
	for _, d := range b.Runs {
		if !d.Finished.IsZero() {
			sum += d.Finished.Sub(d.Started)
		}
	}
	return sum
}

// Render prints all runs.
func (b *Bundle) Render(w io.Writer, color bool) {
	for i, d := range b.Runs {
		if i > 0 {
			fmt.Fprintln(w, "\n────────")
		}
		d.Render(w, color)
	}
}

// WriteCSV writes the figures of all runs, each line with its article.
func (b *Bundle) WriteCSV(w io.Writer) error {
	for i, d := range b.Runs {
		if err := d.writeCSV(w, i == 0); err != nil {
			return err
		}
	}
	return nil
}

// Whole is what a file has: of one run, just that.
func (b *Bundle) Whole() any {
	if len(b.Runs) == 1 && b.Schema != BundleSchema {
		return b.Runs[0]
	}
	b.Schema = BundleSchema
	return b
}

// Encode writes the file's text.
func (b *Bundle) Encode(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	if err := e.Encode(b.Whole()); err != nil {
		return fmt.Errorf("encode bench document: %w", err)
	}
	return nil
}

// Write writes the file, as Document.Write does.
func (b *Bundle) Write(path string) error {
	var text bytes.Buffer
	if err := b.Encode(&text); err != nil {
		return err
	}
	return WriteWhole(path, text.Bytes())
}

// WriteWhole writes a file beside path and renames it. What is no file, a pipe or
// /dev/stdout, is written to.
func WriteWhole(path string, text []byte) error {
	if st, err := os.Stat(path); err == nil && !st.Mode().IsRegular() {
		if err := os.WriteFile(path, text, 0); err != nil {
			return fmt.Errorf("write bench document: %w", err)
		}
		return nil
	}
	tmp := path + ".part"
	if err := os.WriteFile(tmp, text, 0o644); err != nil {
		return fmt.Errorf("write bench document: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("write bench document: %w", err)
	}
	return nil
}

// ReadAny reads a file of one run or of several.
func ReadAny(path string) (*Bundle, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read bench document: %w", err)
	}
	var head struct{ Schema string }
	if err := json.Unmarshal(text, &head); err != nil {
		return nil, fmt.Errorf("read bench document %s: %w", path, err)
	}
	if head.Schema != BundleSchema {
		d, err := Read(path)
		if err != nil {
			return nil, err
		}
		return &Bundle{Runs: []*Document{d}}, nil
	}
	b := &Bundle{}
	if err := json.Unmarshal(text, b); err != nil {
		return nil, fmt.Errorf("read bench document %s: %w", path, err)
	}
	if len(b.Runs) == 0 {
		return nil, fmt.Errorf("read bench document %s: runs is empty", path)
	}
	for i, d := range b.Runs {
		if d == nil {
			return nil, fmt.Errorf("read bench document %s: runs[%d] is empty", path, i)
		}
		if err := d.checkSchema(); err != nil {
			return nil, fmt.Errorf("read bench document %s: runs[%d]: %w", path, i, err)
		}
	}
	return b, nil
}
