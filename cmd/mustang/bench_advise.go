// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench advise: which way of connecting pods suits this node.

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/advise"
	"github.com/mustang-net/mustang/bench/report"
)

func newBenchAdviseCmd(g *globals) *cobra.Command {
	var need, file, from string
	var firewall bool
	var budget time.Duration
	cmd := &cobra.Command{
		Use:   "advise",
		Short: "Time what this node offers for a need, and recommend a way of connecting pods",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o, err := advise.Options(advise.Need(need))
			if err != nil {
				return usageError{err}
			}
			var doc *report.Document
			if from != "" {
				if doc, err = report.Read(from); err != nil {
					return err
				}
				doc.Compute()
			} else {
				o.Budget = budget
				if doc, err = benchRun(cmd, &globals{Output: "table"}, o, file); doc == nil {
					return err
				}
			}
			a := advise.Of(doc, advise.Need(need), firewall)
			if from != "" && a.Advised == nil && len(a.Others) == 0 {
				return usagef("--from %s has no way by ClusterIP that was measured for %s: give a run of the same need", from, need)
			}
			if g.structured() {
				return errors.Join(err, g.print(cmd.OutOrStdout(), a, nil))
			}
			a.Render(cmd.OutOrStdout())
			return err
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&need, "need", string(advise.Latency), fmt.Sprintf("what pods are to be good at: one of %v", advise.Needs))
	fl.BoolVar(&firewall, "host-firewall", false, "rules in the host's FORWARD chain must see traffic between pods")
	fl.DurationVar(&budget, "budget", 3*time.Minute, "as many rounds as fit into this time; a claim needs 15")
	fl.StringVar(&file, "json", "", "write every raw round to this file, after each round")
	fl.StringVar(&from, "from", "", "advise by this file of an earlier run instead of running")
	cmd.MarkFlagsMutuallyExclusive("from", "budget")
	cmd.MarkFlagsMutuallyExclusive("from", "json")
	return cmd
}
