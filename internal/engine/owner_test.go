// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"os"
	"strings"
	"testing"
)

// In a bpffs that is mounted without a mode everybody may make directories.
func TestPinsAreNotPutIntoAnotherUsersDirectory(t *testing.T) {
	n := newNode(t)
	if err := os.Mkdir(n.scope.BPFFS, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(n.scope.BPFFS, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	e, err := Open(context.Background(), n.scope, n.opts)
	if err == nil {
		e.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "belongs to user 65534") {
		t.Errorf("opened: %v", err)
	}
	if err := os.Remove(n.scope.BPFFS); err != nil {
		t.Error(err)
	}
}
