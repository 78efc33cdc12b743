// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Each command that --help shows has a row in docs/cli.md.
func TestDocsHaveEachCommand(t *testing.T) {
	text, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile("(?m)^\\| `.*$").FindAllString(string(text), -1)
	root := newRootCmd()
	var look func(c *cobra.Command)
	look = func(c *cobra.Command) {
		names := strings.Fields(c.CommandPath())[1:]
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() && sub.Name() != "help" && sub.Name() != "completion" {
				look(sub)
			}
		}
		if len(names) == 0 {
			return
		}
		last := regexp.MustCompile(`\b` + regexp.QuoteMeta(names[len(names)-1]) + `\b`)
		for _, row := range rows {
			cell := strings.SplitN(strings.ReplaceAll(row, `\|`, " "), "|", 3)[1] // the commands
			if strings.Contains(cell, "`"+names[0]) && last.MatchString(cell) {
				return
			}
		}
		t.Errorf("docs/cli.md has no row for `mustang %s`", strings.Join(names, " "))
	}
	look(root)
}
