// SPDX-License-Identifier: Apache-2.0

package leftover

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func TestTemporaryFilesOfKilledRunsGo(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(os.TempDir(), fmt.Sprintf("%s%d-nginx-1234", tempPrefix, dead.ProcessState.Pid()))
	mine, err := TempDir("nginx")
	if err != nil {
		t.Fatal(err)
	}
	others := filepath.Join(os.TempDir(), tempPrefix+"notes")
	for _, dir := range []string{left, others} {
		if err := os.MkdirAll(filepath.Join(dir, "logs"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := Sweep(); err != nil {
		t.Fatal(err)
	}
	for dir, stays := range map[string]bool{left: false, mine: true, others: true} {
		if _, err := os.Stat(dir); (err == nil) != stays {
			t.Errorf("%s stays: %v, want %v", dir, err == nil, stays)
		}
	}
}
