// SPDX-License-Identifier: Apache-2.0

// Package built makes the binaries that tests run.
package built

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const from = "github.com/mustang-net/mustang/cmd/"

// Binary builds cmd/NAME into dir and returns its path, or that of the one which
// the environment's variable names.
func Binary(dir, name, variable string) (string, error) {
	if bin := os.Getenv(variable); bin != "" {
		return bin, nil
	}
	bin := filepath.Join(dir, name)
	build := exec.Command("go", "build", "-o", bin, from+name)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", name, err, out)
	}
	return bin, nil
}

// Declare is called by a test of each package that runs programs made by Binary.
// Go keeps a package's result for as long as what it imports, and what its tests
// read, stays the same; a program that they run is neither. So here the
// directories are read that the programs are made of.
func Declare(t testing.TB, names ...string) {
	t.Helper()
	if os.Getenv("MUSTANG_BIN") != "" || os.Getenv("MUSTANG_CNI_BIN") != "" {
		t.Skip("the programs are given")
	}
	args := []string{"list", "-deps", "-f", "{{with .Module}}{{if .Main}}{{$.Dir}} {{.GoMod}}{{end}}{{end}}"}
	for _, name := range names {
		args = append(args, from+name)
	}
	out, err := exec.Command("go", args...).Output()
	if err != nil {
		t.Fatalf("list what %v are made of: %v", names, err)
	}
	for path := range strings.FieldsSeq(string(out)) {
		info, err := os.Stat(path)
		if err == nil && info.IsDir() {
			_, err = os.ReadDir(path)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
