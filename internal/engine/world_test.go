// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// These tests use the real kernel: own namespaces, an own bpffs, an own cgroup.

var (
	mount  string // a bpffs
	cgroup string // an empty cgroup2 directory
)

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Println("engine tests need root; skipped")
		return
	}
	code := 1
	dir, err := os.MkdirTemp("", "mustang-engine-")
	if err == nil {
		mount = filepath.Join(dir, "bpf")
		err = setUp()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "engine tests:", err)
	} else {
		code = m.Run()
	}
	unix.Unmount(mount, unix.MNT_DETACH)
	os.Remove(cgroup)
	os.RemoveAll(dir)
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func setUp() error {
	if err := os.Mkdir(mount, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("bpf", mount, "bpf", 0, ""); err != nil {
		return err
	}
	root, err := Scope{}.cgroupRoot()
	if err != nil {
		return err
	}
	cgroup, err = os.MkdirTemp(root, "mustang-engine-")
	return err
}

// node is one node with its scope. The test runs in its namespace.
type node struct {
	t     *testing.T
	name  string
	scope Scope
	opts  Options
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, name: fmt.Sprintf("mst-e%d-%d", os.Getpid(), time.Now().UnixNano()%1e6)}
	n.scope = Scope{BPFFS: filepath.Join(mount, n.name), StateDir: filepath.Join(t.TempDir(), "state"), CgroupRoot: cgroup}
	n.opts = Options{
		Sizes:  datapath.Sizes{CT: 1024, CTNew: 1024, Services: 4096, Slots: 4096, Backends: 4096},
		Notify: func(s string) { t.Log("notice:", s) },
	}
	n.namespace(n.name)
	enter(t, netns.Path(n.name))
	n.run("ip link set lo up")
	n.run("sysctl -qw net.ipv4.ip_forward=1")
	t.Cleanup(func() {
		if err := Reset(context.Background(), n.scope, n.opts.Notify); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(n.scope.BPFFS); !os.IsNotExist(err) {
			t.Errorf("%s is still there", n.scope.BPFFS)
		}
	})
	return n
}

// enter puts the test's goroutine into a namespace until the test ends.
func enter(t *testing.T, path string) {
	t.Helper()
	runtime.LockOSThread()
	home, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	ns, err := netns.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		home.Close()
	})
}

func (n *node) namespace(name string) {
	n.t.Helper()
	if err := netns.Create(netns.Path(name)); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		if err := netns.Delete(netns.Path(name)); err != nil {
			n.t.Error(err)
		}
	})
}

// run runs a command line in the node's namespace.
func (n *node) run(format string, args ...any) string {
	n.t.Helper()
	line := fmt.Sprintf(format, args...)
	cmd := exec.Command("sh", "-c", line)
	var said strings.Builder // ip complains of others' namespaces that go while it lists links
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		n.t.Fatalf("%s: %v: %s%s", line, err, out, &said)
	}
	return strings.TrimSpace(string(out))
}

// pod makes a pod by hand, as the README does: veth, onlink default route,
// host route. It returns the path of its namespace.
func (n *node) pod(i int) string {
	n.t.Helper()
	name := fmt.Sprintf("%s-p%d", n.name, i)
	n.namespace(name)
	n.connect(name, i)
	return netns.Path(name)
}

func (n *node) connect(name string, i int) {
	n.t.Helper()
	n.run("ip link add h%d type veth peer name eth0 netns %s && ip link set h%d up", i, name, i)
	n.run("ip -n %s link set eth0 up && ip -n %s addr add 10.9.0.%d/32 dev eth0 && ip -n %s addr add fd09::%d/128 dev eth0 nodad", name, name, i, name, i)
	n.run("ip -n %s route add default via 169.254.10.24 dev eth0 onlink", name)
	n.run("ip -n %s neigh add 169.254.10.24 dev eth0 lladdr $(cat /sys/class/net/h%d/address || ip -br link show h%d | awk '{print $3}')", name, i, i)
	n.run("ip route add 10.9.0.%d/32 dev h%d", i, i)
}

func (n *node) open() *Engine {
	n.t.Helper()
	e, err := Open(context.Background(), n.scope, n.opts)
	if err != nil {
		n.t.Fatal(err)
	}
	return e
}

// do opens the scope as a new tool does, for one thing, on the node: a subtest has
// a thread of its own, which is elsewhere.
func (n *node) do(fn func(e *Engine) error) error {
	return netns.Do(netns.Path(n.name), func() error {
		e, err := Open(context.Background(), n.scope, n.opts)
		if err != nil {
			return err
		}
		return errors.Join(fn(e), e.Close())
	})
}

func (n *node) must(fn func(e *Engine) error) {
	n.t.Helper()
	if err := n.do(fn); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) services() []state.Binding {
	n.t.Helper()
	var list []state.Binding
	n.must(func(e *Engine) (err error) { list, err = e.Services(); return err })
	return list
}

func (n *node) endpoints() []state.Endpoint {
	n.t.Helper()
	var list []state.Endpoint
	n.must(func(e *Engine) (err error) { list, err = e.Endpoints(); return err })
	return list
}

func (n *node) add(path string) (ep state.Endpoint, err error) {
	n.t.Helper()
	err = n.do(func(e *Engine) (err error) {
		ep, err = e.AddEndpoint(context.Background(), EndpointSpec{Netns: path, IfName: "eth0", Owner: state.OwnerCLI})
		return err
	})
	return ep, err
}

func svc(front string, backends ...string) state.Service { return plain(state.TCP, front, backends...) }

// plain is a Service of the command line with one frontend.
func plain(p state.Protocol, front string, backends ...string) state.Service {
	f := state.Frontend{AddrPort: netip.MustParseAddrPort(front), Protocol: p}
	port := state.ServicePort{Protocol: p, Frontends: []state.ServiceFrontend{{AddrPort: f.AddrPort}}}
	for _, b := range backends {
		port.Backends = append(port.Backends, state.ServiceBackend{AddrPort: netip.MustParseAddrPort(b), Ready: true, Serving: true})
	}
	return state.Service{ServiceID: service.PlainID(state.OwnerCLI, f), Ports: []state.ServicePort{port}}
}

// bound is a Service's only binding.
func bound(t *testing.T, s state.Service) state.Binding {
	t.Helper()
	list, errs := service.Bind(s, service.Node{})
	if len(list) != 1 || len(errs) > 0 {
		t.Fatalf("%v: %v, %v", s, list, errs)
	}
	return list[0]
}

// front is a Service's first frontend.
func front(s state.Service) state.Frontend {
	return state.Frontend{AddrPort: s.Ports[0].Frontends[0].AddrPort, Protocol: s.Ports[0].Protocol}
}

// makeAll makes list all that Kubernetes has.
func makeAll(e *Engine, list []state.Service) ([]service.Problem, error) {
	names := make([]state.ServiceID, len(list))
	for i, s := range list {
		names[i] = s.ServiceID
	}
	if _, err := e.ChangeServices(state.OwnerKubernetes, list, nil); err != nil {
		return nil, err
	}
	return e.RetainServices(state.OwnerKubernetes, names)
}
