// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench services: how soon changes of Services reach packets.

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/services"
	"github.com/mustang-net/mustang/lab"
)

func newBenchServicesCmd(g *globals) *cobra.Command {
	var o services.Options
	var file string
	cmd := &cobra.Command{
		Use:   "services",
		Short: "How soon changes of Services reach packets, by a real API server, beside kube-proxy",
		Long: `Starts etcd and an API server (built by test/kube/kube build; run this inside the
repository) in a lab's node, and each contestant in turn.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find the mustang binary: %w", err)
			}
			o.Binary, o.Log = self, cmd.ErrOrStderr()
			if _, err := lab.GC(); err != nil { // a killed bench's
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
			defer stop()
			report, err := services.Run(ctx, o)
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
	f.StringSliceVar(&o.Contestants, "contestants", services.Contestants, "what to measure")
	f.IntSliceVar(&o.Services, "services", []int{1, 1000, 5000}, "numbers of Services beside the measured one")
	f.IntVar(&o.Endpoints, "endpoints", 50, "of each of them")
	f.IntVar(&o.Rounds, "rounds", 100, "changes of each kind")
	f.StringVar(&file, "json", "", "write every latency to this file")
	return cmd
}
