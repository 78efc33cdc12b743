// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// These tests have a client outside the node (on w0), a backend on another node
// (on w1), and a pod of the node, each with real sockets, in both families.

// edgeWorld is such a node.
type edgeWorld struct {
	*node
	client, other, pod, home string // paths of namespaces
}

func newEdgeWorld(t *testing.T) *edgeWorld {
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	// Addresses are good at once: the first packet must not wait.
	n.run("sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0")
	n.run("sysctl -qw net.ipv6.conf.all.forwarding=1 net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.default.rp_filter=1")
	w.client, w.other = w.wire(0, 1), w.wire(1, 2)
	w.pod = n.pod(2)
	pod := n.name + "-p2"
	n.run("ip -n %s link set lo up && ip -n %s -6 route add default via fe80::1 dev eth0 onlink", pod, pod)
	n.run("ip -n %s neigh add fe80::1 dev eth0 lladdr $(cat /sys/class/net/h2/address || ip -br link show h2 | awk '{print $3}')", pod)
	n.run("ip -6 route add fd09::2/128 dev h2")
	if _, err := n.add(w.pod); err != nil {
		t.Fatal(err)
	}
	inCgroup(t)
	n.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0", "w1"}, Host: true}) })
	return w
}

// wire joins a namespace to the node: network i, in which the node is 1.
func (w *edgeWorld) wire(i, host int) string {
	name := fmt.Sprintf("%s-w%d", w.name, i)
	w.namespace(name)
	w.run("ip netns exec %s sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0", name)
	w.plug(i, 0)
	return netns.Path(name)
}

// plug makes network i's devices, the node's with this ifindex; 0: any.
func (w *edgeWorld) plug(i, ifindex int) {
	name := fmt.Sprintf("%s-w%d", w.name, i)
	index := ""
	if ifindex != 0 {
		index = fmt.Sprintf("index %d", ifindex)
	}
	w.run("ip link add w%d %s type veth peer name eth0 netns %s && ip link set w%d up && ip -n %s link set eth0 up && ip -n %s link set lo up", i, index, name, i, name, name)
	w.run("ip addr add 198.51.%d.1/24 dev w%d && ip addr add 2001:db8:%d::1/64 dev w%d nodad", 100+i, i, i, i)
	w.run("ip -n %s addr add 198.51.%d.9/24 dev eth0 && ip -n %s addr add 2001:db8:%d::9/64 dev eth0 nodad", name, 100+i, name, i)
	w.run("ip -n %s route add default via 198.51.%d.1 && ip -n %s -6 route add default via 2001:db8:%d::1", name, 100+i, name, i)
}

// childPod is an endpoint with a child of w0, whose gateway is the client.
func (w *edgeWorld) childPod() string {
	path := w.child()
	if _, err := w.add(path); err != nil {
		w.t.Fatal(err)
	}
	return path
}

// child is such a pod before it is an endpoint.
func (w *edgeWorld) child() string {
	name := w.name + "-mv"
	w.namespace(name)
	w.run("ip netns exec %s sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0", name)
	w.run("ip link add link w0 name mv0 netns %s type macvlan mode bridge", name)
	w.run("ip -n %s link set mv0 name eth0 && ip -n %s link set eth0 up && ip -n %s link set lo up", name, name, name)
	w.run("ip -n %s addr add 198.51.100.2/24 dev eth0 && ip -n %s addr add 2001:db8:0::2/64 dev eth0 nodad", name, name)
	w.run("ip -n %s route add default via 198.51.100.9 && ip -n %s -6 route add default via 2001:db8:0::9", name, name)
	return netns.Path(name)
}

// serve answers whoever comes with "NAME saw ADDRESS", over both protocols and
// in both families, until the test ends.
func (w *edgeWorld) serve(path, name string, port int) {
	w.t.Helper()
	err := netns.Do(path, func() error {
		for _, network := range []string{"tcp4", "tcp6"} {
			l, err := net.Listen(network, fmt.Sprintf(":%d", port))
			if err != nil {
				return err
			}
			w.t.Cleanup(func() { l.Close() })
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					fmt.Fprintf(c, "%s saw %v", name, c.RemoteAddr())
					c.Close()
				}
			}()
		}
		for _, network := range []string{"udp4", "udp6"} {
			u, err := net.ListenPacket(network, fmt.Sprintf(":%d", port))
			if err != nil {
				return err
			}
			w.t.Cleanup(func() { u.Close() })
			go func() {
				buf := make([]byte, 2048)
				for {
					_, from, err := u.ReadFrom(buf)
					if err != nil {
						return
					}
					u.WriteTo(fmt.Appendf(nil, "%s saw %v", name, from), from)
				}
			}()
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// patience is that with what hangs: an emulated or busy machine may let anybody wait.
const patience = time.Minute

// ask is who answered a client in path, and the address that it saw.
func ask(path, network, to string) (name string, saw netip.Addr, err error) {
	return askFor(patience, path, network, to)
}

var askedFrom atomic.Uint32

// askFor is for who must not be answered, too.
func askFor(wait time.Duration, path, network, to string) (name string, saw netip.Addr, err error) {
	err = netns.Do(path, func() error {
		d := net.Dialer{Timeout: wait}
		if network == "udp" { // no two from one port: the second would be of the first one's flow
			d.LocalAddr = &net.UDPAddr{Port: int(20000 + askedFrom.Add(1)%10000)}
		}
		c, err := d.Dial(network, to)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(wait))
		if network == "udp" {
			if _, err := c.Write([]byte("?")); err != nil {
				return err
			}
		}
		buf := make([]byte, 2048)
		n, err := c.Read(buf)
		if err != nil && err != io.EOF {
			return err
		}
		var addr string
		name, addr, _ = strings.Cut(string(buf[:n]), " saw ")
		a, err := netip.ParseAddrPort(addr)
		saw = a.Addr().Unmap()
		return err
	})
	return name, saw, err
}

// published is a Service with every kind of frontend in one family; backends
// marked by * are on this node.
func published(p state.Protocol, v6 bool, backends ...string) state.Service {
	fronts := []string{"10.96.0.1:80", "0.0.0.0:30080", "192.0.2.1:80", "192.0.2.2:80"}
	if v6 {
		fronts = []string{"[fd96::1]:80", "[::]:30080", "[2001:db8:2::1]:80", "[2001:db8:2::2]:80"}
	}
	port := state.ServicePort{Name: "p", Protocol: p}
	for kind, f := range fronts {
		port.Frontends = append(port.Frontends, state.ServiceFrontend{Kind: state.FrontendKind(kind), AddrPort: netip.MustParseAddrPort(f)})
	}
	for _, b := range backends {
		rest, local := strings.CutPrefix(b, "*")
		port.Backends = append(port.Backends, state.ServiceBackend{AddrPort: netip.MustParseAddrPort(rest), Ready: true, Serving: true, Local: local})
	}
	family := "4"
	if v6 {
		family = "6"
	}
	return state.Service{ServiceID: state.ServiceID{Owner: state.OwnerKubernetes, Namespace: "ns", Name: "web" + p.String() + family}, Ports: []state.ServicePort{port}}
}

// replace gives the node Services over both protocols and families, edited.
func (w *edgeWorld) replace(four, six []string, edit func(s *state.Service)) {
	w.t.Helper()
	var list []state.Service
	for _, p := range []state.Protocol{state.TCP, state.UDP} {
		for _, s := range []state.Service{published(p, false, four...), published(p, true, six...)} {
			if edit != nil {
				edit(&s)
			}
			list = append(list, s)
		}
	}
	w.must(func(e *Engine) error {
		problems, err := makeAll(e, list)
		if len(problems) > 0 {
			w.t.Error(problems)
		}
		return err
	})
}

// each runs fn for both protocols and families.
func each(t *testing.T, fn func(t *testing.T, network string, v6 bool)) {
	for _, network := range []string{"tcp", "udp"} {
		for _, v6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/v6=%v", network, v6), func(t *testing.T) { fn(t, network, v6) })
		}
	}
}

var (
	externals = map[bool][]string{
		false: {"198.51.100.1:30080", "198.51.101.1:30080", "192.0.2.1:80", "192.0.2.2:80"},
		true:  {"[2001:db8:0::1]:30080", "[2001:db8:1::1]:30080", "[2001:db8:2::1]:80", "[2001:db8:2::2]:80"},
	}
	clusterIP = map[bool]string{false: "10.96.0.1:80", true: "[fd96::1]:80"}
	nodeIP    = map[bool]netip.Addr{false: netip.MustParseAddr("198.51.100.1"), true: netip.MustParseAddr("2001:db8::1")}
	clientIP  = map[bool]netip.Addr{false: netip.MustParseAddr("198.51.100.9"), true: netip.MustParseAddr("2001:db8::9")}
)
