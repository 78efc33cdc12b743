// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

const (
	fin = oracle.FIN
	syn = oracle.SYN
	rst = oracle.RST
	ack = oracle.ACK
)

// speaker sends packets of one flow through a network and checks where they end.
type speaker struct {
	t     *testing.T
	net   *Network
	proto uint8
}

// packet is one of this flow's, with checksums that are right.
func (s speaker) packet(p Pod, from, to netip.AddrPort, flags uint8) *Packet {
	return Eth(p.MAC, p.NodeMAC).IP(from.Addr(), to.Addr()).L4(s.proto, from.Port(), to.Port(), flags).Payload(24)
}

// send sends a packet of pod p and returns where it ended; what arrives has good checksums.
func (s speaker) send(p Pod, from, to netip.AddrPort, flags uint8) Arrival {
	s.t.Helper()
	a, err := s.net.Send(p, s.packet(p, from, to, flags).Frame())
	return s.checked(a, err)
}

// receive brings a packet from outside to pod p.
func (s speaker) receive(p Pod, from, to netip.AddrPort, flags uint8) Arrival {
	s.t.Helper()
	frame := Eth(Router, p.MAC).IP(from.Addr(), to.Addr()).L4(s.proto, from.Port(), to.Port(), flags).Payload(24).Frame()
	a, err := s.net.Receive(p, frame)
	return s.checked(a, err)
}

func (s speaker) checked(a Arrival, err error) Arrival {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
	if a.Dropped == "" && !a.Headers.Control {
		if ip, l4 := oracle.Sums(a.Frame, a.Headers); ip == oracle.SumBad || l4 == oracle.SumBad {
			s.t.Errorf("checksums: network %v, transport %v, of %v", ip, l4, a)
		}
	}
	return a
}

// sees fails unless the packet came to pod as the tuple.
func (s speaker) sees(a Arrival, pod Pod, from, to netip.AddrPort) {
	s.t.Helper()
	want := Tuple{s.proto, from, to}
	if a.Dropped != "" || a.Pod != pod.ID || a.Tuple() != want {
		s.t.Fatalf("%v, want at pod %d as %v", a, pod.ID, want)
	}
}

func (s speaker) dropped(a Arrival, reason uint32) {
	s.t.Helper()
	if a.Dropped != ReasonName(reason) {
		s.t.Fatalf("%v, want dropped: %s", a, ReasonName(reason))
	}
}

// left fails unless the packet left the node as the tuple.
func (s speaker) left(a Arrival, from, to netip.AddrPort) {
	s.t.Helper()
	if a.Dropped != "" || a.Pod != 0 || a.Tuple() != (Tuple{s.proto, from, to}) {
		s.t.Fatalf("%v, want that it leaves as %v>%v", a, from, to)
	}
}

// eachWay runs a test on the host's end and inside the pod, for both families.
func eachWay(t *testing.T, f func(t *testing.T, net *Network, v6 bool)) {
	for name, w := range map[string]way{"host": {}, "inner": {inPod: true}, "inner_vouched": {inPod: true, vouch: true}} {
		for family, v6 := range map[string]bool{"v4": false, "v6": true} {
			t.Run(name+"_"+family, func(t *testing.T) {
				f(t, usualNetwork(t, w), v6)
			})
		}
	}
}

// way is where programs sit, and whether they vouch for packets to each other.
type way struct{ inPod, vouch bool }

func usualNetwork(t *testing.T, w way) *Network {
	t.Helper()
	net := NewNetwork(t, Options{InPod: w.inPod}, 4)
	if w.vouch {
		net.Vouch(t)
	}
	return net
}

func end(a netip.Addr, p uint16) netip.AddrPort { return netip.AddrPortFrom(a, p) }

// scene is what most flow tests need: a client, two servers, a Service that has the first.
type scene struct {
	speaker
	client, server, second Pod
	c, b, vip              netip.AddrPort
}

func newScene(t *testing.T, net *Network, v6 bool, proto uint8) scene {
	s := scene{speaker: speaker{t, net, proto}, client: net.Pods[1], server: net.Pods[2], second: net.Pods[3]}
	s.c = end(s.client.IP(v6), 1000)
	s.b = end(s.server.IP(v6), 8080)
	s.vip = end(VIP(1, v6), 80)
	net.SetService(t, proto, s.vip, s.b)
	return s
}

// open opens a flow by the client's tuple, up to its third packet.
func (s scene) open(to, served netip.AddrPort) {
	s.t.Helper()
	seen := s.send(s.client, s.c, to, syn)
	if seen.Dropped != "" {
		s.t.Fatal(seen)
	}
	s.sees(seen, s.server, seen.Tuple().Src, served)
	s.sees(s.send(s.server, served, seen.Tuple().Src, syn|ack), s.client, to, s.c)
	s.sees(s.send(s.client, s.c, to, ack), s.server, seen.Tuple().Src, served)
}

func (s scene) flow(src, dst netip.AddrPort) *Flow {
	s.t.Helper()
	return s.net.Flow(s.t, Tuple{s.proto, src, dst}, bpfgen.CTScopeFlow)
}

// wantFlow checks one entry: its role, table and rest of life.
func (s scene) wantFlow(src, dst netip.AddrPort, role uint8, established bool, life int) {
	s.t.Helper()
	f := s.flow(src, dst)
	if f == nil {
		s.t.Fatalf("no entry for %v>%v", src, dst)
	}
	if f.Entry.Role != role || f.Established != established {
		s.t.Errorf("entry %v>%v: role %d established %v, want %d %v", src, dst, f.Entry.Role, f.Established, role, established)
	}
	if left := f.Left(); left < life-4 || left > life+1 {
		s.t.Errorf("entry %v>%v: %d s left, want %d", src, dst, left, life)
	}
	if f.Tuple() != (Tuple{s.proto, src, dst}) {
		s.t.Errorf("entry's original direction is %v, want %v>%v", f.Tuple(), src, dst)
	}
}

func TestDirectFlowFromFirstPacketToPromotion(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		a := s.send(s.client, s.c, s.b, syn)
		s.sees(a, s.server, s.c, s.b)
		if a.Direct == net.InPod {
			t.Errorf("redirected: %v", a.Direct)
		}
		s.wantFlow(s.c, s.b, bpfgen.CTDirect, false, 60)
		s.sees(s.send(s.server, s.b, s.c, syn|ack), s.client, s.b, s.c)
		s.wantFlow(s.c, s.b, bpfgen.CTDirect, false, 86400) // it lies where it will stay
		s.sees(s.send(s.client, s.c, s.b, ack), s.server, s.c, s.b)
		s.wantFlow(s.c, s.b, bpfgen.CTDirect, true, 86400)
		s.sees(s.send(s.server, s.b, s.c, ack), s.client, s.b, s.c)
		if n := len(net.Flows(t)); n != 1 {
			t.Errorf("%d entries for one direct flow", n)
		}
	})
}

func TestTranslatedFlowFromFirstPacketToPromotion(t *testing.T) {
	for name, proto := range map[string]uint8{"tcp": oracle.TCP, "udp": oracle.UDP, "sctp": oracle.SCTP} {
		halfOpen, life := 60, 86400
		if proto != oracle.TCP {
			halfOpen, life = 30, 180
		}
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, proto)
				s.sees(s.send(s.client, s.c, s.vip, syn), s.server, s.c, s.b)
				s.wantFlow(s.c, s.vip, bpfgen.CTPreNAT, false, halfOpen)
				s.wantFlow(s.c, s.b, bpfgen.CTPostNAT, false, halfOpen)
				s.sees(s.send(s.server, s.b, s.c, syn|ack), s.client, s.vip, s.c)
				s.sees(s.send(s.client, s.c, s.vip, ack), s.server, s.c, s.b)
				s.wantFlow(s.c, s.vip, bpfgen.CTPreNAT, true, life)
				s.wantFlow(s.c, s.b, bpfgen.CTPostNAT, true, life)
				s.sees(s.send(s.server, s.b, s.c, ack), s.client, s.vip, s.c)
				if n := len(net.Flows(t)); n != 2 {
					t.Errorf("%d entries for one translated flow", n)
				}
			})
		})
	}
}

func TestEchoIsADirectFlow(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		proto := uint8(oracle.ICMP)
		if v6 {
			proto = oracle.ICMPv6
		}
		s := newScene(t, net, v6, proto)
		c, b := end(s.c.Addr(), 77), end(s.b.Addr(), 77)
		s.sees(s.send(s.client, c, b, 0), s.server, c, b)
		s.sees(s.send(s.server, b, c, ack), s.client, b, c)
		s.wantFlow(c, b, bpfgen.CTDirect, false, 30)
		s.dropped(s.send(s.client, c, end(s.vip.Addr(), 77), 0), bpfgen.ReasonServicePort)
	})
}

func TestClosingShortensAFlowsLife(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags uint8
		life  int
	}{{"fin", fin | ack, 120}, {"rst", rst, 10}} {
		t.Run(c.name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, oracle.TCP)
				s.open(s.b, s.b)
				s.sees(s.send(s.client, s.c, s.b, c.flags), s.server, s.c, s.b)
				s.wantFlow(s.c, s.b, bpfgen.CTDirect, true, c.life)
				s.sees(s.send(s.server, s.b, s.c, c.flags), s.client, s.b, s.c)
				s.wantFlow(s.c, s.b, bpfgen.CTDirect, true, c.life)
			})
		})
	}
}

func TestOneEndsResetClosesBothHalves(t *testing.T) {
	for name, byServer := range map[string]bool{"by_client": false, "by_server": true} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, oracle.TCP)
				s.open(s.vip, s.b)
				if byServer {
					s.sees(s.send(s.server, s.b, s.c, rst|ack), s.client, s.vip, s.c)
				} else {
					s.sees(s.send(s.client, s.c, s.vip, rst), s.server, s.c, s.b)
				}
				for _, dst := range []netip.AddrPort{s.vip, s.b} {
					if f := s.flow(s.c, dst); f == nil || f.Entry.ClosingOrig|f.Entry.ClosingReply == 0 {
						t.Errorf("the half towards %v does not know that the flow has ended", dst)
					} else if f.Left() > 11 {
						t.Errorf("the half towards %v lives on for %d s", dst, f.Left())
					}
				}
			})
		})
	}
}

func TestExpiredFlowsAreNotFound(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		direct := end(s.client.IP(v6), 1001)
		s.open(s.vip, s.b)
		s.sees(s.send(s.client, direct, s.b, syn), s.server, direct, s.b)
		net.Age(t, 70)
		s.sees(s.send(s.client, s.c, s.vip, ack), s.server, s.c, s.b)
		s.sees(s.send(s.server, s.b, direct, syn|ack), s.client, s.b, direct)
		s.wantFlow(direct, s.b, bpfgen.CTDirect, false, 86400) // its opener's still, and answered
		net.Age(t, 86400+10)
		s.dropped(s.send(s.client, s.c, s.vip, ack), bpfgen.ReasonMidstreamNAT)
		s.sees(s.send(s.client, s.c, s.vip, syn), s.server, s.c, s.b)
		s.wantFlow(s.c, s.vip, bpfgen.CTPreNAT, false, 60)
	})
}

func TestMidstreamPacketWithoutAnEntry(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		s.sees(s.send(s.client, s.c, s.b, ack), s.server, s.c, s.b)
		s.wantFlow(s.c, s.b, bpfgen.CTDirect, false, 60)
		for _, flags := range []uint8{0, ack, fin | ack, rst, syn | ack, syn | rst} {
			a := s.send(s.client, s.c, s.vip, flags)
			s.dropped(a, bpfgen.ReasonMidstreamNAT)
			// The pod learns of it at once; a reset is never answered (RFC 9293 3.5.2).
			if a.Refused != (flags&rst == 0) {
				t.Errorf("flags %#x: answered %v", flags, a.Refused)
			}
		}
		if n := net.Drops(t, bpfgen.ReasonMidstreamNAT, bpfgen.DirFromPod); n != 6 {
			t.Errorf("%d counted, want 6", n)
		}
	})
}

func TestALostHalfIsRestoredByTheOther(t *testing.T) {
	for name, lost := range map[string]bool{"pre": true, "post": false} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, oracle.TCP)
				s.open(s.vip, s.b)
				before := s.flow(s.c, s.b)
				net.Age(t, 5)
				if lost {
					net.DeleteFlow(t, Tuple{s.proto, s.c, s.vip}, 0)
					s.sees(s.send(s.server, s.b, s.c, ack), s.client, s.vip, s.c)
					s.wantFlow(s.c, s.vip, bpfgen.CTPreNAT, true, 86400)
				} else {
					net.DeleteFlow(t, Tuple{s.proto, s.c, s.b}, 0)
					s.sees(s.send(s.client, s.c, s.vip, ack), s.server, s.c, s.b)
					s.wantFlow(s.c, s.b, bpfgen.CTPostNAT, true, 86400)
					after := s.flow(s.c, s.b)
					before.Entry.Expires, before.Entry.Near = after.Entry.Expires, after.Entry.Near
					if before.Entry != after.Entry {
						t.Errorf("restored as %+v, was %+v", after.Entry, before.Entry)
					}
				}
				s.sees(s.send(s.client, s.c, s.vip, ack), s.server, s.c, s.b)
				s.sees(s.send(s.server, s.b, s.c, ack), s.client, s.vip, s.c)
			})
		})
	}
}

func TestHalfOpenFlowIsKeptAliveByItsOpener(t *testing.T) {
	for name, lost := range map[string]bool{"late_answer": false, "lost_half": true} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, oracle.UDP)
				s.sees(s.send(s.client, s.c, s.vip, 0), s.server, s.c, s.b)
				if lost {
					net.DeleteFlow(t, Tuple{s.proto, s.c, s.b}, 0)
				}
				for range 5 {
					net.Age(t, 10)
					s.sees(s.send(s.client, s.c, s.vip, 0), s.server, s.c, s.b)
				}
				s.sees(s.send(s.server, s.b, s.c, 0), s.client, s.vip, s.c)
			})
		})
	}
}

func TestFlowsThroughTheHostsStackAnswerThroughIt(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		outside := end(External(1, v6), 5000)
		s.sees(s.receive(s.server, outside, s.b, syn), s.server, outside, s.b)
		s.left(s.send(s.server, s.b, outside, syn|ack), s.b, outside)
		f := s.flow(outside, s.b)
		if via := f.Entry.Flags&bpfgen.CTViaStack != 0; via == net.InPod {
			t.Errorf("marked as through the stack: %v", via)
		}
		if net.InPod {
			return
		}
		// A local pod whose packets came through the stack too, by a user's own rule.
		s.sees(s.receive(s.server, s.c, s.b, syn), s.server, s.c, s.b)
		if a := s.send(s.server, s.b, s.c, syn|ack); a.Direct || a.Pod != s.client.ID {
			t.Errorf("the answer: %v, want through the kernel", a)
		}
	})
}

func TestFlowToAnotherNodeGoesToTheKernel(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		remote := end(External(3, v6), 8080)
		net.SetService(t, s.proto, s.vip, remote)
		s.left(s.send(s.client, s.c, s.vip, syn), s.c, remote)
		s.sees(s.receive(s.client, remote, s.c, syn|ack), s.client, s.vip, s.c)
		s.left(s.send(s.client, s.c, s.vip, ack), s.c, remote)
		s.wantFlow(s.c, remote, bpfgen.CTPostNAT, true, 86400)
		s.sees(s.receive(s.client, remote, s.c, ack), s.client, s.vip, s.c)
	})
}

func TestCountersNameBothEnds(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		frame := s.packet(s.client, s.c, s.vip, syn).Frame()
		s.sees(s.send(s.client, s.c, s.vip, syn), s.server, s.c, s.b)
		from, to := net.Counters(t, s.client).FromPod, net.Counters(t, s.server).ToPod
		if from.Packets != 1 || from.Bytes != uint64(len(frame)) || to != from {
			t.Errorf("sent %+v, received %+v, want one of %d bytes each", from, to, len(frame))
		}
		other := net.Counters(t, s.client).ToPod.Packets + net.Counters(t, s.server).FromPod.Packets
		if other != 0 {
			t.Errorf("%d packets counted the wrong way", other)
		}
	})
}
