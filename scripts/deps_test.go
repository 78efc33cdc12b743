// SPDX-License-Identifier: Apache-2.0

// Package scripts tests what the Makefile calls.
package scripts

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// An old Go is told from one that go.mod takes, before anything is installed or built.
func TestDepsSaysWhichGoIsNeeded(t *testing.T) {
	mod, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	needed := strings.Fields(string(mod[strings.Index(string(mod), "\ngo "):]))[1]
	for version, enough := range map[string]bool{"go1.19.8": false, "": false, "go" + needed: true, "go1.100.1": true} {
		dir := t.TempDir()
		script := "#!/bin/sh\n[ -n '" + version + "' ] && echo " + version + "\n"
		for _, name := range []string{"go", "iperf3", "iptables-nft", "nft"} { // nothing is missing
			if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command("./deps", "run")
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		if (err == nil) != enough || !enough && !strings.Contains(string(out), "needs Go "+needed+" or newer") {
			t.Errorf("%q: %v: %s", version, err, out)
		}
	}
}

// sudo's PATH is not the user's.
func TestMakeFindsGoWhereItsInstructionsPutIt(t *testing.T) {
	cmd := exec.Command("make", "-s", "-f", "Makefile", "-f", "-", "where")
	cmd.Dir, cmd.Env = "..", []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Stdin = strings.NewReader("where:\n\t@echo $$PATH\n")
	if out, err := cmd.CombinedOutput(); err != nil || !strings.HasSuffix(strings.TrimSpace(string(out)), ":/usr/local/go/bin") {
		t.Errorf("%v: %s", err, out)
	}
}
