// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench nodes: pods on two nodes.

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/nodes"
	"github.com/mustang-net/mustang/lab"
)

func newBenchNodesCmd(g *globals) *cobra.Command {
	o := nodes.Defaults()
	var file string
	cmd := &cobra.Command{
		Use:   "nodes",
		Short: "Pods on two nodes: direct and VXLAN, by eBPF and by the kernel, beside bare namespaces",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find the mustang binary: %w", err)
			}
			o.Binary, o.Self, o.Log, o.Terminal = self, []string{self, "bench-load"}, cmd.ErrOrStderr(), benchTerminal(os.Stderr)
			if _, err := lab.GC(); err != nil { // a killed bench's
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
			defer stop()
			report, err := nodes.Run(ctx, o)
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
	f.StringVar(&o.Mode, "mode", o.Mode, fmt.Sprintf("how pods are connected: one of %v", lab.Modes))
	f.IntVar(&o.Rounds, "rounds", o.Rounds, "a claim needs 15")
	f.DurationVar(&o.Duration, "duration", o.Duration, "of each sample")
	f.StringVar(&o.Cores, "cores", o.Cores, "client and server on the same core, or across two: same or cross")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "of the order of samples and of the bootstrap")
	f.BoolVar(&o.IPv6, "ipv6", false, "over IPv6")
	f.IntVar(&o.MTU, "mtu", o.MTU, "of the wire and the pods, in bytes")
	f.StringVar(&file, "json", "", "write every raw round to this file")
	return cmd
}
