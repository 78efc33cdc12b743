// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench cni: ADD and DEL of CNI plugins.

import (
	"context"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/cni"
<<<<<<< HEAD
=======
	"github.com/mustang-net/mustang/internal/install"
	"github.com/mustang-net/mustang/lab"
>>>>>>> refs/heads/deploy
)

func newBenchCNICmd(g *globals) *cobra.Command {
	var o cni.Options
	var file string
	cmd := &cobra.Command{
		Use:   "cni",
		Short: "How long ADD and DEL take, beside the reference CNI plugins",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
<<<<<<< HEAD
			return benchReport(cmd, g, file, func(ctx context.Context, self string) (*cni.Report, error) {
				o.Binary, o.Log = self, cmd.ErrOrStderr()
				if o.Plugin == "" {
					o.Plugin = filepath.Join(filepath.Dir(self), pluginFile)
				}
				return cni.Run(ctx, o)
			})
=======
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find the mustang binary: %w", err)
			}
			o.Binary, o.Log = self, cmd.ErrOrStderr()
			if o.Plugin == "" {
				o.Plugin = filepath.Join(filepath.Dir(self), install.Plugin)
			}
			if _, err := lab.GC(); err != nil { // a killed bench's
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
			defer stop()
			report, err := cni.Run(ctx, o)
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
>>>>>>> refs/heads/deploy
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Plugin, "plugin", "", "the CNI plugin (default: "+install.Plugin+" beside this tool)")
	f.StringVar(&o.Reference, "reference", "/usr/lib/cni", "directory of the reference plugins")
	f.StringSliceVar(&o.Contestants, "contestants", nil, "some of: "+strings.Join(cni.Names(), ", ")+" (default: all; "+cni.Base+" always)")
	f.IntVar(&o.Rounds, "rounds", 15, "a claim needs 15")
	f.IntVar(&o.Full, "full-rounds", 2, "rounds that fill a node with 110 pods")
	f.Uint64Var(&o.Seed, "seed", 1, "of the order of contestants")
	f.StringVar(&file, "json", "", "write every latency to this file")
	return cmd
}
