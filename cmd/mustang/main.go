// SPDX-License-Identifier: Apache-2.0

// Command mustang connects pods and gives them Services.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
)

// globals are the flags that every subcommand shares.
type globals struct {
	BPFFS, StateDir, CgroupRoot, Output string
}

func main() {
	g := &globals{}
	root := &cobra.Command{Use: "mustang", Short: "An eBPF pod network", SilenceUsage: true, SilenceErrors: true}
	f := root.PersistentFlags()
	f.StringVar(&g.BPFFS, "bpffs", "/sys/fs/bpf/mustang", "directory for pinned maps and links")
	f.StringVar(&g.StateDir, "state-dir", "/run/mustang", "directory for what maps cannot hold")
	f.StringVar(&g.CgroupRoot, "cgroup-root", "", "cgroup v2 directory whose sockets are ours (default: found in /proc/mounts)")
	f.StringVarP(&g.Output, "output", "o", "table", "table, json or yaml")
	root.AddCommand(newPodCmd(g), newLabCmd(g), newBenchCmd(g), newBenchLoadCmd())
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "mustang:", err)
		var code interface{ ExitCode() int }
		if errors.As(err, &code) && code.ExitCode() > 0 {
			os.Exit(code.ExitCode())
		}
		os.Exit(1)
	}
}
