// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/test/kube"
)

// TestPodsOnMustang is a cluster whose pods are connected by mustang-cni, by
// real kubelets through containerd: they become Ready by the kubelet's probes,
// and those of one node reach each other by address.
func TestPodsOnMustang(t *testing.T) {
	prepare(t)
	tool, plugin := buildTool(t, "mustang"), buildTool(t, "mustang-cni")
	for _, mode := range []string{"veth", "bridge", "macvlan"} {
		t.Run(mode, func(t *testing.T) {
			c := &testCluster{t: t, name: clusterName()}
			t.Cleanup(func() {
				if out, err := c.try("down"); err != nil {
					t.Errorf("down: %v\n%s", err, out)
				}
				assertNothingLeft(t, c.name)
			})
			c.run("up", "--cni=none", "--proxy=none", "--bind="+filepath.Dir(tool))
			for _, node := range []string{"n1", "n2"} {
				c.installPlugin(node, mode, plugin)
			}
			c.run("kubectl", "wait", "--for=condition=Ready", "node", "--all", "--timeout=60s")
			c.apply(probedPods)
			c.run("kubectl", "rollout", "status", "daemonset/server", "--timeout=90s")
			c.run("kubectl", "rollout", "status", "daemonset/peer", "--timeout=90s")
			for _, node := range []string{"n1", "n2"} {
				c.podsTalk(node)
			}
			c.deletedLeavesNothing(tool)
		})
	}
}

// probedPods are two servers on each node, which the kubelet probes by TCP and HTTP.
var probedPods = daemonSet("server") + "---" + daemonSet("peer")

func daemonSet(name string) string {
	return `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: ` + name + `}
spec:
  selector: {matchLabels: {app: ` + name + `}}
  template:
    metadata: {labels: {app: ` + name + `}}
    spec:
      terminationGracePeriodSeconds: 0
      automountServiceAccountToken: false
      containers:
      - name: web
        image: ` + kube.AgnhostImage + `
        imagePullPolicy: Never
        args: [netexec, --http-port=8080]
        readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
        livenessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
`
}

func buildTool(t *testing.T, name string) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), name)
	cmd := exec.Command("go", "build", "-o", bin, "../../cmd/"+name)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return bin
}

// installPlugin puts the plugin and a list for it where the node's containerd looks.
func (c *testCluster) installPlugin(node, mode, plugin string) {
	c.t.Helper()
	var spec struct {
		Spec struct{ PodCIDR string }
	}
	if err := json.Unmarshal([]byte(c.run("kubectl", "get", "node", node, "-o", "json")), &spec); err != nil {
		c.t.Fatal(err)
	}
	dir := filepath.Join("/var/lib/mustang-kube", c.name, node, "cni")
	binary, err := os.ReadFile(plugin)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "bin", "mustang-cni"), binary, 0o755)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	list := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "mustang", "plugins": [{
		"type": "mustang-cni", "mode": %q, "uplink": "eth0", "cgroupRoot": "/sys/fs/cgroup/unified",
		"ipam": {"type": "mustang", "pools": [{"subnet": %q}]}}]}`, mode, spec.Spec.PodCIDR)
	if err := os.WriteFile(filepath.Join(dir, "net.d", "10-mustang.conflist"), []byte(list), 0o644); err != nil {
		c.t.Fatal(err)
	}
}

// podsTalk has the peer of a node ask the server of the same node by its address.
func (c *testCluster) podsTalk(node string) {
	c.t.Helper()
	peer := c.podOn(node, "peer", "{.items[0].metadata.name}")
	ip := c.podOn(node, "server", "{.items[0].status.podIP}")
	want := c.podOn(node, "server", "{.items[0].metadata.name}")
	out := c.run("kubectl", "exec", peer, "--", "curl", "-sS", "--max-time", "5", "http://"+ip+":8080/hostname")
	if !strings.HasSuffix(out, want) {
		c.t.Errorf("%s asked %s at %s and got %q", peer, want, ip, out)
	}
}

func (c *testCluster) podOn(node, app, path string) string {
	c.t.Helper()
	return c.run("kubectl", "get", "pod", "-l", "app="+app, "--field-selector", "spec.nodeName="+node, "-o", "jsonpath="+path)
}

// deletedLeavesNothing deletes all pods and wants no endpoint to stay.
func (c *testCluster) deletedLeavesNothing(tool string) {
	c.t.Helper()
	c.run("kubectl", "delete", "daemonset", "server", "peer", "--wait")
	for _, node := range []string{"n1", "n2"} {
		eventually(c.t, "endpoints of "+node+" after its pods are gone", func() error {
			out := c.run("enter", node, "--", tool, "ep", "ls", "-o", "json")
			var list []any
			if err := json.Unmarshal([]byte(out), &list); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			if len(list) > 0 {
				return fmt.Errorf("still there: %s", out)
			}
			return nil
		})
	}
}
