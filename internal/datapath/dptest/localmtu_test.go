// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// TestALocalMTUIsForMustangsPodsOnly: what only they take must not be sent to
// another neighbour on a bridge, who would lose it without a word.
func TestALocalMTUIsForMustangsPodsOnly(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		if net.InPod {
			t.Skip("a sub-interface has no local MTU")
		}
		s := newScene(t, net, v6, oracle.UDP)
		s.client.MTU, s.client.LinkMTU = 65520, 1500
		s.server.MTU, s.server.LinkMTU = 65520, 1500
		net.SetPod(t, s.client)
		net.SetPod(t, s.server)
		narrow := NewPod(9)
		narrow.LinkMTU = 1500
		net.SetPod(t, narrow)
		stranger := netip.AddrPortFrom(NewPod(200).IP(v6), 53)
		neighbour := [6]byte{2, 0, 0, 0, 0, 200}
		for _, c := range []struct {
			name    string
			to      netip.AddrPort
			length  int
			gso     uint32
			verdict Verdict
			mac     [6]byte
		}{
			{"a sibling takes it at once", s.b, 3000, 0, Redirect, s.server.MAC},
			{"a sibling without one: the node answers", netip.AddrPortFrom(narrow.IP(v6), 53), 1501, 0, Next, s.client.NodeMAC},
			{"a sibling without one, what fits", netip.AddrPortFrom(narrow.IP(v6), 53), 1500, 0, Redirect, narrow.MAC},
			{"a stranger, what fits", stranger, 1500, 0, Next, neighbour},
			{"a stranger: the node answers", stranger, 1501, 0, Next, s.client.NodeMAC},
			{"a stranger, a bundle of what fits", stranger, 3000, 1400, Next, neighbour},
		} {
			p := Eth(s.client.MAC, neighbour).IP(s.c.Addr(), c.to.Addr()).UDP(s.c.Port(), c.to.Port())
			head := len(p.Payload(0).Frame()) - 14
			r, err := net.Run(net.PodPrograms.FromPod, p.Payload(c.length-head).Frame(), Context{Endpoint: s.client.ID, GSOSize: c.gso, GSOSegs: 7})
			check(t, err)
			if r.Verdict != c.verdict || [6]byte(r.Packet) != c.mac {
				t.Errorf("%s: %v to %x, want %v to %x", c.name, r, r.Packet[:6], c.verdict, c.mac)
			}
		}
	})
}

// What a Service's backend answers and its client does not take goes to the stack as the backend sent it: the stack tells
// that, and not the Service's address.
func TestAnswersOverTheMTUAreTheKernelsAsSent(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		if net.InPod {
			t.Skip("a sub-interface has no local MTU")
		}
		for _, proto := range []uint8{oracle.TCP, oracle.UDP, oracle.SCTP} {
			s := newScene(t, net, v6, proto)
			s.server.MTU = 65520
			net.SetPod(t, s.server)
			s.open(s.vip, s.b)
			for range 2 { // by the short way, then by the long one
				for _, c := range []struct {
					payload int
					src     netip.AddrPort
				}{{1000, s.vip}, {1600, s.b}} {
					frame := s.packet(s.server, s.b, s.c, ack).Payload(c.payload).Frame()
					r, err := net.Run(net.PodPrograms.FromPod, frame, Context{Endpoint: s.server.ID})
					check(t, err)
					h, _ := oracle.Parse(r.Packet)
					if got := netip.AddrPortFrom(h.Src, h.Sport); got != c.src || (r.Verdict == Redirect) != (c.src == s.vip) {
						t.Errorf("%d of %d bytes: from %v, %v", proto, c.payload, got, r)
					}
				}
				net.VoidFlows(t)
			}
			net.ClearFlows(t)
		}
	})
}
