// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestASysctlIsOff(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a namespace needs root")
	}
	runtime.LockOSThread() // never unlocked: the namespace ends with the thread
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	const key = "ipv4/ip_forward"
	for value, off := range map[string]bool{"0": true, "1": false} {
		if err := os.WriteFile(Sysctl(key), []byte(value), 0); err != nil {
			t.Fatal(err)
		}
		if SysctlOff(key) != off {
			t.Errorf("it is %s, and off: %v", value, !off)
		}
	}
	if SysctlOff("ipv4/conf/there-is-none/forwarding") {
		t.Error("one that is not there is off")
	}
}
