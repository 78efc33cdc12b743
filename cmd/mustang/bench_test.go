// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/seed"
)

func TestBenchShowPrintsYAML(t *testing.T) {
	file := filepath.Join(t.TempDir(), "run.json")
	if err := (&report.Document{Schema: report.Schema}).Write(file); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	root := newRootCmd()
	root.SetArgs([]string{"bench", "show", file, "-o", "yaml"})
	root.SetOut(&out)
	if err := root.Execute(); err != nil || !strings.Contains(out.String(), "\nschema: "+report.Schema+"\n") {
		t.Errorf("%v: %s", err, out.String())
	}
}

// nothing is the report of a bench that was cut short.
type nothing struct{ empty bool }

func (nothing) Render(io.Writer) {}
func (n nothing) Empty() bool    { return n.empty }

func TestARunWithoutARoundLeavesTheFile(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	file := filepath.Join(t.TempDir(), "run.json")
	unfinished := &report.Bundle{Runs: []*report.Document{{Schema: report.Schema, Samples: []runner.Sample{}}}}
	for name, write := range map[string]func(empty bool) error{
		"a file of its own": func(empty bool) error {
			cmd := newRootCmd()
			cmd.SetContext(t.Context())
			return benchReport(cmd, &globals{}, file, func(context.Context, string) (*nothing, error) { return &nothing{empty}, nil })
		},
		"articles": func(empty bool) error {
			if empty {
				return seedFlags{json: file}.write(unfinished)
			}
			whole := &report.Document{Schema: report.Schema, Samples: []runner.Sample{{Round: 1}}}
			return seedFlags{json: file}.write(&report.Bundle{Runs: []*report.Document{whole}})
		},
	} {
		if err := os.WriteFile(file, []byte("earlier"), 0o644); err != nil {
			t.Fatal(err)
		}
		err := write(true)
		if text, _ := os.ReadFile(file); err == nil || !strings.Contains(err.Error(), file+" stays as it was") || string(text) != "earlier" {
			t.Errorf("%s: %v; the file has %s", name, err, text)
		}
		err = write(false)
		if text, _ := os.ReadFile(file); err != nil || string(text) == "earlier" {
			t.Errorf("%s with a round: %v; the file has %s", name, err, text)
		}
	}
}

func TestSeedDoesNotWriteOverOtherArticles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "seeds.json")
	d := &report.Document{Schema: report.Schema, Settings: report.Settings{Article: "A"}, Samples: []runner.Sample{{Round: 1}}}
	if err := d.Write(file); err != nil {
		t.Fatal(err)
	}
	f := seedFlags{json: file}
	for name, want := range map[string]bool{"A": true, "B": false} {
		a, err := seed.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.others([]seed.Article{a}); (err == nil) != want || err != nil && !strings.Contains(err.Error(), "--resume "+file) {
			t.Errorf("seed %s: %v", name, err)
		}
	}
}

// What would be passed over is refused, before anything runs.
func TestBenchRefusesFlagsThatItWouldIgnore(t *testing.T) {
	file := filepath.Join(t.TempDir(), "seeds.json")
	d := &report.Document{Schema: report.Schema, Settings: report.Settings{Article: "B"}, Samples: []runner.Sample{{Round: 1}}}
	if err := d.Write(file); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"seed B --from " + file + " --budget 5m": "budget from",
		"advise --from " + file + " --budget 5m": "budget from",
		"advise --from " + file + " --json x":    "from json",
		"path --check a --update b":              "check update",
		"seed B --html /nowhere/page.html":       "--html /nowhere/page.html",
		"seed B --resume " + file + " --quick":   "--quick: the run of seed B in " + file,
	} {
		root := newRootCmd()
		root.SetArgs(append([]string{"bench"}, strings.Fields(line)...))
		root.SetOut(io.Discard)
		root.SetErr(io.Discard)
		if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) || exitCode(err) != 2 {
			t.Errorf("bench %s: %v, want %q", line, err, want)
		}
	}
}
