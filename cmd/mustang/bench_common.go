// SPDX-License-Identifier: Apache-2.0

package main

// What the commands of mustang bench share.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/leftover"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/lab"
)

// benchSelf is this binary, which the labs and loads of a bench run.
func benchSelf() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the mustang binary: %w", err)
	}
	return self, nil
}

// benchLoad is the command that runs the load program.
func benchLoad(self string) []string { return []string{self, "bench-load"} }

// benchStart removes what a killed bench left, and returns a context that ends with
// Ctrl-C: the run then keeps its finished rounds.
func benchStart(cmd *cobra.Command) (context.Context, context.CancelFunc, error) {
	if err := run.NeedsRoot(); err != nil {
		return nil, nil, err
	}
	_, err := lab.GC()
	if err = errors.Join(err, leftover.Sweep()); err != nil {
		return nil, nil, err
	}
	ctx, stop := interruptible(cmd.Context())
	return ctx, stop, nil
}

// benchRender is a bench's report.
type benchRender[R any] interface {
	*R
	Render(io.Writer)
	Empty() bool // nothing of it is finished
}

// benchReport runs a bench, and writes and prints its report, also that of a run that
// was cut short. file is for the report as JSON, "" for none.
func benchReport[R any, P benchRender[R]](cmd *cobra.Command, g *globals, file string, run func(ctx context.Context, self string) (P, error)) error {
	self, err := benchSelf()
	if err != nil {
		return err
	}
	if err := benchWritable("--json", file); err != nil {
		return err
	}
	ctx, stop, err := benchStart(cmd)
	if err != nil {
		return err
	}
	defer stop()
	report, err := run(ctx, self)
	if report == nil {
		return err
	}
	text, encodeErr := json.MarshalIndent(report, "", "  ")
	err = errors.Join(err, encodeErr)
	err = errors.Join(err, benchWrite(file, P(report).Empty(), func(file string) error { return os.WriteFile(file, append(text, '\n'), 0o644) }))
	if g.structured() {
		return errors.Join(err, g.print(cmd.OutOrStdout(), report, nil))
	}
	report.Render(cmd.OutOrStdout())
	return err
}

// benchWrite writes a run's file, "" for none. A run of which nothing is finished leaves
// there what an earlier one has written.
func benchWrite(file string, empty bool, write func(file string) error) error {
	switch {
	case file == "":
		return nil
	case empty:
		return fmt.Errorf("no round was finished: %s stays as it was", file)
	}
	return write(file)
}

// benchWritable says before a run whether the file of a flag can be written.
func benchWritable(flag, file string) error {
	if st, err := os.Stat(file); file == "" || err == nil && !st.Mode().IsRegular() && !st.IsDir() {
		return nil // a pipe, a terminal
	}
	f, err := os.CreateTemp(filepath.Dir(file), filepath.Base(file)+".*")
	if err == nil {
		err = errors.Join(f.Close(), os.Remove(f.Name()))
	}
	if st, statErr := os.Stat(file); statErr == nil && st.IsDir() {
		err = errors.New("is a directory")
	}
	if err != nil {
		return usagef("%s %s: %w; give a file in a directory that can be written to", flag, file, err)
	}
	return nil
}

// benchTerminal says whether a file is a terminal.
func benchTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
