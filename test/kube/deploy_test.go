// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"archive/tar"
	"compress/gzip"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/mustang-net/mustang/test/kube"
)

// install makes a cluster as `make cluster` does: mustang from deploy/. set is
// what `helm --set` would say; "": the generated manifest. env is for scripts/cluster.
func install(t *testing.T, set string, env ...string) *testCluster {
	t.Helper()
	prepare(t)
	c := &testCluster{t: t, name: clusterName()}
	t.Cleanup(func() {
		if out, err := c.try("down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		assertNothingLeft(t, c.name)
	})
	cmd := exec.Command("../../scripts/cluster", "up")
	cmd.Env = append(os.Environ(), "NAME="+c.name, "SET="+set)
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("install: %v\n%s", err, out)
	}
	t.Logf("%s", out)
	return c
}

// connectivity runs the tool's own test.
func (c *testCluster) connectivity(tool string) {
	c.t.Helper()
	cmd := exec.Command(tool, "connectivity", "test", "--kubeconfig", filepath.Join("/var/lib/mustang-kube", c.name, "kubeconfig"), "--sysdump", "none")
	if out, err := cmd.CombinedOutput(); err != nil {
		c.t.Fatalf("connectivity test: %v\n%s", err, out)
	}
	if left := c.run("kubectl", "get", "namespaces", "-l", "app.kubernetes.io/name=mustang-connectivity", "-o", "name"); left != "" {
		c.t.Errorf("the connectivity test left %s", left)
	}
}

// summary is a line of the driver's.
var summary = regexp.MustCompile(`(?m)^\d+ passed, .*`)

// TestInstalled is mustang from the manifest that users apply.
func TestInstalled(t *testing.T) {
	c := install(t, "")
	tool := buildTool(t, "mustang")
	t.Run("the agents have nothing to complain of", func(t *testing.T) { (&testCluster{t, c.name}).nothingAmiss() })
	t.Run("everybody who may reaches everybody", func(t *testing.T) { (&testCluster{t, c.name}).connectivity(tool) })
	t.Run("a sysdump has every node, and no Secret", func(t *testing.T) { (&testCluster{t, c.name}).sysdump(tool) })
	t.Run("the startup taint goes", func(t *testing.T) { (&testCluster{t, c.name}).startupTaint() })
	t.Run("the agent may do no more to nodes", func(t *testing.T) { (&testCluster{t, c.name}).agentsRights() })
	t.Run("upstream's conformance", func(t *testing.T) {
		if missing, err := kube.MissingE2E(); err != nil {
			t.Fatal(err)
		} else if len(missing) > 0 {
			t.Skipf("not built yet: %s; to build: test/kube/kube build --e2e", strings.Join(missing, ", "))
		}
		out, err := exec.Command(driver, "e2e", "--name", c.name, "--output", t.TempDir()).CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out[max(0, len(out)-3000):])
		}
		t.Log(summary.FindString(string(out)))
	})
	t.Run("uninstalled, it leaves nothing", func(t *testing.T) { (&testCluster{t, c.name}).uninstall() })
}

// TestInstalledOtherwise is the same by other values of the chart.
func TestInstalledOtherwise(t *testing.T) {
	for set, between := range map[string]string{
		"agent.node-mode=vxlan agent.vxlan-port=8472 agent.vxlan-vni=77": `"vni": 77, "port": 8472`,
		"agent.cni.mode=bridge": `"vni": 1, "port": 4789`,
	} {
		t.Run(set, func(t *testing.T) {
			c := install(t, set)
			c.nothingAmiss()
			for _, pod := range c.agents() {
				out := c.run("kubectl", "exec", "-n", "kube-system", pod, "-c", "agent", "--", "mustang", "node", "set", "-o", "json")
				if !strings.Contains(strings.Join(strings.Fields(out), " "), between) {
					t.Errorf("%s has %s; want %s", pod, out, between)
				}
			}
			c.connectivity(buildTool(t, "mustang"))
		})
	}
}

// agents are the names of the agents' pods.
func (c *testCluster) agents() []string {
	c.t.Helper()
	return strings.Fields(c.run("kubectl", "get", "pods", "-n", "kube-system", "-l", "app.kubernetes.io/name=mustang", "-o", "jsonpath={.items[*].metadata.name}"))
}

// nothingAmiss wants all in force that Services of each protocol need of a node, by
// an agent that may do no more than its manifest says.
func (c *testCluster) nothingAmiss() {
	c.t.Helper()
	c.apply(`
apiVersion: v1
kind: Service
metadata: {name: each-protocol, namespace: default}
spec:
  type: NodePort
  ipFamilyPolicy: PreferDualStack
  selector: {app: nobody}
  ports:
    - {name: tcp, port: 80, protocol: TCP}
    - {name: udp, port: 80, protocol: UDP}
    - {name: sctp, port: 80, protocol: SCTP}
`)
	for _, node := range []string{"n1", "n2"} {
		eventually(c.t, "datagrams are gathered on "+node, func() error {
			out, err := c.try("enter", node, "--", "sh", "-c", "ip -o link show mst-gather up")
			if err == nil && !strings.Contains(out, "mst-gather@") {
				err = fmt.Errorf("there is no device for it: %q", out)
			}
			return err
		})
	}
	c.run("kubectl", "delete", "service", "each-protocol", "-n", "default")
	masqueraded := 0
	for _, pod := range c.agents() {
		said := c.run("kubectl", "exec", "-n", "kube-system", pod, "-c", "agent", "--", "mustang", "status")
		if strings.Contains(said, "Masquerade") {
			masqueraded++
		}
		if strings.Contains(said, "by nftables") {
			c.t.Errorf("pods are not masqueraded by programs: %s", said)
		}
	}
	if masqueraded == 0 {
		c.t.Error("no node masquerades a pod")
	}
	for _, node := range []string{"n1", "n2"} {
		if rules := c.run("enter", node, "--", "nft", "list", "ruleset"); strings.Contains(rules, "type nat hook") || strings.Contains(rules, "\t\tmasquerade") {
			c.t.Errorf("the kernel of %s translates:\n%s", node, rules)
		}
	}
	for _, line := range strings.Split(c.run("kubectl", "logs", "-n", "kube-system", "-l", "app.kubernetes.io/name=mustang", "-c", "agent", "--prefix", "--tail=-1"), "\n") {
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			c.t.Errorf("%s", line)
		}
	}
}

// sysdump asks for one, as a user with a report to write.
func (c *testCluster) sysdump(tool string) {
	file := filepath.Join(c.t.TempDir(), "dump.tar.gz")
	cmd := exec.Command(tool, "sysdump", "--kubeconfig", kube.Kubeconfig(c.name), "--file", file)
	if out, err := cmd.CombinedOutput(); err != nil {
		c.t.Fatalf("sysdump: %v\n%s", err, out)
	}
	f, err := os.Open(file)
	if err != nil {
		c.t.Fatal(err)
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		c.t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			c.t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			c.t.Fatal(err)
		}
		names = append(names, h.Name)
		if strings.Contains(string(text), "\nERROR: ") {
			c.t.Errorf("%s could not be read: %.500s", h.Name, text)
		}
		if strings.Contains(string(text), `"kind":"Secret"`) {
			c.t.Errorf("%s has a Secret", h.Name)
		}
	}
	for _, part := range []string{"n1/", "n2/", "api/nodes.json", "api/services.json"} {
		if !strings.Contains(strings.Join(names, "\n"), part) {
			c.t.Errorf("nothing of %s is in the sysdump: %v", part, names)
		}
	}
}

// startupTaint puts the taint on beside another one: the agent takes its own off.
func (c *testCluster) startupTaint() {
	c.run("kubectl", "taint", "node", "n2", "example.org/stays=yes:PreferNoSchedule", "mustang.net/not-ready=:NoSchedule")
	eventually(c.t, "the taints of n2", func() error {
		if keys := c.run("kubectl", "get", "node", "n2", "-o", "jsonpath={.spec.taints[*].key}"); keys != "example.org/stays" {
			return fmt.Errorf("they are %q", keys)
		}
		return nil
	})
	c.run("kubectl", "taint", "node", "n2", "example.org/stays-")
}

// agentsRights tries, with a token of n1's agent, what RBAC alone would let pass.
func (c *testCluster) agentsRights() {
	pod := c.run("kubectl", "get", "pod", "-n", "kube-system", "-l", "app.kubernetes.io/name=mustang", "--field-selector", "spec.nodeName=n1", "-o", "jsonpath={.items[0].metadata.name}")
	uid := c.run("kubectl", "get", "pod", "-n", "kube-system", pod, "-o", "jsonpath={.metadata.uid}")
	token := c.run("kubectl", "create", "token", "mustang", "-n", "kube-system", "--bound-object-kind=Pod", "--bound-object-name="+pod, "--bound-object-uid="+uid)
	server := c.run("kubectl", "config", "view", "-o", "jsonpath={.clusters[0].cluster.server}")
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	patch := func(node, what string) error {
		r, err := http.NewRequest(http.MethodPatch, server+"/api/v1/nodes/"+node, strings.NewReader(what))
		if err != nil {
			return err
		}
		r.Header.Set("Authorization", "Bearer "+token)
		r.Header.Set("Content-Type", "application/merge-patch+json")
		answer, err := client.Do(r)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err == nil && !strings.Contains(string(text), "mustang's agent may") {
			err = fmt.Errorf("status %d, and not by the policy: %.300s", answer.StatusCode, text)
		}
		return err
	}
	for what, node := range map[string]string{
		`{"metadata":{"labels":{"x":"y"}}}`: "n1", `{"spec":{"unschedulable":true}}`: "n1", `{"spec":{"taints":[{"key":"x","effect":"NoSchedule"}]}}`: "n1",
		`{"metadata":{"finalizers":["x.example/y"]}}`: "n1", `{"spec":{"providerID":"x://y"}}`: "n1",
		`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"x","uid":"y"}]}}`: "n1",
		`{"metadata":{"annotations":{"x":"y"}}}`:                                                         "n2",
	} {
		if err := patch(node, what); err != nil {
			c.t.Errorf("patch of %s by n1's agent, %s: %v", node, what, err)
		}
	}
}

// uninstall goes the way of docs/deploy.md, and looks at the nodes.
func (c *testCluster) uninstall() {
	c.run("kubectl", "delete", "-f", "../../deploy/mustang.yaml", "--wait")
	c.run("kubectl", "apply", "-f", "../../deploy/uninstall.yaml")
	c.run("kubectl", "rollout", "status", "daemonset/mustang-uninstall", "-n", "kube-system", "--timeout=5m")
	c.run("kubectl", "delete", "-f", "../../deploy/uninstall.yaml", "--wait")
	for _, node := range []string{"n1", "n2"} {
		c.holdsNothing(node)
	}
}

// holdsNothing wants nothing of mustang's on a node, and no network list.
func (c *testCluster) holdsNothing(node string) {
	c.t.Helper()
	for what, command := range map[string]string{
		"pins":      "ls -A /sys/fs/bpf | grep mustang || true", // the kernel has files of its own there
		"state":     "ls -A /run/mustang 2>/dev/null || true",
		"links":     "ip -o link | grep -E 'mst|mv-|iv-' || true",
		"routes":    "ip route show table all proto 109; ip -6 route show table all proto 109",
		"rules":     "nft list tables | grep mustang || true",
		"neighbors": "ip neigh show nud permanent",
		"filters":   "tc filter show dev eth0 ingress; tc filter show dev eth0 egress",
		"files":     "ls /opt/cni/bin/mustang-cni /etc/cni/net.d/*mustang* 2>/dev/null || true",
	} {
		if out := c.run("enter", node, "--", "sh", "-c", command); out != "" {
			c.t.Errorf("%s left on %s: %s", what, node, out)
		}
	}
	c.noPrograms(node)
}

// noPrograms wants no program on the node's cgroup2 root. The kernel takes one off
// a moment after its last pin is gone.
func (c *testCluster) noPrograms(node string) {
	c.t.Helper()
	dir, err := os.Open(c.cgroup2(c.t, node))
	if err != nil {
		c.t.Fatal(err)
	}
	defer dir.Close()
	for _, kind := range []ebpf.AttachType{ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect, ebpf.AttachCGroupUDP4Sendmsg, ebpf.AttachCGroupUDP6Recvmsg} {
		eventually(c.t, fmt.Sprintf("no programs of kind %v on the cgroups of %s", kind, node), func() error {
			r, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: kind})
			if err == nil && len(r.Programs) > 0 {
				err = fmt.Errorf("there are %d", len(r.Programs))
			}
			return err
		})
	}
}
