// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench policy: what NetworkPolicy costs.

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/policy"
)

func newBenchPolicyCmd(g *globals) *cobra.Command {
	o := policy.Defaults()
	var file string
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "What NetworkPolicy costs, with few rules and with many, beside nftables",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return benchReport(cmd, g, file, func(ctx context.Context, self string) (*policy.Report, error) {
				o.Binary, o.Self, o.Log = self, benchLoad(self), cmd.ErrOrStderr()
				return policy.Run(ctx, o)
			})
		},
	}
	f := cmd.Flags()
	f.IntSliceVar(&o.Sizes, "sizes", o.Sizes, "numbers of rules, and of addresses in one rule")
	f.IntSliceVar(&o.Pods, "pods", o.Pods, "numbers of pods with a policy each")
	f.IntVar(&o.Rounds, "rounds", o.Rounds, "a claim needs 15")
	f.DurationVar(&o.Duration, "duration", o.Duration, "of each sample")
	f.IntVar(&o.Turns, "turns", o.Turns, "of each sample: contestants take turns")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "of the order of samples and of the bootstrap")
	f.StringVar(&file, "json", "", "write every sample to this file")
	return cmd
}
