// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A check changes nothing: what it finds wrong once, it finds wrong again.
func TestCheckGeneratedFindsTheSameTwice(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	script, err := os.ReadFile("check-generated")
	if err != nil {
		t.Fatal(err)
	}
	write("scripts/check-generated", string(script))
	write("deploy/tools/go.mod", "module x\n")
	write("internal/datapath/dptest/crc_bpfel_test.go", "old\n")
	write("go", "#!/bin/sh\n[ $1 = run ] || { echo new | tee bpfgen/pod.go >dptest/more_bpfel_test.o; }\n")
	check := func() (string, error) {
		cmd := exec.Command(filepath.Join(root, "scripts/check-generated"))
		cmd.Env = append(os.Environ(), "GO="+filepath.Join(root, "go"))
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	write("internal/datapath/bpfgen/pod.go", "old\n")
	for range 2 {
		if out, err := check(); err == nil || !strings.Contains(out, "make generate") || !strings.Contains(out, "more_bpfel_test.o") {
			t.Errorf("%v: %s", err, out)
		}
	}
	write("internal/datapath/bpfgen/pod.go", "new\n")
	write("internal/datapath/dptest/more_bpfel_test.o", "new\n")
	if out, err := check(); err != nil {
		t.Errorf("what is as it is generated: %v: %s", err, out)
	}
}
