// SPDX-License-Identifier: Apache-2.0

package bpfgen

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Programs of another build are replaced by this hash: one that is left behind
// by a merge would leave old programs at work.
func TestObjectsHashIsOfTheseObjects(t *testing.T) {
	files, err := filepath.Glob("*_bpfel.o")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	h := sha256.New()
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(h, "%s %d\n", file, len(text))
		h.Write(text)
	}
	if got := fmt.Sprintf("%x", h.Sum(nil)); got != ObjectsHash {
		t.Errorf("ObjectsHash is %s, and the objects' is %s: run go generate ./internal/...", ObjectsHash, got)
	}
}
