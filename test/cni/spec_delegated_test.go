// SPDX-License-Identifier: Apache-2.0

package cni_test

// One test for each sentence of the spec 1.1.0 that binds a plugin, by the
// sentence's words: delegated plugins (section 4).

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// fakeIPAM makes an IPAM plugin that notes how it is called, and fails at the
// commands in fail.
func (n *node) fakeIPAM(fail ...string) (log func() []string) {
	n.t.Helper()
	return n.ipamThatGives(`"ips":[{"address":"10.8.0.2/24","gateway":"10.8.0.1"}],"routes":[{"dst":"10.99.0.0/16"}],"dns":{"nameservers":["10.8.0.53"]}`, fail...)
}

// ipamThatGives is fakeIPAM with what ADD answers besides the version.
func (n *node) ipamThatGives(fields string, fail ...string) (log func() []string) {
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
[ $CNI_COMMAND = ADD ] && echo '{"cniVersion":"1.1.0",%s}'
exit 0
`, file, strings.Join(fail, " "), fields)
	if err := os.WriteFile(filepath.Join(dir, "fake-ipam"), []byte(script), 0o755); err != nil {
		n.t.Fatal(err)
	}
	return func() []string {
		text, _ := os.ReadFile(file)
		return strings.Split(strings.TrimSpace(string(text)), "\n")
	}
}

func TestDelegated_MustReceiveTheSameEnvironmentAndBeExecutedForEachCommand(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		log := n.fakeIPAM()
		c := n.container()
		conf := n.config(mode).with("ipam", map[string]any{"type": "fake-ipam"})
		n.ok(n.exec(n.command(binary, "STATUS", conf)))
		a := c.add(conf, "CNI_ARGS=K=V")
		if len(a.IPs) != 1 || !strings.HasPrefix(a.IPs[0].Address, "10.8.0.2/") || a.DNS["nameservers"] == nil {
			t.Errorf("got %s", a.stdout)
		}
		if !strings.Contains(run(t, "ip", "-n", c.ns, "route"), "10.99.0.0/16 via ") {
			t.Error("IPAM's route is missing")
		}
		c.ok(c.call("CHECK", conf.prev(a), "CNI_ARGS=K=V"))
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
		if got := strings.Join(commands, " "); got != "STATUS ADD CHECK DEL GC" {
			t.Errorf("called: %s", got)
		}
	})
}

func TestDelegated_IfItFailsOnADDThePluginShouldExecuteItWithDEL(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		log := n.fakeIPAM("ADD")
		c := n.container()
		conf := n.config(mode).with("ipam", map[string]any{"type": "fake-ipam"})
		n.refused(c.call("ADD", conf), 142, "no ADD today")
		if lines := log(); len(lines) != 2 || !strings.HasPrefix(lines[1], "DEL "+c.id) {
			t.Errorf("called: %q", lines)
		}
	})
}

func TestDelegated_IfItReturnsAnErrorThePluginShouldReturnAnError(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		n.fakeIPAM("CHECK", "GC", "STATUS")
		c := n.container()
		conf := n.config(mode).with("ipam", map[string]any{"type": "fake-ipam"})
		n.refused(n.exec(n.command(binary, "STATUS", conf)), 50, "no STATUS today")
		a := c.add(conf)
		n.refused(c.call("CHECK", conf.prev(a)), 100, "no CHECK today")
		run(t, "sed", "-i", "s/142/11/", filepath.Join(n.dir, "plugins", "fake-ipam")) // try again later
		n.refused(c.call("CHECK", conf.prev(a)), 11, "no CHECK today")
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
	})
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

// A table of its own is asked by rules, which are the user's: a default route there is one
// like others. By the main table's, its number said or not, the pod's own is made.
func TestDelegated_ADefaultRouteInATableOfItsOwnIsMade(t *testing.T) {
	for mode, hop := range map[string][2]string{"veth": {"169.254.10.24", "169.254.10.24"}, "bridge": {"10.8.0.9", "10.8.0.1"}} {
		t.Run(mode, func(t *testing.T) {
			n := newNode(t)
			n.ipamThatGives(`"ips":[{"address":"10.8.0.2/24","gateway":"10.8.0.1"},{"address":"fd00:8::2/64","gateway":"fd00:8::1"}],
				"routes":[{"dst":"0.0.0.0/0","gw":"10.8.0.9","table":254,"mtu":1400},{"dst":"0.0.0.0/0","gw":"10.8.0.1","table":100,"mtu":1300},{"dst":"::/0","table":100}]`)
			c, conf := n.container(), n.config(mode).with("ipam", map[string]any{"type": "fake-ipam"})
			a := c.add(conf)
			for args, want := range map[string]string{
				"-4 route show default":           "default via " + hop[0] + " dev eth0",
				"-4 route show default table 100": "default via " + hop[1] + " dev eth0",
				"-6 route show default table 100": "default via f",
			} {
				if out := run(t, "ip", append([]string{"-n", c.ns}, strings.Fields(args)...)...); !strings.HasPrefix(out, want) || strings.Contains(out, "mtu 1300") != strings.Contains(args, "-4 route show default table") {
					t.Errorf("ip %s: %q, want %q", args, out, want)
				}
			}
			if strings.Count(a.stdout, `"table":100`) != 2 || len(a.Routes) != 4 {
				t.Errorf("the result: %s", a.stdout)
			}
			if !strings.Contains(a.stderr, "mtu, advmss and priority of the default route to 0.0.0.0/0 are not obeyed") {
				t.Errorf("standard error: %q", a.stderr)
			}
			c.ok(c.call("CHECK", conf.prev(a)))
			c.del(conf)
		})
	}
}

// One that lived on would give an address when the DEL of the killed ADD is done.
func TestDelegated_AKilledADDsIPAMPluginEndsWithIt(t *testing.T) {
	n := newNode(t)
	dir := filepath.Join(n.dir, "plugins")
	began := filepath.Join(n.dir, "began")
	script := fmt.Sprintf("#!/bin/sh\n[ $CNI_COMMAND = ADD ] || exit 0\necho $$ >%s-new\nmv %[1]s-new %[1]s\nexec sleep infinity\n", began)
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "slow-ipam"), []byte(script), 0o755)); err != nil {
		t.Fatal(err)
	}
	c, conf := n.container(), n.config("veth").with("ipam", map[string]any{"type": "slow-ipam"})
	cmd := c.command(binary, "ADD", conf, c.env()...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	n.eventually("IPAM is asked", func() bool {
		text, _ := os.ReadFile(began)
		pid, _ = strconv.Atoi(strings.TrimSpace(string(text)))
		return pid > 0
	})
	lives := func() bool { // nobody may have waited for it yet
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		return strings.Contains(string(text), "infinity") || strings.Contains(string(text), "slow-ipam")
	}
	t.Cleanup(func() {
		if lives() {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	cmd.Process.Kill() // nsenter has become the plugin
	cmd.Wait()
	n.eventually("IPAM's plugin has ended", func() bool { return !lives() })
	c.del(conf)
}

// The list may have changed since ADD: who gave an address takes it back, by the
// configuration that it gave it by.
func TestDelegated_ReleasesAlsoWhenTheListHasChanged(t *testing.T) {
	for name, changed := range map[string]func(n *node, c config, ipam map[string]any) config{
		"another IPAM": func(n *node, c config, _ map[string]any) config { return c.with("ipam", n.config("veth")["ipam"]) },
		"another name": func(_ *node, c config, _ map[string]any) config { return c.with("name", "renamed") },
		"another directory": func(n *node, c config, ipam map[string]any) config {
			ipam = maps.Clone(ipam)
			ipam["dataDir"] = filepath.Join(n.dir, "elsewhere")
			return c.with("ipam", ipam)
		},
		"nothing": func(_ *node, c config, _ map[string]any) config { return c },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			dir := filepath.Join(n.dir, "host-local")
			ipam := map[string]any{"type": "host-local", "dataDir": dir, "ranges": []any{[]any{map[string]any{"subnet": "10.6.0.0/24"}}}}
			reserved := func() []string {
				list, _ := filepath.Glob(filepath.Join(dir, "*", "10.6*"))
				return list
			}
			c, older := n.container(), n.config("veth").with("ipam", ipam)
			c.add(older)
			if len(reserved()) != 1 {
				t.Fatalf("allocations: %v", reserved())
			}
			c.del(changed(n, older, ipam))
			if left := reserved(); len(left) > 0 {
				t.Errorf("allocations left: %v", left)
			}
		})
	}
}
