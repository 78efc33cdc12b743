// SPDX-License-Identifier: Apache-2.0

package cni_test

// mustang uninstall: what was made goes, whether records tell of it or not, and what
// was there before stays.

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// uninstall takes mustang off the node. Other plugins are those in bin.
func (n *node) uninstall(bin string) string {
	n.t.Helper()
	out := n.tool("uninstall", "--pods", "--bin-dir", bin, "--conf-dir", n.t.TempDir())
	for _, left := range []string{n.state(), filepath.Join(n.bpffs(), "scope")} {
		if _, err := os.Stat(left); !os.IsNotExist(err) {
			n.t.Errorf("%s is still there", left)
		}
	}
	return out
}

func (n *node) links() string { return run(n.t, "ip", "-n", n.name, "-o", "addr") }

func TestUninstall_DeletesTheBridgesThatWereMadeAndNoOther(t *testing.T) {
	n := newNode(t)
	for _, args := range []string{"link add br-old type bridge", "addr add 10.9.0.1/24 dev br-old", "link set br-old up"} {
		run(t, "ip", append([]string{"-n", n.name}, strings.Fields(args)...)...)
	}
	conf := n.config("bridge").with("ipam", map[string]any{"type": "mustang", "pools": []string{"10.9.0.0/24"}})
	n.container().add(conf.with("bridge", "br-old"))
	for _, bridge := range []string{"mst-br0", "br-new"} {
		n.container().add(conf.with("name", bridge).with("bridge", bridge).with("ipam", map[string]any{"type": "mustang", "pools": []string{"10.8.0.0/24"}}))
	}
	gone := n.container() // whose record no longer tells of its bridge
	gone.add(conf.with("name", "gone").with("bridge", "br-gone"))
	gone.del(conf.with("name", "gone").with("bridge", "br-gone"))
	n.uninstall(t.TempDir())
	left := n.links()
	if !strings.Contains(left, "br-old    inet 10.9.0.1/24") {
		t.Errorf("the bridge that was there before is gone, or its address:\n%s", left)
	}
	for _, made := range []string{"mst-br0", "br-new", "br-gone"} {
		if strings.Contains(left, made) {
			t.Errorf("%s is still there:\n%s", made, left)
		}
	}
}

// For ipam dhcp the administrator makes the bridge, and the default name is as good as any.
// One that an earlier version made under it has no mark, and is known by how it was made.
func TestUninstall_LeavesABridgeOfTheDefaultNameThatWasThereBefore(t *testing.T) {
	for name, c := range map[string]struct {
		made  []string
		stays bool
	}{
		"without a port":        {[]string{"link add mst-br0 type bridge"}, true},
		"with a port":           {[]string{"link add mst-br0 type bridge", "link add nic0 master mst-br0 type veth peer name nic1"}, true},
		"by an earlier version": {[]string{"link add mst-br0 address 02:00:00:00:00:01 type bridge mcast_snooping 0"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			for _, args := range append(c.made, "addr add 10.9.0.1/24 dev mst-br0") {
				run(t, "ip", append([]string{"-n", n.name}, strings.Fields(args)...)...)
			}
			n.container().add(n.config("bridge").with("ipam", v4Pool))
			n.uninstall(t.TempDir())
			if left := n.links(); strings.Contains(left, "mst-br0    inet 10.9.0.1/24") != c.stays {
				t.Errorf("left:\n%s", left)
			}
		})
	}
}

func TestUninstall_DeletesTheShimOfADrainedNode(t *testing.T) {
	for name, renamed := range map[string]bool{"": false, "whose uplink was renamed": true} {
		t.Run(name, func(t *testing.T) {
			n, on := newNode(t), uplink
			c := n.container()
			c.add(n.config("macvlan"))
			c.del(n.config("macvlan"))
			if renamed {
				on = "other0"
				run(t, "ip", "-n", n.name, "link", "set", uplink, "name", on)
			}
			run(t, "ip", "-n", n.name, "link", "add", "mv-mine", "link", on, "type", "macvlan", "mode", "bridge")
			run(t, "ip", "-n", n.name, "link", "set", "mv-mine", "up")
			n.uninstall(t.TempDir())
			if left := run(t, "ip", "-n", n.name, "-o", "link"); strings.Contains(left, "mv-up0") || !strings.Contains(left, "mv-mine") {
				t.Errorf("left: %s", left)
			}
		})
	}
}

func TestUninstall_GivesBackWhatOtherIPAMPluginsGave(t *testing.T) {
	for name, there := range map[string]bool{"by the plugin": true, "though the plugin is gone": false} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			bin, dir := t.TempDir(), filepath.Join(n.dir, "host-local")
			if there {
				if err := os.Symlink(filepath.Join(debianCNI, "host-local"), filepath.Join(bin, "host-local")); err != nil {
					t.Fatal(err)
				}
			}
			c := n.container()
			c.add(n.config("veth").with("ipam", map[string]any{"type": "host-local", "dataDir": dir, "ranges": []any{[]any{map[string]any{"subnet": "10.6.0.0/24"}}}}))
			out := n.uninstall(bin)
			if said := strings.Contains(out, "host-local"); said == there {
				t.Errorf("it said %q", out)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "*", "10.6*")); len(left) > 0 == there {
				t.Errorf("allocations left: %v", left)
			}
		})
	}
}

func TestUninstall_CountsPodsByTheCommandLine(t *testing.T) {
	n := newNode(t)
	a, plain := n.container(), n.container()
	n.tool("pod", "add", "a", "--netns", a.path(), "--ip", "10.9.0.98")
	n.tool("pod", "add", "b", "--netns", plain.path(), "--ip", "10.9.0.99", "--plain")
	out, err := n.toolCommand("uninstall", "--bin-dir", t.TempDir(), "--conf-dir", t.TempDir()).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "2 pods are connected by mustang: a (eth0), b (eth0)") {
		t.Errorf("%v: %s", err, out)
	}
	said := n.uninstall(t.TempDir())
	for _, name := range []string{"a", "b"} {
		if !strings.Contains(said, "disconnected "+name+" (eth0)\n") {
			t.Errorf("it said %q", said)
		}
	}
	if left := run(t, "ip", "-n", n.name, "-o", "link"); strings.Contains(left, ": mst") {
		t.Errorf("left: %s", left)
	}
}

func TestUninstall_OfANodeThatOnceHadPodsLeavesNothing(t *testing.T) {
	n := newNode(t)
	n.tool("pod", "add", "a", "--netns", n.container().path(), "--ip", "10.9.0.98")
	n.tool("pod", "rm", "a")
	n.uninstall(t.TempDir())
}
