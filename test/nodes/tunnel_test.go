// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/lab"
)

// drops are a node's, by reason.
func (w *world) drops(n *lab.Node) map[string]uint64 {
	w.t.Helper()
	var status struct {
		Drops []struct {
			Reason  string
			Packets uint64
		}
	}
	w.must(json.Unmarshal([]byte(w.mustang(n, "status", "-o", "json")), &status))
	out := map[string]uint64{}
	for _, d := range status.Drops {
		out[d.Reason] += d.Packets
	}
	return out
}

// lost fails unless no ping comes back and the first node counts the reason.
func (w *world) lost(from *lab.Space, reason, args string) {
	w.t.Helper()
	first := w.lab.Nodes()[0]
	before := w.drops(first)[reason]
	cmd := from.Command(context.Background(), "sh", "-c", "ping -c 2 -i 0.1 -W 1 "+args)
	if out, err := cmd.CombinedOutput(); err == nil {
		w.t.Errorf("%s: an answer came:\n%s", reason, out)
	}
	eventually(w.t, "dropped and counted as "+reason, func() bool { return w.drops(first)[reason] > before })
}

func TestStrangersInTheTunnelAreDroppedAndNamed(t *testing.T) {
	for _, routing := range []string{"ebpf", "legacy"} {
		t.Run(routing, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, lab.Join{Mode: "vxlan", HostRouting: routing})
			first, second := w.lab.Nodes()[0], w.lab.Nodes()[1]
			for _, ipv6 := range families {
				sub := w.on(t, ipv6)
				to := sub.ip(w.client).String()
				stranger := map[bool]string{false: "10.99.0.1", true: "fd99::1"}[ipv6]
				w.run(&second.Space, "ip addr add %s dev lo", stranger)
				sub.lost(&second.Space, "tunnel_source", "-I "+stranger+" "+to)
				// An address of the first node's own pods.
				near := sub.ip(w.near).String()
				w.run(&second.Space, "ip addr add %s dev lo", near)
				sub.lost(&second.Space, map[string]string{"ebpf": "wire_spoofed", "legacy": "tunnel_source"}[routing], "-I "+near+" "+to)
				w.run(&second.Space, "ip addr del %s dev lo", near)
				// A pod's of the second node, past the tunnel: the first node's stack lets it on to the pod.
				far, wire := sub.ip(w.far).String(), map[bool]string{false: first.Wire4.String(), true: first.Wire6.String()}[ipv6]
				w.run(&second.Space, "ip addr add %s dev lo", far)
				w.run(&second.Space, "ip route add %s via %s", to, wire)
				sub.lost(&second.Space, "tunnel_source", "-I "+far+" "+to)
				w.run(&second.Space, "ip route del %s via %s", to, wire)
				w.run(&second.Space, "ip addr del %s dev lo", far)
				sub.tcp(w.far, sub.direct(w.far))
			}
			w.mustang(second, "node", "set", "--vni", "5")
			w.lost(&w.far.Space, "tunnel_vni", w.client.IPv4.String())
			w.mustang(second, "node", "set", "--vni", "1")
			w.tcp(w.far, w.direct(w.far))
			w.mustang(first, "node", "rm", "n2")
			// The device is gone with the last node in the tunnel: nobody listens, nobody is counted.
			if out, err := w.far.Command(deadline(t), "ping", "-c", "1", "-W", "1", w.client.IPv4.String()).CombinedOutput(); err == nil {
				t.Errorf("a removed node is answered:\n%s", out)
			}
			w.mustang(first, "node", "add", "n3", "--address", "10.3.0.77", "--pod-cidr", "10.1.9.0/24", "--mode", "vxlan")
			w.lost(&w.far.Space, "tunnel_peer", w.client.IPv4.String())
		})
	}
}

// The other node is one that knows nothing of mustang: a plain VXLAN device with
// an entry for each node.
func TestPlainVXLANIsUnderstood(t *testing.T) {
	for _, routing := range []string{"ebpf", "legacy"} {
		t.Run(routing, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, lab.Join{Mode: "vxlan", HostRouting: routing})
			second := w.lab.Nodes()[1]
			for _, n := range []string{"n1", "n2"} {
				w.mustang(second, "node", "rm", n)
			}
			w.must(second.Join(deadline(t), lab.Join{Kernel: true, Mode: "vxlan"}))
			for family, ipv6 := range families {
				t.Run(family, func(t *testing.T) {
					sub := w.on(t, ipv6)
					sub.tcp(w.far, sub.direct(w.far))
					sub.bulk(w.far, sub.vip(w.far))
					sub.udp(w.far, sub.vip(w.far))
					sub.run(&w.far.Space, "ping -c 2 -i 0.01 -W 30 %s", sub.ip(w.client))
				})
			}
		})
	}
}

// Pods and the other node's own addresses reach each other by the tunnel, though the way to these
// is the wire: a reverse path filter that is strict by default must not mind.
func TestTheTunnelUnderAStrictReversePathFilter(t *testing.T) {
	for _, routing := range []string{"ebpf", "legacy"} {
		t.Run(routing, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, lab.Join{Mode: "direct", HostRouting: routing})
			for _, n := range w.lab.Nodes() {
				w.run(&n.Space, "sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=1")
			}
			w.must(w.lab.Join(deadline(t), lab.Join{Mode: "vxlan", HostRouting: routing}))
			second := w.lab.Nodes()[1]
			w.run(&w.client.Space, "ping -c 2 -i 0.1 -W 5 %s", second.Wire4)
			w.run(&second.Space, "ping -c 2 -i 0.1 -W 5 -I %s %s", second.Wire4, w.client.IPv4)
			w.tcp(w.far, w.direct(w.far))
		})
	}
}

// A server on a node that is bound to no address answers from wherever the route says: from where a pod elsewhere
// has asked it, for a socket that is connected hears nobody else.
func TestANodeAnswersByTheTunnelFromWhereItWasAsked(t *testing.T) {
	for _, routing := range []string{"ebpf", "legacy"} {
		t.Run(routing, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, lab.Join{Mode: "vxlan", HostRouting: routing})
			second := w.lab.Nodes()[1]
			var server net.PacketConn
			w.must(second.Do(func() (err error) {
				server, err = net.ListenPacket("udp", ":4321")
				return err
			}))
			defer server.Close()
			go func() {
				buf := make([]byte, 100)
				for {
					n, from, err := server.ReadFrom(buf)
					if err != nil {
						return
					}
					server.WriteTo(buf[:n], from)
				}
			}()
			for _, to := range []netip.Addr{second.Wire4, second.Wire6} {
				w.must(w.client.Do(func() error {
					c, err := net.Dial("udp", netip.AddrPortFrom(to, 4321).String())
					if err != nil {
						return err
					}
					defer c.Close()
					c.SetDeadline(time.Now().Add(10 * time.Second))
					if _, err := c.Write([]byte("who")); err != nil {
						return err
					}
					_, err = c.Read(make([]byte, 100))
					return err
				}))
				w.run(&second.Space, "ping -c 1 -W 5 %s", map[bool]netip.Addr{true: w.client.IPv4, false: w.client.IPv6}[to.Is4()])
			}
		})
	}
}

// What is in a tunnel of its sender's own (a VPN's, a cluster's within pods) is wrapped like all else, though the kernel's
// helper pushes headers on nothing that has some.
func TestATunnelInTheTunnel(t *testing.T) {
	ends := []netip.Addr{netip.MustParseAddr("10.77.0.1"), netip.MustParseAddr("10.77.0.2")}
	for _, join := range []lab.Join{{Mode: "direct"}, {Mode: "vxlan"}, {Mode: "vxlan", HostRouting: "legacy"}} {
		t.Run(join.Mode+join.HostRouting, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, join)
			node := w.lab.Nodes()[0]
			for _, from := range []place{podPlace(w.client), {"node", &node.Space, node.Wire4, node.Wire6}} {
				sub, pair := w.by(from), []place{from, podPlace(w.far)}
				for i, end := range pair {
					w.run(end.space, "ip link add own0 mtu 1300 type vxlan id 5 local %s remote %s dstport 5555", end.ip4, pair[1-i].ip4)
					w.run(end.space, "ip address add %s/24 dev own0", ends[i])
					w.run(end.space, "ip link set own0 up")
				}
				w.run(from.space, "ping -c 2 -i 0.1 -W 5 %s", ends[1])
				sub.bulk(w.far, netip.AddrPortFrom(ends[1], serverPort))
				for _, end := range pair {
					w.run(end.space, "ip link del own0")
				}
			}
		})
	}
}

// Whoever may write Services may name a node's address and the tunnel's port, or have a host port there: all
// that the nodes' pods send each other would be that Service's.
func TestTheTunnelIsNoServices(t *testing.T) {
	for _, routing := range []string{"ebpf", "legacy"} {
		t.Run(routing, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, lab.Join{Mode: "vxlan", HostRouting: routing})
			first := w.lab.Nodes()[0]
			w.mustang(first, "edge", "set", "--dev", lab.Uplink, "--dev", lab.Wire)
			for _, taken := range [][]string{{"--external-ip", first.Wire4.String()}, {"--node-port", "4789"}} {
				service := netip.AddrPortFrom(lab.VIP4(30), 4789).String()
				w.mustang(first, append([]string{"svc", "add", "--service", service, "--protocol", "udp", "--backend", netip.AddrPortFrom(w.client.IPv4, 9999).String()}, taken...)...)
				w.run(&w.client.Space, "ping -c 2 -i 0.1 -W 5 %s", w.far.IPv4)
				w.run(&w.client.Space, "ping -c 2 -i 0.1 -W 5 -M dont -s 4000 %s", w.far.IPv4)
				w.run(&w.far.Space, "ping -c 2 -i 0.1 -W 5 %s", w.client.IPv6)
				w.mustang(first, "svc", "rm", "--service", service, "--protocol", "udp")
			}
		})
	}
}

// Who sends under a node's address is that node to the others' tunnels, and says for which pods. A pod does not, whoever
// masquerades it behind the programs, and whatever address of the other node it names.
func TestAPodIsNoNodeInTheTunnel(t *testing.T) {
	for _, routing := range []string{"ebpf", "legacy"} {
		t.Run(routing, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, lab.Join{Mode: "vxlan", HostRouting: routing})
			first, second := w.lab.Nodes()[0], w.lab.Nodes()[1]
			w.run(&first.Space, "nft add table ip theirs")
			w.run(&first.Space, "nft add chain ip theirs post { type nat hook postrouting priority srcnat ; }")
			w.run(&first.Space, "nft add rule ip theirs post ip saddr %s ip daddr != %s masquerade", w.client.IPv4, w.far.IPv4)
			w.mustang(first, "node", "sync")
			other := second.Wire4.Next().Next().Next().Next().Next().Next()
			w.run(&second.Space, "ip addr add %s/16 dev %s", other, lab.Wire)
			device := strings.Fields(w.run(&second.Space, "ip -br link show mst-vxlan"))[2]
			forged := pingInTheTunnel(t, device, w.near.IPv4, w.far.IPv4)
			for _, to := range []netip.Addr{second.Wire4, other} {
				before := w.pings(w.far)
				w.must(w.client.Do(func() error {
					c, err := net.Dial("udp", netip.AddrPortFrom(to, 4789).String())
					if err != nil {
						return err
					}
					defer c.Close()
					_, err = c.Write(forged)
					return err
				}))
				w.run(&w.client.Space, "ping -c 1 -W 5 %s", w.far.IPv4) // what was sent before has come by now
				if n := w.pings(w.far) - before; n != 1 {
					t.Errorf("by %v, %d pings came to the pod, and one was sent", to, n)
				}
			}
		})
	}
}

// pings is how many a pod has received.
func (w *world) pings(p *lab.Pod) int {
	w.t.Helper()
	_, counts, _ := strings.Cut(w.run(&p.Space, "grep ^Icmp: /proc/net/snmp"), "\n")
	n, err := strconv.Atoi(strings.Fields(counts)[9])
	w.must(err)
	return n
}

// pingInTheTunnel is VXLAN's header, and in it a ping.
func pingInTheTunnel(t *testing.T, device string, from, to netip.Addr) []byte {
	t.Helper()
	mac, err := net.ParseMAC(device)
	if err != nil {
		t.Fatal(err)
	}
	ip := slices.Concat([]byte{0x45, 0, 0, 28, 0, 1, 0, 0, 64, 1, 0, 0}, from.AsSlice(), to.AsSlice())
	var sum uint32
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	return slices.Concat([]byte{8, 0, 0, 0, 0, 0, 1, 0}, mac, []byte{2, 0, 0, 0, 0, 1, 8, 0}, ip, []byte{8, 0, 0xf7, 0xfe, 0, 1, 0, 0})
}
