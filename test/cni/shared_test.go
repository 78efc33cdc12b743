// SPDX-License-Identifier: Apache-2.0

package cni_test

// Namespaces where somebody else's interface is, or was: whoever is refused, or
// comes late, takes nothing of it.

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// linked is a directory with a link to each container's namespace, which no
// other test sees.
func (n *node) linked(list ...*container) string {
	n.t.Helper()
	dir := n.t.TempDir()
	for _, c := range list {
		if err := os.Symlink(c.path(), filepath.Join(dir, c.id)); err != nil {
			n.t.Fatal(err)
		}
	}
	return dir
}

func TestADD_WhereAnAdoptedPodIsIsRefusedAndLeavesItBe(t *testing.T) {
	for _, mode := range []string{"veth", "bridge", "macvlan", "chained"} {
		t.Run(mode, func(t *testing.T) {
			n := newNode(t)
			c := n.container()
			older := "link add old0 type veth peer name eth0 netns " + c.ns
			if mode == "macvlan" {
				older = "link add link up0 name eth0 netns " + c.ns + " type macvlan mode bridge"
			}
			run(t, "ip", append([]string{"-n", n.name}, strings.Fields(older)...)...)
			for _, args := range []string{"addr add 10.30.0.2/24 dev eth0", "link set eth0 up"} {
				run(t, "ip", append([]string{"-n", c.ns}, strings.Fields(args)...)...)
			}
			dir, bin := n.linked(c), t.TempDir()
			n.tool("install-cni", "--bin-dir", bin, "--conf-dir", bin, "--plugin", binary, "--pool", "10.9.0.0/24", "--netns-dir", dir, "--adopt")
			there := n.tool("ep", "ls")
			path, conf := filepath.Join(dir, c.id), n.config(mode)
			if mode == "chained" {
				conf["prevResult"] = map[string]any{"cniVersion": "1.1.0", "interfaces": []any{map[string]any{"name": "eth0", "sandbox": path}},
					"ips": []any{map[string]any{"address": "10.30.0.2/24", "interface": 0}}}
			}
			n.refused(c.call("ADD", conf, "CNI_NETNS="+path), 101, "exists")
			if mode != "chained" { // there DEL is for whoever has the place
				c.del(conf, "CNI_NETNS="+path) // as runtimes do then
			}
			if got := n.tool("ep", "ls"); !strings.Contains(there, "10.30.0.2") || got != there {
				t.Errorf("endpoints:\n%sbefore:\n%s", got, there)
			}
			if out := run(t, "ip", "-n", c.ns, "link", "show", "eth0"); !strings.Contains(out, ",UP") {
				t.Errorf("the adopted pod's interface: %s", out)
			}
			run(t, "ip", "netns", "del", c.ns)
			n.ok(n.exec(n.command(binary, "GC", n.config(mode).with("cni.dev/valid-attachments", []any{}))))
		})
	}
}

func TestPodAdd_WhereAContainerIsIsRefusedAndLeavesItBe(t *testing.T) {
	for _, mode := range []string{"veth", "macvlan"} {
		t.Run(mode, func(t *testing.T) {
			n := newNode(t)
			c := n.container()
			a := c.add(n.config(mode))
			if out, err := n.toolCommand("pod", "add", "b", "--netns", c.path(), "--ip", "10.9.0.99").CombinedOutput(); err == nil || !strings.Contains(string(out), "already connected") {
				t.Errorf("%v: %s", err, out)
			}
			c.ok(c.call("CHECK", n.config(mode).prev(a)))
			c.del(n.config(mode))
		})
	}
}

func TestDEL_ThatComesLateLeavesWhoHasTheNamespacesPathNow(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		first, second := n.container(), n.container()
		second.ns = first.ns
		first.add(n.config(mode))
		run(t, "ip", "netns", "del", first.ns)
		n.device(mode) // a virtual one dies with the namespace
		run(t, "ip", "netns", "add", first.ns)
		a := second.add(n.config(mode))
		first.del(n.config(mode), "CNI_NETNS=")
		second.ok(second.call("CHECK", n.config(mode).prev(a)))
		second.del(n.config(mode))
	})
}
