// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/test/kube"
)

// This file does what the documents say, in their words.

// patient says whether tests that take minutes each were asked for.
func patient(t *testing.T) {
	t.Helper()
	if os.Getenv("MUSTANG_CLUSTER") == "" {
		t.Skip("it takes minutes: make test-cluster")
	}
	prepare(t)
}

// TestReadme types the README's commands for a cluster, as a stranger would.
func TestReadme(t *testing.T) {
	patient(t)
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)```sh\n(sudo make cluster\n.*?)```").FindSubmatch(text)
	if block == nil {
		t.Fatal("the README has no commands that begin with sudo make cluster")
	}
	c := &testCluster{t: t, name: clusterName()}
	t.Cleanup(func() {
		if out, err := c.try("down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		assertNothingLeft(t, c.name)
	})
	// Root needs no sudo, and somebody's own cluster has the name.
	words := strings.NewReplacer("sudo ", "", "--name mustang", "--name "+c.name).Replace(string(block[1]))
	cmd := exec.Command("bash", "-e", "-O", "expand_aliases", "-c", words)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "NAME="+c.name)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !regexp.MustCompile(`(?m)^web-[a-z0-9]+-[a-z0-9]{5}`).Match(out) {
		t.Errorf("no web pod has answered:\n%s", out)
	}
}

// TestHelm installs the chart with Helm itself, changes a value, is refused a wrong
// one, and removes it.
func TestHelm(t *testing.T) {
	patient(t)
	c := &testCluster{t: t, name: clusterName()}
	t.Cleanup(func() {
		if out, err := c.try("down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		assertNothingLeft(t, c.name)
	})
	program := filepath.Join(t.TempDir(), "helm")
	inTools(t, "go", "build", "-o", program, "helm.sh/helm/v3/cmd/helm")
	helm := func(args ...string) (string, error) {
		cmd := exec.Command(program, append(args, "-n", "kube-system", "--kubeconfig", kube.Kubeconfig(c.name))...)
		cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	must := func(args ...string) {
		t.Helper()
		if out, err := helm(args...); err != nil {
			t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	const chart = "../../deploy/chart/mustang"
	c.run("up", "--cni=none", "--proxy=none", "--dual-stack")
	c.loadMustang()
	must("install", "mustang", chart, "--set", "apiServer=10.89.0.1:6443", "--wait", "--timeout", "3m")
	c.run("ready")
	c.answers()

	if out, err := helm("upgrade", "mustang", chart, "--reuse-values", "--set", "agent.node-mode=carrier-pigeon"); err == nil || !strings.Contains(out, "node-mode") {
		t.Errorf("a wrong value: %v, and not with its name: %s", err, out)
	}
	must("upgrade", "mustang", chart, "--reuse-values", "--set", "agent.log-level=debug", "--wait", "--timeout", "3m")
	if out := c.run("kubectl", "get", "configmap", "mustang", "-n", "kube-system", "-o", "yaml"); !strings.Contains(out, "log-level: debug") || !strings.Contains(out, "10.89.0.1:6443") {
		t.Errorf("after the upgrade: %s", out)
	}
	c.answers()

	must("uninstall", "mustang", "--wait")
	must("install", "mustang-uninstall", chart, "--set", "uninstall=true", "--wait", "--timeout", "3m")
	must("uninstall", "mustang-uninstall", "--wait")
	for _, node := range []string{"n1", "n2"} {
		c.holdsNothing(node)
	}
}

// inTools runs a command in the module of deploy/tools.
func inTools(t *testing.T, command ...string) {
	t.Helper()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir = "../../deploy/tools"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
	}
}

// loadMustang gives the nodes mustang's image.
func (c *testCluster) loadMustang() {
	c.t.Helper()
	dir := c.t.TempDir()
	inTools(c.t, "go", "run", "./image", "--version", "0.1.0", "--arch", "amd64", "--out", dir)
	c.run("load-image", filepath.Join(dir, "mustang-0.1.0-amd64.tar"))
}

// answers wants a Service with a server on each node to answer from each of them.
func (c *testCluster) answers() {
	c.t.Helper()
	c.apply(workload)
	c.run("kubectl", "rollout", "status", "deployment/web", "--timeout=3m")
	c.run("kubectl", "rollout", "status", "daemonset/client", "--timeout=3m")
	for _, node := range []string{"n1", "n2"} {
		words := append([]string{"kubectl", "exec", c.client(node), "--"}, curl("http://web/hostname")...)
		eventually(c.t, "a pod of "+node+" asks the Service by name", func() error {
			out, err := c.try(words...)
			if err != nil || !strings.HasPrefix(out, "web-") {
				return fmt.Errorf("%q, %v", out, err)
			}
			return nil
		})
	}
}
