// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/test/kube"
)

// TestServicesByAgent is a cluster without kube-proxy: mustang-cni connects the
// pods, and an agent on each node makes Services. DNS is the first of them.
func TestServicesByAgent(t *testing.T) {
	prepare(t)
	tool, plugin := buildTool(t, "mustang"), buildTool(t, "mustang-cni")
	c := &testCluster{t: t, name: clusterName()}
	t.Cleanup(func() {
		if out, err := c.try("down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		assertNothingLeft(t, c.name)
	})
	c.run("up", "--cni=none", "--proxy=none", "--bind="+filepath.Dir(tool))
	for _, node := range []string{"n1", "n2"} {
		c.installPlugin(node, "veth", plugin)
		c.startAgent(node, tool)
	}
	c.run("ready")
	c.apply(probedPods + services)
	c.run("kubectl", "rollout", "status", "daemonset/server", "--timeout=90s")
	c.run("kubectl", "rollout", "status", "daemonset/peer", "--timeout=90s")
	for _, node := range []string{"n1", "n2"} {
		peer := c.podOn(node, "peer", "{.items[0].metadata.name}")
		c.reaches("a pod of "+node+", by name", "server-", "kubectl", "exec", peer, "--", "curl", "-sS", "--max-time", "2", "http://server.default.svc.cluster.local/hostname")
		c.reaches("a pod of "+node+", by a local Service", c.podOn(node, "server", "{.items[0].metadata.name}"),
			"kubectl", "exec", peer, "--", "curl", "-sS", "--max-time", "2", "http://server-local/hostname")
		c.reaches("the node "+node+" itself", "server-", "enter", node, "--", "curl", "-sS", "--max-time", "2", "http://10.96.7.7/hostname")
		c.reaches("the node port of "+node+", from the control plane", "server-", "enter", kube.ControlPlane, "--", "curl", "-sS", "--max-time", "2", "http://"+nodeAddress(node)+":30080/hostname")
	}
}

const services = `
---
apiVersion: v1
kind: Service
metadata: {name: server}
spec: {type: NodePort, clusterIP: 10.96.7.7, selector: {app: server}, ports: [{port: 80, targetPort: 8080, nodePort: 30080}]}
---
apiVersion: v1
kind: Service
metadata: {name: server-local}
spec: {selector: {app: server}, internalTrafficPolicy: Local, ports: [{port: 80, targetPort: 8080}]}
`

func nodeAddress(node string) string { return "10.89.0.1" + strings.TrimPrefix(node, "n") }

// reaches waits until a command answers with a prefix, ten times in a row.
func (c *testCluster) reaches(who, prefix string, args ...string) {
	c.t.Helper()
	eventually(c.t, who, func() error {
		for range 10 {
			out, err := c.try(args...)
			if err == nil && !strings.HasPrefix(lastLine(out), prefix) {
				err = errors.New("the answer is not " + prefix)
			}
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
		}
		return nil
	})
}

func lastLine(s string) string { return s[strings.LastIndexByte(s, '\n')+1:] }

// startAgent runs an agent with the rights of a kube-proxy where the node's own
// daemons are.
func (c *testCluster) startAgent(node, tool string) {
	c.t.Helper()
	log, err := os.Create(filepath.Join(c.t.TempDir(), node+".agent.log"))
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.Command(driver, "enter", "--name", c.name, node, "--", tool, "--cgroup-root", "/sys/fs/cgroup/unified",
		"agent", "--node", node, "--kubeconfig", "/etc/kubernetes/kube-proxy.conf")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	c.t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		select {
		case err := <-ended:
			if err != nil {
				c.t.Errorf("the agent of %s: %v", node, err)
			}
		case <-time.After(20 * time.Second):
			_ = cmd.Process.Kill()
			c.t.Errorf("the agent of %s does not end", node)
		}
		if c.t.Failed() {
			text, _ := os.ReadFile(log.Name())
			c.t.Logf("the agent of %s:\n%s", node, text)
		}
		log.Close()
	})
}
