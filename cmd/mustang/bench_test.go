// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/bench/report"
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
