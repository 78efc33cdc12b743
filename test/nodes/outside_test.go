// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/lab"
)

// newKeeping is newMasqueraded with a pod that keeps its address towards all.
func newKeeping(t *testing.T, join lab.Join) masqueraded {
	m := newBeside(t, join)
	m.pod, m.from, m.keeps = m.client, podPlace(m.client), true
	return m
}

// Pods that keep their addresses reach the outside past the host's stack, with and
// without an edge, or by it; either way they are reached from there, and what they
// send arrives whole.
func TestOutsideWithAnAddressOfItsOwn(t *testing.T) {
	for _, mode := range []string{"direct", "vxlan"} {
		for what, by := range map[string]string{"ebpf": "ebpf", "edge": "ebpf", "legacy": "stack"} {
			t.Run(mode+"/"+what, func(t *testing.T) {
				routing := map[string]string{"ebpf": "ebpf", "stack": "legacy"}[by]
				m := newKeeping(t, lab.Join{Mode: mode, HostRouting: routing})
				if what == "edge" {
					m.mustang(m.node, "edge", "set", "--dev", lab.Uplink, "--dev", lab.Wire)
				}
				if got, because := m.by(); got != by || (by == "ebpf") != (len(because) == 0) {
					t.Fatalf("by %s, because %v", got, because)
				}
				forwarded := m.forwarded(m.node)
				for family, ipv6 := range families {
					t.Run(family, func(t *testing.T) {
						m := m.on(t, ipv6)
						m.sees()
						for _, p := range []*lab.Pod{m.outside, m.beyond} {
							m.ping(p, m.direct(p))
							m.bulk(p, m.direct(p))
							m.datagrams(p, m.direct(p))
						}
						m.refused(m.outside, m.direct(m.outside))
					})
				}
				if f := forwarded(); (f == "") != (by == "ebpf") {
					t.Errorf("the stack forwarded:\n%s", f)
				}
				for _, ipv6 := range families {
					m := m.on(t, ipv6)
					m.refused(m.beyond, m.direct(m.beyond)) // what comes by a tunnel to say so is the stack's
					if name, saw, err := askFrom(&m.outside.Space, "tcp", m.direct(m.pod)); err != nil || name != m.pod.Name || saw != m.ip(m.outside) {
						t.Errorf("from outside: %q sees %v, %v", name, saw, err)
					}
				}
			})
		}
	}
}

// A firewall that lets only whole connections pass sees either all of one or none,
// and who forwards may change at any time.
func TestOutsideChangesHands(t *testing.T) {
	m := newKeeping(t, lab.Join{Mode: "direct", HostRouting: "ebpf"})
	edge := []string{"edge", "set", "--dev", lab.Uplink, "--dev", lab.Wire}
	m.mustang(m.node, edge...)
	m.run(&m.node.Space, "nft add table inet guard")
	m.run(&m.node.Space, "nft add chain inet guard f { type filter hook forward priority 0 ; }")
	m.run(&m.node.Space, "nft add rule inet guard f ct state invalid counter drop")
	byPrograms := m.open("begun by programs")
	for what, change := range map[string][2]string{
		"another's own NAT of destinations": {"nft -f -", "nft delete table ip mine"},
		"legacy":                            {"", ""},
	} {
		if change[0] == "" {
			m.mustang(m.node, "node", "set", "--host-routing", "legacy")
		} else {
			m.run(&m.node.Space, "nft add table ip mine")
			m.run(&m.node.Space, "nft add chain ip mine pre { type nat hook prerouting priority -100 ; }")
			m.run(&m.node.Space, "nft add rule ip mine pre ip daddr 192.0.2.1 dnat to %s", m.outside.IPv4)
			m.mustang(m.node, edge...)
		}
		if by, because := m.by(); by != "stack" || len(because) != 1 {
			t.Errorf("%s: by %s, because %v", what, by, because)
		}
		byStack := m.open("begun by the stack")
		if change[0] != "" {
			if _, saw, err := askFrom(&m.pod.Space, "tcp", netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), serverPort)); err != nil || saw != m.pod.IPv4 {
				t.Errorf("%s: %v, %v", what, saw, err)
			}
			// The kernel translates nothing any more where it has no rule to, nor a server's last segment.
			eventually(t, "the server has closed, too", func() bool {
				return m.run(&m.pod.Space, "ss -Htn dst 192.0.2.1") == ""
			})
			m.run(&m.node.Space, "%s", change[1])
			m.mustang(m.node, edge...)
		} else {
			m.mustang(m.node, "node", "set", "--host-routing", "ebpf")
		}
		if by, because := m.by(); by != "ebpf" {
			t.Errorf("after %s: by %s, because %v", what, by, because)
		}
		byStack()
		byPrograms()
	}
	if out := m.run(&m.node.Space, "nft list chain inet guard f"); !strings.Contains(out, "packets 0 ") {
		t.Errorf("dropped as invalid:\n%s", out)
	}
}
