// SPDX-License-Identifier: Apache-2.0

package cni_test

// What tests must not leave: of pods on the node, of descriptors in this
// process, and what a run that was killed could not remove.

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// nothingOfPods is the look around every test, at its end: whatever it did, no
// pod may have anything on the node any more. (What pods share stays: tables,
// programs, the bridge, the shim.)
func (n *node) nothingOfPods() {
	if n.t.Failed() {
		return
	}
	for _, pattern := range []string{
		n.state() + "/cni/attachments/*.json", n.state() + "/cni/addresses/[0-9a-f]*", n.state() + "/endpoints/*.json", n.state() + "/journal*",
		n.bpffs() + "/scope/links/ep-*",
	} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			n.t.Errorf("left behind: %v", left)
		}
	}
	for _, table := range []string{"mst_endpoints_v1", "mst_endpoint_addrs_v1", "mst_parents_v1"} {
		if left := n.entries(table); left != "" {
			n.t.Errorf("left behind in %s: %s", table, left)
		}
	}
	var links []struct {
		IfName string `json:"ifname"`
	}
	if err := json.Unmarshal([]byte(run(n.t, "ip", "-n", n.name, "-j", "link")), &links); err != nil {
		n.t.Error(err)
	}
	for _, l := range links {
		if len(l.IfName) == 15 && strings.HasPrefix(l.IfName, "mst") {
			n.t.Errorf("left behind: interface %s", l.IfName)
		}
	}
	if text := run(n.t, "nsenter", "--net=/var/run/netns/"+n.name, "nft", "list", "tables"); strings.Contains(text, "mustang") {
		n.t.Errorf("left behind: %s", text)
	}
}

// watchDescriptors wants this process to have no more of them at the test's end.
// Those of children that a test ends go a moment later.
func watchDescriptors(t *testing.T) {
	before := fds(os.Getpid())
	t.Cleanup(func() {
		for end := time.Now().Add(slow(patience)); fds(os.Getpid()) > before; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Errorf("%d descriptors are open, and %d were before", fds(os.Getpid()), before)
				return
			}
		}
	})
}

func fds(pid int) int {
	list, _ := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/fd")
	return len(list)
}

// maker is the process whose test made something of this name; 0: nobody's.
func maker(name string) int {
	rest, ours := strings.CutPrefix(name, prefix)
	pid, err := strconv.Atoi(strings.SplitN(rest, "-", 2)[0])
	if !ours || err != nil {
		return 0
	}
	return pid
}

// lives says that a process runs these tests.
func lives(pid int) bool {
	self, _ := os.Readlink("/proc/self/exe")
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	return err == nil && (filepath.Base(exe) == filepath.Base(self) || strings.HasSuffix(exe, ".test"))
}

// removeLeft removes what runs left that were killed: processes in their
// namespaces, the namespaces, the mounts with all that is pinned there.
func removeLeft() {
	spaces, _ := filepath.Glob("/var/run/netns/" + prefix + "*")
	for _, path := range spaces {
		name := filepath.Base(path)
		if pid := maker(name); pid == 0 || lives(pid) {
			continue
		}
		pids, _ := exec.Command("ip", "netns", "pids", name).Output()
		for _, text := range strings.Fields(string(pids)) {
			if pid, err := strconv.Atoi(text); err == nil {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		exec.Command("ip", "netns", "del", name).Run()
	}
	mounts, _ := os.ReadFile("/proc/self/mounts")
	for _, line := range slices.Backward(strings.Split(string(mounts), "\n")) {
		f := strings.Fields(line)
		if len(f) < 3 || f[2] != "bpf" || maker(f[0]) == 0 || lives(maker(f[0])) {
			continue
		}
		if unix.Unmount(f[1], unix.MNT_DETACH) == nil {
			os.RemoveAll(filepath.Dir(filepath.Dir(f[1]))) // the test's own temporary directory
		}
	}
}
