// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/internal/engine"
)

func newResetCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "reset",
		Short: "Remove every trace of mustang from this node: programs, tables, Services, endpoints",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// Pods that pod add made keep their records: pod rm takes them away.
			if err := newPodStore(g.StateDir).Drop(); err != nil {
				return err
			}
			return engine.Reset(cmd.Context(), g.scope(), g.notify)
		},
	}
}
