// SPDX-License-Identifier: Apache-2.0

// Command mustang connects pods and gives them Services.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
)

// globals are the flags that every subcommand shares.
type globals struct {
	BPFFS, StateDir, CgroupRoot, Output string
}

func (g *globals) scope() engine.Scope {
	return engine.Scope{BPFFS: g.BPFFS, StateDir: g.StateDir, CgroupRoot: g.CgroupRoot}
}

// open opens this node's scope. Warnings go to standard error.
func (g *globals) open(ctx context.Context, readOnly bool) (*engine.Engine, error) {
	return engine.Open(ctx, g.scope(), engine.Options{ReadOnly: readOnly, Notify: notify})
}

// with runs fn on the open scope.
func (g *globals) with(ctx context.Context, readOnly bool, fn func(*engine.Engine) error) error {
	e, err := g.open(ctx, readOnly)
	if err != nil {
		return err
	}
	return errors.Join(fn(e), e.Close())
}

func notify(sentence string) { fmt.Fprintln(os.Stderr, "mustang:", sentence) }

// usageError is wrong usage: exit status 2.
type usageError struct{ error }

func (usageError) ExitCode() int   { return 2 }
func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

func newRootCmd() *cobra.Command {
	g := &globals{}
	root := &cobra.Command{
		Use:           "mustang",
		Short:         "An eBPF pod network",
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return g.checkOutput()
		},
	}
	f := root.PersistentFlags()
	f.StringVar(&g.BPFFS, "bpffs", engine.DefaultBPFFS, "directory for pinned tables, programs and links; one for each node on this machine")
	f.StringVar(&g.StateDir, "state-dir", engine.DefaultStateDir, "directory for what tables cannot hold; one for each node on this machine")
	f.StringVar(&g.CgroupRoot, "cgroup-root", "", "cgroup2 directory whose sockets get Services (default: where cgroup2 is mounted)")
	f.StringVarP(&g.Output, "output", "o", "table", "table, json or yaml; wide for more columns")
	root.AddCommand(newSvcCmd(g), newEpCmd(g), newStatusCmd(g), newResetCmd(g), newPodCmd(g), newNodeCmd(g), newLabCmd(g),
		newBenchCmd(g), newBenchLoadCmd(), newInstallCNICmd(g), newUninstallCNICmd(g))
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w; `%s --help` lists the flags", err, cmd.CommandPath())
	})
	return root
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	err := newRootCmd().ExecuteContext(ctx)
	stop()
	if err == nil {
		return
	}
	// Several errors come joined by newlines: one line each.
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Fprintln(os.Stderr, "mustang:", line)
	}
	os.Exit(exitCode(err))
}

// exitCode is 2 for wrong usage, else 1.
func exitCode(err error) int {
	var code interface{ ExitCode() int }
	if errors.As(err, &code) && code.ExitCode() > 0 {
		return code.ExitCode()
	}
	// cobra's own complaints about the command line have no type.
	for _, prefix := range []string{"unknown command", "required flag", "accepts ", "requires ", "if any flags in the group"} {
		if strings.HasPrefix(err.Error(), prefix) {
			return 2
		}
	}
	return 1
}
