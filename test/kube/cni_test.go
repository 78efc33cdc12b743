// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/test/built"
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
			c := mustangCluster(t, tool)
			for _, node := range []string{"n1", "n2"} {
				c.installPlugin(node, plugin, c.network(node, mode))
			}
			c.startProbedPods()
			for _, node := range []string{"n1", "n2"} {
				c.podsTalk(node)
			}
			c.deletedLeavesNothing(tool)
		})
	}
}

// TestPodsWithASecondInterface has pods as Multus makes them: the runtime calls
// one plugin, and that calls mustang twice, in two modes. Each interface works.
func TestPodsWithASecondInterface(t *testing.T) {
	prepare(t)
	tool, plugin := buildTool(t, "mustang"), buildTool(t, "mustang-cni")
	c := mustangCluster(t, tool)
	for i, node := range []string{"n1", "n2"} {
		second := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "second", "type": "mustang-cni", "mode": "macvlan", "uplink": "eth0",
			"cgroupRoot": "/sys/fs/cgroup/unified", "ipam": {"type": "mustang", "pools": ["10.77.%d.0/24", "fd00:77:%d::/64"]}}`, i, i)
		c.installPlugin(node, plugin, `{"type": "two-networks"}`)
		c.addFiles(node, map[string]string{"bin/two-networks": twoNetworks, "net.d/networks/1": second,
			"net.d/networks/0": strings.Replace(c.network(node, "veth"), "{", `{"cniVersion": "1.0.0", "name": "mustang", `, 1)})
	}
	c.startProbedPods()
	for _, node := range []string{"n1", "n2"} {
		c.podsTalk(node)
		var list []struct {
			IfName, Netns string
			IPs           []string
		}
		out := c.run("enter", node, "--", tool, "ep", "ls", "-o", "json")
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			t.Fatal(err)
		}
		server, peer := c.podOn(node, "server", "{.items[0].metadata.name}"), c.podOn(node, "peer", "{.items[0].metadata.name}")
		ip, space, tried := c.podOn(node, "server", "{.items[0].status.podIP}"), "", 0
		for _, ep := range list {
			if slices.Contains(ep.IPs, ip) {
				space = ep.Netns
			}
		}
		for _, ep := range list {
			if ep.IfName != "net1" || ep.Netns != space {
				continue
			}
			for _, a := range ep.IPs {
				tried++
				host := net.JoinHostPort(a, "8080")
				if got := c.run("kubectl", "exec", peer, "--", "curl", "-sS", "--max-time", "60", "http://"+host+"/hostname"); !strings.HasSuffix(got, server) {
					t.Errorf("%s asked %s at %s and got %q", peer, server, host, got)
				}
			}
		}
		if tried != 2 {
			t.Errorf("%d addresses of the second interface were tried, not 2: %s", tried, out)
		}
	}
	c.deletedLeavesNothing(tool)
}

// twoNetworks calls mustang for eth0, and for net1 with another configuration;
// the first answer is the runtime's.
const twoNetworks = `#!/bin/bash
here=/etc/cni/net.d/networks
call() { CNI_IFNAME=$1 /opt/cni/bin/mustang-cni <$2; }
case $CNI_COMMAND in
ADD) first=$(call eth0 $here/0) || { echo "$first"; exit 1; }
     second=$(call net1 $here/1) || { echo "$second"; exit 1; }
     echo "$first" ;;
DEL) call net1 $here/1 && call eth0 $here/0 ;;
VERSION) call eth0 $here/0 ;;
esac
`

// mustangCluster is one whose network is about to be installed.
func mustangCluster(t *testing.T, tool string) *testCluster {
	t.Helper()
	c := &testCluster{t: t, name: clusterName()}
	t.Cleanup(func() {
		if out, err := c.try("down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		assertNothingLeft(t, c.name)
	})
	c.run("up", "--cni=none", "--proxy=none", "--bind="+filepath.Dir(tool))
	return c
}

// startProbedPods returns when all are Ready.
func (c *testCluster) startProbedPods() {
	c.t.Helper()
	c.run("kubectl", "wait", "--for=condition=Ready", "node", "--all", "--timeout=5m")
	c.apply(probedPods)
	c.run("kubectl", "rollout", "status", "daemonset/server", "--timeout=5m")
	c.run("kubectl", "rollout", "status", "daemonset/peer", "--timeout=5m")
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
	bin, err := built.Binary(t.TempDir(), name, "")
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

// network is mustang's configuration for a node's pods.
func (c *testCluster) network(node, mode string) string {
	c.t.Helper()
	var spec struct {
		Spec struct{ PodCIDR string }
	}
	if err := json.Unmarshal([]byte(c.run("kubectl", "get", "node", node, "-o", "json")), &spec); err != nil {
		c.t.Fatal(err)
	}
	return fmt.Sprintf(`{"type": "mustang-cni", "mode": %q, "uplink": "eth0", "cgroupRoot": "/sys/fs/cgroup/unified",
		"ipam": {"type": "mustang", "pools": [{"subnet": %q}]}}`, mode, spec.Spec.PodCIDR)
}

// installPlugin puts the plugin, and a list of one, where the node's containerd looks.
func (c *testCluster) installPlugin(node, plugin, network string) {
	c.t.Helper()
	binary, err := os.ReadFile(plugin)
	if err != nil {
		c.t.Fatal(err)
	}
	c.addFiles(node, map[string]string{"bin/mustang-cni": string(binary)})
	c.addFiles(node, map[string]string{"net.d/10-mustang.conflist": `{"cniVersion": "1.0.0", "name": "mustang", "plugins": [` + network + `]}`})
}

// addFiles writes below a node's CNI directories.
func (c *testCluster) addFiles(node string, files map[string]string) {
	c.t.Helper()
	for name, text := range files {
		path := filepath.Join("/var/lib/mustang-kube", c.name, node, "cni", name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = os.WriteFile(path, []byte(text), 0o755)
		}
		if err != nil {
			c.t.Fatal(err)
		}
	}
}

// podsTalk has the peer of a node ask the server of the same node by its address.
func (c *testCluster) podsTalk(node string) {
	c.t.Helper()
	peer := c.podOn(node, "peer", "{.items[0].metadata.name}")
	ip := c.podOn(node, "server", "{.items[0].status.podIP}")
	want := c.podOn(node, "server", "{.items[0].metadata.name}")
	out := c.run("kubectl", "exec", peer, "--", "curl", "-sS", "--max-time", "60", "http://"+ip+":8080/hostname")
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
