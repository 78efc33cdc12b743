// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mustang-net/mustang/test/kube"
)

// TestServicesByAgent is a cluster without kube-proxy: mustang-cni connects the
// pods, and an agent on each node makes Services, DNS the first of them, and
// NetworkPolicies.
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
	c.apply(rights)
	for _, node := range []string{"n1", "n2"} {
		c.installPlugin(node, plugin, c.network(node, "veth"))
		c.startAgent(node, tool)
	}
	c.run("ready")
	c.apply(probedPods + services)
	c.run("kubectl", "rollout", "status", "daemonset/server", "--timeout=5m")
	c.run("kubectl", "rollout", "status", "daemonset/peer", "--timeout=5m")
	for _, node := range []string{"n1", "n2"} {
		peer := c.podOn(node, "peer", "{.items[0].metadata.name}")
		c.reaches("a pod of "+node+", by name", "server-", "kubectl", "exec", peer, "--", "curl", "-sS", "--max-time", "10", "http://server.default.svc.cluster.local/hostname")
		c.reaches("a pod of "+node+", by a local Service", c.podOn(node, "server", "{.items[0].metadata.name}"),
			"kubectl", "exec", peer, "--", "curl", "-sS", "--max-time", "10", "http://server-local/hostname")
		c.reaches("the node "+node+" itself", "server-", "enter", node, "--", "curl", "-sS", "--max-time", "10", "http://10.96.7.7/hostname")
		c.reaches("the node port of "+node+", from the control plane", "server-", "enter", kube.ControlPlane, "--", "curl", "-sS", "--max-time", "10", "http://"+nodeAddress(node)+":30080/hostname")
	}
	c.policyHolds()
}

// policyHolds: policies across nodes, by packet and through Services.
func (c *testCluster) policyHolds() {
	c.t.Helper()
	curl := func(from, to, seconds string) []string {
		return []string{"kubectl", "exec", c.podOn(from, "peer", "{.items[0].metadata.name}"), "--", "curl", "-sS", "--max-time", seconds, "http://" + to + "/hostname"}
	}
	targets := map[string]string{
		"by address": c.podOn("n1", "server", "{.items[0].status.podIP}") + ":8080", "by Service": "10.96.7.7",
	}
	c.apply(closed)
	for _, from := range []string{"n1", "n2"} {
		for how, to := range targets {
			c.refused("a pod of "+from+", "+how, curl(from, to, "2")...)
		}
	}
	c.run("kubectl", "label", "pods", "-l", "app=peer", "may=yes")
	for _, from := range []string{"n1", "n2"} {
		for how, to := range targets {
			c.reaches("a pod of "+from+" that may, "+how, "server-", curl(from, to, "10")...)
		}
	}
	c.run("kubectl", "delete", "networkpolicy", "closed")
}

// childOf is a process's only child, whichever of its threads began it.
func childOf(pid int) (child int, err error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return 0, err
	}
	for _, file := range threads {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the thread has ended
		}
		if _, err := fmt.Sscan(string(text), &child); err == nil {
			return child, nil
		}
	}
	return 0, fmt.Errorf("process %d has no child", pid)
}

// refused waits until a command fails, and wants it to fail three times more.
func (c *testCluster) refused(who string, args ...string) {
	c.t.Helper()
	eventually(c.t, who+" is stopped", func() error {
		for range 3 {
			if out, err := c.try(args...); err == nil {
				return errors.New("the answer is " + out)
			}
		}
		return nil
	})
}

const closed = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: closed}
spec: {podSelector: {matchLabels: {app: server}}, ingress: [{from: [{podSelector: {matchLabels: {may: "yes"}}}]}]}
`

// rights are what an agent needs besides those of a kube-proxy.
const rights = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: mustang-agent}
rules:
- {apiGroups: [""], resources: [pods, namespaces], verbs: [list, watch]}
- {apiGroups: [networking.k8s.io], resources: [networkpolicies], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: mustang-agent}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: mustang-agent}
subjects: [{kind: User, apiGroup: rbac.authorization.k8s.io, name: "system:kube-proxy"}]
`

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
		// It waits for the agent, and dies of signals that it does not hand on.
		if agent, err := childOf(cmd.Process.Pid); err != nil || syscall.Kill(agent, syscall.SIGINT) != nil {
			c.t.Errorf("the agent of %s is gone: %v", node, err)
		}
		select {
		case err := <-ended:
			if err != nil {
				c.t.Errorf("the agent of %s: %v", node, err)
			}
		case <-time.After(time.Minute):
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
