// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench cni: ADD and DEL of CNI plugins.

import (
	"context"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/cni"
	"github.com/mustang-net/mustang/internal/install"
)

func newBenchCNICmd(g *globals) *cobra.Command {
	var o cni.Options
	var file string
	cmd := &cobra.Command{
		Use:   "cni",
		Short: "How long ADD and DEL take, beside the reference CNI plugins",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return benchReport(cmd, g, file, func(ctx context.Context, self string) (*cni.Report, error) {
				o.Binary, o.Log = self, cmd.ErrOrStderr()
				if o.Plugin == "" {
					o.Plugin = filepath.Join(filepath.Dir(self), install.Plugin)
				}
				return cni.Run(ctx, o)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Plugin, "plugin", "", "the CNI plugin (default: "+install.Plugin+" beside this tool)")
	f.StringVar(&o.Reference, "reference", "/usr/lib/cni", "directory of the reference plugins")
	f.StringSliceVar(&o.Contestants, "contestants", nil, "some of: "+strings.Join(cni.Names(), ", ")+" (default: all; "+cni.Base+" always)")
	f.IntVar(&o.Rounds, "rounds", 15, "a claim needs 15")
	f.IntVar(&o.Full, "full-rounds", 2, "rounds that fill a node with 110 pods; a claim about these needs 15")
	f.Uint64Var(&o.Seed, "seed", 1, "of the order of contestants")
	f.StringVar(&file, "json", "", "write every latency to this file")
	return cmd
}
