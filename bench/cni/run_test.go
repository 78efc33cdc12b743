// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/vishvananda/netns"
)

// What a killed run left goes with the next one; a living one's stays.
func TestNamespacesOfKilledRunsGo(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	left := fmt.Sprintf("%s%d-0", spacePrefix, dead.ProcessState.Pid())
	t.Cleanup(func() { _ = netns.DeleteNamed(left) })
	mine, err := makeSpaces(1)
	t.Cleanup(func() {
		if err := removeSpaces(mine); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	makeNamed(t, left)
	if err := removeDead(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Join(netnsDir, left)); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", left, err)
	}
	if _, err := os.Lstat(mine[0].path); err != nil {
		t.Errorf("a living run's namespace: %v", err)
	}
}

func makeNamed(t *testing.T, name string) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	made, err := netns.NewNamed(name)
	if err != nil {
		t.Fatal(err)
	}
	made.Close()
	if err := netns.Set(home); err != nil {
		t.Fatal(err)
	}
}
