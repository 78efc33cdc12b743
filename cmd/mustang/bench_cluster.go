// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench cluster: pods and Services of an existing Kubernetes.

import (
	"errors"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/cluster"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
)

func newBenchClusterCmd(g *globals) *cobra.Command {
	o, file := cluster.Defaults(), ""
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Pods and Services of an existing Kubernetes, whatever its network, beside its nodes",
		Long: `Make pods on two nodes of a cluster, in a namespace of their own, and measure
streams, request/response and connections between them: on one node and from node
to node, by pod IP and by ClusterIP, as ratios to node to node. The namespace goes
when the run ends. Pods are privileged, and some are in the nodes' network.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := benchWritable("--json", file); err != nil {
				return err
			}
			if file != "" {
				o.Keep = func(d *report.Document) error { return d.Write(file) }
			}
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			doc, err := cluster.Run(ctx, o, run.Log{W: cmd.ErrOrStderr(), Terminal: benchTerminal(os.Stderr)})
			if doc == nil {
				return err
			}
			return errors.Join(benchPrint(cmd, g.Output, doc), err, benchWrite(file, doc.Empty(), doc.Write))
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&o.Kubeconfig, "kubeconfig", "", "of an administrator (default: where kubectl looks)")
	fl.StringVar(&o.Image, "image", o.Image, "an image with mustang; with --host-binary, any")
	fl.StringVar(&o.HostBinary, "host-binary", "", "path of mustang on the nodes, for an image that has none")
	fl.IntVar(&o.Rounds, "rounds", o.Rounds, "a claim needs 15")
	fl.DurationVar(&o.Budget, "budget", 0, "instead of --rounds: as many as fit into this time, 5m")
	fl.DurationVar(&o.Duration, "duration", o.Duration, "of each sample")
	fl.Uint64Var(&o.Seed, "seed", o.Seed, "of the order of samples and of the bootstrap")
	fl.StringVar(&file, "json", "", "write every raw round to this file, after each round")
	return cmd
}

// newBenchAgentCmd runs in the cluster's pods.
func newBenchAgentCmd() *cobra.Command {
	var listen string
	cmd := &cobra.Command{
		Use: "agent", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			self, err := benchSelf()
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
			defer stop()
			return cluster.Serve(ctx, listen, os.Getenv(cluster.SecretVariable), benchLoad(self))
		},
	}
	cmd.Flags().StringVar(&listen, "listen", ":25211", "address and port")
	return cmd
}
