// SPDX-License-Identifier: Apache-2.0

// Command mustang connects pods and gives them Services.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
)

// globals are the flags that every subcommand shares.
type globals struct {
	BPFFS, StateDir, CgroupRoot, Output string

	// In an agent that runs a call of the tool:
	shared   *engine.Engine    // the agent's
	files    map[string][]byte // what the tool has read; also in a tool that has asked an agent in vain
	dir      string            // where the tool was called
	warnings io.Writer         // the tool's standard error
	left     func() error      // to do when others may have the engine again
}

// after does what takes long and needs no engine: in an agent when others may have it again.
func (g *globals) after(fn func() error) error {
	if g.shared == nil {
		return fn()
	}
	g.left = fn
	return nil
}

func (g *globals) scope() engine.Scope {
	return engine.Scope{BPFFS: g.BPFFS, StateDir: g.StateDir, CgroupRoot: g.CgroupRoot}
}

// open opens this node's scope. Warnings go to standard error.
func (g *globals) open(ctx context.Context, readOnly bool) (*engine.Engine, error) {
	if g.shared != nil {
		return g.shared.Lend(g.notify), nil
	}
	return engine.Open(ctx, g.scope(), engine.Options{ReadOnly: readOnly, Notify: g.notify})
}

// with runs fn on the open scope.
func (g *globals) with(ctx context.Context, readOnly bool, fn func(*engine.Engine) error) error {
	e, err := g.open(ctx, readOnly)
	if err != nil {
		return err
	}
	return errors.Join(fn(e), e.Abandon())
}

func (g *globals) notify(sentence string) { fmt.Fprintln(g.warnings, "mustang:", sentence) }

// usageError is wrong usage: exit status 2.
type usageError struct{ error }

func (usageError) ExitCode() int   { return 2 }
func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// version is set where a release is built.
var version = "dev"

func newRootCmd() *cobra.Command { return newRoot(&globals{warnings: os.Stderr}) }

func newRoot(g *globals) *cobra.Command {
	root := &cobra.Command{
		Use:           "mustang",
		Short:         "An eBPF pod network",
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, args []string) error {
			if cmd.HasSubCommands() {
				return nil // only tells what there is
			}
			if err := g.checkOutput(); err != nil {
				return err
			}
			if info, err := os.Stat(g.StateDir); errors.Is(err, unix.ENOTDIR) || err == nil && !info.IsDir() {
				return usagef("--state-dir: %s is no directory; name one, or what is to be one", g.StateDir)
			}
			return g.delegate(cmd, args)
		},
	}
	f := root.PersistentFlags()
	f.StringVar(&g.BPFFS, "bpffs", fromEnv("MUSTANG_BPFFS", engine.DefaultBPFFS), "directory for pinned tables, programs and links; one for each node on this machine")
	f.StringVar(&g.StateDir, "state-dir", fromEnv("MUSTANG_STATE_DIR", engine.DefaultStateDir), "directory for what tables cannot hold; one for each node on this machine")
	f.StringVar(&g.CgroupRoot, "cgroup-root", fromEnv("MUSTANG_CGROUP_ROOT", ""), "cgroup2 directory whose sockets get Services (default: where cgroup2 is mounted)")
	f.StringVarP(&g.Output, "output", "o", "table", "table, json or yaml; wide for more columns")
	root.AddCommand(newSvcCmd(g), newEdgeCmd(g), newPolicyCmd(g), newEpCmd(g), newStatusCmd(g), newObserveCmd(g), newWhyCmd(g), newResetCmd(g), newPodCmd(g), newNodeCmd(g), newLabCmd(g),
		newBenchCmd(g), newBenchLoadCmd(), newInstallCNICmd(g), newUninstallCNICmd(g), newAgentCmd(g), newConnectivityCmd(g), newSysdumpCmd(g), newUninstallCmd(g))
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	refuseUnknown(root)
	help, _, _ := root.Find([]string{"help"})
	help.Args = func(_ *cobra.Command, args []string) error {
		about, rest, _ := root.Find(args)
		return unknown(about, rest)
	}
	root.SetFlagErrorFunc(flagError)
	return root
}

// refuseUnknown has groups of commands refuse a name that is none of theirs: cobra
// tells what there is, with success. Commands say what they take.
func refuseUnknown(root *cobra.Command) {
	for _, group := range root.Commands() {
		refuseUnknown(group)
	}
	if !root.HasSubCommands() || root.Runnable() {
		refuseArgs(root)
		return
	}
	root.DisableFlagsInUseLine = true
	root.Args = unknown
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
}

// unknown refuses a name that is none of a group's.
func unknown(group *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case args[0] == "version":
		return usagef("`%s --version` tells the version", group.Root().Name())
	}
	group.SuggestionsMinimumDistance = 2
	like := ""
	for _, name := range group.SuggestionsFor(args[0]) {
		like += fmt.Sprintf(", as `%s %s`", group.CommandPath(), name)
	}
	return usagef("unknown command %q for %q; `%s --help` lists those that exist%s", args[0], group.CommandPath(), group.CommandPath(), like)
}

// fromEnv is a flag's default: the environment's word, else ours. A container
// says by it where its agent's scope is, so that each tool in it finds that.
func fromEnv(name, otherwise string) string { return cmp.Or(os.Getenv(name), otherwise) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	context.AfterFunc(ctx, stop) // a second one ends the process at once
	err := newRootCmd().ExecuteContext(ctx)
	stop()
	if by := (answered{}); errors.As(err, &by) {
		_, err := os.Stdout.Write(by.Out)
		os.Stderr.Write(by.Err)
		os.Exit(max(by.Code, tell(os.Stderr, err)))
	}
	if code := tell(os.Stderr, err); code != 0 {
		os.Exit(code)
	}
}

// input is a command's standard input, for who reads all of it.
func input(cmd *cobra.Command) io.Reader { return interruptibleReader{cmd.Context(), cmd.InOrStdin()} }

// interruptibleReader is a reader that waits no longer than its context.
type interruptibleReader struct {
	ctx context.Context
	r   io.Reader
}

func (i interruptibleReader) Read(p []byte) (int, error) {
	type result struct {
		n   int
		err error
	}
	done := make(chan result, 1)
	room := make([]byte, len(p)) // p is the caller's again when this returns
	go func() {
		n, err := i.r.Read(room)
		done <- result{n, err}
	}()
	select {
	case r := <-done:
		return copy(p, room[:r.n]), r.err
	case <-i.ctx.Done():
		return 0, errors.New("interrupted")
	}
}

// tell reports an error, and answers the exit status that goes with it.
func tell(w io.Writer, err error) int {
	if err == nil {
		return 0
	}
	// Several errors come joined by newlines: one line each.
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Fprintln(w, "mustang:", line)
	}
	return exitCode(err)
}

// exitCode is 2 for wrong usage, else 1. What a program that we ran ended with is not
// ours, but for lab run's.
func exitCode(err error) int {
	var code interface{ ExitCode() int }
	if errors.As(err, &code) && code.ExitCode() > 0 {
		if _, others := code.(*exec.ExitError); !others {
			return code.ExitCode()
		}
	}
	// cobra's own complaints about flags have no type.
	for _, prefix := range []string{"required flag", "if any flags in the group"} {
		if strings.HasPrefix(err.Error(), prefix) {
			return 2
		}
	}
	return 1
}
