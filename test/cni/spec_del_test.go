// SPDX-License-Identifier: Apache-2.0

package cni_test

// One test for each sentence of the spec 1.1.0 that binds a plugin, by the
// sentence's words: DEL and GC.

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestDEL_MustAcceptMultipleCallsAndReturnSuccessIfTheInterfaceIsMissing(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		c.del(n.config(mode)) // never added
		a := c.add(n.config(mode))
		c.del(n.config(mode).prev(a))
		c.del(n.config(mode).prev(a))
		c.del(n.config(mode))
	})
}

func TestDEL_ShouldCompleteWithoutErrorWithoutTheNamespace(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		for _, netns := range []string{"", "/var/run/netns/gone"} {
			c := n.container()
			conf := n.config(mode).with("masquerade", true)
			a := c.add(conf)
			run(t, "ip", "netns", "del", c.ns)
			c.del(conf.prev(a), "CNI_NETNS="+netns)
			n.device(mode) // a virtual one dies with the namespace
		}
	})
}

// A physical one comes back by itself, under the pod's name for it. This one is
// moved as the kernel does.
func TestDEL_WithoutTheNamespaceThePodsDeviceIsTheNodesAgain(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprintf("after the next ADD: %v", late), func(t *testing.T) {
			n := newNode(t)
			n.device("host-device")
			conf := n.config("host-device")
			first, second := n.container(), n.container()
			first.add(conf)
			run(t, "ip", "-n", first.ns, "link", "set", "eth0", "down")
			run(t, "ip", "-n", first.ns, "link", "set", "eth0", "netns", n.name)
			run(t, "ip", "netns", "del", first.ns)
			if !late {
				first.del(conf)
				if out := run(t, "ip", "-n", n.name, "-d", "link", "show", "dev0"); strings.Contains(out, "mustang") || !strings.Contains(out, "group default") {
					t.Errorf("after DEL: %s", out)
				}
			}
			a := second.add(conf)
			if late {
				first.del(conf)
			}
			second.ok(second.call("CHECK", conf.prev(a)))
			run(t, "ip", "-n", n.outside(), "addr", "add", "10.9.0.1/24", "dev", "dev0")
			if !n.pings(second.ns, "10.9.0.1") {
				t.Error("the next pod does not reach its gateway")
			}
			second.del(conf)
		})
	}
}

// With the MAC address and the MTU that it had, and not those that its pod was given:
// also where its namespace died first, for the next pod.
func TestDEL_ThePodsDeviceIsAsItWas(t *testing.T) {
	for _, x := range []struct {
		name        string
		vanish, del bool
	}{{"with its namespace", false, true}, {"without its namespace", true, true}, {"before its DEL, for the next ADD", true, false}} {
		t.Run(x.name, func(t *testing.T) {
			n := newNode(t)
			n.device("host-device")
			conf := n.config("host-device")
			first, second := n.container(), n.container()
			like := func(ns, ifname string) string {
				t.Helper()
				f := strings.Fields(run(t, "ip", "-n", ns, "-o", "link", "show", ifname))
				return f[slices.Index(f, "link/ether")+1] + " mtu " + f[slices.Index(f, "mtu")+1]
			}
			before := like(n.name, "dev0")
			first.add(conf.with("mtu", 1400).with("capabilities", map[string]any{"mac": true}).with("runtimeConfig", map[string]any{"mac": "02:00:00:00:00:08"}))
			if got := like(first.ns, "eth0"); got != "02:00:00:00:00:08 mtu 1400" {
				t.Fatalf("the pod has %s", got)
			}
			if x.vanish {
				run(t, "ip", "-n", first.ns, "link", "set", "eth0", "down")
				run(t, "ip", "-n", first.ns, "link", "set", "eth0", "netns", n.name)
				run(t, "ip", "netns", "del", first.ns)
			}
			if x.del {
				first.del(conf)
				if got := like(n.name, "dev0"); got != before {
					t.Errorf("after DEL it is %s, and was %s", got, before)
				}
			}
			second.add(conf)
			if got := like(second.ns, "eth0"); got != before {
				t.Errorf("the next pod has %s, and the node had %s", got, before)
			}
			first.del(conf)
			second.del(conf)
			if got := like(n.name, "dev0"); got != before {
				t.Errorf("at last it is %s, and was %s", got, before)
			}
		})
	}
}

func TestDEL_ShouldCompleteWithoutErrorWithoutState(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		a := c.add(n.config(mode))
		n.forgetRecords()
		c.del(n.config(mode).prev(a))
	})
}

// forgetRecords loses what the node knows of its attachments.
func (n *node) forgetRecords() {
	records, _ := filepath.Glob(filepath.Join(n.state(), "cni", "attachments", "*"))
	for _, file := range records {
		if err := os.Remove(file); err != nil {
			n.t.Fatal(err)
		}
	}
}

func TestGC_RemovesExactlyWhatIsNotInValidAttachments(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		conf := n.config(mode).with("masquerade", true)
		count := 3
		if mode == "host-device" {
			count = 1 // there is one device
		}
		var all []*container
		var results []answer
		for range count {
			c := n.container()
			all, results = append(all, c), append(results, c.add(conf))
		}
		n.refused(n.exec(n.command(binary, "GC", conf)), 7, "valid-attachments")
		valid := []any{map[string]any{"containerID": all[0].id, "ifname": "eth0"}}
		gc := n.ok(n.exec(n.command(binary, "GC", conf.with("cni.dev/valid-attachments", valid))))
		if gc.stdout != "" {
			t.Errorf("output: %s", gc.stdout)
		}
		all[0].ok(all[0].call("CHECK", conf.prev(results[0])))
		for i, c := range all[1:] {
			if a := c.call("CHECK", conf.prev(results[i+1])); a.status == 0 {
				t.Errorf("%s is still there", c.id)
			}
		}
		other := conf.with("name", "another-network").with("cni.dev/valid-attachments", []any{})
		n.ok(n.exec(n.command(binary, "GC", other)))
		all[0].ok(all[0].call("CHECK", conf.prev(results[0])))
		// What libcni makes of no attachment at all.
		n.ok(n.exec(n.command(binary, "GC", conf.with("cni.dev/valid-attachments", json.RawMessage("null")))))
	})
}

func TestGC_IfAnErrorIsEncounteredShouldContinue(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		n.fakeIPAM("DEL")
		delegated := n.config(mode).with("ipam", map[string]any{"type": "fake-ipam"}).with("cni.dev/valid-attachments", []any{})
		first := n.container()
		first.add(delegated)
		own := n.container()
		if mode != "host-device" { // there is one device
			own.add(n.config(mode))
		}
		gc := n.exec(n.command(binary, "GC", delegated))
		if gc.status == 0 || !strings.Contains(gc.stdout, "no DEL today") {
			t.Errorf("got %s", gc.stdout)
		}
		if out, err := exec.Command("ip", "-n", first.ns, "link", "show", "eth0").CombinedOutput(); err == nil {
			t.Errorf("the interface stayed: %s", out)
		}
		if reserved, _ := filepath.Glob(filepath.Join(n.state(), "cni", "addresses", "10.9.*")); len(reserved) > 0 {
			t.Errorf("the other pod's address stayed: %v", reserved)
		}
		n.fakeIPAM()
		n.ok(n.exec(n.command(binary, "GC", delegated)))
	})
}
