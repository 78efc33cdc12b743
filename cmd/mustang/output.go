// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

var outputs = []string{"table", "wide", "json", "yaml"}

func (g *globals) checkOutput(cmd *cobra.Command) error {
	if group(cmd).Name() == "bench" && g.Output == "yaml" {
		return usagef("bench prints no yaml: use -o json")
	}
	if slices.Contains(outputs, g.Output) {
		return nil
	}
	return usagef("output %q is none of %s", g.Output, strings.Join(outputs, ", "))
}

// print writes v as JSON or YAML, or else what table writes.
func (g *globals) print(w io.Writer, v any, table func(w io.Writer)) error {
	switch g.Output {
	case "json":
		text, err := json.MarshalIndent(v, "", "  ")
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(w, string(text))
		return err
	case "yaml":
		text, err := yaml.Marshal(v)
		if err != nil {
			return err
		}
		_, err = w.Write(text)
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	table(tw)
	return tw.Flush()
}

// row writes one line of a table.
func row(w io.Writer, cells ...any) {
	for i, c := range cells {
		if i > 0 {
			io.WriteString(w, "\t")
		}
		fmt.Fprint(w, c)
	}
	io.WriteString(w, "\n")
}

// size is n bytes for people.
func size(n uint64) string {
	switch {
	case n >= 10<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 10<<10:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}
