// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"os/exec"
	"testing"
)

// Others change the node's firewall while its chains are listed: the kernel says then that
// the list may lack something, and it is taken again.
func TestChainsAreListedWhileOthersChangeThem(t *testing.T) {
	n := newNode(t)
	n.run("%s", `nft add table ip many; for i in $(seq 400); do echo add chain ip many c$i; done | nft -f -`)
	others := exec.Command("sh", "-c", `while nft add table ip t && nft delete table ip t; do :; done`)
	if err := others.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = others.Process.Kill(), others.Wait() }()
	failed := 0
	for range 300 {
		if _, err := Firewall(); err != nil {
			failed++
			t.Log(err)
		}
	}
	if failed > 0 {
		t.Errorf("%d of 300 lists failed", failed)
	}
}
