// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestStorm loads a Service across nodes while everything around it is killed,
// stopped, and made anew, and counts what its clients meet: on mustang, and on
// kube-proxy with the bridge plugin. The servers and their node are not touched:
// so nothing that fails is the storm's own doing.
func TestStorm(t *testing.T) {
	for _, network := range []string{"mustang", "kube-proxy and bridge"} {
		t.Run(network, func(t *testing.T) {
			c := stormCluster(t, network == "mustang")
			c.apply(stormPods)
			c.run("kubectl", "rollout", "status", "deployment/server", "--timeout=90s")
			c.apply(fmt.Sprintf(stormClient, stormTime))
			c.run("kubectl", "wait", "--for=jsonpath={.status.phase}=Running", "pod/client", "--timeout=90s")
			c.storm(map[bool]string{true: "mustang agent", false: "kube-proxy"}[network == "mustang"])
			for _, l := range c.loads() {
				t.Logf("%s, %s: %d questions, p50 %v, p99 %v, longest %v; failed: %v", network, l.How, l.Asked, l.P50, l.P99, l.Max, l.Failed)
				if network == "mustang" && (len(l.Failed) > 0 || l.Asked == 0) {
					t.Errorf("%s: of %d questions failed %v", l.How, l.Asked, l.Failed)
				}
			}
		})
	}
}

const stormTime = 75 * time.Second

// stormLoad is what `mustang connectivity load` prints.
type stormLoad struct {
	How           string         `json:"how"`
	Asked         int            `json:"asked"`
	Failed        map[string]int `json:"failed"`
	P50, P99, Max time.Duration
}

// stormCluster is a cluster with mustang, or with its peers and mustang's image,
// which has the load.
func stormCluster(t *testing.T, mustang bool) *testCluster {
	if mustang {
		return install(t, "")
	}
	prepare(t)
	c := &testCluster{t: t, name: clusterName()}
	t.Cleanup(func() {
		if out, err := c.try("down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		assertNothingLeft(t, c.name)
	})
	c.run("up", "--dual-stack")
	archives, err := filepath.Glob("../../bin/image/mustang-*-amd64.tar")
	if err != nil || len(archives) != 1 {
		t.Fatalf("images: %v, %v; want one", archives, err)
	}
	c.run("load-image", archives[0])
	return c
}

var stormPods = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: server}
spec:
  replicas: 2
  selector: {matchLabels: {app: server}}
  template:
    metadata: {labels: {app: server}}
    spec:
      nodeName: n2
      containers:
      - {name: peer, image: "mustang-net/mustang:0.1.0", args: [connectivity, serve], readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}}
---
apiVersion: v1
kind: Service
metadata: {name: server}
spec:
  clusterIP: 10.96.9.9
  selector: {app: server}
  ports: [{name: tcp, port: 80, targetPort: 8080}, {name: udp, port: 80, targetPort: 8080, protocol: UDP}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: churn}
spec:
  replicas: 0
  selector: {matchLabels: {app: churn}}
  template:
    metadata: {labels: {app: churn}}
    spec:
      terminationGracePeriodSeconds: 0
      containers: [{name: pause, image: "mustang.test/pause:3.10.1"}]
---
apiVersion: v1
kind: Service
metadata: {name: churn}
spec: {selector: {app: churn}, ports: [{port: 80}]}
`

// stormClient is the load: a pod's own process, since a stream of kubectl's would
// end with the kubelet.
const stormClient = `
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  nodeName: n1
  restartPolicy: Never
  containers:
  - {name: peer, image: "mustang-net/mustang:0.1.0", args: [connectivity, load, "--for=%v", "10.96.9.9:80"]}
`

// loads are the client's results, when it has ended.
func (c *testCluster) loads() (list []stormLoad) {
	c.run("kubectl", "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/client", "--timeout=90s")
	out := c.run("kubectl", "logs", "client")
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		c.t.Errorf("load: %v\n%s", err, out)
	}
	return list
}

// storm goes on for stormTime.
func (c *testCluster) storm(proxy string) {
	end := time.Now().Add(stormTime)
	for round := 0; time.Now().Before(end); round++ {
		for _, node := range []string{"n1", "n2"} {
			c.signal(node, proxy, "KILL")
		}
		switch round {
		case 0:
			c.run("kubectl", "scale", "deployment/churn", "--replicas=40")
		case 2:
			c.signal("n1", "kubelet", "KILL")
		case 4:
			c.signal("cp", "kube-apiserver", "STOP")
		case 9:
			c.signal("cp", "kube-apiserver", "CONT")
		case 11:
			c.run("kubectl", "scale", "deployment/churn", "--replicas=0")
		}
		time.Sleep(3 * time.Second)
	}
}

// signal sends a signal to the processes of a machine whose command line has
// these words one after the other. It looks at the machine's own processes only.
func (c *testCluster) signal(machine, words, signal string) {
	script := fmt.Sprintf(`for p in /proc/[0-9]*; do
  case "$(tr '\0' ' ' <$p/cmdline 2>/dev/null)" in %s) kill -%s ${p#/proc/} 2>/dev/null;; esac
done; true`, "*"+strings.ReplaceAll(words, " ", `\ `)+`\ *`, signal)
	c.run("enter", machine, "--", "sh", "-c", script)
}
