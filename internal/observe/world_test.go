// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/netns"
	services "github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// These tests use the real kernel: own namespaces, an own bpffs, an own cgroup.

var mount, cgroup string // a bpffs, and a cgroup2 directory that this process is in

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Println("observe tests need root; skipped")
		return
	}
	code := 1
	dir, err := os.MkdirTemp("", "mustang-observe-")
	if err == nil {
		mount = filepath.Join(dir, "bpf")
		err = setUp()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "observe tests:", err)
	} else {
		code = m.Run()
	}
	unix.Unmount(mount, unix.MNT_DETACH)
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
	mounts, err := os.ReadFile("/proc/mounts")
	for line := range strings.SplitSeq(string(mounts), "\n") {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			cgroup = f[1]
			return nil
		}
	}
	return fmt.Errorf("no cgroup2 is mounted: %w", err)
}

// world is one node with two pods, the first of which sends.
type world struct {
	t     *testing.T
	name  string
	scope engine.Scope
	n     *Node
	pods  map[int]state.Endpoint
}

const serverPort = 8080

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, name: fmt.Sprintf("mst-o%d-%d", os.Getpid(), time.Now().UnixNano()%1e6), pods: map[int]state.Endpoint{}}
	w.scope = engine.Scope{BPFFS: filepath.Join(mount, w.name), StateDir: filepath.Join(t.TempDir(), "state"), CgroupRoot: cgroup}
	w.namespace(w.name)
	w.enter(netns.Path(w.name))
	w.run("ip link set lo up && sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
	t.Cleanup(func() {
		if err := engine.Reset(context.Background(), w.scope, func(string) {}); err != nil {
			t.Error(err)
		}
	})
	return w
}

// open looks at the node, which must exist by now.
func (w *world) open() *Node {
	w.t.Helper()
	n, err := Open(w.scope.BPFFS, w.scope.StateDir)
	w.check(err)
	w.t.Cleanup(func() { n.Close() })
	w.n = n
	return n
}

func (w *world) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) enter(path string) {
	w.t.Helper()
	runtime.LockOSThread()
	home, err := netns.Current()
	w.check(err)
	ns, err := netns.Open(path)
	w.check(err)
	defer ns.Close()
	w.check(unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET))
	w.t.Cleanup(func() {
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		home.Close()
	})
}

func (w *world) namespace(name string) {
	w.t.Helper()
	w.check(netns.Create(netns.Path(name)))
	w.t.Cleanup(func() {
		if err := netns.Delete(netns.Path(name)); err != nil {
			w.t.Error(err)
		}
	})
}

func (w *world) run(format string, args ...any) {
	w.t.Helper()
	line := fmt.Sprintf(format, args...)
	if out, err := exec.Command("sh", "-c", line).CombinedOutput(); err != nil {
		w.t.Fatalf("%s: %v: %s", line, err, out)
	}
}

// do opens the scope as a tool does, for one thing.
func (w *world) do(fn func(e *engine.Engine) error) {
	w.t.Helper()
	sizes := datapath.Sizes{CT: 4096, CTNew: 4096, Services: 4096, Slots: 4096, Backends: 4096}
	e, err := engine.Open(context.Background(), w.scope, engine.Options{Sizes: sizes, Notify: func(s string) { w.t.Log(s) }})
	w.check(err)
	err = fn(e)
	w.check(e.Close())
	w.check(err)
}

// veth makes pod i on a veth pair, named shop/pod-i.
func (w *world) veth(i int, path state.ServicePath) state.Endpoint {
	w.t.Helper()
	ns := fmt.Sprintf("%s-p%d", w.name, i)
	w.namespace(ns)
	w.run("ip link add h%d type veth peer name eth0 netns %s && ip link set h%d up", i, ns, i)
	w.run("nsenter --net=%s sysctl -qw net.ipv6.conf.eth0.accept_ra=0", netns.Path(ns)) // nor does it ask for routers, again and again
	w.run("ip -n %s link set lo up && ip -n %s link set eth0 up && ip -n %s addr add 10.9.0.%d/32 dev eth0 && ip -n %s addr add fd09::%d/128 dev eth0 nodad", ns, ns, ns, i, ns, i)
	w.run("mac=$(ip -br link show h%d | awk '{print $3}'); for gw in 169.254.10.24 fe80::a9fe:a18; do ip -n %s neigh add $gw lladdr $mac dev eth0; ip -n %s route add default via $gw dev eth0 onlink; done", i, ns, ns)
	w.run("ip route add 10.9.0.%d/32 dev h%d && ip -6 route add fd09::%d/128 dev h%d", i, i, i, i)
	return w.endpoint(i, ns, path)
}

func (w *world) endpoint(i int, ns string, path state.ServicePath) state.Endpoint {
	w.t.Helper()
	return w.endpointOf(i, ns, path, state.PodRef{Namespace: "shop", Name: fmt.Sprintf("pod-%d", i)})
}

func (w *world) endpointOf(i int, ns string, path state.ServicePath, pod state.PodRef) (ep state.Endpoint) {
	w.t.Helper()
	w.do(func(e *engine.Engine) (err error) {
		ep, err = e.AddEndpoint(context.Background(), engine.EndpointSpec{
			Netns: netns.Path(ns), IfName: "eth0", Owner: state.OwnerCLI, ServicePath: path,
			Pod:    pod,
			Labels: map[string]string{"app": fmt.Sprintf("app-%d", i)},
		})
		return err
	})
	w.pods[i] = ep
	return ep
}

// Frontends that worlds have; empty has no backend.
var (
	shop4, shop6 = netip.MustParseAddrPort("10.96.0.1:80"), netip.MustParseAddrPort("[fd96::1]:80")
	empty4       = netip.MustParseAddrPort("10.96.0.2:80")
)

func (w *world) services(to state.Endpoint) {
	w.t.Helper()
	var list []state.Service
	for _, p := range []state.Protocol{state.TCP, state.UDP} {
		list = append(list, plain(p, shop4, netip.AddrPortFrom(to.IP4, serverPort)), plain(p, shop6, netip.AddrPortFrom(to.IP6, serverPort)), plain(p, empty4))
	}
	w.do(func(e *engine.Engine) error { return e.AddServices(list...) })
}

// plain is a Service of the command line with one frontend.
func plain(p state.Protocol, front netip.AddrPort, backends ...netip.AddrPort) state.Service {
	port := state.ServicePort{Protocol: p, Frontends: []state.ServiceFrontend{{AddrPort: front}}}
	for _, b := range backends {
		port.Backends = append(port.Backends, state.ServiceBackend{AddrPort: b, Ready: true, Serving: true})
	}
	id := services.PlainID(state.OwnerCLI, state.Frontend{AddrPort: front, Protocol: p})
	return state.Service{ServiceID: id, Ports: []state.ServicePort{port}}
}

// serve echoes TCP and UDP in a pod.
func (w *world) serve(ep state.Endpoint) {
	w.t.Helper()
	var l net.Listener
	var u net.PacketConn
	w.check(netns.Do(ep.Netns, func() (err error) {
		if l, err = net.Listen("tcp", fmt.Sprintf(":%d", serverPort)); err != nil {
			return err
		}
		u, err = net.ListenPacket("udp", fmt.Sprintf(":%d", serverPort))
		return err
	}))
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			var b [16]byte
			n, _ := c.Read(b[:])
			c.Write(b[:n])
			c.Close()
		}
	})
	running.Go(func() {
		var b [16]byte
		for {
			n, from, err := u.ReadFrom(b[:])
			if err != nil {
				return
			}
			u.WriteTo(b[:n], from)
		}
	})
	w.t.Cleanup(func() {
		l.Close()
		u.Close()
		running.Wait()
	})
}

// patience is that with what hangs.
const patience = time.Minute

// talk exchanges a word with a server, and says what went wrong.
func talk(ep state.Endpoint, network string, to netip.AddrPort) error {
	var c net.Conn
	err := netns.Do(ep.Netns, func() (err error) {
		c, err = net.DialTimeout(network, to.String(), patience)
		return err
	})
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("word")); err != nil {
		return err
	}
	var b [16]byte
	_, err = c.Read(b[:])
	return err
}

// sendFrames puts frames on a pod's interface, past its stack.
func (w *world) sendFrames(ep state.Endpoint, bypass bool, frames ...[]byte) {
	w.t.Helper()
	w.check(netns.Do(ep.Netns, func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if bypass {
			if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
				return err
			}
		}
		for _, f := range frames {
			kind := datapath.Port(uint16(f[12])<<8 | uint16(f[13]))
			err := unix.Sendto(fd, f, 0, &unix.SockaddrLinklayer{Ifindex: ep.PodIndex, Protocol: kind, Halen: 6})
			if errors.Is(err, unix.ENOBUFS) {
				err = nil // so a sender learns that the link below dropped its packet
			}
			if err != nil {
				return fmt.Errorf("send %x: %w", f, err)
			}
		}
		return nil
	}))
}

// watcher collects flows.
type watcher struct {
	t     *testing.T
	mu    sync.Mutex
	flows []Flow
	notes []string
	end   func()
	ended chan error
}

// watch starts to watch, and has begun when it returns.
func (w *world) watch(o WatchOptions) *watcher {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	c := &watcher{t: w.t, ended: make(chan error, 1)}
	before := w.readers()
	o.Notify = func(s string) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.notes = append(c.notes, s)
	}
	go func() {
		c.ended <- w.n.Watch(ctx, o, func(f Flow) error {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.flows = append(c.flows, f)
			return nil
		})
	}()
	c.end = sync.OnceFunc(func() {
		cancel()
		if err := <-c.ended; err != nil {
			c.t.Error(err)
		}
	})
	w.t.Cleanup(c.end)
	eventually(w.t, "the watcher has its place", func() bool { return w.readers() > before })
	return c
}

// readers is how many places are taken.
func (w *world) readers() (n int) {
	w.t.Helper()
	all, err := w.n.dp.Readers.All()
	w.check(err)
	for place, r := range all {
		if place > 0 && r.Until != 0 {
			n++
		}
	}
	return n
}

// expect waits for a flow.
func (c *watcher) expect(what string, like func(Flow) bool) (found Flow) {
	c.t.Helper()
	eventually(c.t, what, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, f := range c.flows {
			if like(f) {
				found = f
				return true
			}
		}
		return false
	}, func() string {
		c.mu.Lock()
		defer c.mu.Unlock()
		text, _ := json.MarshalIndent(c.flows, "", " ")
		return "told: " + string(text)
	})
	return found
}

func (c *watcher) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flows = nil
}

func (c *watcher) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.flows)
}

func eventually(t *testing.T, what string, ok func() bool, more ...func() string) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			for _, m := range more {
				t.Log(m())
			}
			t.Fatalf("never seen: %s", what)
		}
	}
}
