// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/spf13/cobra"

func newLabCmd(g *globals) *cobra.Command { return &cobra.Command{Use: "lab"} }
