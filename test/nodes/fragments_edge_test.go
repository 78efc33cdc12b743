// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/lab"
)

// orders are those in which a wire may deliver a datagram's fragments.
var orders = map[string]func([][]byte) [][]byte{
	"in order":   func(p [][]byte) [][]byte { return p },
	"first last": func(p [][]byte) [][]byte { return append(slices.Clone(p[1:]), p[0]) },
	"reversed":   reversed,
	"duplicated": func(p [][]byte) [][]byte { // but for the one that makes it whole: what follows begins anew
		out := slices.Repeat(reversed(p[1:]), 2)
		return append(out, p[0])
	},
	"first in the middle": func(p [][]byte) [][]byte {
		out := reversed(p[1:])
		return slices.Insert(out, len(out)/2, p[0])
	},
}

func reversed(p [][]byte) [][]byte {
	out := slices.Clone(p)
	slices.Reverse(out)
	return out
}

// Datagrams of clients outside reach a Service's pod, on this node or another, in
// whatever order their fragments come; and so do the answers.
func TestFragmentsFromOutside(t *testing.T) {
	for _, mode := range []string{"direct", "vxlan"} {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, lab.Join{Mode: mode, HostRouting: "ebpf"})
			w.publish()
			for family, ipv6 := range families {
				sub := w.by(w.outsidePlace()).on(t, ipv6)
				for _, p := range []*lab.Pod{w.near, w.far} {
					for by, at := range sub.at(p, echoed) {
						if by == "pod" {
							continue
						}
						for name, order := range orders {
							t.Run(fmt.Sprintf("%s/%s/%s/%s", family, p.Name, by, name), func(t *testing.T) {
								for _, size := range []int{4000, 60000} {
									sub.on(t, ipv6).cutUp(at, size, order)
								}
							})
						}
						t.Run(fmt.Sprintf("%s/%s/%s/overlapping", family, p.Name, by), func(t *testing.T) {
							sub.on(t, ipv6).overlapping(at)
						})
					}
				}
				t.Run(family+"/answers", func(t *testing.T) { sub.on(t, ipv6).answersCutUp() })
				t.Run(family+"/the node's own", func(t *testing.T) { sub.on(t, ipv6).nodesOwn() })
			}
		})
	}
}

// cutUp asks with a datagram in fragments, and wants it back.
func (w *world) cutUp(at netip.AddrPort, size int, order func([][]byte) [][]byte) {
	w.t.Helper()
	u := w.listenUDP()
	defer u.Close()
	data := noise(size)
	for range 3 {
		w.raw(w.from.space, at.Addr(), order(cut(plain(u.LocalAddr()), at, data)))
		if got, from := w.heard(u, 2*time.Second); !bytes.Equal(got, data) || from != at {
			w.t.Fatalf("of %d bytes to %s, %d came back from %s", size, at, len(got), from)
		}
	}
}

// heard is the next datagram, nil when none comes in time.
func (w *world) heard(u net.PacketConn, within time.Duration) ([]byte, netip.AddrPort) {
	u.SetReadDeadline(time.Now().Add(slow(within)))
	buf := make([]byte, 65536)
	n, from, err := u.ReadFrom(buf)
	if err != nil {
		return nil, netip.AddrPort{}
	}
	return buf[:n], plain(from)
}

// overlapping fragments make no datagram, in any order.
func (w *world) overlapping(at netip.AddrPort) {
	w.t.Helper()
	u := w.listenUDP()
	defer u.Close()
	for name, order := range orders {
		if name == "duplicated" {
			continue // what is left would be whole
		}
		from := plain(u.LocalAddr())
		pieces := cut(from, at, noise(4000))
		over := fragment(from.Addr(), at.Addr(), 2*piece-8, true, make([]byte, piece))
		w.raw(w.from.space, at.Addr(), slices.Insert(order(pieces), 1, over))
	}
	if got, from := w.heard(u, time.Second); got != nil {
		w.t.Errorf("%d bytes came back from %s", len(got), from)
	}
}

// answersCutUp answers from the far node in fragments, in every order.
func (w *world) answersCutUp() {
	w.t.Helper()
	server := w.by(podPlace(w.far)).listenUDP()
	defer server.Close()
	backend := plain(server.LocalAddr())
	first, port := w.lab.Nodes()[0], 30400
	vip, at := lab.VIP4(50), first.IPv4
	if w.ipv6 {
		vip, at, port = lab.VIP6(50), first.IPv6, 30401
	}
	w.mustang(first, "svc", "add", "--service", netip.AddrPortFrom(vip, vipPort).String(), "--protocol", "udp",
		"--node-port", fmt.Sprint(port), "--backend", backend.String())
	u := w.listenUDP()
	defer u.Close()
	to := netip.AddrPortFrom(at, uint16(port))
	_, err := u.WriteTo([]byte("who"), net.UDPAddrFromAddrPort(to))
	w.must(err)
	_, worn := w.heard(server, 5*time.Second)
	if !worn.IsValid() {
		w.t.Fatal("nobody asks")
	}
	for name, order := range orders {
		for _, size := range []int{4000, 60000} {
			data := noise(size)
			w.raw(&w.lab.Nodes()[1].Space, worn.Addr(), order(cut(backend, worn, data)))
			if got, from := w.heard(u, 2*time.Second); !bytes.Equal(got, data) || from != to {
				w.t.Errorf("%s: of %d bytes, %d came back from %s", name, size, len(got), from)
			}
		}
	}
}

// nodesOwn asks a socket of the node, which is no Service's.
func (w *world) nodesOwn() {
	w.t.Helper()
	first := w.lab.Nodes()[0]
	itself := place{"itself", &first.Space, first.IPv4, first.IPv6}
	server := w.by(itself).listenUDP()
	defer server.Close()
	u := w.listenUDP()
	defer u.Close()
	for name, order := range orders {
		data := noise(4000)
		at := plain(server.LocalAddr())
		w.raw(w.from.space, at.Addr(), order(cut(plain(u.LocalAddr()), at, data)))
		if got, from := w.heard(server, 2*time.Second); !bytes.Equal(got, data) || from != plain(u.LocalAddr()) {
			w.t.Errorf("%s: %d bytes came from %s", name, len(got), from)
		}
	}
}

// A flood of fragments that belong to nothing, with every identification that there
// is, fills what the kernel has for them. Datagrams in order need nothing of it.
func TestFloodOfFragmentsFromOutside(t *testing.T) {
	w := newWorld(t, lab.Config{}, lab.Join{Mode: "direct", HostRouting: "ebpf"})
	w.publish()
	for family, ipv6 := range families {
		t.Run(family, func(t *testing.T) {
			w := w.by(w.outsidePlace()).on(t, ipv6)
			for _, p := range []*lab.Pod{w.near, w.far} {
				at := w.at(p, echoed)["nodeport"]
				u := w.listenUDP()
				data := noise(4000)
				start := time.Now()
				w.flood(plain(u.LocalAddr()), at)
				flooded := time.Now()
				// Some may have an identification that the flood had just now.
				for try := 1; ; try++ {
					_, err := u.WriteTo(data, net.UDPAddrFromAddrPort(at))
					w.must(err)
					if got, _ := w.heard(u, 100*time.Millisecond); bytes.Equal(got, data) {
						t.Logf("%s: flooded for %s; the first answer after %d datagrams, %s", p.Name, flooded.Sub(start), try, time.Since(flooded))
						break
					}
					if time.Since(flooded) > slow(4*time.Second) {
						t.Fatalf("%s: no answer in %d tries", p.Name, try)
					}
				}
				time.Sleep(time.Until(flooded.Add(3 * time.Second))) // no longer just now
				// One that the flood had at its end, while what the kernel has for fragments is still full.
				datagramID -= 100
				w.raw(w.from.space, at.Addr(), cut(plain(u.LocalAddr()), at, data))
				if got, _ := w.heard(u, 2*time.Second); !bytes.Equal(got, data) {
					t.Errorf("%s: with an identification of the flood, %d bytes came back", p.Name, len(got))
				}
				for range 50 {
					if got := w.exchange(u, at, data); !bytes.Equal(got, data) {
						t.Errorf("%s: %d bytes came back", p.Name, len(got))
					}
				}
				u.Close()
			}
		})
	}
}

// flood sends, from one address to one port, a middle fragment of each of 65,536 datagrams.
func (w *world) flood(from, to netip.AddrPort) {
	w.t.Helper()
	var packets [][]byte
	for range 1 << 16 {
		datagramID++
		packets = append(packets, fragment(from.Addr(), to.Addr(), piece, true, make([]byte, piece)))
	}
	w.raw(w.from.space, to.Addr(), packets)
}

// forgetGather leaves the node's table as a mustang does that knows no such device.
func (w *world) forgetGather(n *lab.Node) {
	w.t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(n.BPFFS(), "maps", "mst_node_v1"), nil)
	w.must(err)
	defer m.Close()
	config := make([]byte, m.ValueSize())
	w.must(m.Lookup(uint32(0), &config))
	const gather = 20 // struct node_config, bpf/types.h
	clear(config[gather : gather+4])
	w.must(m.Put(uint32(0), config))
}

// What gathers is there for as long as there are other nodes, or an edge and a
// Service of datagrams, and is whole again after whoever took it away.
func TestTheGatherComesAndGoes(t *testing.T) {
	w := newWorld(t, lab.Config{}, lab.Join{Mode: "direct", HostRouting: "ebpf"})
	first := w.lab.Nodes()[0]
	for _, n := range w.lab.Nodes() {
		for _, s := range w.services() {
			if s.Protocol == "udp" {
				w.mustang(n, "svc", "rm", "--service", netip.AddrPortFrom(s.VIP, s.Port).String(), "--protocol", "udp")
			}
		}
	}
	parts := func() string {
		return w.run(&first.Space, "ip -o link") + w.run(&first.Space, "ip -6 route")
	}
	there := func(what string, want bool) {
		t.Helper()
		if strings.Contains(parts(), "mst-gather@") != want {
			t.Errorf("%s: the device is there: %v", what, !want)
		}
		// Nothing of the node's own traffic passes a hook of netfilter.
		if hooks := w.run(&first.Space, "nft list tables"); hooks != "" {
			t.Errorf("%s: on the node there is %s", what, hooks)
		}
	}
	add := func(protocol string) {
		w.mustang(first, "svc", "add", "--service", netip.AddrPortFrom(lab.VIP4(60), vipPort).String(), "--protocol", protocol,
			"--node-port", "30500", "--backend", netip.AddrPortFrom(w.far.IPv4, serverPort).String())
	}
	remove := func(protocol string) {
		w.mustang(first, "svc", "rm", "--service", netip.AddrPortFrom(lab.VIP4(60), vipPort).String(), "--protocol", protocol)
	}
	there("another node", true)
	w.run(&first.Space, "ip link del mst-gather")
	w.statusSays(first, "nothing puts datagrams together")
	w.run(&first.Space, "nft add table inet mustang-fragments") // as mustang had it once
	w.mustang(first, "node", "sync")
	there("after it was taken", true)
	w.run(&first.Space, "ip link del mst-gather")
	w.forgetGather(first)
	w.mustang(first, "node", "sync")
	there("after an older mustang", true)
	w.mustang(first, "node", "rm", w.lab.Nodes()[1].Name)
	there("nothing", false)
	w.mustang(first, "edge", "set", "--dev", lab.Uplink)
	there("an edge", false)
	add("tcp")
	there("an edge, and a Service of connections", false)
	remove("tcp")
	add("udp")
	there("an edge, and a Service of datagrams", true)
	before := parts()
	w.mustang(first, "node", "sync")
	w.mustang(first, "edge", "set", "--dev", lab.Uplink)
	if now := parts(); now != before {
		t.Errorf("the same again changed\n%sto\n%s", before, now)
	}
	w.run(&first.Space, "ip link del mst-gather")
	w.mustang(first, "edge", "set", "--dev", lab.Uplink)
	there("after the device was taken", true)
	w.run(&first.Space, "ip link del mst-gather")
	remove("udp")
	there("without the Service, after the device was taken", false)
	w.run(&first.Space, "ip link add mst-gather type veth peer name mst-gather-end") // as who is killed leaves it
	w.mustang(first, "edge", "set", "--dev", lab.Uplink)
	there("after half of it was made", false)
	add("udp")
	there("with the Service again", true)
	remove("udp")
	there("without the Service", false)
	add("udp")
	there("with it again", true)
	w.mustang(first, "edge", "rm")
	there("without the edge", false)
	w.mustang(first, "edge", "set", "--dev", lab.Uplink)
	there("with it again", true)
	w.run(&first.Space, "ip link del mst-gather")
	w.run(&first.Space, "nft add table ip mustang-fragments")
	w.mustang(first, "reset")
	there("after a reset", false)
}
