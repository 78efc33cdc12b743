// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/mustang-net/mustang/test/kube"
)

// driver is the command that users run, built once.
var driver string

// prepare skips the test with the reason and the mend where a cluster cannot
// start, and removes what killed runs of this test left.
func prepare(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("a cluster takes a minute: not in short mode")
	}
	if os.Geteuid() != 0 {
		t.Skip("a cluster needs root")
	}
	if err := kube.CheckMachine(); err != nil {
		t.Skip(err)
	}
	missing, err := kube.Missing()
	if err != nil {
		t.Fatal(err)
	}
	if len(missing) > 0 {
		t.Skipf("not built yet: %s; to build (12 minutes, once): test/kube/kube build", strings.Join(missing, ", "))
	}
	driver = filepath.Join(t.TempDir(), "kube")
	if out, err := exec.Command("go", "build", "-o", driver, "./cmd/kube").CombinedOutput(); err != nil {
		t.Fatalf("build the driver: %v\n%s", err, out)
	}
	names, err := kube.Clusters()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		var pid int
		if _, err := fmt.Sscanf(name, namePrefix+"%d", &pid); err == nil && syscall.Kill(pid, 0) != nil {
			if err := kube.Down(name); err != nil {
				t.Error(err)
			}
		}
	}
}

const namePrefix = "test-"

// clusterName holds our process id, so that a later run can tell a cluster in
// use from one that was left.
func clusterName() string { return fmt.Sprintf("%s%d", namePrefix, os.Getpid()) }

// testCluster is a running cluster and the driver to use it with.
type testCluster struct {
	t    *testing.T
	name string
}

// try runs a command of the driver's. Those that wait have limits of their own, with
// sentences; this one is for what hangs.
func (c *testCluster) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, driver, append([]string{args[0], "--name", c.name}, args[1:]...)...)
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (c *testCluster) run(args ...string) string {
	c.t.Helper()
	out, err := c.try(args...)
	if err != nil {
		c.t.Fatalf("kube %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func (c *testCluster) apply(manifest string) {
	c.t.Helper()
	file := filepath.Join(c.t.TempDir(), "manifest.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o644); err != nil {
		c.t.Fatal(err)
	}
	c.run("kubectl", "apply", "-f", file)
}

// eventually tries until a deadline, which is far from what a machine needs that is busy with other things.
func eventually(t *testing.T, what string, try func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(5 * time.Minute); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

func TestCluster(t *testing.T) {
	prepare(t)
	before := tunables(t)
	c := &testCluster{t: t, name: clusterName()}
	t.Cleanup(func() { // also when the test fails half-way
		if out, err := c.try("down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		assertNothingLeft(t, c.name)
		if after := tunables(t); after != before {
			t.Errorf("sysctls of the machine changed: %s, were %s", after, before)
		}
	})
	c.run("up", "--dual-stack", "--cni=bridge", "--proxy=nftables")
	c.apply(workload)
	c.run("kubectl", "rollout", "status", "deployment/web", "--timeout=5m")
	c.run("kubectl", "rollout", "status", "daemonset/client", "--timeout=5m")

	t.Run("services of both families", c.services)
	t.Run("names", c.names)
	t.Run("a node has its own cgroup2 root", c.cgroupRoots)
	t.Run("a second up does not disturb it", c.secondUp)
	t.Run("load-image", c.loadImage)
	t.Run("a daemon that dies starts again", c.restart)
	t.Run("a node comes back after a power cut", c.powerCut)
}

// workload is a server on each node, its Service in both families, and a
// client on each node.
var workload = deployment("web", 2, webServer(1, "DoNotSchedule", "", "/healthz")) + `
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  ipFamilyPolicy: RequireDualStack
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
---` + idleClients

// clusterIPs are the Service's addresses, IPv4 and IPv6.
func (c *testCluster) clusterIPs() []string {
	c.t.Helper()
	var service struct {
		Spec struct {
			ClusterIPs []string `json:"clusterIPs"`
		} `json:"spec"`
	}
	if err := json.Unmarshal([]byte(c.run("kubectl", "get", "service", "web", "-o", "json")), &service); err != nil {
		c.t.Fatal(err)
	}
	if len(service.Spec.ClusterIPs) != 2 {
		c.t.Fatalf("want two cluster IPs, got %v", service.Spec.ClusterIPs)
	}
	return service.Spec.ClusterIPs
}

// client is the client pod's name on a node.
func (c *testCluster) client(node string) string {
	return c.run("kubectl", "get", "pod", "-l", "app=client", "--field-selector=spec.nodeName="+node, "-o", "jsonpath={.items[0].metadata.name}")
}

// places are where requests come from: a name and the words before curl.
func (c *testCluster) places() map[string][]string {
	places := map[string][]string{}
	for _, node := range []string{"n1", "n2"} {
		places["node "+node] = []string{"enter", node, "--"}
		places["pod on "+node] = []string{"kubectl", "exec", c.client(node), "--"}
	}
	return places
}

// curl asks once; where it is asked again, a lost answer is not waited for.
func curl(url string) []string {
	return []string{"curl", "-sS", "-g", "--connect-timeout", "2", "--max-time", "5", url}
}

// curlOnce is patient: nobody asks again.
func curlOnce(url string) []string { return []string{"curl", "-sS", "-g", "--max-time", "60", url} }

// services sends requests until both servers have answered, from everywhere.
func (c *testCluster) services(t *testing.T) {
	for _, ip := range c.clusterIPs() {
		url := "http://" + netip.AddrPortFrom(netip.MustParseAddr(ip), 80).String() + "/hostname"
		for place, words := range c.places() {
			t.Run(place+" to "+ip, func(t *testing.T) {
				servers := map[string]bool{}
				eventually(t, "two servers behind "+url, func() error {
					out, err := c.try(append(words, curl(url)...)...)
					if err != nil {
						return fmt.Errorf("%w: %s", err, out)
					}
					servers[out] = true
					if len(servers) < 2 {
						return fmt.Errorf("only %v answered", servers)
					}
					return nil
				})
			})
		}
	}
}

func (c *testCluster) names(t *testing.T) {
	words := append([]string{"kubectl", "exec", c.client("n1"), "--"}, curl("http://web.default.svc.cluster.local/hostname")...)
	eventually(t, "ask by name", func() error {
		out, err := c.try(words...)
		if err != nil || !strings.HasPrefix(out, "web-") {
			return fmt.Errorf("%q, %v", out, err)
		}
		return nil
	})
}

// cgroupRoots attaches a program to one node's cgroup2 root, as an agent
// would: it must see what the node and its pods connect, and nothing else. It
// counts what connects to the Service, as no daemon of a node does.
func (c *testCluster) cgroupRoots(t *testing.T) {
	service := netip.MustParseAddr(c.clusterIPs()[0])
	counter, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer counter.Close()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R1, asm.R1, 4, asm.Word), // user_ip4
			asm.LoadImm(asm.R2, int64(binary.NativeEndian.Uint32(service.AsSlice())), asm.DWord),
			asm.JNE.Reg(asm.R1, asm.R2, "out"),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, counter.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.Mov.Imm(asm.R1, 1),
			asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	attached, err := link.AttachCgroup(link.CgroupOptions{
		Path: c.cgroup2(t, "n1"), Attach: ebpf.AttachCGroupInet4Connect, Program: program,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer attached.Close()

	url := "http://" + service.String() + "/hostname"
	for place, words := range c.places() {
		var before, after uint64
		if err := counter.Lookup(uint32(0), &before); err != nil {
			t.Fatal(err)
		}
		loop := "set -e; for i in $(seq 30); do " + strings.Join(curlOnce(url), " ") + "; done"
		if out, err := c.try(append(words, "sh", "-c", loop)...); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := counter.Lookup(uint32(0), &after); err != nil {
			t.Fatal(err)
		}
		want := map[bool]uint64{true: 30}[strings.HasSuffix(place, "n1")]
		if after-before != want {
			t.Errorf("30 connections from %s: the program on n1's cgroup2 root saw %d, want %d", place, after-before, want)
		}
	}
	inside := c.run("enter", "n1", "--", "stat", "-c", "%i", "/sys/fs/cgroup/unified")
	if outside := inode(t, c.cgroup2(t, "n1")); inside != outside {
		t.Errorf("n1 sees cgroup %s as the root, its own is %s", inside, outside)
	}
}

func (c *testCluster) cgroup2(t *testing.T, machine string) string {
	dir, err := kube.Cgroup2(c.name, machine)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func inode(t *testing.T, path string) string {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return strconv.FormatUint(st.Ino, 10)
}

func (c *testCluster) secondUp(t *testing.T) {
	out, err := c.try("up")
	if err == nil || !strings.Contains(out, "runs already") {
		t.Errorf("a second up: %v, %q", err, out)
	}
	c.run("kubectl", "get", "nodes")
}

func (c *testCluster) loadImage(t *testing.T) {
	cache, err := kube.Cache()
	if err != nil {
		t.Fatal(err)
	}
	archives, _ := filepath.Glob(filepath.Join(cache, "store/pause.tar-*/pause.tar"))
	if len(archives) == 0 {
		t.Fatal("no image archive in the cache")
	}
	c.run("load-image", archives[0])
}

func (c *testCluster) restart(t *testing.T) {
	const pids = "pidof kube-proxy"
	before := c.run("enter", "n1", "--", "sh", "-c", pids)
	c.run("enter", "n1", "--", "kill", before)
	eventually(t, "a new kube-proxy", func() error {
		after, err := c.try("enter", "n1", "--", "sh", "-c", pids)
		if err != nil || after == before {
			return fmt.Errorf("%q, was %q: %v", after, before, err)
		}
		return nil
	})
}

// powerCut wants nothing of a node that is off but its disk, and its pods again
// when it is on.
func (c *testCluster) powerCut(t *testing.T) {
	group, pod := c.cgroup2(t, "n2"), c.client("n2")
	c.run("off", "n2")
	if _, err := os.Stat(group); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the node's control group: %v; want none", err)
	}
	c.run("on", "n2")
	eventually(t, "the pod starts again", func() error {
		restarts, err := c.try("kubectl", "get", "pod", pod, "-o", "jsonpath={.status.containerStatuses[0].restartCount}")
		if n, _ := strconv.Atoi(restarts); err == nil && n == 0 {
			err = fmt.Errorf("it has started again %q times", restarts)
		}
		return err
	})
}

// TestKilledUp kills `up` at different moments. The next up or down finds
// everything and removes it.
func TestKilledUp(t *testing.T) {
	prepare(t)
	c := &testCluster{t: t, name: clusterName() + "-killed"}
	t.Cleanup(func() { _, _ = c.try("down") })
	for _, after := range []time.Duration{20 * time.Millisecond, 60 * time.Millisecond, 200 * time.Millisecond, 3 * time.Second} {
		t.Run(after.String(), func(t *testing.T) {
			cmd := exec.Command(driver, "up", "--name", c.name, "--nodes=1", "--cni=none", "--proxy=none")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(after) // the moment is the point
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			c.run("down")
			assertNothingLeft(t, c.name)
		})
	}
	cmd := exec.Command(driver, "up", "--name", c.name, "--nodes=1", "--cni=none", "--proxy=none")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	c.run("up", "--nodes=1", "--cni=none", "--proxy=none") // sweeps
	c.run("down")
	assertNothingLeft(t, c.name)
}

// tunables are the machine's sysctls that a kubelet sets where it is not kept from it.
func tunables(t *testing.T) string {
	t.Helper()
	var all []string
	for _, name := range []string{"kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "vm/panic_on_oom", "net/ipv4/ip_forward", "fs/inotify/max_user_instances"} {
		value, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, name+"="+strings.TrimSpace(string(value)))
	}
	return strings.Join(all, " ")
}

// assertNothingLeft looks for the cluster's name in all that it could have left.
func assertNothingLeft(t *testing.T, name string) {
	t.Helper()
	if names, err := kube.Clusters(); err != nil || strings.Contains(strings.Join(names, " ")+" ", name+" ") {
		t.Errorf("clusters: %v, %v", names, err)
	}
	for what, pattern := range map[string]string{
		"run directory or lock": "/var/lib/mustang-kube/" + name + "*",
		"network namespaces":    "/run/netns/kube-" + name + "-*",
	} {
		if found, _ := filepath.Glob(pattern); len(found) > 0 {
			t.Errorf("%s are left: %v", what, found)
		}
	}
	for _, file := range []string{"/proc/self/mountinfo", "/proc/net/dev"} {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(content), "mustang-kube/"+name) || strings.Contains(string(content), "kube-"+name) {
			t.Errorf("%s names the cluster:\n%s", file, content)
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasSuffix(path, "mustang-kube/"+name) {
			t.Errorf("cgroup is left: %s", path)
		}
		return nil
	})
	processes, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range processes {
		cmdline, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(cmdline), "mustang-kube/"+name+"/") {
			t.Errorf("process is left: %s %s", path, strings.ReplaceAll(string(cmdline), "\x00", " "))
		}
	}
}
