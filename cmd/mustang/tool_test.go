// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/report"
)

// These tests run the tool as a user does: this test binary is the tool when
// asked to be.
const beTool = "MUSTANG_TEST_BE_TOOL"

var mount string // a bpffs

func TestMain(m *testing.M) {
	if os.Getenv(beTool) != "" {
		main()
		return
	}
	if os.Geteuid() != 0 {
		fmt.Println("tests of the tool need root; skipped")
		return
	}
	dir, err := os.MkdirTemp("", "mustang-tool-")
	if err == nil {
		mount = filepath.Join(dir, "bpf")
		err = os.Mkdir(mount, 0o700)
	}
	if err == nil {
		err = unix.Mount("bpf", mount, "bpf", 0, "")
	}
	code := 1
	if err != nil {
		fmt.Fprintln(os.Stderr, "tests of the tool:", err)
	} else {
		code = m.Run()
	}
	unix.Unmount(mount, unix.MNT_DETACH)
	os.RemoveAll(dir)
	os.Exit(code)
}

// tool is the tool on one node: a namespace and a scope.
type tool struct {
	t                   *testing.T
	netns, bpffs, state string
}

func newTool(t *testing.T) *tool {
	t.Helper()
	name := fmt.Sprintf("mst-t%d-%d", os.Getpid(), rand.IntN(1e6))
	w := &tool{t, name, filepath.Join(mount, name), filepath.Join(t.TempDir(), "state")}
	w.sh("ip netns add %s", name)
	t.Cleanup(func() {
		w.ok("reset")
		w.sh("ip netns del %s", name)
		for _, left := range []string{w.bpffs, w.state} {
			if _, err := os.Stat(left); !os.IsNotExist(err) {
				t.Errorf("%s is still there after reset", left)
			}
		}
	})
	return w
}

func (w *tool) sh(format string, args ...any) {
	w.t.Helper()
	line := fmt.Sprintf(format, args...)
	if out, err := exec.Command("sh", "-c", line).CombinedOutput(); err != nil {
		w.t.Fatalf("%s: %v: %s", line, err, out)
	}
}

// command is the tool with args, in the node's namespace.
func (w *tool) command(args ...string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	full := append([]string{"--net=/var/run/netns/" + w.netns, self, "--bpffs", w.bpffs, "--state-dir", w.state}, args...)
	cmd := exec.Command("nsenter", full...)
	cmd.Env = append(os.Environ(), beTool+"=1")
	return cmd
}

// run is what a command printed on both ways, and its exit status.
func (w *tool) run(stdin string, args ...string) (stdout, stderr string, code int) {
	w.t.Helper()
	var out, errs bytes.Buffer
	cmd := w.command(args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		w.t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func (w *tool) ok(args ...string) string {
	w.t.Helper()
	out, errs, code := w.run("", args...)
	if code != 0 {
		w.t.Fatalf("%v: status %d: %s", args, code, errs)
	}
	return out
}

// services are frontend and backends, sorted.
func (w *tool) services() []string {
	w.t.Helper()
	var list []serviceView
	if err := json.Unmarshal([]byte(w.ok("svc", "ls", "-o", "json")), &list); err != nil {
		w.t.Fatal(err)
	}
	out := []string{}
	for _, s := range list {
		slices.Sort(s.Backends)
		out = append(out, fmt.Sprintf("%s %s:%d %s", s.Protocol, s.Service, s.Port, strings.Join(s.Backends, ",")))
	}
	slices.Sort(out)
	return out
}

func TestSvcTable(t *testing.T) {
	w := newTool(t)
	w.ok("svc", "add", "--service=10.96.0.100:5201", "--backend=192.168.10.10:5201", "--protocol", "tcp")
	out, errs, _ := w.run("", "svc", "ls")
	want := "ID  PRO  SERVICE      PORT  BACKENDS\n1   tcp  10.96.0.100  5201  192.168.10.10:5201\n"
	if out != want || errs != "Services restored from maps\n" {
		t.Fatalf("%s%s", out, errs)
	}
	w.ok("svc", "add", "--service=10.96.0.100:5201", "--backend=192.168.10.11:5201", "--replace", "--protocol", "tcp")
	if got := w.services(); !slices.Equal(got, []string{"tcp 10.96.0.100:5201 192.168.10.11:5201"}) {
		t.Fatal(got)
	}
	_, errs, code := w.run(`[{service: "10.96.0.1:80", backends: ["10.0.0.1:80"]}, {service: "[fd00::1]:53", protocol: udp, backends: []}]`, "svc", "apply", "-f", "-")
	if code != 0 {
		t.Fatal(errs)
	}
	if got := w.services(); len(got) != 4 {
		t.Fatal(got)
	}
	w.ok("svc", "rm", "1")
	w.ok("svc", "rm", "--service", "10.96.0.1:80")
	if got := w.services(); len(got) != 1 {
		t.Fatal(got)
	}
}

func TestBadInputIsASentenceAndChangesNothing(t *testing.T) {
	w := newTool(t)
	w.ok("svc", "add", "--service=10.96.0.1:80", "--backend=10.0.0.1:80", "--protocol=tcp")
	before := w.services()
	latency := filepath.Join(t.TempDir(), "latency.json")
	if err := (&report.Document{Schema: report.Schema, Subjects: []report.Subject{{ID: "p", Mode: "veth", By: "mustang", Via: report.ClusterIP}}}).Write(latency); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		stdin string
		args  []string
		code  int
		want  []string
	}{
		{"", []string{"svc", "add", "--service=10.96.0.1", "--backend=10.0.0.1:80"}, 2, []string{"service", "ADDRESS:PORT"}},
		{"", []string{"svc", "add", "--service=10.96.0.1:80", "--backend=10.0.0.1:80", "--protocol=tcp"}, 1, []string{"duplicate", "--replace"}},
		{"", []string{"svc", "add", "--service=10.96.0.2:80", "--backend=[fd00::1]:80"}, 2, []string{"backend [fd00::1]:80", "family"}},
		{"", []string{"svc", "add"}, 2, []string{"service"}},
		{"", []string{"svc", "add", "--servise=x"}, 2, []string{"--servise", "--help"}},
		{"", []string{"svc", "ls", "-o", "xml"}, 2, []string{"output", "json"}},
		{"", []string{"svc", "rm", "--service=10.96.0.9:80"}, 1, []string{"not found", "svc ls"}},
		{"", []string{"svc", "rm", "77"}, 1, []string{"service id 77", "svc ls"}},
		{"", []string{"svc", "rm"}, 2, []string{"--service"}},
		{"", []string{"svc", "rm", "x"}, 2, []string{`"x"`, "svc ls"}},
		{"{", []string{"svc", "apply", "-f", "-"}, 2, []string{"not a list"}},
		{"# none\n", []string{"svc", "apply", "-f", "-"}, 2, []string{"no list"}},
		{`[{service: "10.96.0.5:80", backends: ["10.0.0.1:80"]}, {service: "10.96.0.6:0"}]`, []string{"svc", "apply", "-f", "-"}, 2, []string{"entry 2", "1 to 65535"}},
		{`[{service: "10.96.0.5:80", backend: []}]`, []string{"svc", "apply", "-f", "-"}, 2, []string{"backend"}},
		{"[]\n---\n{\n", []string{"svc", "apply", "-f", "-"}, 2, []string{"not a list"}},
		{"# all\n---\nnodes: []\n---\nnodes: []\n", []string{"node", "apply", "-f", "-"}, 2, []string{"2 documents"}},
		{"", []string{"svc", "apply", "-f", "/none/such"}, 2, []string{"/none/such"}},
		{"", []string{"ep", "add", "--ifname=eth0", "--netns=/var/run/netns/none-such"}, 2, []string{"/var/run/netns/none-such", "ip netns"}},
		{"", []string{"ep", "add", "--ifname=eth0", "--netns=/var/run/netns/" + w.netns, "--service-path=fast"}, 2, []string{"service-path", "both, socket, tc, none"}},
		{"", []string{"ep", "rm"}, 2, []string{"--netns"}},
		{"", []string{"ep", "rm", "9"}, 1, []string{"endpoint 9", "ep ls"}},
		{"", []string{"nonsense"}, 2, []string{"nonsense"}},
		{"", []string{"svc", "list"}, 2, []string{`"list"`, "mustang svc --help"}},
		{"", []string{"lab", "run", "--nodes=0", "--", "true"}, 2, []string{"--nodes"}},
		{"", []string{"lab", "run", "--nodes=2", "--pods=254", "--", "true"}, 2, []string{"--pods", "253"}},
		{"", []string{"bench", "samehost", "--modes=pigeon"}, 2, []string{"pigeon"}},
		{"", []string{"bench", "samehost", "--modes=veth,veth"}, 2, []string{"veth", "twice"}},
		{"", []string{"bench", "samehost", "--rounds=0"}, 2, []string{"--rounds"}},
		{"", []string{"bench", "samehost", "--json=/none/such.json"}, 2, []string{"--json", "/none/such.json"}},
		{"", []string{"svc", "delete", "1"}, 2, []string{`"delete"`, "mustang svc --help"}},
		{"", []string{"bench", "nonsense"}, 2, []string{`"nonsense"`}},
		{"", []string{"bench", "cni", "--rounds", "0"}, 2, []string{"--rounds"}},
		{"", []string{"bench", "cluster", "--rounds", "0", "--kubeconfig", "/none/such"}, 2, []string{"--rounds"}},
		{"", []string{"bench", "cluster", "--duration", "1ms", "--kubeconfig", "/none/such"}, 2, []string{"30ms"}},
		{"", []string{"bench", "nodes", "--rounds", "0"}, 2, []string{"--rounds"}},
		{"", []string{"bench", "nodes", "--duration", "1ms"}, 2, []string{"--duration", "100ms"}},
		{"", []string{"bench", "policy", "--rounds", "0"}, 2, []string{"--rounds"}},
		{"", []string{"bench", "policy", "--sizes", "10,10"}, 2, []string{"--sizes", "twice"}},
		{"", []string{"bench", "nodes", "--sizes", "64,64"}, 2, []string{"--sizes", "twice"}},
		{"", []string{"bench", "path", "--services-by", "pigeon"}, 2, []string{"pigeon"}},
		{"", []string{"bench", "services", "--contestants="}, 2, []string{"--contestants", "mustang"}},
		{"", []string{"bench", "calibrate", "--pairs", "0"}, 2, []string{"--pairs"}},
		{"", []string{"svc"}, 0, nil},
		{"", []string{"node", "set", "--port", "0"}, 2, []string{"--port"}},
		{"", []string{"install-cni", "--conf-dir", w.state + "x"}, 2, []string{"--pool"}},
		{"", []string{"bench", "advise", "--need", "glory"}, 2, []string{"latency"}},
		{"", []string{"bench", "advise", "--need", "throughput", "--from", latency}, 2, []string{"throughput", "same need"}},
		{"", []string{"svc", "ls", "--bpffs", w.state + "x/y"}, 1, []string{"give --bpffs " + w.bpffs}},
		{"", []string{"svc", "add", "--service=10.96.0.7:80", "--bpffs", w.state + "x/y"}, 1, []string{"mount -t bpf bpf"}},
	} {
		_, errs, code := w.run(tc.stdin, tc.args...)
		if code != tc.code {
			t.Errorf("%v: status %d, not %d: %s", tc.args, code, tc.code, errs)
		}
		for _, s := range tc.want {
			if !strings.Contains(errs, s) || !strings.HasPrefix(errs, "mustang: ") {
				t.Errorf("%v: %q does not say %q", tc.args, errs, s)
			}
		}
	}
	if got := w.services(); !slices.Equal(got, before) {
		t.Errorf("Services changed: %v", got)
	}
}

func TestNodeSetWithoutFlagsOfItsOwnShows(t *testing.T) {
	w := newTool(t) // which says where the node is
	if out := w.ok("node", "set"); !strings.Contains(out, "ebpf") {
		t.Errorf("it shows %q", out)
	}
	w.ok("node", "set", "--host-routing=legacy")
	if out := w.ok("node", "set", "-o", "json"); !strings.Contains(out, `"host_routing": "legacy"`) {
		t.Errorf("it shows %q", out)
	}
}

// Tables cost tens of megabytes.
func TestARefusedFirstCommandLeavesNothing(t *testing.T) {
	w := newTool(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"svc", "rm", "3"},
		{"ep", "add", "--ifname=eth0", "--netns=/var/run/netns/none-such"},
		{"pod", "add", "a", "--ip=10.1.0.2/24", "--mode=macvlan", "--uplink=lo"},
		{"svc", "add", "--service=10.96.0.1:80", "--state-dir=" + filepath.Join(file, "state")},
	} {
		if out, errs, code := w.run("", args...); code == 0 {
			t.Errorf("%v: %s%s", args, out, errs)
		}
		if _, err := os.Stat(w.bpffs); !os.IsNotExist(err) {
			t.Errorf("%v left %s", args, w.bpffs)
		}
	}
}

// Nor does one that has nothing to do: the pod of a node that was reset goes without them.
func TestACommandThatChangesNothingLeavesNothing(t *testing.T) {
	w := newTool(t)
	pod := fmt.Sprintf("nothing%d", os.Getpid())
	w.ok("pod", "add", pod, "--ip=10.1.0.2/32")
	w.ok("reset")
	for _, args := range [][]string{{"pod", "rm", pod}, {"node", "sync"}} {
		w.ok(args...)
		if _, err := os.Stat(w.bpffs); !os.IsNotExist(err) {
			t.Errorf("%v left %s", args, w.bpffs)
		}
	}
}

func TestTwoToolsAtOnceBothTakeEffect(t *testing.T) {
	w := newTool(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			out, err := w.command("svc", "add", fmt.Sprintf("--service=10.96.0.%d:80", i+1), "--backend=10.0.0.1:80", "--protocol=tcp").CombinedOutput()
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	wg.Wait()
	if got := w.services(); len(got) != 8 {
		t.Fatal(got)
	}
}

// killed runs a command and kills it after d. It reports whether the command
// ended by itself, well.
func (w *tool) killed(d time.Duration, args ...string) bool {
	w.t.Helper()
	cmd := w.command(args...)
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	timer := time.AfterFunc(d, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	return cmd.Wait() == nil
}

// Killed at any instant, a change has happened or has not, and the next tool
// works. nsenter executes the tool in its own process, so the kill is the tool's.
func TestKilledServiceChangesAreOldOrNew(t *testing.T) {
	w := newTool(t)
	w.ok("svc", "add", "--service=10.96.0.9:80", "--backend=10.0.0.9:80", "--protocol=tcp")
	states := map[bool][]string{
		false: {"tcp 10.96.0.9:80 10.0.0.9:80"},
		true: {
			"tcp 10.96.0.1:80 10.0.0.1:80,10.0.0.2:80,10.0.0.3:80",
			"tcp 10.96.0.9:80 10.0.0.9:80",
			"udp 10.96.0.1:80 10.0.0.1:80,10.0.0.2:80,10.0.0.3:80",
		},
	}
	add := []string{"svc", "add", "--service=10.96.0.1:80", "--backend=10.0.0.1:80,10.0.0.2:80,10.0.0.3:80"}
	rm := []string{"svc", "rm", "--service=10.96.0.1:80"}
	w.killLoop(10*time.Second, add, rm, func() bool {
		got := w.services()
		for there, want := range states {
			if slices.Equal(got, want) {
				return there
			}
		}
		t.Fatalf("neither old nor new: %v", got)
		return false
	})
}

func TestKilledEndpointChangesAreOldOrNew(t *testing.T) {
	w := newTool(t)
	pod := w.netns + "-p"
	w.sh("ip netns add %s && ip -n %s link add h1 type veth peer name eth0 netns %s", pod, w.netns, pod)
	t.Cleanup(func() { w.sh("ip netns del %s", pod) })
	w.sh("ip -n %s addr add 10.9.0.1/32 dev eth0 && ip -n %s link set eth0 up && ip -n %s link set h1 up", pod, pod, w.netns)
	path := "--netns=/var/run/netns/" + pod
	add := []string{"ep", "add", "--ifname=eth0", path}
	rm := []string{"ep", "rm", "--ifname=eth0", path}
	w.ok(add...)
	w.ok(rm...)
	w.killLoop(10*time.Second, add, rm, func() bool {
		var list []endpointView
		if err := json.Unmarshal([]byte(w.ok("ep", "ls", "-o", "json")), &list); err != nil {
			t.Fatal(err)
		}
		attached := w.attachments("h1")
		switch {
		case len(list) == 0 && attached == 0:
			return false
		case len(list) == 1 && attached == 2 && len(list[0].IPs) == 1 && list[0].Netns != "":
			return true
		}
		t.Fatalf("neither old nor new: %+v, %d attachments", list, attached)
		return false
	})
}

// attachments counts our links, and our filters on an interface of the node's.
func (w *tool) attachments(ifname string) int {
	w.t.Helper()
	pins, err := filepath.Glob(filepath.Join(w.bpffs, "links", "ep-*"))
	if err != nil {
		w.t.Fatal(err)
	}
	n := len(pins)
	for _, hook := range []string{"ingress", "egress"} {
		out, err := exec.Command("tc", "-n", w.netns, "filter", "show", "dev", ifname, hook).CombinedOutput()
		if err != nil {
			w.t.Fatalf("list filters: %v: %s", err, out)
		}
		n += strings.Count(string(out), "mustang:")
	}
	return n
}

// Resets killed at any instant, and the making of a fresh scope likewise: the
// next tool finishes the one and completes the other.
func TestKilledResetsAreFinished(t *testing.T) {
	w := newTool(t)
	add := []string{"svc", "add", "--service=10.96.0.1:80", "--backend=10.0.0.1:80", "--protocol=tcp", "--replace"}
	want := []string{"tcp 10.96.0.1:80 10.0.0.1:80"}
	start := time.Now()
	w.ok(add...)
	span := time.Since(start)
	rounds := 60
	if testing.Short() {
		rounds = 10
	}
	for range rounds {
		w.killed(time.Duration(rand.Int64N(int64(span))), "reset")
		if got := w.services(); len(got) != 0 && !slices.Equal(got, want) {
			t.Fatalf("neither old nor new: %v", got)
		}
		w.killed(time.Duration(rand.Int64N(int64(span))), add...)
		w.ok(add...)
		if got := w.services(); !slices.Equal(got, want) {
			t.Fatal(got)
		}
	}
}

// killLoop kills adds and removals at random instants, mostly within the time
// that a whole one takes, for d at most; for longer until there was a kill.
func (w *tool) killLoop(d time.Duration, add, rm []string, there func() bool) {
	w.t.Helper()
	rounds := 200
	if testing.Short() {
		rounds, d = 20, d/5
	}
	start := time.Now()
	w.ok(add...)
	span := time.Since(start)
	present := there()
	if !present {
		w.t.Fatal("added, and absent")
	}
	kills, changes := 0, 0
	for time.Since(start) < d && kills+changes < 2*rounds || kills == 0 && time.Since(start) < 2*time.Minute {
		args := add
		if present {
			args = rm
		}
		finished := w.killed(time.Duration(rand.Int64N(int64(span))), args...)
		now := there()
		if finished && now == present {
			w.t.Fatalf("%v succeeded, and changed nothing", args)
		}
		if finished {
			changes++
		} else {
			kills++
		}
		present = now
	}
	w.t.Logf("%d killed, %d finished", kills, changes)
	if kills == 0 {
		w.t.Error("nothing was killed")
	}
}
