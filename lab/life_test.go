// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// hold is what this binary does as a child: a lab with a pod and a process in
// it, until killed.
func hold(name string) int {
	ctx := context.Background()
	l, err := New(ctx, Config{Name: name, Mode: Veth, Binary: os.Getenv("LABTEST_BINARY")})
	if err == nil {
		var p *Pod
		if p, err = l.Node().AddPod(ctx, "p1"); err == nil {
			// The shell ends; its child is an orphan that holds the namespace.
			err = p.Command(ctx, "sh", "-c", "sleep 1000 >/dev/null 2>&1 &").Run()
		}
	}
	fmt.Println("held", err)
	if err != nil {
		return 1
	}
	select {}
}

// startHolder returns when the child's lab is up. The child ends with the test
// at the latest, also when that fails: its lab's name is other tests' too.
func startHolder(t *testing.T, name string) *exec.Cmd {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), holdEnv+"="+name, "LABTEST_BINARY="+binary)
	return startAndAwait(t, c, "held <nil>")
}

// startAndAwait starts c and returns when a line that contains want came.
func startAndAwait(t *testing.T, c *exec.Cmd, want string) *exec.Cmd {
	t.Helper()
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(c) })
	watchdog := time.AfterFunc(2*time.Minute, func() { c.Process.Kill() })
	defer watchdog.Stop()
	s := bufio.NewScanner(out)
	for s.Scan() {
		if strings.Contains(s.Text(), want) {
			return c
		}
	}
	c.Wait()
	t.Fatalf("%v ended without saying %q", c.Args, want)
	return nil
}

func kill(c *exec.Cmd) {
	c.Process.Kill()
	c.Wait() // its error is the signal
}

func info(t *testing.T, name string) (Info, bool) {
	t.Helper()
	all, err := List()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(i Info) bool { return i.Name == name })
	if i < 0 {
		return Info{}, false
	}
	return all[i], true
}

func marked(mark string) (pids []string) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		var pid int
		if _, err := fmt.Sscan(e.Name(), &pid); err == nil && carries(pid, []byte(mark), time.Now().Add(deadline)) {
			pids = append(pids, e.Name())
		}
	}
	return pids
}

func TestKilledLabIsSweptByTheNext(t *testing.T) {
	before := append(machine(t, name("d")), machine(t, name("x"))...)
	c := startHolder(t, name("d"))
	i, ok := info(t, name("d"))
	if pids := marked(i.mark()); !ok || !i.Alive || len(i.NetNS) != 3 || len(pids) == 0 {
		t.Fatalf("the child's lab: %+v, processes %v", i, pids)
	}
	kill(c)
	if i, _ := info(t, name("d")); i.Alive {
		t.Error("a dead lab counts as running")
	}
	l, err := New(testContext(t), Config{Name: name("x"), Mode: Veth, Binary: binary})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := info(t, name("d")); ok {
		t.Error("the dead lab is still there")
	}
	if left := marked(i.mark()); len(left) > 0 {
		t.Errorf("processes of the dead lab live: %v", left)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if d := cmp.Diff(before, append(machine(t, name("d")), machine(t, name("x"))...)); d != "" {
		t.Errorf("left behind:\n%s", d)
	}
}

func TestGCLeavesTheLivingAlone(t *testing.T) {
	l := build(t, Config{Name: name("l"), Mode: Veth}, 1)
	c := startHolder(t, name("d"))
	var swept []string
	err := locked(func() (err error) { // as GC does; any other process that makes a lab sweeps as soon as it may
		kill(c)
		swept, err = sweep()
		return err
	})
	if err != nil || !slices.Contains(swept, name("d")) || slices.Contains(swept, name("l")) {
		t.Errorf("swept %v, %v", swept, err)
	}
	if swept, err = GC(); err != nil || slices.Contains(swept, name("l")) {
		t.Errorf("GC swept %v, %v", swept, err)
	}
	if _, err := l.Mustang(testContext(t), "pod", "ls"); err != nil {
		t.Error(err)
	}
}

func TestNameOfALivingLabIsTaken(t *testing.T) {
	build(t, Config{Name: name("w"), Mode: Veth}, 0)
	_, err := New(testContext(t), Config{Name: name("w"), Mode: Veth, Binary: binary})
	if err == nil || !strings.Contains(err.Error(), name("w")+" is running") {
		t.Errorf("got %v", err)
	}
}

func TestTwoLabsDoNotClash(t *testing.T) {
	a := build(t, Config{Name: name("a"), Mode: Bridge}, 2)
	b := build(t, Config{Name: name("e"), Mode: Macvlan}, 2)
	for _, l := range []*Lab{a, b} {
		p := l.Node().Pods()
		out, err := p[0].Command(testContext(t), "ip", "-br", "addr", "show", "eth0").Output()
		if err != nil || !strings.Contains(string(out), p[0].IPv4.String()) {
			t.Errorf("lab %s: %v %s", l.Name(), err, out)
		}
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if _, err := b.Node().AddPod(testContext(t), "p3"); err != nil {
		t.Errorf("after the other lab's end: %v", err)
	}
}

func TestCloseEndsTheLabsProcesses(t *testing.T) {
	l := build(t, Config{Name: name("c"), Mode: Veth}, 1)
	c := l.Node().Pods()[0].Command(context.Background(), "sleep", "1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	for range 2 {
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-ended:
	case <-time.After(deadline):
		t.Error("the process lives")
	}
}

func TestFailedNewLeavesNothing(t *testing.T) {
	before := machine(t, name("f"))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := New(ctx, Config{Name: name("f"), Mode: Veth, Binary: binary}); err == nil {
		t.Error("New succeeds with a context that ended")
	}
	if d := cmp.Diff(before, machine(t, name("f"))); d != "" {
		t.Errorf("left behind:\n%s", d)
	}
}

func TestFailedAddPodLeavesTheLabUsable(t *testing.T) {
	l := build(t, Config{Name: name("o"), Mode: Veth}, 1)
	if _, err := l.Node().AddPod(testContext(t), "p1"); err == nil {
		t.Error("a name twice is accepted")
	}
	if _, err := l.Node().AddPod(testContext(t), "no good"); err == nil {
		t.Error("a bad name is accepted")
	}
	p, err := l.Node().AddPod(testContext(t), "p2")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Node().RemovePod(testContext(t), p); err != nil {
		t.Error(err)
	}
	if _, err := l.Node().AddPod(testContext(t), "p2"); err != nil {
		t.Errorf("add again after removing: %v", err)
	}
}

func TestInterruptedToolCleansUp(t *testing.T) {
	for _, sig := range []unix.Signal{unix.SIGINT, unix.SIGTERM} {
		before := machine(t, name("i"))
		c := exec.Command(binary, "lab", "up", "--name", name("i"), "--services", "nft")
		startAndAwait(t, c, "lab "+name("i")+" is up")
		if err := c.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		if err := c.Wait(); err != nil {
			t.Errorf("after %s: %v", sig, err)
		}
		if d := cmp.Diff(before, machine(t, name("i"))); d != "" {
			t.Errorf("after %s, left behind:\n%s", sig, d)
		}
	}
}

func TestLabUnderNohupOutlivesItsTerminal(t *testing.T) {
	c := exec.Command("nohup", binary, "lab", "run", "--name", name("i"), "--pods=1", "--services=none", "--", "sh", "-c", "echo it is up; sleep 1")
	startAndAwait(t, c, "it is up")
	if err := c.Process.Signal(unix.SIGHUP); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Error(err)
	}
}

func TestLabRunPassesEnvironmentAndExitCode(t *testing.T) {
	c := exec.Command(binary, "lab", "run", "--name", name("r"), "--services", "none", "--pods", "1", "--",
		"sh", "-c", `echo "$LAB_PODS $LAB_P1_IPV4 $LAB_P1_NETNS"; exit 7`)
	out, _ := c.Output()
	if got, want := string(out), "p1 10.1.0.2 /var/run/netns/mst-"+name("r")+"-p1\n"; got != want {
		t.Errorf("printed %q, want %q", got, want)
	}
	if code := c.ProcessState.ExitCode(); code != 7 {
		t.Errorf("exit code %d, want 7", code)
	}
}

func TestMustangInALabIsTheLabsNodes(t *testing.T) {
	c := exec.Command(binary, "lab", "run", "--name", name("s"), "--services", "mustang", "--pods", "1", "--", binary, "ep", "ls")
	if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "10.1.0.2") {
		t.Errorf("%v; printed %q, want the lab's endpoint", err, out)
	}
}

// The settings of the kernel are hidden, as IPv6's are where it has none.
func TestAKernelWithoutIPv6IsNamed(t *testing.T) {
	before := machine(t, name("6"))
	out, err := exec.Command("unshare", "--mount", "sh", "-c", `mount -t tmpfs none /proc/sys && exec "$@"`, "sh",
		binary, "lab", "run", "--name", name("6"), "--pods=1", "--services=none", "--", "true").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "no IPv6") || !strings.Contains(string(out), "ipv6.disable=1") {
		t.Errorf("%v: %s", err, out)
	}
	if d := cmp.Diff(before, machine(t, name("6"))); d != "" {
		t.Errorf("left behind:\n%s", d)
	}
}

func TestBadConfigIsNamed(t *testing.T) {
	for want, cfg := range map[string]Config{
		"name":     {Name: "too-long", Mode: Veth},
		"mode":     {Name: "t", Mode: "wire"},
		"services": {Name: "t", Mode: Veth, Services: "magic"},
		"MTU":      {Name: "t", Mode: Veth, MTU: 100},
		"BridgeNF": {Name: "t", Mode: Bridge, Services: NFT},
	} {
		cfg.Binary = binary
		if _, err := New(testContext(t), cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want it to say %q", cfg, err, want)
		}
	}
}

func TestBridgeNFIsPerLab(t *testing.T) {
	for _, on := range []bool{true, false} {
		l := build(t, Config{Name: name("g"), Mode: Bridge, BridgeNF: on}, 0)
		var got []byte
		if err := l.Node().Do(func() (err error) {
			got, err = os.ReadFile("/proc/sys/net/bridge/bridge-nf-call-iptables")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if want := map[bool]string{true: "1\n", false: "0\n"}[on]; string(got) != want {
			t.Errorf("bridge-nf-call-iptables is %q, want %q", got, want)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestEachNodesPodsAreInItsNetwork(t *testing.T) {
	for _, nodes := range []int{1, 2, MaxNodes} {
		for i := range nodes {
			v4, _ := podNets(i+1, nodes)
			last := nth(v4, MaxPods(nodes)+1)
			if broadcast := last.Next(); !v4.Contains(broadcast) || v4.Contains(broadcast.Next()) {
				t.Errorf("%d nodes: the last pod of %s has %s", nodes, v4, last)
			}
		}
	}
}

func TestAddressPlan(t *testing.T) {
	for want, got := range map[string]string{
		"10.96.0.1":          VIP4(1).String(),
		"10.97.134.160":      VIP4(100000).String(),
		"fd00:10:96::1:86a0": VIP6(100000).String(),
		"10.1.1.4":           nth(PodCIDR4, 260).String(),
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
