// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net/netip"
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

// throughTheDoor leaves the node's sockets alone, and leads their packets there.
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
		}
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
				for _, to := range append(externals[v6][2:], clusterIP[v6]) {
					saws := nodeIP[v6]
					if c.itself {
						saws = netip.MustParseAddrPort(to).Addr()
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
		for _, to := range append(externals[v6][2:], clusterIP[v6]) {
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

// state is what of the door shows: its routes and rules, and whether it is up.
func (w *edgeWorld) state() string {
	return w.run("ip rule; ip -6 rule; ip route show table 7172980; ip -6 route show table 7172980; ip -br link | grep mst- | sed 's/@.*UP/ UP/'")
}
