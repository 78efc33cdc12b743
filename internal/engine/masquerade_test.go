// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// masqueraded makes the world's pod one that wears the node's address, by programs.
func (w *edgeWorld) masqueraded() {
	w.t.Helper()
	w.must(func(e *Engine) error {
		list, err := e.Endpoints()
		if err != nil {
			return err
		}
		for _, ep := range list {
			if err := e.RemoveEndpoint(ep.ID); err != nil {
				return err
			}
		}
		if _, err = e.AddEndpoint(context.Background(), EndpointSpec{Netns: w.pod, IfName: "eth0", Owner: state.OwnerCNI, Masquerade: &state.Masquerade{}}); err != nil {
			return err
		}
		s, err := e.masqueradeStatus()
		if err == nil && s.By != "ebpf" {
			w.t.Fatalf("masquerade is by %s: %q", s.By, s.Because)
		}
		return err
	})
}

// Pods of nodes that nobody joined to this one (somebody else leads there) see a pod's own address, as long as it is
// said where pods are, also when a pod comes or who masquerades is decided anew.
func TestMasqueradedPodsKeepTheirAddressAmongPods(t *testing.T) {
	w := newEdgeWorld(t)
	other := w.name + "-w1"
	w.run("ip -n %s addr add 10.77.0.5/32 dev lo && ip -n %s addr add fd77::5/128 dev lo", other, other)
	w.run("ip route add 10.77.0.0/24 via 198.51.101.9 dev w1 && ip -6 route add fd77::/64 via 2001:db8:1::9 dev w1")
	w.serve(w.other, "other", 8080)
	pods := []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24"), netip.MustParsePrefix("10.77.0.0/24"), netip.MustParsePrefix("fd77::/64")}
	sees := func(when string, own bool) {
		t.Helper()
		for i, to := range []string{"10.77.0.5:8080", "[fd77::5]:8080"} {
			want := []string{"198.51.101.1", "2001:db8:1::1"}[i]
			if own {
				want = []string{"10.9.0.2", "fd09::2"}[i]
			}
			if _, saw, err := ask(w.pod, "tcp", to); err != nil || saw.String() != want {
				t.Errorf("%s: another node's pod sees %v, %v; want %v", when, saw, err, want)
			}
		}
	}
	w.masqueraded()
	sees("before anybody says where pods are", false)
	w.must(func(e *Engine) error { return e.SetInside(pods) })
	sees("once it is said", true)
	w.must(func(e *Engine) error { e.known = nil; return e.syncMasquerade() })
	sees("when it is decided anew", true)
	w.must(func(e *Engine) error { return e.SetInside(pods[:1]) })
	sees("when those pods are no more", false)
}

// Of a device's several networks, pods wear the address of the gateway's, and over
// IPv6 one that reaches as far as its default route.
func TestPodsWearTheAddressThatLeadsOutside(t *testing.T) {
	t.Run("one router", func(t *testing.T) {
		wearOutermost(t, "ip route add default via 203.0.113.9 && ip -6 route add default via 2001:db8::9")
	})
	t.Run("two", func(t *testing.T) {
		wearOutermost(t, "ip route add default nexthop via 203.0.113.9 nexthop via 203.0.113.8 && "+
			"ip -6 route add default nexthop via 2001:db8::9 nexthop via 2001:db8::8")
	})
}

func wearOutermost(t *testing.T, routes string) {
	w := newEdgeWorld(t)
	client := w.name + "-w0"
	w.run("ip addr add 203.0.113.1/24 dev w0 && ip addr add fd55::1/64 dev w0 nodad") // IPv6's newest comes first
	w.run("ip -n %s addr add 203.0.113.9/24 dev eth0 && ip -n %s route replace default via 203.0.113.1", client, client)
	w.run("ip -n %s addr add 10.66.0.1/32 dev lo && ip -n %s addr add 2001:db8:66::1/128 dev lo", client, client)
	w.run("ip -n %s addr add 203.0.113.8/24 dev eth0 && ip -n %s addr add 2001:db8::8/64 dev eth0 nodad", client, client)
	w.run("%s", routes)
	w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0", "w1"}}) })
	w.masqueraded()
	w.serve(w.client, "client", 8080)
	for to, want := range map[string]string{"10.66.0.1:8080": "203.0.113.1", "[2001:db8:66::1]:8080": "2001:db8::1"} {
		if _, saw, err := ask(w.pod, "tcp", to); err != nil || saw.String() != want {
			t.Errorf("%s sees %v, %v; want %s", to, saw, err, want)
		}
	}
}

// What the node itself would have may be a temporary address, which takes no node
// ports: then pods wear the best of the others, not the newest.
func TestPodsWearAnAddressThatLasts(t *testing.T) {
	w := newEdgeWorld(t)
	w.run("sysctl -qw net.ipv6.conf.w0.use_tempaddr=2 && ip addr change 2001:db8::1/64 dev w0 nodad mngtmpaddr")
	w.run("ip addr add fd55::1/64 dev w0 nodad && ip addr add 2001:db8::dead/64 dev w0 nodad preferred_lft 0")
	w.run("ip -6 route add default via 2001:db8::9 && ip -6 route get 2001:db8:66::1 | grep src && ip -6 addr show dev w0 temporary | grep inet6")
	w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0", "w1"}}) })
	w.must(func(e *Engine) error {
		unread := e.loadServices()
		worn, err := e.wear()
		l, unknown := netlink.LinkByName("w0")
		if err := errors.Join(unread, err, unknown); err != nil {
			return err
		}
		if got := worn[uint32(l.Attrs().Index)].Ip6; got != datapath.FromAddr(netip.MustParseAddr("2001:db8::1")) {
			t.Errorf("pods wear %v", netip.AddrFrom16(got.Bytes))
		}
		return nil
	})
}

// Where ports say which device a flow leaves by, no address is that of all flows between
// two ends, as the programs would have it for a moment: the kernel masquerades.
func TestDevicesThatPortsChoose(t *testing.T) {
	w := newEdgeWorld(t)
	w.masqueraded()
	w.run("ip route add 10.66.0.0/24 nexthop via 198.51.100.9 dev w0 nexthop via 198.51.101.9 dev w1")
	w.run("ip -6 route add 2001:db8:66::/64 nexthop via 2001:db8::9 dev w0 nexthop via 2001:db8:1::9 dev w1")
	for _, c := range []struct{ policy4, policy6, to string }{{"0", "0", ""}, {"1", "0", "10.66.0.0/24"}, {"0", "1", "2001:db8:66::/64"}} {
		w.run("sysctl -qw net.ipv4.fib_multipath_hash_policy=%s net.ipv6.fib_multipath_hash_policy=%s", c.policy4, c.policy6)
		w.must(func(e *Engine) error {
			if err := e.syncMasquerade(); err != nil {
				return err
			}
			s, err := e.masqueradeStatus()
			if err == nil && (s.By == "ebpf") != (c.to == "") || !strings.Contains(strings.Join(s.Because, "\n"), c.to) {
				t.Errorf("%+v: by %s, because %q", c, s.By, s.Because)
			}
			return err
		})
	}
}

// So it is where a routing rule does, in any of its words.
func TestDevicesThatRulesChooseByPorts(t *testing.T) {
	w := newEdgeWorld(t)
	w.masqueraded()
	w.run("ip route add default via 198.51.101.9 dev w1 table 77 && ip -6 route add default via 2001:db8:1::9 dev w1 table 77")
	for rule, chooses := range map[string]bool{
		"pref 700 ipproto tcp lookup 77": true, "pref 700 ipproto udp dport 53 lookup 77": true, "pref 700 ipproto tcp sport 80 lookup 77": true,
		"pref 700 tos 0x10 lookup 77": true, "pref 700 from 10.77.0.0/16 lookup 77": false,
		"pref 700 iif lo ipproto sctp lookup 77": false, "pref 700 iif " + peers.DoorName + " ipproto sctp lookup 77": false, // as the door's
	} {
		for _, family := range []string{"-4", "-6"} {
			if family == "-6" && !chooses {
				continue
			}
			w.run("ip %s rule add %s", family, rule)
			w.must(func(e *Engine) error {
				if err := e.syncMasquerade(); err != nil {
					return err
				}
				s, err := e.masqueradeStatus()
				if err == nil && (s.By == "ebpf") == chooses || strings.Contains(strings.Join(s.Because, "\n"), "rule 700") != chooses {
					t.Errorf("%s %s: by %s, because %q", family, rule, s.By, s.Because)
				}
				return err
			})
			w.run("ip %s rule del %s", family, rule)
		}
	}
}

// masqueradedBy wants the world's pod to wear the node's address, and that somebody in particular sees to it.
func (w *edgeWorld) masqueradedBy(by, when string) {
	w.t.Helper()
	for v6, to := range map[bool]string{false: "198.51.100.9:8080", true: "[2001:db8::9]:8080"} {
		if _, saw, err := ask(w.pod, "tcp", to); err != nil || saw != nodeIP[v6] {
			w.t.Errorf("%s: the outside sees %v, %v; want %v", when, saw, err, nodeIP[v6])
		}
	}
	w.must(func(e *Engine) error {
		s, err := e.masqueradeStatus()
		if err == nil && s.By != by {
			w.t.Errorf("%s: masquerade is by %s, want %s", when, s.By, by)
		}
		return err
	})
}

// A pod inside its interface has the kernel masquerade all: also those that the programs did it for, of which the
// command line's are in no set of the plugin's. With the last one gone the programs do it again.
func TestAPodInsideItsInterfaceTakesNobodysMasquerade(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.client, "client", 8080)
	child := w.child()
	add := func(path string, owner state.Owner) (ep state.Endpoint) {
		t.Helper()
		w.must(func(e *Engine) (err error) {
			ep, err = e.AddEndpoint(context.Background(), EndpointSpec{Netns: path, IfName: "eth0", Owner: owner, Masquerade: &state.Masquerade{}})
			return err
		})
		return ep
	}
	w.must(func(e *Engine) error { return e.RemoveEndpoint(w.firstID(e)) })
	add(w.pod, state.OwnerCLI)
	w.masqueradedBy("ebpf", "alone")
	inside := add(child, state.OwnerCNI)
	w.masqueradedBy("nftables", "beside one inside its interface")
	w.must(func(e *Engine) error { return e.RemoveEndpoint(inside.ID) })
	w.masqueradedBy("ebpf", "alone again")
	inside = add(child, state.OwnerCNI)
	w.must(func(e *Engine) error {
		return e.store.WriteJournal(operation{Kind: opRemoveEndpoint, Endpoint: &inside})
	})
	w.masqueradedBy("ebpf", "after a killed removal")
}
