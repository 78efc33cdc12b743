// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// installer runs install-cni and uninstall-cni on directories of its own.
type installer struct {
	t                    *testing.T
	bin, conf, plugin, d string
}

func newInstaller(t *testing.T) installer {
	d := t.TempDir()
	i := installer{t, filepath.Join(d, "bin"), filepath.Join(d, "net.d"), filepath.Join(d, "plugin"), d}
	if err := os.WriteFile(i.plugin, []byte("#!/bin/true\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return i
}

func (i installer) run(args ...string) (string, error) {
	i.t.Helper()
	cmd := newRootCmd()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs(append(args, "--bin-dir", i.bin, "--conf-dir", i.conf, "--bpffs", filepath.Join(i.d, "none"), "--state-dir", filepath.Join(i.d, "state")))
	err := cmd.Execute()
	return out.String(), err
}

func (i installer) files() string {
	files, _ := filepath.Glob(filepath.Join(i.d, "*", "*"))
	hidden, _ := filepath.Glob(filepath.Join(i.d, "*", ".*"))
	return strings.ReplaceAll(strings.Join(append(files, hidden...), " "), i.d+"/", "")
}

func TestInstallCNIAndUninstallLeavesNothing(t *testing.T) {
	i := newInstaller(t)
	for range 2 { // again is an upgrade
		if _, err := i.run("install-cni", "--plugin", i.plugin, "--pool", "10.244.1.0/24"); err != nil {
			t.Fatal(err)
		}
	}
	if got := i.files(); got != "bin/mustang-cni net.d/05-mustang.conflist" {
		t.Errorf("installed: %s", got)
	}
	for range 2 {
		if _, err := i.run("uninstall-cni"); err != nil {
			t.Fatal(err)
		}
	}
	if got := i.files(); got != "" {
		t.Errorf("left: %s", got)
	}
}

func TestInstallCNIRefusesToDisplaceAnotherNetwork(t *testing.T) {
	i := newInstaller(t)
	other := filepath.Join(i.conf, "10-other.conflist")
	if err := os.MkdirAll(i.conf, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(other, []byte(`{"name":"other","plugins":[{"type":"bridge"}]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	args := []string{"install-cni", "--plugin", i.plugin, "--pool", "10.244.1.0/24"}
	if _, err := i.run(args...); err == nil || !strings.Contains(err.Error(), other) {
		t.Errorf("got %v", err)
	}
	if got := i.files(); got != "net.d/10-other.conflist" {
		t.Errorf("something was installed: %s", got)
	}
	if _, err := i.run(append(args, "--displace")...); err != nil {
		t.Error(err)
	}
	if _, err := i.run("uninstall-cni", "--conf-name", "10-other.conflist"); err == nil {
		t.Error("another network's list was removed")
	}
}

func TestInstallCNIChecksTheList(t *testing.T) {
	i := newInstaller(t)
	list := filepath.Join(t.TempDir(), "list")
	if err := os.WriteFile(list, []byte(`{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "mustang-cni", "ipam": {"type": "mustang", "pools": ["10.1.0.1/24"]}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for says, args := range map[string][]string{
		"pods need addresses": {}, "--mode: mode \"pigeon\"": {"--mode", "pigeon", "--pool", "10.1.0.0/24"}, "--mode: chained": {"--mode", "chained", "--pool", "10.1.0.0/24"},
		"--pool: subnet \"10.1.0.1/24\"": {"--pool", "10.1.0.1/24"}, "--pool: pool \"10.1.0.0\"": {"--pool", "10.1.0.0"}, "--pool: pools 10.1.0.0/24 and": {"--pool", "10.1.0.0/24,10.1.0.0/25"},
		`--mtu "9k"`: {"--mtu", "9k", "--pool", "10.1.0.0/24"}, `--mtu "1e3"`: {"--mtu", "1e3", "--pool", "10.1.0.0/24"},
		"--mtu: MTU 9 is": {"--mtu", "9", "--pool", "10.1.0.0/24"}, "--mtu: MTU 1000 is": {"--mtu", "1000", "--pool", "10.1.0.0/24,fd00:1::/64"},
		"--config: ipam.pools: subnet": {"--config", list}, "--masquerade-exclude: \"ten\"": {"--pool", "10.1.0.0/24", "--masquerade-exclude", "ten"},
		"--masquerade-exclude: has no meaning": {"--pool", "10.1.0.0/24", "--masquerade=false", "--masquerade-exclude", "10.0.0.0/8"},
	} {
		if _, err := i.run(append([]string{"install-cni", "--plugin", i.plugin}, args...)...); err == nil || !strings.HasPrefix(err.Error(), says) {
			t.Errorf("%v: got %v", args, err)
		}
	}
	if got := i.files(); got != "" {
		t.Errorf("installed: %s", got)
	}
}

// Beside an agent there is no waiting for the lock that it holds.
func TestInstallCNIDoesNotWaitForAnAgent(t *testing.T) {
	w, i := newTool(t), newInstaller(t)
	w.ok("svc", "add", "--service=10.96.0.100:5201", "--backend=192.168.10.10:5201") // so there is a scope
	agent, err := os.Open(w.bpffs)
	if err != nil {
		t.Fatal(err)
	}
	defer agent.Close()
	if err := unix.Flock(int(agent.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	out, errs, code := w.run("", "install-cni", "--bin-dir", i.bin, "--conf-dir", i.conf, "--plugin", i.plugin, "--pool", "10.244.1.0/24")
	if want := "works on " + w.bpffs + ": pods that exist already are not looked at"; code != 0 || !strings.Contains(errs, want) || !strings.Contains(out, "05-mustang.conflist") {
		t.Errorf("status %d, %q, %q; want %q", code, out, errs, want)
	}
}

// A node with pods of an older network, and namespaces that are no pods of it.
func (w *tool) olderNetwork() (dir, veth, macvlan string) {
	w.t.Helper()
	dir = w.t.TempDir()
	space := func(name string) string {
		full := w.netns + name
		w.sh("ip netns add %s", full)
		w.t.Cleanup(func() { w.sh("ip netns del %s", full) })
		if err := os.Symlink("/var/run/netns/"+full, filepath.Join(dir, name)); err != nil {
			w.t.Fatal(err)
		}
		return full
	}
	veth, macvlan = space("-veth"), space("-macvlan")
	other, otherVeth, otherMacvlan, bare := space("-other"), space("-otherveth"), space("-othermacvlan"), space("-bare")
	for i, x := range []struct{ node, veth, macvlan string }{{w.netns, veth, macvlan}, {other, otherVeth, otherMacvlan}} {
		w.sh("ip -n %s link add host type veth peer name eth0 netns %s", x.node, x.veth)
		w.sh("ip -n %s link add up0 type bridge && ip -n %s link set up0 up", x.node, x.node)
		w.sh("ip -n %s link add eth0 link up0 netns %s type macvlan mode bridge", x.node, x.macvlan)
		for j, pod := range []string{x.veth, x.macvlan} {
			w.sh("ip -n %s addr add 10.%d.%d.2/24 dev eth0 && ip -n %s link set eth0 up", pod, 30+i, j, pod)
		}
	}
	w.sh("ip -n %s link add eth0 type bridge", bare) // without an address
	return dir, veth, macvlan
}

func TestInstallCNINamesPodsThatExistedOrAdoptsThem(t *testing.T) {
	w, i := newTool(t), newInstaller(t)
	dir, veth, macvlan := w.olderNetwork()
	args := []string{"install-cni", "--bin-dir", i.bin, "--conf-dir", i.conf, "--plugin", i.plugin, "--pool", "10.244.1.0/24", "--netns-dir", dir}
	addresses := filepath.Join(w.state, "cni", "addresses")
	looked := filepath.Join(addresses, "looked-10.244.1.0_24")
	if err := errors.Join(os.MkdirAll(addresses, 0o700), os.Symlink("others", looked)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(filepath.Join(w.state, "cni")) })
	out := w.ok(args...)
	if _, err := os.Lstat(looked); !os.IsNotExist(err) {
		t.Error("the next ADD does not look for addresses that these pods have")
	}
	for _, name := range []string{"-veth", "-macvlan"} {
		if want := "not mustang's: eth0 in " + filepath.Join(dir, name) + " (10.30."; !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	if strings.Contains(out, "-bare") || strings.Contains(w.ok("ep", "ls"), "10.30.") {
		t.Errorf("a namespace without a pod is listed, or a pod was adopted:\n%s", out)
	}
	out = w.ok(append(args, "--adopt")...)
	for name, says := range map[string]string{"-veth": "adopted", "-macvlan": "adopted", "-otherveth": "not this node's:", "-othermacvlan": "not this node's:"} {
		if want := fmt.Sprintf("%s eth0 in %s (", says, filepath.Join(dir, name)); !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	var eps []endpointView
	if err := json.Unmarshal([]byte(w.ok("ep", "ls", "-o", "json")), &eps); err != nil {
		t.Fatal(err)
	}
	if len(eps) != 2 {
		t.Errorf("endpoints: %+v", eps)
	}
	// A Service works in what was adopted: nobody listens, so it is refused at once.
	w.ok("svc", "add", "--service", "10.96.0.1:80", "--protocol", "tcp")
	for _, pod := range []string{veth, macvlan} {
		w.sh("ip -n %s route add default dev eth0", pod)
		w.sh("! nsenter --net=/var/run/netns/%s timeout 2 bash -c 'exec 3<>/dev/tcp/10.96.0.1/80' 2>/tmp/mst-adopt-$$ && grep -qi refused /tmp/mst-adopt-$$; r=$?; rm -f /tmp/mst-adopt-$$; exit $r", pod)
	}
	if out := w.ok(args...); strings.Contains(out, filepath.Join(dir, "-veth")) {
		t.Errorf("an adopted pod is listed again:\n%s", out)
	}
	w.givesBackByForceAlone()
	w.ok("svc", "rm", "--service", "10.96.0.1:80", "--protocol", "tcp")
}

// givesBackByForceAlone gives back the interface of a runtime's pod, which nothing would put back.
func (w *tool) givesBackByForceAlone() {
	w.t.Helper()
	var list []endpointView
	if err := json.Unmarshal([]byte(w.ok("ep", "ls", "-o", "json")), &list); err != nil || len(list) == 0 {
		w.t.Fatalf("%v: %v", list, err)
	}
	id := fmt.Sprint(list[0].ID)
	if _, errs, code := w.run("", "ep", "rm", id); code != 1 || !strings.Contains(errs, "endpoint "+id) || !strings.Contains(errs, "--force") {
		w.t.Errorf("status %d: %s", code, errs)
	}
	if out := w.ok("ep", "ls", "-o", "json"); !strings.Contains(out, list[0].Netns) {
		w.t.Errorf("what was refused is gone:\n%s", out)
	}
	w.ok("ep", "rm", "--force", id)
	if out := w.ok("ep", "ls", "-o", "json"); strings.Contains(out, list[0].Netns) {
		w.t.Errorf("still there:\n%s", out)
	}
}
