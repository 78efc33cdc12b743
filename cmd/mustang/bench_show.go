// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench show and compare: what the files of --json say.

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/report"
)

func newBenchShowCmd(g *globals) *cobra.Command {
	var csv, page string
	cmd := &cobra.Command{
		Use:   "show FILE",
		Short: "Print the report of a file that --json wrote, recomputed from its rounds",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			doc, err := report.Read(args[0])
			if err != nil {
				return err
			}
			doc.Compute()
			for _, out := range []struct {
				path  string
				write func(io.Writer) error
			}{{csv, doc.WriteCSV}, {page, doc.WriteHTML}} {
				if out.path == "" {
					continue
				}
				if err := benchFile(out.path, out.write); err != nil {
					return err
				}
			}
			if csv != "" || page != "" {
				return nil
			}
			return benchPrint(cmd, g.Output, doc)
		},
	}
	cmd.Flags().StringVar(&csv, "csv", "", "write all figures to this file instead, one a line")
	cmd.Flags().StringVar(&page, "html", "", "write the report to this file instead, as one page that needs nothing else")
	return cmd
}

func newBenchCompareCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "compare OLD NEW",
		Short: "What became faster or slower between two files that --json wrote",
		Long: `Compare every ratio to loopback that two runs have: faster, slower, the same
within 3 %, or not shown. Exit status is not 0 when anything became slower.`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			var docs [2]*report.Document
			for i, path := range args {
				doc, err := report.Read(path)
				if err != nil {
					return err
				}
				doc.Compute()
				docs[i] = doc
			}
			c := report.Compare(docs[0], docs[1])
			if g.Output == "json" {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", " ")
				if err := e.Encode(c); err != nil {
					return fmt.Errorf("encode comparison: %w", err)
				}
			} else {
				c.Render(cmd.OutOrStdout(), benchTerminal(os.Stdout))
			}
			if n := c.Count(report.Slower); n > 0 {
				return fmt.Errorf("%d figures became slower", n)
			}
			return nil
		},
	}
}

func benchFile(path string, write func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	if err := write(f); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
