// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestMigration moves a running cluster from kube-proxy and the bridge plugin to
// mustang, node by node, and back, the way that docs/deploy.md goes. All the while a
// pod of the node that is not touched asks a Service whose servers move along, each
// question by a new connection: none may fail.
func TestMigration(t *testing.T) {
	patient(t)
	wantStormTools(t)
	tool := buildTool(t, "mustang")
	c := &testCluster{t: t, name: clusterName()}
	t.Cleanup(func() {
		if out, err := c.try("down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		assertNothingLeft(t, c.name)
	})
	c.run("up", "--dual-stack", "--bind="+filepath.Dir(tool))
	c.loadMustang()
	out, err := exec.Command("bash", "-c", `cd ../../deploy/tools && go run ./manifest --set apiServer=10.89.0.1:6443 --set agent.cni-displace=true --set 'nodeSelector.network\.mustang\.net=yes'`).Output()
	if err != nil {
		t.Fatal(err)
	}
	c.apply(string(out))
	c.apply(stormFiles + movable)
	c.run("kubectl", "rollout", "status", "deployment/web", "--timeout=3m")

	steps := []struct {
		move, stay string
		do         func(node string)
	}{
		{"n2", "n1", c.toMustang}, {"n1", "n2", c.toMustang},
		{"n1", "n2", func(node string) { c.fromMustang(node, tool) }}, {"n2", "n1", func(node string) { c.fromMustang(node, tool) }},
	}
	for i, s := range steps {
		client := fmt.Sprintf("client-%d", i)
		c.apply(strings.Replace(stormClient(fmt.Sprint(i), debian(untilTold)), "nodeName: n1", "nodeName: "+s.stay, 1))
		c.run("kubectl", "wait", "--for=condition=Ready", "pod/"+client, "--timeout=3m")
		c.run("kubectl", "drain", s.move, "--ignore-daemonsets", "--force", "--timeout=3m")
		s.do(s.move)
		c.run("kubectl", "uncordon", s.move)
		c.spread()
		c.run("kubectl", "exec", client, "--", "touch", "/tmp/enough")
		c.run("kubectl", "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/"+client, "--timeout=3m")
		var asked, failed int
		log := c.run("kubectl", "logs", client)
		if _, err := fmt.Sscanf(lastLine(log), "asked %d failed %d", &asked, &failed); err != nil || asked == 0 || failed > 0 {
			t.Errorf("while %s moved, a pod of %s asked: %v\n%s", s.move, s.stay, err, log)
		}
		t.Logf("while %s moved: %s", s.move, lastLine(log))
	}
	c.run("kubectl", "delete", "-n", "kube-system", "daemonset/mustang", "--wait")
}

// toMustang is a drained node's way.
func (c *testCluster) toMustang(node string) {
	c.run("kubectl", "label", "node", node, "network.mustang.net=yes")
	c.run("stop", node, "kube-proxy")
	c.run("enter", node, "--", "kube-proxy", "--cleanup", "--config=/etc/kubernetes/kube-proxy.yaml")
	eventually(c.t, "the agent of "+node, func() error {
		out, err := c.try("kubectl", "get", "pod", "-n", "kube-system", "-l", "app.kubernetes.io/name=mustang", "--field-selector", "spec.nodeName="+node, "-o", `jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "True" {
			err = fmt.Errorf("ready: %q", out)
		}
		return err
	})
	c.run("enter", node, "--", "sh", "-c", "mv /etc/cni/net.d/10-bridge.conflist /etc/kubernetes/")
	c.restartRest(node)
	c.run("enter", node, "--", "ip", "link", "del", "cni0")
}

// fromMustang is the way back.
func (c *testCluster) fromMustang(node, tool string) {
	c.run("kubectl", "label", "node", node, "network.mustang.net-")
	eventually(c.t, "no agent on "+node, func() error {
		out, err := c.try("kubectl", "get", "pod", "-n", "kube-system", "-l", "app.kubernetes.io/name=mustang", "--field-selector", "spec.nodeName="+node, "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	})
	c.run("enter", node, "--", tool, "--cgroup-root", "/sys/fs/cgroup", "uninstall", "--pods")
	c.holdsNothing(node)
	c.run("enter", node, "--", "sh", "-c", "mv /etc/kubernetes/10-bridge.conflist /etc/cni/net.d/")
	c.run("start", node, "kube-proxy")
	c.restartRest(node)
}

// restartRest deletes what a drain leaves: pods of DaemonSets with an address of the
// old network. They come back with one of the new.
func (c *testCluster) restartRest(node string) {
	c.run("kubectl", "delete", "pod", "-l", "app=client", "--field-selector", "spec.nodeName="+node, "--wait")
}

// spread brings a server back to each node.
func (c *testCluster) spread() {
	c.run("kubectl", "rollout", "restart", "deployment/web")
	c.run("kubectl", "rollout", "status", "deployment/web", "--timeout=3m")
}

// untilTold asks again and again, and says at the end how often, and how often in vain.
const untilTold = `asked=0 failed=0
while [ ! -e /tmp/enough ]; do
  asked=$((asked+1))
  curl -sS -o /dev/null --max-time 20 http://10.96.9.1/hostname || failed=$((failed+1))
  sleep 0.05
done 2>&1
echo asked $asked failed $failed`

// movable are servers that answer for a while after they were told to end, as any
// server should that a Service leads to, and a pod that no drain moves.
var movable = deployment("web", 4, webServer(20, "ScheduleAnyway", ", --delay-shutdown=8", "/readyz")) + `
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: web}
spec: {minAvailable: 2, selector: {matchLabels: {app: web}}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.9.1, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---` + idleClients
