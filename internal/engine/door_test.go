// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// What the door does with packets does not depend on their protocol, and not
// every kernel here has SCTP: so a rule of the test's own leads TCP and UDP of
// sockets that no program translates into it. test/service has SCTP itself.

// throughTheDoor leaves the node's sockets alone, and leads their packets there: to
// its own addresses those to a node port, and the answers to the edge's ports. Table
// local's rule is elsewhere, as others move it, so that these stand before it.
func (w *edgeWorld) throughTheDoor() {
	w.t.Helper()
	w.must(func(e *Engine) error {
		home, err := netns.Cookie()
		if err != nil {
			return err
		}
		return e.dp.Netns.Put([]uint64{home}, []datapath.NetnsInfo{{Flags: bpfgen.EPNode}})
	})
	for _, family := range []string{"-4", "-6"} {
		for _, proto := range []string{"tcp", "udp"} {
			w.run("ip %s rule add pref 108 iif lo ipproto %s lookup 7172980", family, proto)
			for _, ports := range []string{"30080", "61000-65534"} {
				w.run("ip %s rule add pref 1 iif lo ipproto %s dport %s lookup 7172980", family, proto, ports)
			}
		}
		w.run("ip %s rule add pref 2 lookup local && ip %s rule del pref 0 lookup local", family, family)
	}
}

// sctp gives the node Services over SCTP, without which there is no door.
func (w *edgeWorld) sctp(four, six []string) {
	w.t.Helper()
	w.must(func(e *Engine) error {
		_, err := e.ChangeServices(state.OwnerKubernetes, []state.Service{published(state.SCTP, false, four...), published(state.SCTP, true, six...)}, nil)
		return err
	})
}

func (w *edgeWorld) door() bool {
	w.t.Helper()
	rules := w.run("ip rule; ip -6 rule")
	out := w.run("ip -o link")
	there := strings.Contains(out, peers.DoorName)
	if routes := strings.Contains(rules, "ipproto sctp"); routes != there {
		w.t.Errorf("a door: %v, a rule that leads into it: %v", there, routes)
	}
	return there
}

func TestTheNodeReachesServicesByPacket(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.pod, "pod", 8080)
	w.serve(w.other, "other", 8080)
	w.serve(w.home, "node", 8081)
	w.throughTheDoor()
	for name, c := range map[string]struct {
		four, six []string
		edit      func(s *state.Service)
		want      string
		itself    bool // the backend sees the Service's address
	}{
		"a pod here":          {[]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"}, nil, "pod", false},
		"on another node":     {[]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, nil, "other", false},
		"the node itself":     {[]string{"*198.51.100.1:8081"}, []string{"*[2001:db8::1]:8081"}, nil, "node", true},
		"policy Local, there": {[]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, local, "other", false},
	} {
		w.replace(c.four, c.six, c.edit) // here: a test within has another thread, in another namespace
		w.sctp(c.four, c.six)
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, network string, v6 bool) {
				for i, to := range append(slices.Clone(externals[v6]), clusterIP[v6]) {
					saws := nodeIP[v6]
					if at := netip.MustParseAddrPort(to).Addr(); c.itself || i < 2 && c.want == "pod" {
						saws = at // which the socket has from the address that it goes to
					}
					if c.itself && i == 1 && network == "udp" {
						continue // its answer has the address that the way back to this one names
					}
					for range 3 {
						name, saw, err := askFor(2*time.Second, w.home, network, to)
						if err != nil || name != c.want || saw != saws {
							t.Errorf("%s: %q saw %v, %v; want %q, which sees %v", to, name, saw, err, c.want, saws)
						}
					}
				}
			})
		})
	}
	w.replace(nil, nil, nil)
	w.sctp(nil, nil)
	each(t, func(t *testing.T, network string, v6 bool) {
		if network == "udp" {
			return // its refusal is an ICMP packet, which no rule lets in
		}
		for _, to := range append(slices.Clone(externals[v6]), clusterIP[v6]) {
			if name, _, err := askFor(2*time.Second, w.home, network, to); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("without a backend, %s: %q, %v", to, name, err)
			}
		}
	})
}

// A port that is no Service's is reached as if there were no door, but for the
// cluster's own addresses, which refuse it.
func TestTheDoorIsForServicesAlone(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.other, "other", 8081)
	for _, a := range []string{"192.0.2.1/32", "2001:db8:2::1/128"} {
		w.run("ip -n %s-w1 addr add %s dev lo nodad && ip route add %s via %s", w.name, a, a, map[bool]string{false: "198.51.101.9", true: "2001:db8:1::9"}[strings.Contains(a, ":")])
	}
	w.replace(nil, nil, nil)
	w.sctp([]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"})
	w.throughTheDoor()
	w.run("sysctl -qw net.ipv4.conf.w1.rp_filter=2") // docs/services.md, SCTP
	each(t, func(t *testing.T, network string, v6 bool) {
		if network == "udp" {
			return // as above; and the server answers from another address
		}
		at := netip.MustParseAddrPort(externals[v6][2]).Addr()
		if name, _, err := askFor(2*time.Second, w.home, network, netip.AddrPortFrom(at, 8081).String()); err != nil || name != "other" {
			t.Errorf("%q, %v", name, err)
		}
		at = netip.MustParseAddrPort(clusterIP[v6]).Addr()
		if name, _, err := askFor(2*time.Second, w.home, network, netip.AddrPortFrom(at, 8081).String()); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("the cluster IP: %q, %v", name, err)
		}
	})
}

// The door is there while there is a Service behind it and the node's sockets are
// served, and is made whole again by whatever follows a step that was the last.
func TestTheDoorComesAndGoes(t *testing.T) {
	w := newEdgeWorld(t)
	there := func(what string, want bool) {
		t.Helper()
		if w.door() != want {
			t.Errorf("%s: there is a door: %v", what, !want)
		}
	}
	edge := func(host bool) {
		t.Helper()
		w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0", "w1"}, Host: host}) })
	}
	w.replace([]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"}, nil)
	there("TCP and UDP alone", false)
	w.sctp([]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"})
	there("SCTP", true)
	edge(false)
	there("without the node's sockets", false)
	edge(true)
	there("with them again", true)
	whole := w.state()
	for _, broken := range []string{
		"ip link del %s",
		"ip rule del pref 109; ip rule del pref 109; ip -6 rule del pref 109",
		"ip route flush table 7172980; ip -6 route flush table 7172980",
		"ip link set %s down",
	} {
		if strings.Contains(broken, "%") {
			broken = fmt.Sprintf(broken, peers.DoorName)
		}
		w.run("%s", broken)
		edge(true)
		if now := w.state(); now != whole {
			t.Errorf("after %q:\n%s\nbefore:\n%s", broken, now, whole)
		}
	}
	w.replace(nil, nil, nil)
	there("the last SCTP Service gone", false)
	w.sctp([]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"})
	w.must(func(e *Engine) error { return e.Reset() })
	there("reset", false)
}

// By the node's own addresses the door is there for the ports alone that Services
// have, wherever those are reached, and follows them and the node's addresses.
func TestTheDoorFollowsTheNodesPorts(t *testing.T) {
	w := newEdgeWorld(t)
	pristine := w.run("ip rule; ip -6 rule")
	want := func(what string, ports ...string) {
		t.Helper()
		var have []string
		for _, line := range strings.Split(w.run("ip -N rule; ip -6 -N rule"), "\n") {
			if f := strings.Fields(line); f[0] == "0:" && slices.Contains(f, "dport") {
				have = append(have, f[slices.Index(f, "to")+1]+" "+f[slices.Index(f, "dport")+1])
			}
		}
		slices.Sort(have)
		slices.Sort(ports)
		if !slices.Equal(have, ports) {
			t.Errorf("%s: rules for %q, want %q", what, have, ports)
		}
		if door := strings.Contains(w.run("ip -o link"), peers.DoorName); door != (len(ports) > 0) {
			t.Errorf("%s: there is a door: %v", what, door)
		}
		if now := w.run("ip rule; ip -6 rule"); len(ports) == 0 && now != pristine {
			t.Errorf("%s:\n%s\nwant\n%s", what, now, pristine)
		}
	}
	nodePort := func(p uint16, backend string) state.Service {
		any := map[bool]string{true: "[::]", false: "0.0.0.0"}[strings.Contains(backend, "[")]
		return state.Service{
			ServiceID: state.ServiceID{Owner: state.OwnerKubernetes, Namespace: "ns", Name: fmt.Sprint(any, p)},
			Ports: []state.ServicePort{{Protocol: state.SCTP,
				Frontends: []state.ServiceFrontend{{Kind: state.NodePort, AddrPort: netip.MustParseAddrPort(fmt.Sprintf("%s:%d", any, p))}},
				Backends:  []state.ServiceBackend{{AddrPort: netip.MustParseAddrPort(backend), Ready: true, Serving: true}}}},
		}
	}
	change := func(list ...state.Service) {
		t.Helper()
		w.must(func(e *Engine) error {
			problems, err := makeAll(e, list)
			if len(problems) > 0 {
				t.Error(problems)
			}
			return err
		})
	}
	a, b, six := nodePort(30080, "10.9.0.2:8080"), nodePort(30081, "10.9.0.2:8080"), nodePort(30080, "[fd09::2]:8080")
	want("nothing")
	change(a)
	want("a node port", "198.51.100.1 30080", "198.51.101.1 30080")
	change(a, b, six)
	want("more", "198.51.100.1 30080-30081", "198.51.101.1 30080-30081", "2001:db8::1 30080", "2001:db8:1::1 30080")
	itself := nodePort(30080, "[2001:db8::1]:8080")
	change(itself)
	want("the node is a backend", "2001:db8::1 30080", "2001:db8:1::1 30080", "2001:db8::1 61000-65534", "2001:db8:1::1 61000-65534")
	pod := netip.MustParseAddrPort("10.9.0.2:8080")
	ports := []HostPort{
		{Protocol: state.SCTP, HostPort: 7000, Pod: pod},
		{Protocol: state.SCTP, HostIP: netip.MustParseAddr("198.51.101.1"), HostPort: 7002, Pod: pod},
		{Protocol: state.SCTP, HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 7003, Pod: pod},
		{Protocol: state.TCP, HostPort: 7004, Pod: pod},
	}
	w.must(func(e *Engine) error { return e.AddHostPorts(ports...) })
	change()
	want("host ports", "198.51.100.1 7000", "198.51.101.1 7000", "198.51.101.1 7002")
	w.run("ip addr add 198.51.103.7/24 dev w0")
	follow := func() {
		t.Helper()
		w.must(func(e *Engine) error {
			_, err := e.FollowEdge(Edge{Devices: []string{"w0", "w1"}, Host: true})
			return err
		})
	}
	follow()
	want("another address", "198.51.100.1 7000", "198.51.101.1 7000", "198.51.103.7 7000", "198.51.101.1 7002")
	w.run("ip addr del 198.51.103.7/24 dev w0 && ip rule del pref 0 lookup 7172980")
	follow()
	want("without it, and after a rule was lost", "198.51.100.1 7000", "198.51.101.1 7000", "198.51.101.1 7002")
	w.must(func(e *Engine) error { return e.RemoveHostPorts(ports...) })
	want("the last gone")
	change(a)
	want("again", "198.51.100.1 30080", "198.51.101.1 30080")
	w.must(func(e *Engine) error { return e.Reset() })
	want("reset")
}

// state is what of the door shows: its routes and rules, and whether it is up.
func (w *edgeWorld) state() string {
	return w.run("ip rule; ip -6 rule; ip route show table 7172980; ip -6 route show table 7172980; ip -br link | grep mst- | sed 's/@.*UP/ UP/'")
}
