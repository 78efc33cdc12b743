// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/lab"
)

// joins are all ways of joining nodes.
func joins() []lab.Join {
	var out []lab.Join
	for _, routing := range []string{"legacy", "ebpf"} {
		for _, mode := range []string{"direct", "vxlan"} {
			out = append(out, lab.Join{Mode: mode, HostRouting: routing})
		}
		out = append(out, lab.Join{Mode: "vxlan", HostRouting: routing, Underlay: "ipv6", VNI: 77, Port: 8472})
	}
	return out
}

func nameOf(j lab.Join) string {
	name := j.Mode + "/" + j.HostRouting
	if j.Underlay != "" {
		name += "/over " + j.Underlay
	}
	return name
}

var families = map[string]bool{"ipv4": false, "ipv6": true}

// TestNodes runs the whole table: ways of joining nodes × where the client is ×
// on which node the server is × by which address it is asked × families; then what
// else is to hold however nodes are joined.
func TestNodes(t *testing.T) {
	for _, mode := range modes() {
		for _, j := range joins() {
			t.Run(fmt.Sprintf("%s/%s", mode, nameOf(j)), func(t *testing.T) {
				w := newWorld(t, lab.Config{Mode: mode, Nodes: 3}, j)
				w.publish()
				clients := []place{w.from, w.outsidePlace()}
				for family, ipv6 := range families {
					for _, c := range clients {
						t.Run(family+"/from "+c.name, func(t *testing.T) { w.on(t, ipv6).by(c).table() })
					}
				}
				// In the same nodes, for making them takes longest; the last leaves nothing.
				for _, part := range []struct {
					name string
					run  func(*world)
				}{
					{"node ports from outside", (*world).nodePortsFromOutside},
					{"node ports of another node", (*world).nodePortsOfAnotherNode},
					{"a removed node", (*world).removedNode},
					{"why", (*world).why},
					{"forward hook", (*world).forwardHook},
					{"a wire that shrinks", (*world).wireThatShrinks},
					{"policy of the receiver", (*world).policyOfTheReceiver},
					{"reset", (*world).reset},
				} {
					t.Run(part.name, func(t *testing.T) { part.run(w.on(t, false)) })
				}
			})
		}
	}
}

// What a pod serves: the port of its server, and of Services' frontends.
type served struct {
	backend uint16
	vip     int // of the near pod; the far one has the next
	port    uint16
	node    uint16 // the near pod's node port; the far one has the next
}

var (
	echoed   = served{serverPort, 20, vipPort, 30080}
	measured = served{5201, 30, 5201, 30180} // by iperf3
	browsed  = served{8090, 40, 8090, 30280} // nginx
)

// publish starts the other servers, and makes Services with node ports on the
// first node.
func (w *world) publish() {
	w.t.Helper()
	first := w.lab.Nodes()[0]
	w.mustang(first, "edge", "set", "--dev", lab.Uplink, "--dev", lab.Wire)
	for i, p := range []*lab.Pod{w.near, w.far} {
		w.nginx(p)
		for _, s := range []served{echoed, measured, browsed} {
			for ip, vip := range map[netip.Addr]netip.Addr{p.IPv4: lab.VIP4(s.vip + i), p.IPv6: lab.VIP6(s.vip + i)} {
				w.mustang(first, "svc", "add", "--service", netip.AddrPortFrom(vip, s.port).String(),
					"--node-port", fmt.Sprint(int(s.node)+i), "--backend", netip.AddrPortFrom(ip, s.backend).String())
			}
		}
	}
}

// at are the addresses by which a pod's server is asked.
func (w *world) at(p *lab.Pod, s served) map[string]netip.AddrPort {
	first, i := w.lab.Nodes()[0], 0
	if p == w.far {
		i = 1
	}
	node, vip := first.IPv4, lab.VIP4(s.vip+i)
	if w.ipv6 {
		node, vip = first.IPv6, lab.VIP6(s.vip+i)
	}
	return map[string]netip.AddrPort{
		"pod":       netip.AddrPortFrom(w.ip(p), s.backend),
		"clusterip": netip.AddrPortFrom(vip, s.port),
		"nodeport":  netip.AddrPortFrom(node, s.node+uint16(i)),
	}
}

// seen is the address that a server sees of the client: its own, but where a
// client outside uses a Service; that wears the first node's, on the way to the
// backend.
func (w *world) seen(p *lab.Pod, at netip.AddrPort) netip.Addr {
	first := w.lab.Nodes()[0]
	inside := w.from.name != "outside"
	switch {
	case inside || at.Addr() == w.ip(p):
		return w.me()
	case p == w.far:
		return w.wornTo(w.ipv6)
	case w.ipv6:
		return first.IPv6
	}
	return first.IPv4
}

// wornTo is the address that a client outside wears on its way to the other node:
// the first node's on the wire between them, or the tunnel's, where it has none of the family.
func (w *world) wornTo(ipv6 bool) netip.Addr {
	first := w.lab.Nodes()[0]
	switch {
	case w.join.Mode == "vxlan" && w.join.Underlay == "ipv6" && !ipv6:
		return first.PodNet4.Addr() // of this family the node has none between nodes
	case ipv6:
		return first.Wire6
	}
	return first.Wire4
}

func (w *world) table() {
	for _, to := range []*lab.Pod{w.near, w.far} {
		for _, c := range []struct {
			name string
			run  func(*world, *lab.Pod, netip.AddrPort)
			by   served
			not  string // by which address it is not asked: "pod", or "service" for all others
		}{
			{"tcp", (*world).tcp, echoed, ""},
			{"one port", (*world).onePort, echoed, "pod"},
			{"bulk", (*world).bulk, echoed, ""},
			{"udp", (*world).udp, echoed, ""},
			{"datagrams", (*world).datagrams, echoed, ""},
			{"iperf3", (*world).measure, measured, ""},
			{"ab", (*world).browse, browsed, ""},
			{"refused", (*world).refused, echoed, "service"},
			{"ping", (*world).ping, echoed, "service"},
		} {
			for by, at := range w.at(to, c.by) {
				if c.not == "pod" && by == "pod" || c.not == "service" && by != "pod" {
					continue
				}
				w.t.Run(fmt.Sprintf("%s/%s/%s", to.Name, by, c.name), func(t *testing.T) {
					c.run(w.on(t, w.ipv6), to, at)
				})
			}
		}
	}
}
