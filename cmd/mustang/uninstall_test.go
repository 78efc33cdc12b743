// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
)

// What a STATUS that was killed has left is mustang's.
func TestUninstallTakesWhatAKilledStatusLeft(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, ".status-1234"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := removeState(dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("the state directory is still there")
	}
}
