// SPDX-License-Identifier: Apache-2.0

package cni_test

// One test for each sentence of the spec (section in the name) that binds a
// plugin.

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestADD_MustOutputAResultStructure(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		dns := map[string]any{"nameservers": []any{"10.9.0.53"}, "search": []any{"example.org"}}
		a := c.add(n.config(mode).with("dns", dns))
		defer c.del(n.config(mode))
		if a.CNIVersion != "1.1.0" || !cmp.Equal(a.DNS, dns) {
			t.Errorf("version or dns: %s", a.stdout)
		}
		if len(a.IPs) != 2 || len(a.Routes) != 2 || a.Routes[0].Dst != "0.0.0.0/0" || a.Routes[1].Dst != "::/0" {
			t.Fatalf("addresses or routes: %s", a.stdout)
		}
		for _, ip := range a.IPs {
			i := a.Interfaces[*ip.Interface]
			if i.Name != "eth0" || i.Sandbox != c.path() || i.Mtu != 1500 || i.Mac == "" && mode != "netkit-l3" {
				t.Errorf("interface of %s: %+v", ip.Address, i)
			}
			if !strings.Contains(run(t, "ip", "-n", c.ns, "addr", "show", "eth0"), ip.Address) {
				t.Errorf("%s is not on the interface", ip.Address)
			}
			if ip.Gateway == "" {
				t.Errorf("no gateway: %s", a.stdout)
			}
		}
	})
}

func TestADD_OutputsTheVersionSuppliedOnInput(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		for _, v := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
			c := n.container()
			conf := n.config(mode).with("cniVersion", v)
			a := c.add(conf)
			if a.CNIVersion != v || len(a.IPs) != 2 || len(a.Interfaces) == 0 {
				t.Errorf("%s: %s", v, a.stdout)
			}
			if (v < "1") != strings.Contains(a.stdout, `"version":"4"`) {
				t.Errorf("%s: the result's shape is another version's: %s", v, a.stdout)
			}
			c.del(conf)
		}
	})
}

func TestADD_IfAnInterfaceOfTheRequestedNameExistsMustReturnAnError(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		a := c.add(n.config(mode))
		n.refused(c.call("ADD", n.config(mode)), 101, "already")
		other := *c
		other.id = "another"
		if a := other.call("ADD", n.config(mode)); a.status == 0 {
			t.Errorf("got %s", a.stdout)
		}
		// The runtime DELs after a failed ADD: the first container keeps all.
		other.del(n.config(mode))
		c.ok(c.call("CHECK", n.config(mode).prev(a)))
		c.del(n.config(mode))
	})
}

func TestADD_IfUnableToUseTheInterfaceNameMustReturnAnError(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		for _, name := range []string{"a/b", "a name", strings.Repeat("x", 16), "..", "a:b", "lo"} {
			c := n.container()
			c.ifname = name
			if a := c.call("ADD", n.config(mode)); a.status == 0 || a.Code == 0 {
				t.Errorf("%q: status %d: %s", name, a.status, a.stdout)
			}
		}
	})
}

func TestADD_PrevResultIsHandledByPassingItThrough(t *testing.T) {
	n := newNode(t)
	c := n.container()
	ptp := config{"cniVersion": "1.0.0", "name": "n", "type": "ptp", "ipam": map[string]any{"type": "static", "addresses": []any{map[string]any{"address": "10.4.0.2/24", "gateway": "10.4.0.1"}}}}
	prev := c.ok(c.plugin("ptp", "ADD", ptp))
	conf := n.config("chained").with("cniVersion", "1.0.0")
	a := c.add(conf.prev(prev))
	var want, got any
	json.Unmarshal([]byte(prev.stdout), &want)
	json.Unmarshal([]byte(a.stdout), &got)
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	c.del(conf.prev(prev))
	n.refused(n.container().call("ADD", n.config("veth").with("cniVersion", "1.0.0").prev(prev)), 7, "chained")
	n.refused(n.container().call("ADD", conf), 7, "chained")
	c.ok(c.plugin("ptp", "DEL", ptp))
}

func TestPlugin_MustExitWithZeroOnSuccessAndNonZeroOnFailure(t *testing.T) {
	n := newNode(t)
	for _, command := range []string{"ADD", "DEL", "CHECK", "GC", "STATUS"} {
		a := n.exec(n.command(binary, command, config{"cniVersion": "1.1.0"}, n.container().env()...))
		n.refused(a, 7, "name")
		if a.CNIVersion != "1.1.0" {
			t.Errorf("%s: the error has no version: %s", command, a.stdout)
		}
	}
}

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

func TestDEL_CompletesWithoutTheNamespace(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		if mode == "host-device" {
			t.Skip("a virtual device dies with the container's namespace")
		}
		for _, netns := range []string{"", "/var/run/netns/gone"} {
			c := n.container()
			conf := n.config(mode).with("masquerade", true)
			a := c.add(conf)
			run(t, "ip", "netns", "del", c.ns)
			c.del(conf.prev(a), "CNI_NETNS="+netns)
		}
	})
}

func TestDEL_CompletesWithoutState(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		a := c.add(n.config(mode))
		if err := os.RemoveAll(filepath.Join(n.state(), "cni", "attachments")); err != nil {
			t.Fatal(err)
		}
		c.del(n.config(mode).prev(a))
		os.Mkdir(filepath.Join(n.state(), "cni", "attachments"), 0o755)
	})
}

func TestCHECK_MustConsultPrevResult(t *testing.T) {
	n := newNode(t)
	c := n.container()
	conf := n.config("veth").with("masquerade", true)
	a := c.add(conf)
	n.refused(c.call("CHECK", conf), 7, "prevResult")
	c.ok(c.call("CHECK", conf.prev(a)))
	other := strings.Replace(a.stdout, a.address(0), "10.9.0.200", 1)
	n.refused(c.call("CHECK", conf.with("prevResult", json.RawMessage(other))), 100, "10.9.0.200 is missing")
	c.del(conf)
}

func TestCHECK_MustHandleBeingCalledImmediatelyAfterADD(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		conf := n.config(mode).with("masquerade", true)
		a := c.add(conf)
		c.ok(c.call("CHECK", conf.prev(a)))
		c.del(conf)
	})
}

func TestCHECK_MustAllowALaterPluginToHaveModifiedRoutes(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		a := c.add(n.config(mode))
		run(t, "ip", "-n", c.ns, "route", "add", "blackhole", "10.77.0.0/16")
		run(t, "ip", "-n", c.ns, "route", "del", "default")
		later := a
		later.stdout = strings.Replace(a.stdout, `{"dst":"0.0.0.0/0","gw":"`+a.Routes[0].Gw+`"},`, "", 1)
		c.ok(c.call("CHECK", n.config(mode).prev(later)))
		n.refused(c.call("CHECK", n.config(mode).prev(a)), 100, "route to 0.0.0.0/0")
		c.del(n.config(mode))
	})
}

func TestCHECK_NamesWhatSomebodyBroke(t *testing.T) {
	for _, x := range []struct {
		name string
		brk  func(n *node, c *container, host, addr string)
		says string
	}{
		{"interface down", func(n *node, c *container, _, _ string) { run(n.t, "ip", "-n", c.ns, "link", "set", "eth0", "down") }, "eth0 in the container is down"},
		{"interface gone", func(n *node, c *container, _, _ string) { run(n.t, "ip", "-n", c.ns, "link", "del", "eth0") }, "interface eth0"},
		{"address gone", func(n *node, c *container, _, addr string) {
			run(n.t, "ip", "-n", c.ns, "addr", "del", addr+"/32", "dev", "eth0")
		}, "is missing from eth0"},
		{"mtu changed", func(n *node, c *container, _, _ string) {
			run(n.t, "ip", "-n", c.ns, "link", "set", "eth0", "mtu", "1400")
		}, "has MTU 1400, not 1500"},
		{"host end down", func(n *node, c *container, host, _ string) { run(n.t, "ip", "-n", n.name, "link", "set", host, "down") }, "on the node is down"},
		{"host route gone", func(n *node, c *container, _, addr string) { run(n.t, "ip", "-n", n.name, "route", "del", addr) }, "node's route"},
		{"reservation gone", func(n *node, c *container, _, addr string) {
			os.Remove(filepath.Join(n.state(), "cni", "addresses", addr))
		}, "not reserved"},
		{"record gone", func(n *node, c *container, _, addr string) {
			os.Remove(filepath.Join(n.state(), "cni", "attachments", c.id+"@eth0.json"))
		}, "no complete record"},
		{"masquerade gone", func(n *node, c *container, _, _ string) {
			run(n.t, "nsenter", "--net=/var/run/netns/"+n.name, "nft", "flush", "ruleset")
		}, "not masqueraded"},
		{"programs detached", func(n *node, c *container, host, _ string) {
			run(n.t, "tc", "-n", n.name, "qdisc", "del", "dev", host, "clsact")
		}, "not attached"},
	} {
		t.Run(x.name, func(t *testing.T) {
			n := newNode(t)
			c := n.container()
			conf := n.config("veth").with("masquerade", true)
			a := c.add(conf)
			c.ok(c.call("CHECK", conf.prev(a)))
			x.brk(n, c, a.Interfaces[0].Name, a.address(0))
			n.refused(c.call("CHECK", conf.prev(a)), 100, x.says)
			c.del(conf)
		})
	}
}

func TestSTATUS_MustExitWithZeroIfReady(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		a := n.ok(n.exec(n.command(binary, "STATUS", n.config(mode))))
		if a.stdout != "" {
			t.Errorf("output on success: %s", a.stdout)
		}
	})
}

func TestSTATUS_MustExitNonZeroIfItKnowsThatItCannotServiceADD(t *testing.T) {
	n := newNode(t)
	status := func(conf config) answer { return n.exec(n.command(binary, "STATUS", conf)) }
	n.refused(status(n.config("veth").with("bpffs", "/tmp/none")), 50, "not on a bpffs")
	n.refused(status(n.config("macvlan").with("uplink", "eth9")), 50, "uplink eth9")
	n.refused(status(n.config("veth").with("cgroupRoot", "/tmp")), 50, "cgroup2")
	n.refused(status(n.config("veth").with("mode", "carrier-pigeon")), 7, "carrier-pigeon")
	full := n.config("veth").with("ipam", map[string]any{"type": "mustang", "pools": []string{"10.9.0.0/30"}})
	n.ok(status(full))
	c := n.container()
	c.add(full)
	n.refused(status(full), 50, "10.9.0.0/30")
	n.refused(n.container().call("ADD", full), 102, "10.9.0.0/30")
	n.refused(status(full.with("bpffs", "/tmp/none")), 51, "bpffs")
	c.del(full)
	n.ok(status(full))
}

// fakeIPAM makes an IPAM plugin that notes how it is called, and fails at the
// commands in fail.
func (n *node) fakeIPAM(fail ...string) (log func() []string) {
	n.t.Helper()
	dir := filepath.Join(n.dir, "plugins")
	os.MkdirAll(dir, 0o755)
	file := filepath.Join(dir, "log")
	os.Remove(file)
	script := fmt.Sprintf(`#!/bin/bash
in=$(cat)
[ $CNI_COMMAND = VERSION ] && exec echo '{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}'
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_NETNS $CNI_IFNAME $CNI_ARGS ${CNI_PATH:+path} ${#in}" >>%s
case " %s " in *" $CNI_COMMAND "*) echo '{"cniVersion":"1.1.0","code":142,"msg":"no '$CNI_COMMAND' today"}'; exit 1;; esac
[ $CNI_COMMAND = ADD ] && echo '{"cniVersion":"1.1.0","ips":[{"address":"10.8.0.2/24","gateway":"10.8.0.1"}],"routes":[{"dst":"10.99.0.0/16"}],"dns":{"nameservers":["10.8.0.53"]}}'
exit 0
`, file, strings.Join(fail, " "))
	if err := os.WriteFile(filepath.Join(dir, "fake-ipam"), []byte(script), 0o755); err != nil {
		n.t.Fatal(err)
	}
	return func() []string {
		text, _ := os.ReadFile(file)
		return strings.Split(strings.TrimSpace(string(text)), "\n")
	}
}

func TestDelegated_MustReceiveTheSameEnvironmentAndBeExecutedForEachCommand(t *testing.T) {
	n := newNode(t)
	log := n.fakeIPAM()
	c := n.container()
	conf := n.config("bridge").with("ipam", map[string]any{"type": "fake-ipam"})
	a := c.add(conf, "CNI_ARGS=K=V")
	if len(a.IPs) != 1 || a.IPs[0].Address != "10.8.0.2/24" || a.DNS["nameservers"] == nil {
		t.Errorf("got %s", a.stdout)
	}
	if !strings.Contains(run(t, "ip", "-n", c.ns, "route"), "10.99.0.0/16 via 10.8.0.1") {
		t.Error("IPAM's route is missing")
	}
	c.ok(c.call("CHECK", conf.prev(a), "CNI_ARGS=K=V"))
	n.ok(n.exec(n.command(binary, "STATUS", conf)))
	c.del(conf, "CNI_ARGS=K=V")
	n.ok(n.exec(n.command(binary, "GC", conf.with("cni.dev/valid-attachments", []any{}))))
	var commands []string
	for _, line := range log() {
		f := strings.Fields(line)
		commands = append(commands, f[0])
		if slices.Contains([]string{"ADD", "CHECK", "DEL"}, f[0]) && !strings.HasPrefix(line, fmt.Sprintf("%s %s %s eth0 K=V path", f[0], c.id, c.path())) {
			t.Errorf("environment: %s", line)
		}
	}
	if got := strings.Join(commands, " "); got != "ADD CHECK STATUS DEL GC" {
		t.Errorf("called: %s", got)
	}
}

func TestDelegated_IfItFailsOnADDThePluginExecutesItWithDEL(t *testing.T) {
	n := newNode(t)
	log := n.fakeIPAM("ADD")
	c := n.container()
	conf := n.config("veth").with("ipam", map[string]any{"type": "fake-ipam"})
	n.refused(c.call("ADD", conf), 142, "no ADD today")
	if lines := log(); len(lines) != 2 || !strings.HasPrefix(lines[1], "DEL "+c.id) {
		t.Errorf("called: %q", lines)
	}
}

func TestDelegated_ItsErrorsAreReturned(t *testing.T) {
	n := newNode(t)
	n.fakeIPAM("CHECK", "GC", "STATUS")
	c := n.container()
	conf := n.config("veth").with("ipam", map[string]any{"type": "fake-ipam"})
	a := c.add(conf)
	n.refused(c.call("CHECK", conf.prev(a)), 100, "no CHECK today")
	n.refused(n.exec(n.command(binary, "STATUS", conf)), 50, "no STATUS today")
	gc := n.exec(n.command(binary, "GC", conf.with("cni.dev/valid-attachments", []any{})))
	if gc.status == 0 || !strings.Contains(gc.stdout, "no GC today") {
		t.Errorf("GC: %s", gc.stdout)
	}
	n.fakeIPAM("DEL")
	c.add(conf)
	if a := c.call("DEL", conf); a.status == 0 || !strings.Contains(a.stdout, "no DEL today") {
		t.Errorf("DEL: %s", a.stdout)
	}
	n.fakeIPAM()
	c.del(conf)
}

func TestDelegated_HostLocalAndStaticOfDebianWork(t *testing.T) {
	for name, ipam := range map[string]any{
		"host-local": map[string]any{"type": "host-local", "ranges": []any{[]any{map[string]any{"subnet": "10.6.0.0/24"}}, []any{map[string]any{"subnet": "fd00:6::/64"}}}},
		"static":     map[string]any{"type": "static", "addresses": []any{map[string]any{"address": "10.6.0.9/24", "gateway": "10.6.0.1"}}},
	} {
		for _, version := range []string{"1.0.0", "1.1.0"} { // Debian's know up to 1.0.0
			t.Run(name+" "+version, func(t *testing.T) {
				n := newNode(t)
				if m, ok := ipam.(map[string]any); ok && name == "host-local" {
					m["dataDir"] = filepath.Join(n.dir, "host-local")
				}
				conf := n.config("veth").with("ipam", ipam).with("cniVersion", version)
				c := n.container()
				a := c.add(conf)
				if !strings.HasPrefix(a.IPs[0].Address, "10.6.0.") {
					t.Errorf("got %s", a.stdout)
				}
				c.ok(c.call("CHECK", conf.prev(a)))
				if version == "1.1.0" { // which they are too old for
					n.ok(n.exec(n.command(binary, "STATUS", conf)))
					valid := []any{map[string]any{"containerID": c.id, "ifname": c.ifname}}
					n.ok(n.exec(n.command(binary, "GC", conf.with("cni.dev/valid-attachments", valid))))
				}
				c.del(conf.prev(a))
				if name == "host-local" {
					left, _ := filepath.Glob(filepath.Join(n.dir, "host-local", "*", "10.6*"))
					if len(left) > 0 {
						t.Errorf("allocations left: %v", left)
					}
				}
			})
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
		n.ok(n.exec(n.command(binary, "GC", conf.with("cni.dev/valid-attachments", []any{}))))
	})
}

func TestPlugins_MustHandleBeingExecutedConcurrently(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		if mode == "host-device" {
			t.Skip("there is one device")
		}
		conf := n.config(mode).with("masquerade", true)
		var all []*container
		for range 8 {
			all = append(all, n.container())
		}
		answers := make([]answer, len(all))
		each := func(command string) {
			var wg sync.WaitGroup
			for i, c := range all {
				wg.Go(func() { answers[i] = c.call(command, conf) })
			}
			wg.Wait()
		}
		each("ADD")
		seen := map[string]bool{}
		for i, a := range answers {
			all[i].ok(a)
			for j := range a.IPs {
				if seen[a.address(j)] {
					t.Errorf("%s twice", a.address(j))
				}
				seen[a.address(j)] = true
			}
		}
		if !n.pings(all[0].ns, answers[7].address(0)) || !n.pings(all[3].ns, answers[4].address(1)) {
			t.Error("the containers do not reach each other")
		}
		each("DEL")
		for i, a := range answers {
			all[i].ok(a)
		}
	})
}

func TestVERSION_MustOutputVersionAndSupportedVersions(t *testing.T) {
	n := newNode(t)
	for _, v := range []string{"0.3.1", "1.0.0", "1.1.0"} {
		a := n.ok(n.exec(n.command(binary, "VERSION", config{"cniVersion": v})))
		var got struct{ SupportedVersions []string }
		json.Unmarshal([]byte(a.stdout), &got)
		if a.CNIVersion != v || strings.Join(got.SupportedVersions, " ") != "0.3.1 0.4.0 1.0.0 1.1.0" {
			t.Errorf("got %s", a.stdout)
		}
	}
}

func TestErrors_HaveTheCodesOfTheSpec(t *testing.T) {
	n := newNode(t)
	c := n.container()
	n.refused(c.call("ADD", n.config("veth").with("cniVersion", "9.9.9")), 1, "incompatible")
	n.refused(n.exec(n.command(binary, "ADD", n.config("veth"), "CNI_IFNAME=eth0")), 4, "CNI_CONTAINERID")
	n.refused(n.exec(n.command(binary, "ADD", n.config("veth"), "CNI_IFNAME=eth0")), 4, "CNI_NETNS")
	n.refused(c.call("FROBNICATE", n.config("veth")), 4, "FROBNICATE")
	n.refused(c.call("ADD", n.config("veth").with("mtu", "big")), 6, "mtu")
	n.refused(c.call("ADD", n.config("veth"), "CNI_NETNS=/var/run/netns/none"), 8, "/var/run/netns/none")
	n.refused(c.call("ADD", n.config("veth"), "CNI_NETNS=/etc/passwd"), 8, "not a network namespace")
	n.refused(c.call("ADD", n.config("veth"), "CNI_NETNS=/var/run/netns/"+n.name), 8, "node's own")
	for _, command := range []string{"GC", "STATUS"} {
		n.refused(n.exec(n.command(binary, command, n.config("veth").with("cniVersion", "1.0.0"))), 1, command)
	}
}
