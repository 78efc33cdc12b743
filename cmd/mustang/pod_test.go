// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/record"
	"github.com/mustang-net/mustang/internal/state"
)

// podNode is a node to run mustang pod on, in this process.
type podNode struct {
	t     *testing.T
	netns string
	state string
}

func newPodNode(t *testing.T) *podNode {
	t.Helper()
	n := &podNode{t, netns.Path(fmt.Sprintf("mstpod-%d", os.Getpid())), t.TempDir()}
	if err := netns.Create(n.netns); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Delete(n.netns); err != nil {
			t.Error(err)
		}
	})
	return n
}

// pod is a pod's name that no other run uses.
func (n *podNode) pod(letter string) string { return fmt.Sprintf("mstpod-%d-%s", os.Getpid(), letter) }

// run runs `mustang pod …` in the node's namespace.
func (n *podNode) run(args ...string) (string, error) {
	var out bytes.Buffer
	err := netns.Do(n.netns, func() error {
		root := newRootCmd()
		root.SetArgs(append([]string{"--state-dir", n.state, "--bpffs", filepath.Join(mount, "pods"), "pod"}, args...))
		root.SetOut(&out)
		root.SetErr(&out)
		return root.ExecuteContext(context.Background())
	})
	return out.String(), err
}

func (n *podNode) must(args ...string) string {
	n.t.Helper()
	out, err := n.run(args...)
	if err != nil {
		n.t.Fatalf("pod %v: %v", args, err)
	}
	return out
}

// traces lists all that pods leave: links on the node, records, namespaces.
func (n *podNode) traces() []string {
	n.t.Helper()
	var out []string
	err := netns.Do(n.netns, func() error {
		links, err := net.Interfaces()
		for _, l := range links {
			out = append(out, "link "+l.Name)
		}
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	for _, pattern := range []string{filepath.Join(n.state, "pods", "*"), filepath.Join(n.state, "pods", ".*"), netns.Path(n.pod("*"))} {
		files, _ := filepath.Glob(pattern)
		out = append(out, slices.DeleteFunc(files, func(f string) bool {
			return strings.HasSuffix(f, "/.") || strings.HasSuffix(f, "/..")
		})...)
	}
	return out
}

// attachWith replaces the datapath for one test.
func attachWith(t *testing.T, a endpointAttacher) {
	old := openAttacher
	openAttacher = func(context.Context, *globals) (endpointAttacher, error) { return a, nil }
	t.Cleanup(func() { openAttacher = old })
}

type recordingAttacher struct {
	fail  error
	calls []string
}

func (a *recordingAttacher) AddEndpoint(_ context.Context, ep state.Endpoint, pod podSpec) (uint32, error) {
	a.calls = append(a.calls, fmt.Sprintf("add %s %s %s %s", ep.HostIf, ep.IP4, ep.IP6, pod.servicePath))
	return 7, a.fail
}

func (a *recordingAttacher) RemoveEndpoint(_ context.Context, id uint32, ns, ifname string) error {
	a.calls = append(a.calls, fmt.Sprintf("remove %d %s", id, ifname))
	return nil
}

func TestPodAddLsRm(t *testing.T) {
	n := newPodNode(t)
	a := &recordingAttacher{}
	attachWith(t, a)
	before := n.traces()
	name := n.pod("a")
	n.must("add", name, "--ip=10.1.0.2,fd00::2", "--service-path=tc")
	want := fmt.Sprintf("%s veth 10.1.0.2,fd00::2 %s %s tc", name, netns.Path(name), link.HostName(name))
	if got := strings.Join(strings.Fields(strings.Split(n.must("ls"), "\n")[1]), " "); got != want {
		t.Errorf("ls: %q, want %q", got, want)
	}
	if _, err := n.run("add", name, "--ip=10.1.0.3"); err == nil || !strings.Contains(err.Error(), "exists") {
		t.Errorf("the same name: %v", err)
	}
	if _, err := n.run("add", n.pod("b"), "--ip=fd00::2"); err == nil || !strings.Contains(err.Error(), "--ip") {
		t.Errorf("the same address: %v", err)
	}
	n.must("rm", name)
	n.must("rm", name)
	if d := cmp.Diff([]string{"add " + link.HostName(name) + " 10.1.0.2 fd00::2 tc", "remove 7 eth0"}, a.calls); d != "" {
		t.Errorf("the datapath was told:\n%s", d)
	}
	if d := cmp.Diff(before, n.traces()); d != "" {
		t.Errorf("left behind:\n%s", d)
	}
}

func TestPodRmGivesADeviceBackAsItWas(t *testing.T) {
	n := newPodNode(t)
	if out, err := exec.Command("ip", "-n", filepath.Base(n.netns), "link", "add", "nic0", "type", "veth", "peer", "name", "wire").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	like := func() (s string) {
		t.Helper()
		if err := netns.Do(n.netns, func() error {
			l, err := net.InterfaceByName("nic0")
			if err == nil {
				s = fmt.Sprint(l.HardwareAddr, l.MTU)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return s
	}
	before := like()
	n.must("add", n.pod("a"), "--ip=10.1.0.2/24", "--mode=host-device", "--uplink=nic0", "--mac=02:00:00:00:00:08", "--mtu=1400", "--plain")
	n.must("rm", n.pod("a"))
	if after := like(); after != before {
		t.Errorf("it is %s, and was %s", after, before)
	}
}

func TestPodBadInputChangesNothing(t *testing.T) {
	n := newPodNode(t)
	if out, err := exec.Command("ip", "-n", filepath.Base(n.netns), "addr", "add", "10.9.0.1/32", "dev", "lo").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	before := n.traces()
	for want, args := range map[string][]string{
		"10.9.0.1 is this node's own":    {"--ip=10.9.0.1"},
		"--netns: " + n.netns + " is th": {"--ip=10.1.0.2", "--netns=" + n.netns},
		"broadcast":                      {"--ip=10.1.0.255/24", "--mode=bridge"},
		"mode":                           {"--ip=10.1.0.2", "--mode=string"},
		"--ip":                           {"--ip=10.1.0.300"},
		"IP is missing":                  {},
		"of one family":                  {"--ip=10.1.0.2,10.1.0.3"},
		"no IPv6":                        {"--ip=10.1.0.2", "--gateway=fd00::1"},
		"uplink":                         {"--ip=10.1.0.2", "--mode=macvlan"},
		"--uplink":                       {"--ip=10.1.0.2", "--mode=macvlan", "--uplink=none0"},
		"MTU":                            {"--ip=10.1.0.2", "--mtu=9"},
		"--netns":                        {"--ip=10.1.0.2", "--netns=/proc/self/exe"},
		"--service-path":                 {"--ip=10.1.0.2", "--service-path=shm"},
		"--mac":                          {"--ip=10.1.0.2", "--mac=gg"},
		"--namespace":                    {"--ip=10.1.0.2", "--namespace=Foo bar"},
		`"a b" is no label's key`:        {"--ip=10.1.0.2", "--labels=a b=c"},
		"for the label a":                {"--ip=10.1.0.2", "--labels=a=b c"},
		"is no port's name":              {"--ip=10.1.0.2", "--ports=ht tp=80"},
		"--plain":                        {"--ip=10.1.0.2", "--service-path=tc", "--plain"},
	} {
		_, err := n.run(append([]string{"add", n.pod("a")}, args...)...)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v: got %v, want one sentence with %q", args, err, want)
		}
	}
	if _, err := n.run("add", "../up", "--ip=10.1.0.2", "--plain"); err == nil {
		t.Error("a path as a name is accepted")
	}
	if d := cmp.Diff(before, n.traces()); d != "" {
		t.Errorf("changed:\n%s", d)
	}
}

func TestPodAddRollsBackWhenTheDatapathFails(t *testing.T) {
	n := newPodNode(t)
	broken := errors.New("no room in the table")
	attachWith(t, &recordingAttacher{fail: broken})
	before := n.traces()
	if _, err := n.run("add", n.pod("a"), "--ip=10.1.0.2"); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if d := cmp.Diff(before, n.traces()); d != "" {
		t.Errorf("left behind:\n%s", d)
	}
}

func TestPodRecordOfALivingMakerIsRespected(t *testing.T) {
	n := newPodNode(t)
	other := exec.Command("sleep", "100")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { other.Process.Kill(); other.Wait() }()
	store := newPodStore(n.state)
	rec := podRecord{Name: n.pod("a"), State: podMaking, Maker: record.MakerOf(other.Process.Pid),
		Mode: link.Veth, NetNS: netns.Path(n.pod("a")), IfName: "eth0", Datapath: podPlain}
	if err := store.Locked(func() error { return store.write(rec) }); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"add", rec.Name, "--ip=10.1.0.2", "--plain"}, {"rm", rec.Name}} {
		if _, err := n.run(args...); err == nil || !strings.Contains(err.Error(), "worked on") {
			t.Errorf("%v: %v", args, err)
		}
	}
	other.Process.Kill()
	other.Wait()
	n.must("rm", rec.Name)
}

// Whenever pod add is killed, a repeated add or an rm goes on from there.
func TestPodAddKilledAtAnyInstant(t *testing.T) {
	n := newPodNode(t)
	before := n.traces()
	name := n.pod("a")
	args := []string{"add", name, "--ip=10.1.0.2,fd00::2", "--plain"}
	for i := range 20 {
		c := exec.Command(os.Args[0], append([]string{"--state-dir", n.state, "pod"}, args...)...)
		c.Env = append(os.Environ(), beTool+"=1")
		if err := netns.Do(n.netns, c.Start); err != nil {
			t.Fatal(err)
		}
		killer := time.AfterFunc(time.Duration(rand.IntN(40_000))*time.Microsecond, func() { c.Process.Kill() })
		err := c.Wait()
		killer.Stop()
		if i%2 == 0 && err != nil {
			// Killed between its last write and its end, it has made the pod.
			if _, err := n.run(args...); err != nil && !strings.Contains(err.Error(), "exists") {
				t.Fatalf("round %d: add again: %v", i, err)
			}
		}
		n.must("rm", name)
		if d := cmp.Diff(before, n.traces()); d != "" {
			t.Fatalf("round %d left:\n%s", i, d)
		}
	}
}

// Whoever is refused takes nothing of the pod that has the namespace.
func TestPodAddWhereAPodIsIsRefusedAndLeavesItBe(t *testing.T) {
	w := newTool(t)
	pod := w.netns + "-p"
	w.sh("ip netns add %s", pod)
	t.Cleanup(func() { w.sh("ip netns del %s", pod) })
	space := "--netns=/var/run/netns/" + pod
	w.ok("pod", "add", "a", space, "--ip=10.9.0.2")
	there := w.ok("ep", "ls")
	if _, errs, code := w.run("", "pod", "add", "b", space, "--ip=10.9.0.3"); code != 1 || !strings.Contains(errs, "already connected") {
		t.Errorf("status %d: %s", code, errs)
	}
	if got := w.ok("ep", "ls"); !strings.Contains(there, "10.9.0.2") || got != there {
		t.Errorf("endpoints:\n%sbefore:\n%s", got, there)
	}
	// By the name that ls shows, why knows the pod.
	if wide := w.ok("ep", "ls", "-o", "wide"); !strings.HasSuffix(wide, "  default/a\n") {
		t.Errorf("endpoints:\n%s", wide)
	}
	w.ok("why", "default/a", "default/a")
	w.sh("ip -n %s link show %s | grep -q ,UP", w.netns, link.HostName("a"))
	if n := w.attachments(link.HostName("a")); n != 2 {
		t.Errorf("%d attachments", n)
	}
	w.ok("pod", "rm", "a")
	if out := w.ok("ep", "ls"); strings.Contains(out, "10.9.0.2") {
		t.Errorf("after rm: %s", out)
	}
	w.sh("rmdir %s/pods", w.state)
}
