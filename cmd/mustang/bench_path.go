// SPDX-License-Identifier: Apache-2.0

package main

// mustang bench path: how long a packet's path is.

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/bench/path"
)

// benchPathFlags are path's own flags.
type benchPathFlags struct {
	o                   path.Options
	json, check, update string
}

func newBenchPathCmd(g *globals) *cobra.Command {
	f := benchPathFlags{o: path.Defaults()}
	cmd := &cobra.Command{
		Use:   "path",
		Short: "What a packet costs at each hook of a pod, and a transaction on its whole path",
		Long: `Measure the programs that are attached to a pod's interface, packet by packet:
nanoseconds here; in test/vm/run --icount instructions, and those of whole
transactions too. See docs/bench-path.md.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd, g) },
	}
	fl := cmd.Flags()
	fl.StringSliceVar(&f.o.HookModes, "hooks", f.o.HookModes, "modes whose hooks are measured")
	fl.StringSliceVar(&f.o.Modes, "modes", f.o.Modes, "modes whose transactions are counted; only where the clock counts instructions")
	fl.StringSliceVar(&f.o.PairModes, "pairs", f.o.PairModes, "modes whose transactions between two nodes are counted, there too")
	fl.StringSliceVar(&f.o.ServicesBy, "services-by", f.o.ServicesBy, "what implements Services there; none: pods without mustang")
	fl.IntVar(&f.o.Rounds, "rounds", f.o.Rounds, "samples of each transaction")
	fl.DurationVar(&f.o.Window, "window", f.o.Window, "of a sample, by the emulated clock")
	fl.StringVar(&f.json, "json", "", "write the run to this file")
	fl.StringVar(&f.check, "check", "", "fail when a figure is worse than in this record")
	fl.StringVar(&f.update, "update", "", "write the run to this record; it keeps the parts that were not run")
	cmd.MarkFlagsMutuallyExclusive("check", "update")
	return cmd
}

func (f *benchPathFlags) run(cmd *cobra.Command, g *globals) error {
	self, err := benchSelf()
	if err != nil {
		return err
	}
	if err := benchWritable("--json", f.json); err != nil {
		return err
	}
	f.o.Binary, f.o.Self, f.o.Log = self, benchLoad(self), cmd.ErrOrStderr()
	ctx, stop, err := benchStart(cmd)
	if err != nil {
		return err
	}
	defer stop()
	began := time.Now()
	doc, err := path.Run(ctx, f.o)
	if doc == nil {
		return err
	}
	err = errors.Join(err, benchWrite(f.json, doc.Empty(), doc.Write))
	if g.structured() {
		err = errors.Join(err, g.print(cmd.OutOrStdout(), doc, nil))
	} else {
		doc.Render(cmd.OutOrStdout())
		fmt.Fprintf(cmd.ErrOrStderr(), "took %s\n", time.Since(began).Round(time.Second))
	}
	if err != nil {
		return err
	}
	return f.record(cmd, doc)
}

// record holds the run to its record, or makes that anew.
func (f *benchPathFlags) record(cmd *cobra.Command, doc *path.Document) error {
	if f.update != "" {
		r, err := path.NewRecord(doc)
		if err != nil {
			return err
		}
		old, err := path.ReadRecord(f.update)
		switch {
		case err == nil:
			r.Keep(old)
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
		return r.Write(f.update)
	}
	if f.check == "" {
		return nil
	}
	r, err := path.ReadRecord(f.check)
	if err != nil {
		return err
	}
	return r.Check(doc, cmd.OutOrStdout())
}
