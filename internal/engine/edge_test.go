// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

func TestClientsOutside(t *testing.T) {
	w := newEdgeWorld(t)
	w.run("ip addr add 198.51.100.3/24 dev w0") // a second one of the same network
	w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0", "w1"}, Host: true}) })
	second := map[bool][]string{false: {"198.51.100.3:30080"}}
	w.serve(w.pod, "pod", 8080)
	w.serve(w.other, "other", 8080)
	w.serve(w.home, "node", 8081)
	for name, c := range map[string]struct {
		four, six []string
		edit      func(s *state.Service)
		want      string
		keeps     bool // the backend sees the client
	}{
		"policy Cluster, a pod here":       {[]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"}, nil, "pod", false},
		"policy Cluster, on another node":  {[]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, nil, "other", false},
		"policy Cluster, the node itself":  {[]string{"*198.51.100.1:8081"}, []string{"*[2001:db8::1]:8081"}, nil, "node", true},
		"policy Local, one here, one away": {[]string{"*10.9.0.2:8080", "198.51.101.9:8080"}, []string{"*[fd09::2]:8080", "[2001:db8:1::9]:8080"}, local, "pod", true},
	} {
		t.Run(name, func(t *testing.T) {
			w.replace(c.four, c.six, c.edit)
			each(t, func(t *testing.T, network string, v6 bool) {
				for _, to := range slices.Concat(externals[v6], second[v6], []string{clusterIP[v6]}) {
					if to == clusterIP[v6] && c.edit != nil {
						continue // for it, both backends are right
					}
					saws := nodeIP[v6]
					if c.keeps {
						saws = clientIP[v6]
					}
					for range 3 {
						name, saw, err := ask(w.client, network, to)
						if err != nil || name != c.want || saw != saws {
							t.Errorf("%s: %q saw %v, %v; want %q, which sees %v", to, name, saw, err, c.want, saws)
						}
					}
				}
			})
		})
	}
}

func local(s *state.Service) { s.External = state.PolicyLocal }

// Where the policy Local leaves this node nothing, a client outside waits; one
// here does not notice. Where there is nothing anywhere, it is refused.
func TestClientsOutsideWithoutBackend(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.other, "other", 8080)
	w.replace([]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, local)
	each(t, func(t *testing.T, network string, v6 bool) {
		for _, to := range externals[v6] {
			if name, _, err := askFor(time.Second, w.client, network, to); !timedOut(err) {
				t.Errorf("%s: %q, %v, instead of silence", to, name, err)
			}
			for who, path := range map[string]string{"the pod": w.pod, "the node": w.home} {
				if name, _, err := ask(path, network, to); err != nil || name != "other" {
					t.Errorf("%s from %s: %q, %v", to, who, name, err)
				}
			}
		}
	})
	w.replace(nil, nil, local)
	each(t, func(t *testing.T, network string, v6 bool) {
		for _, to := range append(externals[v6], clusterIP[v6]) {
			for who, path := range map[string]string{"outside": w.client, "the pod": w.pod, "the node": w.home} {
				if name, _, err := ask(path, network, to); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("%s from %s: %q, %v", to, who, name, err)
				}
			}
		}
	})
}

func timedOut(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// loadBalancerSourceRanges hold for the load balancer's address, and no other,
// whoever asks.
func TestSourceRanges(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.pod, "pod", 8080)
	ranges := func(list ...string) {
		w.replace([]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"}, func(s *state.Service) {
			for _, r := range list {
				s.SourceRanges = append(s.SourceRanges, netip.MustParsePrefix(r))
			}
		})
	}
	ranges("203.0.113.0/24", "2001:db8:ff::/48")
	each(t, func(t *testing.T, network string, v6 bool) {
		lb := externals[v6][3]
		if name, _, err := askFor(time.Second, w.client, network, lb); !timedOut(err) {
			t.Errorf("%q, %v, instead of silence", name, err)
		}
		if name, _, err := askFor(time.Second, w.pod, network, lb); !timedOut(err) {
			t.Errorf("the pod: %q, %v, instead of silence", name, err)
		}
		if name, _, err := ask(w.home, network, lb); !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("the node: %q, %v", name, err)
		}
		for _, to := range externals[v6][:3] {
			if name, _, err := ask(w.client, network, to); err != nil || name != "pod" {
				t.Errorf("%s: %q, %v", to, name, err)
			}
		}
	})
	ranges("198.51.100.0/24", "2001:db8::/64", "10.9.0.0/24", "fd09::/64")
	each(t, func(t *testing.T, network string, v6 bool) {
		for who, path := range map[string]string{"outside": w.client, "the pod": w.pod, "the node": w.home} {
			if name, _, err := ask(path, network, externals[v6][3]); err != nil || name != "pod" {
				t.Errorf("%s: %q, %v", who, name, err)
			}
		}
	})
}

// The node's own sockets and the pods have all Services; without --host, the
// node's have none.
func TestTheNodesOwnSockets(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.pod, "pod", 8080)
	w.serve(w.other, "other", 8080)
	w.replace([]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, nil)
	each(t, func(t *testing.T, network string, v6 bool) {
		for _, to := range append(externals[v6], clusterIP[v6]) {
			for who, path := range map[string]string{"the pod": w.pod, "the node": w.home} {
				if name, _, err := ask(path, network, to); err != nil || name != "other" {
					t.Errorf("%s from %s: %q, %v", to, who, name, err)
				}
			}
		}
	})
	w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0"}}) })
	if name, _, err := askFor(time.Second, w.home, "tcp", clusterIP[false]); err == nil {
		t.Errorf("%q answered the node", name)
	}
	w.must(func(e *Engine) error { return e.SetEdge(Edge{}) })
	if name, _, err := ask(w.client, "tcp", externals[false][0]); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%q, %v: without the edge there is no node port", name, err)
	}
	w.must(func(e *Engine) error {
		s, err := e.Edge()
		if len(s.Devices) > 0 || len(s.Addresses) > 0 || s.Host {
			t.Errorf("%+v", s)
		}
		return err
	})
}

// What cannot be done whole leaves the edge as it was; what a killed tool began is
// finished by the next.
func TestAnEdgeIsSetWholeOrNotAtAll(t *testing.T) {
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	w.wire(0, 1)
	w.wire(1, 2)
	n.scope.CgroupRoot = t.TempDir()
	edge := func() (s EdgeStatus) {
		t.Helper()
		n.must(func(e *Engine) (err error) { s, err = e.Edge(); return err })
		return s
	}
	fails := func(want Edge) {
		t.Helper()
		if err := n.do(func(e *Engine) error { return e.SetEdge(want) }); err == nil {
			t.Fatal("sockets of a directory that is no cgroup are served")
		}
	}
	both := Edge{Devices: []string{"w0", "w1"}, Host: true}
	fails(both)
	if s := edge(); len(s.Devices)+len(s.Addresses) > 0 || s.Host {
		t.Errorf("a failed edge is half there: %+v", s)
	}
	n.must(func(e *Engine) error {
		return e.SetEdge(Edge{Devices: []string{"w0"}, Prefixes: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}, Ports: PortRange{62000, 62999}})
	})
	before := edge()
	fails(both)
	if s := edge(); !reflect.DeepEqual(s, before) {
		t.Errorf("a failed edge is %+v\nit was %+v", s, before)
	}
	n.scope.CgroupRoot = cgroup
	both.Ports = DefaultPorts
	n.must(func(e *Engine) error {
		return e.store.WriteJournal(operation{Kind: opEdge, Edge: &both, EdgeBefore: &Edge{}})
	})
	if s := edge(); !slices.Equal(s.Devices, both.Devices) || !s.Host || len(s.Addresses) != 4 {
		t.Errorf("after a kill the edge is %+v", s)
	}
}

// An affinity holds for a client by whichever frontend it comes, at the socket
// and by packet, over restarts of the tool, and ends with its backend.
func TestAffinity(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.other, "a", 8080)
	w.serve(w.other, "b", 8081)
	w.serve(w.other, "c", 8082)
	four := []string{"198.51.101.9:8080", "198.51.101.9:8081", "198.51.101.9:8082"}
	six := []string{"[2001:db8:1::9]:8080", "[2001:db8:1::9]:8081", "[2001:db8:1::9]:8082"}
	sticky := func(s *state.Service) { s.Affinity = time.Hour }
	w.replace(four, six, sticky)
	each(t, func(t *testing.T, network string, v6 bool) {
		for who, path := range map[string]string{"outside": w.client, "the pod": w.pod, "the node": w.home} {
			first := ""
			for i := range 4 {
				for _, to := range append(externals[v6], clusterIP[v6]) {
					name, _, err := ask(path, network, to)
					if err != nil || first != "" && name != first {
						t.Fatalf("%s, round %d: %s answered by %q after %q: %v", who, i, to, name, first, err)
					}
					first = name
				}
			}
		}
	})
	// One that goes takes only its own clients with it; each finds another, and stays there.
	before, _, err := ask(w.client, "tcp", externals[false][0])
	if err != nil {
		t.Fatal(err)
	}
	for gone := range four {
		w.replace(append(append([]string{}, four[:gone]...), four[gone+1:]...), append(append([]string{}, six[:gone]...), six[gone+1:]...), sticky)
		now, _, err := ask(w.client, "tcp", externals[false][0])
		if err != nil || (string("abc"[gone]) != before && now != before) || now == string("abc"[gone]) {
			t.Errorf("without %c: %q after %q, %v", "abc"[gone], now, before, err)
		}
		before = now
		w.replace(four, six, sticky)
	}
	// Without affinity they are all met.
	w.replace(four, six, nil)
	met := map[string]bool{}
	for range 60 {
		name, _, _ := ask(w.client, "tcp", externals[false][0])
		met[name] = true
	}
	if len(met) != 3 {
		t.Errorf("only %v", met)
	}
}

// asking asks again and again over one socket.
type asking struct {
	t *testing.T
	c net.Conn
}

func (w *edgeWorld) asking(path, to string) asking {
	w.t.Helper()
	var c net.Conn
	err := netns.Do(path, func() (err error) {
		c, err = net.Dial("udp", to)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	return asking{w.t, c}
}

func (a asking) who() string {
	a.t.Helper()
	buf := make([]byte, 2048)
	a.c.SetDeadline(time.Now().Add(patience))
	if _, err := a.c.Write([]byte("?")); err != nil {
		a.t.Fatal(err)
	}
	n, err := a.c.Read(buf)
	if err != nil {
		a.t.Fatal(err)
	}
	name, _, _ := strings.Cut(string(buf[:n]), " saw ")
	return name
}

// A datagram flow from outside moves when its backend leaves, and only then.
func TestFlowsFromOutsideMoveWithTheirBackends(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.other, "a", 8080)
	w.serve(w.other, "b", 8081)
	four, six := []string{"198.51.101.9:8080", "198.51.101.9:8081"}, []string{"[2001:db8:1::9]:8080", "[2001:db8:1::9]:8081"}
	for _, edit := range []func(*state.Service){nil, allLocal} {
		w.replace(four, six, edit)
		for _, v6 := range []bool{false, true} {
			for _, to := range externals[v6] {
				flow := w.asking(w.client, to)
				first := flow.who()
				for range 3 {
					if now := flow.who(); now != first {
						t.Fatalf("%s: %s after %s", to, now, first)
					}
				}
				stays := 1 - strings.Index("ab", first)
				w.replace(four[stays:stays+1], six[stays:stays+1], edit)
				if now := flow.who(); now == first {
					t.Errorf("%s: still %s", to, now)
				}
				w.replace(four, six, edit)
				if now := flow.who(); now == first {
					t.Errorf("%s: back to %s", to, now)
				}
			}
		}
	}
}

// allLocal is the policy Local, and every backend on this node.
func allLocal(s *state.Service) {
	s.External = state.PolicyLocal
	for i := range s.Ports[0].Backends {
		s.Ports[0].Backends[i].Local = true
	}
}

// Within one batch, frontends pass from one Service to another without anybody
// noticing; a port that another Service gets leads to nobody of the old one.
func TestFrontendsChangeHandsUnnoticed(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.other, "a", 8080)
	w.serve(w.other, "b", 8081)
	named := func(name string) func(*state.Service) { return func(s *state.Service) { s.Name += name } }
	a4, a6 := []string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}
	w.replace(a4, a6, nil)
	before := tablesOf(w)
	flow := w.asking(w.client, externals[false][0])
	flow.who()
	w.replace(a4, a6, named("-again"))
	if flow.who() != "a" || tablesOf(w) != before {
		t.Error("the flow or the tables noticed")
	}
	w.replace([]string{"198.51.101.9:8081"}, []string{"[2001:db8:1::9]:8081"}, named("-other"))
	if now := flow.who(); now != "b" {
		t.Errorf("the old flow reaches %s", now)
	}
	each(t, func(t *testing.T, network string, v6 bool) {
		for _, path := range []string{w.client, w.pod, w.home} {
			for _, to := range externals[v6] {
				if name, _, err := ask(path, network, to); err != nil || name != "b" {
					t.Errorf("%s: %q, %v", to, name, err)
				}
			}
		}
	})
}

// tablesOf is every entry of the Services' frontends and slots, in order.
func tablesOf(w *edgeWorld) string {
	var out []string
	w.must(func(e *Engine) error {
		fronts, err := e.dp.Frontends.All()
		slots, err2 := e.dp.Slots.All()
		for k, v := range fronts {
			v.Group = 0 // named after the Service
			out = append(out, fmt.Sprint(k, v))
		}
		for k, v := range slots {
			out = append(out, fmt.Sprint(k, v))
		}
		return errors.Join(err, err2)
	})
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// Where programs are attached by clsact, the edge is the same.
func TestEdgeByClsact(t *testing.T) {
	w := newEdgeWorld(t)
	w.must(func(e *Engine) error { return e.SetEdge(Edge{}) })
	w.opts.NoTCX = true
	w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0", "w1"}}) })
	w.serve(w.other, "other", 8080)
	w.replace([]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, nil)
	each(t, func(t *testing.T, network string, v6 bool) {
		if name, saw, err := ask(w.client, network, externals[v6][0]); err != nil || name != "other" || saw != nodeIP[v6] {
			t.Errorf("%q saw %v, %v", name, saw, err)
		}
	})
	w.serve(w.home, "node", 8081)
	w.replace([]string{"*198.51.100.1:8081"}, []string{"*[2001:db8::1]:8081"}, nil)
	each(t, func(t *testing.T, network string, v6 bool) {
		if name, saw, err := ask(w.client, network, externals[v6][0]); err != nil || name != "node" || saw != clientIP[v6] {
			t.Errorf("%q saw %v, %v", name, saw, err)
		}
	})
	w.must(func(e *Engine) error {
		if s, err := e.Edge(); err != nil || len(s.Devices) != 2 {
			t.Errorf("%+v, %v", s, err)
		}
		return e.SetEdge(Edge{})
	})
	if name, _, err := ask(w.client, "tcp", externals[false][0]); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%q, %v", name, err)
	}
}

// A pod with a child of the NIC itself gets its clients from outside with their
// own addresses.
func TestClientsOutsideOfAPodWithItsOwnNIC(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.childPod(), "macvlan", 8080)
	w.replace([]string{"*198.51.100.2:8080"}, []string{"*[2001:db8:0::2]:8080"}, nil)
	each(t, func(t *testing.T, network string, v6 bool) {
		for _, to := range externals[v6] {
			for range 2 {
				if name, saw, err := ask(w.client, network, to); err != nil || name != "macvlan" || saw != clientIP[v6] {
					t.Errorf("%s: %q saw %v, %v", to, name, saw, err)
				}
			}
		}
	})
}

// A socket of the node's own that a Service led somewhere ends as a pod's does.
func TestTheNodesOwnSocketsEndWithTheirBackend(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.other, "a", 8080)
	w.serve(w.other, "b", 8081)
	w.replace([]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, nil)
	for _, v6 := range []bool{false, true} {
		flow, direct := w.asking(w.home, clusterIP[v6]), w.asking(w.home, map[bool]string{false: "198.51.101.9:8080", true: "[2001:db8:1::9]:8080"}[v6])
		if flow.who() != "a" || direct.who() != "a" {
			t.Fatal("somebody else answered")
		}
		w.replace([]string{"198.51.101.9:8081"}, []string{"[2001:db8:1::9]:8081"}, nil)
		if err := pendingError(t, flow.c); !errors.Is(err, syscall.ECONNABORTED) {
			t.Errorf("v6=%v: %v", v6, err)
		}
		if err := pendingError(t, direct.c); err != nil {
			t.Errorf("v6=%v: the one without a Service: %v", v6, err)
		}
		w.replace([]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, nil)
	}
}

// A host port leads clients from everywhere to its pod, which sees those outside
// as they are; it closes with its pod, and nobody takes another's.
func TestHostPorts(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.pod, "pod", 8080)
	open := []HostPort{
		{state.TCP, netip.Addr{}, 8000, netip.MustParseAddrPort("10.9.0.2:8080")},
		{state.UDP, netip.Addr{}, 8000, netip.MustParseAddrPort("[fd09::2]:8080")},
		{state.SCTP, netip.Addr{}, 8000, netip.MustParseAddrPort("10.9.0.2:8080")}, // taken by TCP's no more than UDP's is
		{state.TCP, netip.MustParseAddr("198.51.100.1"), 8001, netip.MustParseAddrPort("10.9.0.2:8080")},
	}
	w.must(func(e *Engine) error { return e.AddHostPorts(open...) })
	w.must(func(e *Engine) error { return e.AddHostPorts(open...) }) // as a repeated ADD does
	reach := map[string]string{"198.51.100.1:8000": "tcp", "198.51.101.1:8000": "tcp", "[2001:db8::1]:8000": "udp", "198.51.100.1:8001": "tcp"}
	for to, network := range reach {
		for who, path := range map[string]string{"outside": w.client, "the pod": w.pod, "the node": w.home} {
			name, saw, err := ask(path, network, to)
			if err != nil || name != "pod" || who == "outside" && saw != clientIP[saw.Is6()] {
				t.Errorf("%s from %s: %q saw %v, %v", to, who, name, saw, err)
			}
		}
	}
	// Another's address is not the pod's to take, and no reason not to start it: as a set of pods has it, one on each node.
	foreign := []HostPort{{state.TCP, netip.MustParseAddr("198.51.101.9"), 8002, open[0].Pod}, {state.UDP, netip.MustParseAddr("2001:db8:1::9"), 8002, open[1].Pod}}
	before := len(w.services())
	w.must(func(e *Engine) error { return errors.Join(e.AddHostPorts(foreign...), e.CheckHostPorts(foreign...)) })
	if list := w.services(); len(list) != before {
		t.Errorf("addresses of others are taken: %+v", list)
	}
	if name, _, err := askFor(time.Second, w.client, "tcp", "198.51.101.1:8001"); err == nil {
		t.Errorf("%q answered on an address that has no such port", name)
	}
	other := open[0]
	other.Pod = netip.MustParseAddrPort("10.9.0.3:8080")
	err := w.do(func(e *Engine) error { return e.AddHostPorts(other) })
	if err == nil || !strings.Contains(err.Error(), "host port tcp 0.0.0.0:8000 is taken") {
		t.Error(err)
	}
	w.must(func(e *Engine) error { return e.RemoveHostPorts(other) }) // not its own
	if _, _, err := ask(w.client, "tcp", "198.51.100.1:8000"); err != nil {
		t.Error(err)
	}
	w.must(func(e *Engine) error { return e.RemoveHostPorts(open...) })
	w.must(func(e *Engine) error { return e.RemoveHostPorts(open...) })
	if list := w.services(); len(list) != 0 {
		t.Errorf("%+v", list)
	}
}

// Where each machine is a router among others, its address is on lo, and NICs may have none but link-local ones, and
// IPv4 next hops of IPv6: the edge serves clients at the addresses of lo, and flows wear them.
func TestClientsOutsideOfANodeWhoseAddressIsOnLo(t *testing.T) {
	w := newEdgeWorld(t)
	client := w.name + "-w0"
	w.run("ip addr flush dev w0 scope global && ip addr flush dev w1 scope global && ip addr add 192.0.2.1/32 dev lo && ip addr add 2001:db8:f::1/128 dev lo nodad")
	w.run("ip -n %s route add 192.0.2.1/32 via inet6 $(ip -br -6 addr show dev w0 scope link | awk '{print $3}' | cut -d/ -f1) dev eth0", client)
	w.run("ip -n %s -6 route add 2001:db8:f::1/128 via $(ip -br -6 addr show dev w0 scope link | awk '{print $3}' | cut -d/ -f1) dev eth0", client)
	w.run("gw=$(ip -n %s -br -6 addr show dev eth0 scope link | awk '{print $3}' | cut -d/ -f1) && ip -4 route add default src 192.0.2.1 nexthop via inet6 $gw dev w0 && ip -6 route add default via $gw dev w0 src 2001:db8:f::1", client)
	w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0", "w1"}, Host: true}) })
	own := map[bool]netip.Addr{false: netip.MustParseAddr("192.0.2.1"), true: netip.MustParseAddr("2001:db8:f::1")}
	w.must(func(e *Engine) error {
		s, err := e.Edge()
		if !slices.Equal(s.Addresses, []netip.Addr{own[false], own[true]}) || s.IP4 != own[false] || s.IP6 != own[true] {
			t.Errorf("the edge is %+v, want node ports on %v", s, own)
		}
		return err
	})
	w.serve(w.pod, "pod", 8080)
	w.serve(w.client, "outside", 8080)
	for _, backends := range []struct {
		four, six []string
		want      string
	}{
		{[]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"}, "pod"},
		{[]string{"198.51.100.9:8080"}, []string{"[2001:db8::9]:8080"}, "outside"},
	} {
		w.replace(backends.four, backends.six, nil)
		each(t, func(t *testing.T, network string, v6 bool) {
			to := netip.AddrPortFrom(own[v6], 30080).String()
			name, saw, err := ask(w.client, network, to)
			if err != nil || name != backends.want || saw != own[v6] {
				t.Errorf("%s: %q saw %v, %v; want %q, which sees %v", to, name, saw, err, backends.want, own[v6])
			}
		})
	}
	w.run("ip addr add 198.51.101.1/24 dev w1")
	w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w1"}}) })
	w.must(func(e *Engine) error {
		s, err := e.Edge()
		nics := netip.MustParseAddr("198.51.101.1")
		if want := []netip.Addr{own[false], nics, own[true]}; !slices.Equal(s.Addresses, want) || s.IP4 != nics {
			t.Errorf("behind a NIC with an address, node ports are on %v, and flows wear %v; want %v and %v", s.Addresses, s.IP4, want, nics)
		}
		return err
	})
	w.run("ip addr flush dev w1 scope global")
	if err := w.do(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"lo"}}) }); err == nil || !strings.Contains(err.Error(), `"lo" is a loopback`) {
		t.Errorf("the edge is at lo: %v", err)
	}
	w.run("ip addr flush dev lo scope global")
	if err := w.do(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0", "w1"}}) }); err == nil || !strings.Contains(err.Error(), "global address") {
		t.Errorf("no NIC has an address: %v", err)
	}
}
