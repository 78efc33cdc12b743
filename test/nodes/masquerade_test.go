// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/lab"
)

// masqueraded is a world with a pod on its first node that wears the node's
// address towards all but pods, and a server outside.
type masqueraded struct {
	*world
	keeps   bool // the pod keeps its address
	node    *lab.Node
	pod     *lab.Pod
	outside *lab.Pod
	beyond  *lab.Pod // the second node itself
}

func newMasqueraded(t *testing.T, join lab.Join) masqueraded {
	m := newBeside(t, join)
	m.pod = m.add("worn")
	m.from = podPlace(m.pod)
	return m
}

// newBeside is the same without that pod.
func newBeside(t *testing.T, join lab.Join) masqueraded {
	w := newWorld(t, lab.Config{Mode: modes()[0]}, join)
	o, second := w.lab.Outside(), w.lab.Nodes()[1]
	m := masqueraded{world: w, node: w.lab.Nodes()[0],
		outside: &lab.Pod{Space: o.Space, Name: "outside", IPv4: o.IPv4, IPv6: o.IPv6},
		beyond:  &lab.Pod{Space: second.Space, Name: "beyond", IPv4: second.Wire4, IPv6: second.Wire6}}
	w.serve(m.outside)
	w.serve(m.beyond)
	return m
}

func (m masqueraded) add(name string) *lab.Pod {
	m.t.Helper()
	p, err := m.node.AddPod(deadline(m.t), name, lab.MasqueradeArgs()...)
	m.must(err)
	return p
}

func (m masqueraded) on(t *testing.T, ipv6 bool) masqueraded {
	m.world = m.world.on(t, ipv6)
	return m
}

// by is who masquerades, or, when the pod keeps its address, who forwards to the
// outside, and why not the programs.
func (m masqueraded) by() (by string, because []string) {
	m.t.Helper()
	type decided struct {
		By      string
		Because []string
	}
	var s struct{ Masquerade, Outside decided }
	m.must(json.Unmarshal([]byte(m.mustang(m.node, "status", "-o", "json")), &s))
	if m.keeps {
		return s.Outside.By, s.Outside.Because
	}
	return s.Masquerade.By, s.Masquerade.Because
}

// open opens connections to the outside, and answers whether they still live.
func (m masqueraded) open(what string) (still func()) {
	m.t.Helper()
	var conns []net.Conn
	for _, ipv6 := range families {
		m := m.on(m.t, ipv6)
		c, err := m.dial("tcp", m.direct(m.outside))
		m.must(err)
		m.t.Cleanup(func() { c.Close() })
		if _, saw, err := greeting(c); err != nil || saw != m.worn()[m.outside].String() {
			m.t.Fatalf("%s: seen as %s, %v", what, saw, err)
		}
		conns = append(conns, c)
	}
	return func() {
		m.t.Helper()
		for _, c := range conns {
			buf := make([]byte, 5)
			if _, err := fmt.Fprint(c, "still"); err != nil {
				m.t.Errorf("%s: %v", what, err)
			} else if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "still" {
				m.t.Errorf("%s: %q, %v", what, buf, err)
			}
		}
	}
}

// tracked is how many connections the node's kernel tracks.
func (m masqueraded) tracked() (n int) {
	m.t.Helper()
	m.must(m.node.Do(func() error {
		text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if err == nil {
			n, err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		return err
	}))
	return n
}

// worn are servers, and the address that each sees.
func (m masqueraded) worn() map[*lab.Pod]netip.Addr {
	up, wire := m.node.IPv4, m.node.Wire4
	if m.ipv6 {
		up, wire = m.node.IPv6, m.node.Wire6
	}
	if m.keeps {
		up = m.ip(m.pod)
	}
	if m.keeps || m.join.Mode == "vxlan" {
		wire = m.ip(m.pod) // by the tunnel, on which pods' addresses are known
	}
	return map[*lab.Pod]netip.Addr{m.outside: up, m.beyond: wire, m.near: m.ip(m.pod), m.far: m.ip(m.pod)}
}

// sees fails unless every server sees the pod as it should.
func (m masqueraded) sees() {
	m.t.Helper()
	for server, want := range m.worn() {
		for _, network := range []string{"tcp", "udp"} {
			name, saw, err := askFrom(&m.pod.Space, network, m.direct(server))
			if err != nil || name != server.Name || saw != want {
				m.t.Errorf("%s to %s: %q sees %v, %v; want %v", network, server.Name, name, saw, err, want)
			}
		}
	}
}

// Pods wear the address of the device by which they leave, towards all that is
// outside and nobody else, by the programs where there is an edge and by the
// kernel else; what they send arrives whole.
func TestMasquerade(t *testing.T) {
	for _, mode := range []string{"direct", "vxlan"} {
		for _, by := range []string{"ebpf", "nftables"} {
			t.Run(mode+"/"+by, func(t *testing.T) {
				m := newMasqueraded(t, lab.Join{Mode: mode, HostRouting: "ebpf"})
				if by == "ebpf" {
					m.mustang(m.node, "edge", "set", "--dev", lab.Uplink, "--dev", lab.Wire)
					m.pod = m.add("later") // the first has begun with rules
					m.from = podPlace(m.pod)
				}
				if got, because := m.by(); got != by || (by == "ebpf") != (len(because) == 0) {
					t.Fatalf("by %s, because %v", got, because)
				}
				before := m.tracked()
				for family, ipv6 := range families {
					t.Run(family, func(t *testing.T) {
						m := m.on(t, ipv6)
						m.sees()
						for _, p := range []*lab.Pod{m.outside, m.beyond} {
							m.ping(p, m.direct(p))
							m.bulk(p, m.direct(p))
							m.datagrams(p, m.direct(p))
							m.refused(p, m.direct(p))
						}
					})
				}
				if _, saw, err := askFrom(&m.node.Space, "tcp", m.direct(m.outside)); err != nil || saw != m.node.IPv4 {
					t.Errorf("the node itself is seen as %v, %v", saw, err)
				}
				if n := m.tracked() - before; (n == 0) != (by == "ebpf") {
					text, _ := m.node.Command(deadline(t), "sh", "-c", "nft list ruleset; cat /proc/net/nf_conntrack").CombinedOutput()
					t.Errorf("the node's kernel tracks %d connections more: %s", n, text)
				}
			})
		}
	}
}

// Who masquerades may change at any time: connections go on the way that they
// began, and the kernel's part goes with the last that needs it.
func TestMasqueradeChangesHands(t *testing.T) {
	m := newMasqueraded(t, lab.Join{Mode: "direct", HostRouting: "ebpf"})
	edge := []string{"edge", "set", "--dev", lab.Uplink, "--dev", lab.Wire}
	m.mustang(m.node, edge...)
	byPrograms := m.open("begun by programs")
	m.mustang(m.node, "node", "set", "--host-routing", "legacy")
	if by, because := m.by(); by != "nftables" || len(because) != 1 || !strings.Contains(because[0], "legacy") {
		t.Fatalf("by %s, because %v", by, because)
	}
	byKernel := m.open("begun by the kernel")
	byPrograms()
	m.mustang(m.node, "node", "set", "--host-routing", "ebpf")
	if by, because := m.by(); by != "ebpf" {
		t.Fatalf("by %s, because %v", by, because)
	}
	again := m.open("begun by programs again")
	byPrograms()
	byKernel()
	again()
	for what, change := range map[string][2]string{
		"another device":    {"link add link " + lab.Uplink + " name other0 type macvlan mode bridge", "link del other0"},
		"another's own NAT": {"", ""},
	} {
		if change[0] != "" {
			m.run(&m.node.Space, "ip %s", change[0])
			m.run(&m.node.Space, "ip link set other0 up")
			m.run(&m.node.Space, "ip route add 198.18.0.0/24 dev other0")
		} else {
			m.run(&m.node.Space, "nft add table ip mine")
			m.run(&m.node.Space, "nft add chain ip mine post { type nat hook postrouting priority 100 ; }")
			m.run(&m.node.Space, "nft add rule ip mine post ip saddr 192.0.2.1 masquerade")
		}
		m.mustang(m.node, edge...)
		if by, because := m.by(); by != "nftables" || len(because) != 1 {
			t.Errorf("%s: by %s, because %v", what, by, because)
		}
		m.open(what)()
		if change[1] != "" {
			m.run(&m.node.Space, "ip %s", change[1])
		} else {
			m.run(&m.node.Space, "nft delete table ip mine")
		}
		m.mustang(m.node, edge...)
		byPrograms()
		byKernel()
	}
	m.mustang(m.node, "reset")
	if left := m.run(&m.node.Space, "nft list tables"); strings.Contains(left, "mustang") {
		t.Errorf("left after reset: %s", left)
	}
}

// A pod is told by its node what cannot leave, and by routers beyond, of its own
// packets, whichever address it has there.
func TestPodsHearOfErrorsOutside(t *testing.T) {
	for who, make := range map[string]func(*testing.T, lab.Join) masqueraded{"masqueraded": newMasqueraded, "keeping": newKeeping} {
		t.Run(who, func(t *testing.T) {
			m := make(t, lab.Join{Mode: "direct", HostRouting: "ebpf"})
			m.mustang(m.node, "edge", "set", "--dev", lab.Uplink, "--dev", lab.Wire)
			if by, because := m.by(); by != "ebpf" {
				t.Fatalf("by %s, because %v", by, because)
			}
			m.run(&m.outside.Space, "sysctl -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
			for family, ipv6 := range families {
				t.Run(family, func(t *testing.T) { m.on(t, ipv6).hearsOfErrors() })
			}
		})
	}
}

func (m masqueraded) hearsOfErrors() {
	m.t.Helper()
	own, over, narrow := m.node.IPv4, "198.18.7.1", "198.18.7.2"
	if m.ipv6 {
		own, over, narrow = m.node.IPv6, "2001:db8:7::1", "2001:db8:7::2"
	}
	ping := func(args string) string {
		out, _ := m.pod.Command(deadline(m.t), strings.Fields("ping -n -c 2 -i 0.01 -W 2 "+args)...).CombinedOutput()
		return string(out)
	}
	m.run(&m.outside.Space, "ip route replace %s via %s", over, own)
	for i, router := range []netip.Addr{own, m.ip(m.outside)} {
		out := ping(fmt.Sprintf("-t %d %s", i+1, over))
		if !strings.Contains(out, "From "+router.String()) || !strings.Contains(out, "exceeded") {
			m.t.Errorf("hop %d: %s", i+1, out)
		}
	}
	m.run(&m.node.Space, "ip route add %s via %s mtu lock 1300", narrow, m.ip(m.outside))
	m.run(&m.outside.Space, "ip addr add %s dev lo", narrow)
	if out := ping("-M do -s 1350 " + narrow); !strings.Contains(out, "1300") {
		m.t.Errorf("over the route's MTU: %s", out)
	}
	if out := ping("-s 4000 " + narrow); !strings.Contains(out, "2 received") {
		m.t.Errorf("in fragments of the path's MTU: %s", out)
	}
}
