// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
	for says, args := range map[string][]string{
		"--pool": {}, "pigeon": {"--mode", "pigeon", "--pool", "10.1.0.0/24"}, "10.1.0.1/24": {"--pool", "10.1.0.1/24"},
		"masqueradeExclude": {"--pool", "10.1.0.0/24", "--masquerade=false", "--masquerade-exclude", "10.0.0.0/8"},
	} {
		if _, err := i.run(append([]string{"install-cni", "--plugin", i.plugin}, args...)...); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: got %v", args, err)
		}
	}
	if got := i.files(); got != "" {
		t.Errorf("installed: %s", got)
	}
}
