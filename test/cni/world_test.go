// SPDX-License-Identifier: Apache-2.0

// Package cni_test runs the CNI plugin as a container runtime does: by its
// environment and standard input, against the words of the CNI spec 1.1.0.
//
// MUSTANG_TEST_MODES (comma-separated) chooses modes; MUSTANG_CNI_BIN names a
// binary instead of building one; MUSTANG_TEST_SLOWNESS lengthens deadlines for
// emulation.
package cni_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/test/built"
)

const (
	roleVariable = "MUSTANG_TEST_ROLE"
	debianCNI    = "/usr/lib/cni"
	uplink       = "up0"
	prefix       = "mstcni" // of the namespaces that tests make

	// Why something is not tested in mode host-device.
	ownNetwork = "the pod is on the network that its device leads to, and the node is not on the way"
)

var (
	binary string
	nodes  atomic.Int32
)

// slow is a time that an emulated machine gets more of.
func slow(d time.Duration) time.Duration {
	n, _ := strconv.Atoi(os.Getenv("MUSTANG_TEST_SLOWNESS"))
	return d * time.Duration(max(1, n))
}

func TestMain(m *testing.M) {
	switch os.Getenv(roleVariable) {
	case "server":
		serve(os.Getenv("LISTEN"))
		return
	case "client":
		wait, _ := time.ParseDuration(os.Getenv("WAIT"))
		os.Exit(dial(os.Getenv("DIAL"), wait))
	case "router":
		os.Exit(advertise())
	}
	removeLeft()
	dir, err := os.MkdirTemp("", "mustang-cni-test-")
	if err == nil {
		binary, err = built.Binary(dir, "mustang-cni", "MUSTANG_CNI_BIN")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "CNI tests:", err)
		os.Exit(1)
	}
	code := m.Run()
	if err := warm.remove(); err != nil {
		fmt.Fprintln(os.Stderr, "CNI tests:", err)
		code = 1
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

func TestWhatIsRunIsAnInput(t *testing.T) { built.Declare(t, "mustang", "mustang-cni") }

// node is a network namespace with an uplink, a bpffs and a state directory of
// its own.
type node struct {
	t          *testing.T
	name, dir  string
	containers int
}

// newNode is a test's own.
func newNode(t *testing.T) *node {
	t.Helper()
	watchDescriptors(t)
	n := makeNode(t, t.TempDir(), func(undo func() error) {
		t.Cleanup(func() {
			if err := undo(); err != nil {
				t.Error(err)
			}
		})
	})
	t.Cleanup(n.nothingOfPods)
	return n
}

// makeNode tells later how to undo each thing it has made, the last first. The
// directory is one in another, which is the node's as well.
func makeNode(t *testing.T, dir string, later func(undo func() error)) *node {
	t.Helper()
	n := &node{t: t, name: fmt.Sprintf("%s%d-%d", prefix, os.Getpid(), nodes.Add(1)), dir: dir}
	for _, space := range []string{n.name, n.outside()} {
		run(t, "ip", "netns", "add", space)
		later(func() error {
			if out, err := exec.Command("ip", "netns", "del", space).CombinedOutput(); err != nil {
				return fmt.Errorf("ip netns del %s: %w: %s", space, err, out)
			}
			return nil
		})
	}
	for _, args := range []string{
		"-n NODE link set lo up", "-n OUT link set lo up", "-n NODE link add up0 type veth peer name up0 netns OUT",
		"-n NODE addr add 192.168.7.1/24 dev up0", "-n OUT addr add 192.168.7.2/24 dev up0",
		"-n NODE addr add fd00:7::1/64 dev up0 nodad", "-n OUT addr add fd00:7::2/64 dev up0 nodad",
		"-n NODE link set up0 up", "-n OUT link set up0 up", "-n NODE route add default via 192.168.7.2",
		"-n NODE -6 route add default via fd00:7::2",
	} {
		args = strings.NewReplacer("NODE", n.name, "OUT", n.outside()).Replace(args)
		run(t, "ip", strings.Fields(args)...)
	}
	if err := os.Mkdir(n.bpffs(), 0o700); err != nil {
		t.Fatal(err)
	}
	// By its source the mount is known as this test's.
	if err := unix.Mount(n.name, n.bpffs(), "bpf", 0, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	later(func() error { return unix.Unmount(n.bpffs(), unix.MNT_DETACH) })
	return n
}

func (n *node) outside() string { return n.name + "-out" }
func (n *node) bpffs() string   { return filepath.Join(n.dir, "bpf") }
func (n *node) state() string   { return filepath.Join(n.dir, "state") }

// container is a network namespace with an id.
func (n *node) container() *container {
	n.t.Helper()
	n.containers++
	c := &container{node: n, id: fmt.Sprintf("c%d", n.containers), ifname: "eth0"}
	c.ns = n.name + "-" + c.id
	made := c.ns // a test may give it another's
	run(n.t, "ip", "netns", "add", made)
	n.t.Cleanup(func() { exec.Command("ip", "netns", "del", made).Run() })
	return c
}

type container struct {
	*node
	id, ns, ifname string
}

func (c *container) path() string { return "/var/run/netns/" + c.ns }

// config is a network's, without IPAM's and mode's.
type config map[string]any

func (n *node) config(mode string) config {
	c := config{"cniVersion": "1.1.0", "name": "net-" + mode, "type": "mustang-cni", "mode": mode,
		"bpffs": filepath.Join(n.bpffs(), "scope"), "stateDir": n.state()}
	switch mode {
	case "chained":
		return c
	case "host-device":
		c["uplink"] = "dev0"
	}
	// The l3 modes are on the outside's terms; all others have pools of their own.
	c["ipam"] = map[string]any{"type": "mustang", "pools": []string{"10.9.0.0/24", "fd00:9::/64"}}
	return c
}

func (c config) with(key string, value any) config {
	out := maps.Clone(c)
	out[key] = value
	if value == nil {
		delete(out, key)
	}
	return out
}

// answer is what a plugin said.
type answer struct {
	stdout, stderr string
	status         int
	result
	Code    int    `json:"code"`
	Msg     string `json:"msg"`
	Details string `json:"details"`
}

type result struct {
	CNIVersion string `json:"cniVersion"`
	Interfaces []struct {
		Name, Mac, Sandbox string
		Mtu                int
	} `json:"interfaces"`
	IPs []struct {
		Address, Gateway string
		Interface        *int
	} `json:"ips"`
	Routes []route        `json:"routes"`
	DNS    map[string]any `json:"dns"`
}

type route struct {
	Dst, Gw string
	Mtu     int
}

// command prepares a plugin's execution on the node.
func (n *node) command(plugin, command string, conf config, env ...string) *exec.Cmd {
	text, err := json.Marshal(conf)
	if err != nil {
		n.t.Fatal(err)
	}
	cmd := exec.Command("nsenter", "--net=/var/run/netns/"+n.name, plugin)
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "CNI_") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	cmd.Env = append(append(cmd.Env, "CNI_COMMAND="+command, "CNI_PATH="+filepath.Join(n.dir, "plugins")+":"+debianCNI), env...)
	cmd.Stdin = bytes.NewReader(text)
	return cmd
}

func (n *node) exec(cmd *exec.Cmd) answer {
	n.t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	a := answer{stdout: out.String(), stderr: errs.String(), status: cmd.ProcessState.ExitCode()}
	if _, exited := err.(*exec.ExitError); err != nil && !exited {
		n.t.Fatal(err)
	}
	if out.Len() > 0 {
		if err := json.Unmarshal(out.Bytes(), &a); err != nil {
			n.t.Fatalf("the answer is no JSON: %v: %s", err, a.stdout)
		}
	}
	return a
}

// env is a container's part of the environment.
func (c *container) env() []string {
	return []string{"CNI_CONTAINERID=" + c.id, "CNI_NETNS=" + c.path(), "CNI_IFNAME=" + c.ifname}
}

func (c *container) call(command string, conf config, env ...string) answer {
	c.t.Helper()
	return c.exec(c.command(binary, command, conf, append(c.env(), env...)...))
}

// add is an ADD that must succeed.
func (c *container) add(conf config, env ...string) answer {
	c.t.Helper()
	return c.ok(c.call("ADD", conf, env...))
}

func (c *container) del(conf config, env ...string) {
	c.t.Helper()
	c.ok(c.call("DEL", conf, env...))
}

func (n *node) ok(a answer) answer {
	n.t.Helper()
	if a.status != 0 {
		n.t.Fatalf("status %d: %s%s", a.status, a.stdout, a.stderr)
	}
	return a
}

// refused wants an error with this code whose text has part.
func (n *node) refused(a answer, code int, part string) {
	n.t.Helper()
	if a.status == 0 || a.Code != code || !strings.Contains(a.Msg+" "+a.Details, part) {
		n.t.Errorf("status %d: %s%s\nwant code %d and %q", a.status, a.stdout, a.stderr, code, part)
	}
}

// prev is conf with a's result as prevResult.
func (c config) prev(a answer) config { return c.with("prevResult", json.RawMessage(a.stdout)) }

// plugin runs another plugin for c.
func (c *container) plugin(name, command string, conf config, env ...string) answer {
	c.t.Helper()
	return c.exec(c.command(filepath.Join(debianCNI, name), command, conf, append(c.env(), env...)...))
}

// traces is everything that an attachment could leave behind.
func (n *node) traces() map[string]string {
	out := make(map[string]string)
	for _, args := range []string{"-o link", "addr", "route", "-6 route", "neigh", "rule", "-6 rule"} {
		text := run(n.t, "ip", append([]string{"-n", n.name}, strings.Fields(args)...)...)
		for _, line := range strings.Split(text, "\n") {
			if strings.HasPrefix(line, "Error") {
				continue // something went while it was listed
			}
			if args == "addr" && (!strings.Contains(line, "inet") || strings.Contains(line, "scope link")) {
				continue // and its own link-local ones
			}
			if strings.Contains(line, "proto kernel") && strings.Contains(line, "fe80::") {
				continue
			}
			if args == "neigh" && !strings.Contains(line, "PERMANENT") {
				continue // what the kernel learned
			}
			for _, word := range []string{"valid_lft", "state", "NO-CARRIER"} {
				if i := strings.Index(line, word); i >= 0 {
					line = line[:i]
				}
			}
			if args == "-o link" {
				line, _, _ = strings.Cut(line, "<")
				if _, name, _ := strings.Cut(line, ": "); strings.HasPrefix(name, "dev") {
					line, _, _ = strings.Cut(name, "@") // a device that died with its namespace is made anew
				}
			}
			if strings.Contains(line, "linkdown") {
				line = strings.ReplaceAll(line, " linkdown", "")
			}
			out["ip "+args+": "+strings.TrimSpace(line)] = ""
		}
	}
	for _, line := range strings.Split(run(n.t, "tc", "-n", n.name, "qdisc", "show"), "\n") {
		out["tc: "+line] = ""
	}
	for _, hook := range []string{"ingress", "egress"} {
		out["tc filter: "+uplink+" "+hook] = run(n.t, "tc", "-n", n.name, "filter", "show", "dev", uplink, hook)
	}
	out["nft"] = run(n.t, "nsenter", "--net=/var/run/netns/"+n.name, "nft", "list", "ruleset")
	for _, root := range []string{n.bpffs(), n.state()} {
		filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			// The pools' cursors stay on purpose, and so do the files that ADDs take turns by.
			if err == nil && !strings.Contains(path, "/last-") && !strings.Contains(path, "/looked-") && !strings.Contains(path, "/turn-") {
				out["file "+path] = ""
			}
			return nil
		})
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		n.t.Fatal(err)
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		if strings.Contains(line, n.name) || strings.Contains(line, n.dir) {
			out["mount "+line] = ""
		}
	}
	namespaces, _ := filepath.Glob("/var/run/netns/" + n.name + "*")
	for _, ns := range namespaces {
		out["netns "+ns] = ""
	}
	for _, m := range []string{"mst_endpoints_v1", "mst_endpoint_addrs_v1", "mst_netns_v1", "mst_parents_v1", "mst_children_v1"} {
		out["table "+m] = n.entries(m)
	}
	return out
}

// same wants two looks at everything to agree.
func (n *node) same(before, after map[string]string) {
	n.t.Helper()
	if d := cmp.Diff(before, after); d != "" {
		n.t.Errorf("left behind (+) or missing (-):\n%s", d)
	}
}

// entries are the non-zero entries of a pinned table, as text.
func (n *node) entries(table string) string {
	return dumpTable(filepath.Join(n.bpffs(), "scope", "maps", table))
}

// unchanged runs fn between two looks at everything.
func (n *node) unchanged(fn func()) {
	n.t.Helper()
	before := n.traces()
	fn()
	if d := cmp.Diff(before, n.traces()); d != "" {
		n.t.Errorf("left behind (+) or missing (-):\n%s", d)
	}
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// chosen are the modes to test: those named, or all that this kernel has.
func chosen(t *testing.T) []string {
	modes := []string{"veth", "bridge", "macvlan", "ipvlan", "ipvlan-l3", "netkit", "netkit-l3", "host-device"}
	named := os.Getenv("MUSTANG_TEST_MODES")
	if named != "" {
		modes = strings.Split(named, ",")
	}
	n := newNode(t)
	return slices.DeleteFunc(modes, func(mode string) bool {
		n.device(mode)
		c := n.container()
		a := c.call("ADD", n.config(mode))
		if a.Code == 2 && named != "" {
			t.Fatalf("mode %s is to be tested: %s", mode, a.Msg)
		}
		if a.Code == 2 {
			t.Logf("mode %s: not on this kernel", mode)
			return true
		}
		c.call("DEL", n.config(mode))
		return false
	})
}

// device makes what host-device moves.
func (n *node) device(mode string) {
	n.t.Helper()
	if mode == "host-device" {
		n.deviceNamed("dev0")
	}
}

func (n *node) deviceNamed(name string) string {
	n.t.Helper()
	if exec.Command("ip", "-n", n.name, "link", "show", name).Run() != nil {
		// The last one went with a container's namespace, which takes its time.
		_ = exec.Command("ip", "-n", n.outside(), "link", "del", name).Run()
		run(n.t, "ip", "-n", n.name, "link", "add", name, "type", "veth", "peer", "name", name, "netns", n.outside())
		run(n.t, "ip", "-n", n.outside(), "link", "set", name, "up")
	}
	return name
}

// dropEndpoints takes all endpoints away, as somebody else might.
func (n *node) dropEndpoints() {
	n.t.Helper()
	files, _ := filepath.Glob(filepath.Join(n.state(), "endpoints", "*.json"))
	if len(files) == 0 {
		n.t.Fatal("there is no endpoint")
	}
	m, err := ebpf.LoadPinnedMap(filepath.Join(n.bpffs(), "scope", "maps", "mst_endpoint_addrs_v1"), nil)
	if err != nil {
		n.t.Fatal(err)
	}
	defer m.Close()
	for key := make([]byte, m.KeySize()); m.NextKey(nil, &key) == nil; {
		if err := m.Delete(key); err != nil {
			n.t.Fatal(err)
		}
	}
}

var modeList []string

func modesOnce(t *testing.T) []string {
	if modeList == nil {
		modeList = chosen(t)
	}
	return modeList
}

// address is the i-th of the result, without its length.
func (a answer) address(i int) string {
	host, _, _ := strings.Cut(a.IPs[i].Address, "/")
	return host
}
