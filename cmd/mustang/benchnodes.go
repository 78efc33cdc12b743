// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench nodes: pods on two nodes.

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

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
			return benchReport(cmd, g, file, func(ctx context.Context, self string) (*nodes.Report, error) {
				o.Binary, o.Self, o.Log, o.Terminal = self, benchLoad(self), cmd.ErrOrStderr(), benchTerminal(os.Stderr)
				return nodes.Run(ctx, o)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Mode, "mode", o.Mode, fmt.Sprintf("how pods are connected: one of %v", lab.Modes))
	f.IntVar(&o.Rounds, "rounds", o.Rounds, "a claim needs 15")
	f.DurationVar(&o.Duration, "duration", o.Duration, "of each sample")
	f.StringVar(&o.Cores, "cores", o.Cores, "client and server on the same core, or across two: same or cross")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "of the order of samples and of the bootstrap")
	f.IntSliceVar(&o.Sizes, "sizes", nil, "bytes of a message: streams and RR of each, as 64,256,1024,4096,16384,65536 (default: the loads' own, with CRR)")
	f.IntVar(&o.Flows, "flows", o.Flows, "connections at once, each with a thread at either end")
	f.BoolVar(&o.IPv6, "ipv6", false, "over IPv6")
	f.IntVar(&o.MTU, "mtu", o.MTU, "of the wire and the pods, in bytes")
	f.IntVar(&o.BigTCP, "big-tcp", 0, "bundle TCP segments to this many bytes, on all wires and in pods; 0: the kernel's 65536")
	f.StringVar(&file, "json", "", "write every raw round to this file")
	return cmd
}
