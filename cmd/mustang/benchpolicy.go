// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench policy: what NetworkPolicy costs.

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/policy"
	"github.com/mustang-net/mustang/lab"
)

func newBenchPolicyCmd(g *globals) *cobra.Command {
	o := policy.Defaults()
	var file string
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "What NetworkPolicy costs, with few rules and with many, beside nftables",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find the mustang binary: %w", err)
			}
			o.Binary, o.Self, o.Log = self, []string{self, "bench-load"}, cmd.ErrOrStderr()
			if _, err := lab.GC(); err != nil { // a killed bench's
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
			defer stop()
			report, err := policy.Run(ctx, o)
			if report == nil {
				return err
			}
			text, encodeErr := json.MarshalIndent(report, "", "  ")
			err = errors.Join(err, encodeErr)
			if file != "" {
				err = errors.Join(err, os.WriteFile(file, append(text, '\n'), 0o644))
			}
			if g.Output == "json" {
				fmt.Fprintln(cmd.OutOrStdout(), string(text))
			} else {
				report.Render(cmd.OutOrStdout())
			}
			return err
		},
	}
	f := cmd.Flags()
	f.IntSliceVar(&o.Sizes, "sizes", o.Sizes, "numbers of rules, and of addresses in one rule")
	f.IntVar(&o.Pods, "pods", o.Pods, "pods with a policy each; 0 leaves them out")
	f.IntVar(&o.Rounds, "rounds", o.Rounds, "a claim needs 15")
	f.DurationVar(&o.Duration, "duration", o.Duration, "of each sample")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "of the order of samples and of the bootstrap")
	f.StringVar(&file, "json", "", "write every sample to this file")
	return cmd
}
