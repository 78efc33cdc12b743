// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench services: how soon changes of Services reach packets.

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/services"
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
			return benchReport(cmd, g, file, func(ctx context.Context, self string) (*services.Report, error) {
				o.Binary, o.Log = self, cmd.ErrOrStderr()
				return services.Run(ctx, o)
			})
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.Contestants, "contestants", services.Contestants, "what to measure")
	f.IntSliceVar(&o.Services, "services", []int{1, 1000, 5000}, "numbers of Services beside the measured one")
	f.IntVar(&o.Endpoints, "endpoints", 50, "of each of them")
	f.IntVar(&o.Rounds, "rounds", 100, "changes of each kind; of what takes long, fewer")
	f.StringVar(&file, "json", "", "write every latency to this file")
	return cmd
}
