// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestStorm loads Services across nodes while everything around them is killed,
// stopped, upgraded and made anew, and counts what their clients meet: on mustang,
// and on kube-proxy with the bridge plugin. The servers and their node are not
// touched: so nothing that fails is the storm's own doing.
func TestStorm(t *testing.T) {
	patient(t)
	wantStormTools(t)
	networks := []string{"mustang"}
	if long {
		networks = append(networks, "kube-proxy and bridge")
	}
	for _, network := range networks {
		t.Run(network, func(t *testing.T) {
			mustang := network == "mustang"
			c := stormCluster(t, mustang)
			c.restartSoon()
			c.startServers()
			c.startClients()
			c.storm(mustang)
			for _, l := range c.loads() {
				t.Logf("%s, %s: %d questions, p50 %v, p99 %v, longest %v; failed: %v", network, l.How, l.Asked, l.P50, l.P99, l.Max, l.Failed)
				if l.Asked == 0 {
					t.Errorf("%s: nothing was asked", l.How)
				}
				if mustang && len(l.Failed) > 0 {
					t.Errorf("%s: of %d questions failed %v", l.How, l.Asked, l.Failed)
				}
			}
		})
	}
}

// long is `make storm`: with everything whole, and on kube-proxy as well.
var long = os.Getenv("MUSTANG_STORM") == "long"

// stormTime is how long clients ask, and outage how long the API server does not answer.
func stormTime() time.Duration { return pick(7*time.Minute, 3*time.Minute) }
func outage() time.Duration    { return pick(time.Minute, 15*time.Second) }

func pick(whole, part time.Duration) time.Duration {
	if long {
		return whole
	}
	return part
}

// Pods come and go in waves: so many at once, and no more than so many in all.
const wave, churned = 50, 500

// stormCluster is a cluster with mustang, or with its peers and mustang's image,
// which has one of the loads. Its third node is for being switched off.
func stormCluster(t *testing.T, mustang bool) *testCluster {
	var c *testCluster
	if mustang {
		c = install(t, "", "NODES=3")
		other := filepath.Join(t.TempDir(), "image")
		cmd := exec.Command("go", "run", "./image", "--version", otherBuild, "--arch", "amd64", "--out", other)
		cmd.Dir = "../../deploy/tools"
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build another image: %v\n%s", err, out)
		}
		c.run("load-image", filepath.Join(other, "mustang-"+otherBuild+"-amd64.tar"))
		return c
	}
	prepare(t)
	c = &testCluster{t: t, name: clusterName()}
	t.Cleanup(func() {
		if out, err := c.try("down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		assertNothingLeft(t, c.name)
	})
	c.run("up", "--dual-stack", "--nodes=3")
	archives, err := filepath.Glob("../../bin/image/mustang-*-amd64.tar")
	if err != nil || len(archives) != 1 {
		t.Fatalf("images: %v, %v; want one", archives, err)
	}
	c.run("load-image", archives[0])
	return c
}

// otherBuild is the version that agents are upgraded to, and downgraded from.
const otherBuild = "0.1.1-storm"

// storm goes on for stormTime: a list of what happens one after the other, and
// killed agents between.
func (c *testCluster) storm(mustang bool) {
	end := time.Now().Add(stormTime())
	proxy := "kube-proxy"
	if mustang {
		proxy = "mustang agent"
	}
	var came int
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() { // pods come and go all the while
		defer close(ended)
		came = c.churn(stop)
	}()
	calm := sync.OnceFunc(func() { close(stop); <-ended })
	defer calm()
	lost := c.countLosses(stop)
	kills := c.killAgents(proxy, 15*time.Second, often)
	for _, what := range []struct {
		name string
		do   func()
	}{
		{"kubelets are killed", func() {
			for _, node := range []string{"n1", "n2"} {
				c.strike(node, "kubelet", "KILL")
			}
		}},
		{"a node is switched off", func() { c.run("off", "n3") }},
		{"agents are killed", func() { kills += c.killAgents(proxy, 30*time.Second, often) }},
		{"it comes back", func() {
			on := time.Now()
			c.run("on", "n3")
			c.back("n3", on)
		}},
		{"upgrade", func() { c.roll(mustang, otherBuild) }},
		{"downgrade", func() { c.roll(mustang, "0.1.0") }},
		{"the API server is away", func() {
			c.strike("cp", "kube-apiserver", "STOP")
			kills += c.killAgents(proxy, outage(), often)
			c.strike("cp", "kube-apiserver", "CONT")
		}},
	} {
		c.t.Logf("%3.0f s before the end, %v: %s", time.Until(end).Seconds(), lost, what.name)
		what.do()
		if time.Now().After(end) {
			c.t.Errorf("clients had ended before this was over: %s", what.name)
		}
	}
	kills += c.killAgents(proxy, time.Until(end), 5*often) // between, they connect pods
	calm()
	c.t.Logf("agents were killed %d times, %d pods came and went; %v", kills, came, lost)
	if kills == 0 || came == 0 {
		c.t.Error("that was no storm")
	}
}

// strike is signal of what must be there.
func (c *testCluster) strike(machine, words, signal string) {
	c.t.Helper()
	if c.signal(machine, words, signal) == 0 {
		c.t.Errorf("no %s on %s got SIG%s", words, machine, signal)
	}
}

// often is the time between two kills: few agents live long enough to have done their work.
const often = 3 * time.Second

// killAgents kills those of both nodes, every so often.
func (c *testCluster) killAgents(proxy string, during, every time.Duration) (killed int) {
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(every) {
		for _, node := range []string{"n1", "n2"} {
			killed += c.signal(node, proxy, "KILL")
		}
	}
	return killed
}

// roll brings the agents to another version, one node after the other; kube-proxy
// has none and is started anew.
func (c *testCluster) roll(mustang bool, version string) {
	if !mustang {
		for _, node := range []string{"n1", "n2", "n3"} {
			c.signal(node, "kube-proxy", "TERM")
		}
		return
	}
	image := "mustang-net/mustang:" + version
	c.run("kubectl", "set", "image", "-n", "kube-system", "daemonset/mustang", "agent="+image, "install-plugin="+image)
	start := time.Now()
	if out, err := c.try("kubectl", "rollout", "status", "-n", "kube-system", "daemonset/mustang", "--timeout=3m"); err != nil {
		pods, _ := c.try("kubectl", "get", "pod", "-A", "-o", "wide")
		agents, _ := c.try("kubectl", "describe", "pod", "-n", "kube-system", "-l", "app.kubernetes.io/name=mustang")
		c.t.Fatalf("rollout to %s: %v\n%s\n%s\n%s", version, err, out, pods, agents)
	}
	c.t.Logf("rollout to %s: %v", version, time.Since(start).Round(time.Second))
}

// back waits until a node that was switched on reports again. Its Ready condition
// does not tell: of a short absence the API server never hears.
func (c *testCluster) back(node string, on time.Time) {
	c.t.Helper()
	eventually(c.t, node+" reports again", func() error {
		out, err := c.try("kubectl", "get", "lease", "-n", "kube-node-lease", node, "-o", "jsonpath={.spec.renewTime}")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		renewed, err := time.Parse(time.RFC3339Nano, out)
		if err == nil && renewed.Before(on) {
			err = fmt.Errorf("its lease is of %s", out)
		}
		return err
	})
	c.run("kubectl", "wait", "--for=condition=Ready", "node/"+node, "--timeout=3m")
}

// restartSoon has kubelets start again after a second what was killed, however often:
// as a node here does with kube-proxy, which is no pod.
func (c *testCluster) restartSoon() {
	const setting = `printf 'featureGates: {KubeletCrashLoopBackOffMax: true}\ncrashLoopBackOff: {maxContainerRestartPeriod: 1s}\n' >>/etc/kubernetes/kubelet.yaml`
	for _, node := range []string{"n1", "n2", "n3"} {
		c.run("enter", node, "--", "sh", "-c", setting)
		c.signal(node, "kubelet", "KILL")
	}
}

// churn makes and deletes pods of a Service, wave by wave, and says how many there
// were. It may not end the test from its goroutine, and while the API server is away
// nothing succeeds.
func (c *testCluster) churn(stop chan struct{}) (came int) {
	for came < churned {
		for _, replicas := range []int{wave, 0} {
			_, err := c.try("kubectl", "scale", "deployment/churn", fmt.Sprintf("--replicas=%d", replicas))
			if err == nil {
				_, err = c.try("kubectl", "rollout", "status", "deployment/churn", "--timeout=100s")
			}
			if err != nil {
				c.t.Logf("after %d pods that came and went, %d: %v", came, replicas, err)
			} else {
				came += replicas
			}
			select {
			case <-stop:
				return came
			default:
			}
		}
	}
	return came
}

// signal sends a signal to the processes of a machine whose command line has
// these words one after the other, and says how many there were. It looks at the
// machine's own processes only.
func (c *testCluster) signal(machine, words, signal string) (sent int) {
	script := fmt.Sprintf(`n=0; for p in /proc/[0-9]*; do
  case "$(tr '\0' ' ' <$p/cmdline 2>/dev/null)" in %s) kill -%s ${p#/proc/} 2>/dev/null && n=$((n+1));; esac
done; echo $n`, "*"+strings.ReplaceAll(words, " ", `\ `)+`\ *`, signal)
	if _, err := fmt.Sscan(lastLine(c.run("enter", machine, "--", "sh", "-c", script)), &sent); err != nil { // a process that ends meanwhile is told of before
		c.t.Error(err)
	}
	return sent
}

// stormTools are the load generators' and servers' packages, all of Debian.
var stormTools = map[string]string{
	"/usr/sbin/nginx": "nginx", "/usr/bin/wrk": "wrk", "/usr/bin/redis-server": "redis-server", "/usr/bin/redis-benchmark": "redis-tools",
	"/usr/bin/pgbench": "postgresql", "/usr/bin/dnsperf": "dnsperf",
}

// wantStormTools fails with the mend.
func wantStormTools(t *testing.T) {
	t.Helper()
	var missing []string
	for file, name := range stormTools {
		if _, err := os.Stat(file); err != nil {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		t.Fatalf("missing: %s; to install: scripts/deps storm", strings.Join(missing, ", "))
	}
}
