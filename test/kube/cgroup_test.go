// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Where no cluster can start that is said before anything is built.
func TestAMachineWithOneVersionOfControlGroupsIsToldFirst(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a mount namespace needs root")
	}
	out, err := exec.Command("unshare", "-m", "sh", "-c", "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec ../../scripts/cluster up").CombinedOutput()
	if s := string(out); err == nil || !strings.HasPrefix(s, "cluster: ") || !strings.Contains(s, "systemd.unified_cgroup_hierarchy=0") || strings.Count(s, "\n") != 1 {
		t.Errorf("%v: %s", err, s)
	}
}
