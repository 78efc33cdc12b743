// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
)

// Who flushes all of nftables takes the masquerade of pods along; it comes back for those
// that are there, as their configuration says.
func TestMasqueradeThatWasFlushedComesBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("nftables needs root")
	}
	runtime.LockOSThread() // never unlocked: the namespace ends with the thread
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	rules := func(command ...string) string {
		t.Helper()
		out, err := exec.Command("nft", command...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	scope := engine.Scope{StateDir: t.TempDir()}
	config := `{"cniVersion": "1.0.0", "name": "net", "type": "mustang-cni", "masquerade": true, "masqueradeExclude": ["172.16.0.0/12"],
		"ipam": {"type": "mustang", "pools": ["10.4.0.0/24"]}}`
	for addr, state := range map[string]string{"10.4.0.1": stateReady, "10.4.0.2": stateReady, "10.4.0.3": stateMaking} {
		a := attachment{ContainerID: "c-" + addr, IfName: "eth0", Network: "net", State: state, Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Config: json.RawMessage(config)}
		c, err := configOf(a, scope)
		if err == nil {
			err = c.Validate()
		}
		if err != nil {
			t.Fatal(err)
		}
		p := &plugin{Config: c, store: storeAt(scope.StateDir)}
		a.Masquerade = p.masqueradeGroup()
		if err := p.store.Locked(func() error { return p.store.Write(a.file(), a) }); err != nil {
			t.Fatal(err)
		}
		if state == stateReady {
			if err := p.masqueradeAdd(a); err != nil {
				t.Fatal(err)
			}
		}
	}
	restores := func(want bool) {
		t.Helper()
		if did, err := RestoreMasquerade(scope); err != nil || did != want {
			t.Errorf("restored: %v, %v; want %v", did, err, want)
		}
	}
	before := rules("list", "ruleset")
	if !strings.Contains(before, "10.4.0.2") || !strings.Contains(before, "172.16.0.0/12") {
		t.Fatal(before)
	}
	restores(false)
	rules("flush", "ruleset")
	restores(true)
	if got := rules("list", "ruleset"); got != before {
		t.Errorf("the rules are\n%s\nand were\n%s", got, before)
	}
	restores(false)
}
