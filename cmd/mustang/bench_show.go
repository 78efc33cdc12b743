// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench show and compare: what the files of --json say.

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/seed"
)

func newBenchShowCmd(g *globals) *cobra.Command {
	var csv, page, svg string
	cmd := &cobra.Command{
		Use:   "show FILE",
		Short: "Print the report of a file that --json wrote, recomputed from its rounds",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			b, err := benchRead(args[0])
			if err != nil {
				return err
			}
			for _, out := range []struct {
				path  string
				write func(io.Writer) error
			}{{csv, b.WriteCSV}, {page, b.WriteHTML}} {
				if out.path == "" {
					continue
				}
				if err := benchFile(out.path, out.write); err != nil {
					return err
				}
			}
			if svg != "" {
				return benchFlames(svg, b)
			}
			if csv != "" || page != "" {
				return nil
			}
			if g.structured() {
				return g.print(cmd.OutOrStdout(), b.Whole(), nil)
			}
			b.Render(cmd.OutOrStdout(), benchTerminal(os.Stdout))
			return nil
		},
	}
	cmd.Flags().StringVar(&csv, "csv", "", "write all figures to this file instead, one a line")
	cmd.Flags().StringVar(&page, "html", "", "write the report to this file instead, as one page that needs nothing else")
	cmd.Flags().StringVar(&svg, "svg", "", "write the flame graphs into this directory instead, a file each")
	return cmd
}

// benchRead reads a file of one run or several, and recomputes all that it says.
func benchRead(path string) (*report.Bundle, error) {
	b, err := report.ReadAny(path)
	if err != nil {
		return nil, err
	}
	b.Compute()
	for _, d := range b.Runs {
		seed.Judge(d)
	}
	return b, nil
}

// benchFlames writes all flame graphs of a file.
func benchFlames(dir string, b *report.Bundle) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write flame graphs: %w", err)
	}
	for _, d := range b.Runs {
		for _, p := range d.Profiles {
			if p.Stack == nil {
				continue
			}
			name := strings.TrimPrefix(d.Settings.Article+"-"+p.FileName()+".svg", "-")
			if err := benchFile(filepath.Join(dir, name), p.WriteSVG); err != nil {
				return err
			}
		}
	}
	return nil
}

func newBenchCompareCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "compare OLD NEW",
		Short: "What became faster or slower between two files that --json wrote",
		Long: `Compare every ratio that the old run has: faster, slower, the same within 3 %, not
shown, or gone. Exit status is not 0 when anything became slower or is gone.`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			var files [2]*report.Bundle
			for i, path := range args {
				var err error
				if files[i], err = benchRead(path); err != nil {
					return err
				}
			}
			c := report.CompareAll(files[0], files[1])
			if g.structured() {
				if err := g.print(cmd.OutOrStdout(), c, nil); err != nil {
					return err
				}
			} else {
				c.Render(cmd.OutOrStdout(), benchTerminal(os.Stdout))
			}
			if slower, gone := c.Count(report.Slower), c.Count(report.Gone); slower+gone > 0 {
				return fmt.Errorf("%d figures became slower, %d are gone", slower, gone)
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
