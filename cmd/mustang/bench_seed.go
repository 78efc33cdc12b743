// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench seed: an article's table and claims on this machine.

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/samehost"
	"github.com/mustang-net/mustang/bench/seed"
	"github.com/mustang-net/mustang/lab"
)

func newBenchSeedCmd(g *globals) *cobra.Command {
	var quick bool
	var budget time.Duration
	var file, from string
	cmd := &cobra.Command{
		Use:   "seed A",
		Short: "An article's table on this machine, with a verdict on each of its claims",
		Long: `Reproduce a table of the articles that mustang is built from, as ratios beside
the article's, and judge its claims: confirmed, not confirmed, or why neither.
A: pods on one host, every way to connect them, by pod IP and by ClusterIP.`,
		Args:      cobra.ExactArgs(1),
		ValidArgs: []string{"A"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] != "A" {
				return fmt.Errorf("seed %s: this version has A only", args[0])
			}
			var doc *report.Document
			var err error
			if from != "" {
				if doc, err = report.Read(from); err != nil {
					return err
				}
				doc.Compute()
			} else if doc, err = seedRun(cmd, seed.OptionsA(quick), budget, file); doc == nil {
				return err
			}
			claims := seed.A(doc)
			if g.Output == "json" {
				text, encodeErr := json.MarshalIndent(claims, "", " ")
				fmt.Fprintln(cmd.OutOrStdout(), string(text))
				return errors.Join(err, encodeErr)
			}
			seed.Render(cmd.OutOrStdout(), args[0], claims)
			return err
		},
	}
	fl := cmd.Flags()
	fl.BoolVar(&quick, "quick", false, "a look; too few rounds for verdicts on ratios")
	fl.DurationVar(&budget, "budget", 0, "as many rounds as fit into this time, instead of 20")
	fl.StringVar(&file, "json", "", "write every raw round to this file, after each round")
	fl.StringVar(&from, "from", "", "judge by this file of an earlier run instead of running")
	return cmd
}

// seedRun measures, with streams by iperf3, the article's own tool, where it is.
func seedRun(cmd *cobra.Command, o samehost.Options, budget time.Duration, file string) (*report.Document, error) {
	if _, err := runner.Iperf3Version(); err != nil {
		o.StreamBy = samehost.StreamOwn
		fmt.Fprintln(cmd.ErrOrStderr(), "no iperf3, the article's tool: install the package iperf3; streams are the load program's")
	}
	o.Budget = budget
	if _, err := lab.GC(); err != nil { // a killed bench's
		return nil, err
	}
	return benchRun(cmd, &globals{Output: "table"}, o, file)
}
