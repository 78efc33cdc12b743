// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/internal/observe"
)

func newWhyCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "why SRC DST[:PORT[/tcp|udp|sctp]]",
		Short: "Would a packet pass now, and if not, what stops it?",
		Long: `Would a new flow from SRC to DST pass now, and if not, what stops it and what is
the smallest change that would let it? The enforcing programs answer, in a dry
run: nothing is sent, and no table changes. SRC and DST are pods (namespace/name),
endpoint ids or addresses; without a port, an echo request is asked about.`,
		Example: `  mustang why shop/web-0 shop/db-0:5432
  mustang why shop/web-0 10.96.0.10:53/udp
  mustang why 192.0.2.7 '[fd00:10:1::4]:8080'`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := observe.CheckEnds(args[0], args[1]); err != nil {
				return usageError{err}
			}
			n, err := observe.Open(g.BPFFS, g.StateDir)
			if err != nil {
				return err
			}
			answers, err := n.Why(args[0], args[1])
			if err := errors.Join(err, n.Close()); err != nil {
				return err
			}
			return g.print(cmd.OutOrStdout(), answers, func(w io.Writer) {
				for _, a := range answers {
					io.WriteString(w, a.Text())
				}
			})
		},
	}
}
