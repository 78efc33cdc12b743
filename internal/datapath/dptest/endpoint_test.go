// SPDX-License-Identifier: Apache-2.0

// Endpoints: who may send what, and what happens to flows when one changes.

package dptest

import (
	"bytes"
	"net/netip"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

func TestAPodSendsFromItsOwnAddressesOnly(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.UDP)
		linkLocal, unspecified := netip.MustParseAddr("169.254.1.1"), netip.IPv4Unspecified()
		want := uint32(bpfgen.ReasonSpoofedAddress)
		if v6 {
			linkLocal, unspecified = netip.MustParseAddr("fe80::1"), netip.IPv6Unspecified()
			if net.InPod {
				want = bpfgen.ReasonNone
			}
		}
		for _, c := range []struct {
			name string
			src  netip.Addr
			want uint32
		}{
			{"its own", s.client.IP(v6), bpfgen.ReasonNone},
			{"another pod's", s.server.IP(v6), bpfgen.ReasonSpoofedAddress},
			{"a Service's", s.vip.Addr(), bpfgen.ReasonSpoofedAddress},
			{"an outsider's", External(1, v6), bpfgen.ReasonSpoofedAddress},
			{"unspecified", unspecified, bpfgen.ReasonSpoofedAddress},
			{"link-local", linkLocal, want},
		} {
			frame := Eth(s.client.MAC, s.client.NodeMAC).IP(c.src, s.b.Addr()).UDP(1, 2).Frame()
			r, err := net.FromPod(s.client, frame)
			check(t, err)
			if r.Reason != c.want {
				t.Errorf("%s address: %v", c.name, r)
			}
		}
	})
}

// No router lets a packet from a link-local address through, which may be its neighbour's, or the node's.
func TestALinkLocalAddressStaysOnTheLink(t *testing.T) {
	onWire(t)
	n := newWireNode(t, false, false)
	s := newScene(t, n.Network, true, oracle.TCP)
	on, open := end(netip.MustParseAddr("fe80::1"), 1000), end(VIP(3, true), 80)
	n.SetService(t, oracle.TCP, open, s.b)
	for _, flags := range []uint8{syn, ack} {
		for what, to := range map[string]netip.AddrPort{
			"a pod": s.b, "another node's pod": end(farPod(9, true), 80), "a Service": s.vip, "a port that it does not have": end(s.vip.Addr(), 81),
		} {
			s.dropped(s.send(s.client, on, to, flags), bpfgen.ReasonSpoofedAddress)
			if flows := n.Flows(t); len(flows) != 0 {
				t.Errorf("%s: %v", what, flows)
			}
		}
	}
	e := s.packet(s.server, on, s.b, ack) // none that it has sent
	s.dropped(s.sent(s.client, Eth(s.client.MAC, s.client.NodeMAC).IP(on.Addr(), s.b.Addr()).ICMP(1, 4, 0).Data(quote(e, 60))), bpfgen.ReasonSpoofedAddress)
	s.left(s.send(s.client, on, end(netip.MustParseAddr("fe80::9"), 80), syn), on, end(netip.MustParseAddr("fe80::9"), 80))
	s.left(s.send(s.client, on, end(wireAddr(1, true), 80), syn), on, end(wireAddr(1, true), 80))
	s.sees(s.checked(n.Send(s.client, Eth(s.client.MAC, s.server.MAC).IP(on.Addr(), s.b.Addr()).TCP(1000, 8080, syn).Frame())), s.server, on, s.b)
}

func TestAPodWithoutIPv6DoesNotSendFromTheUnspecifiedAddress(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, _ bool) {
		p := NewPod(4)
		p.IP6 = netip.Addr{}
		net.SetPod(t, p)
		frame := Eth(p.MAC, p.NodeMAC).IP(netip.IPv6Unspecified(), NewPod(2).IP6).UDP(1, 2).Frame()
		r, err := net.FromPod(p, frame)
		check(t, err)
		if r.Reason != bpfgen.ReasonSpoofedAddress {
			t.Errorf("%v", r)
		}
	})
}

func TestAPodSendsFromItsOwnMACOnly(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.UDP)
		arp := Eth(s.server.MAC, s.client.NodeMAC).Raw(0x0806, make([]byte, 28))
		ip := Eth(s.server.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.b.Addr()).UDP(1, 2).Frame()
		for _, frame := range [][]byte{arp, ip} {
			r, err := net.FromPod(s.client, frame)
			check(t, err)
			if r.Reason != bpfgen.ReasonSpoofedMAC {
				t.Errorf("%v", r)
			}
		}
		if n := net.Drops(t, bpfgen.ReasonSpoofedMAC, bpfgen.DirFromPod); n != 2 {
			t.Errorf("%d counted, want 2", n)
		}
	})
}

// What a neighbour advertisement speaks of is its sender's, as what an ARP packet does: on a bridge others believe it.
func TestAPodAdvertisesItsOwnAddressesOnly(t *testing.T) {
	for _, inPod := range []bool{false, true} {
		net := usualNetwork(t, way{inPod: inPod})
		p, other, all := net.Pods[1], net.Pods[2], netip.MustParseAddr("ff02::1")
		for target, passes := range map[netip.Addr]bool{
			p.IP6: true, netip.MustParseAddr("fe80::1"): true, other.IP6: false, External(1, true): false, netip.IPv6Unspecified(): false,
		} {
			for _, packet := range []*Packet{Eth(p.MAC, other.MAC).IP(p.IP6, other.IP6), Eth(p.MAC, all6).IP(p.IP6, all), Eth(p.MAC, all6).IP(p.IP6, all).Ext(oracle.DestOpts, 8)} {
				frame := packet.ICMP(136, 0, 0x60000000).Data(target.AsSlice()).Byte(hopLimitAt, 255).Frame()
				r, err := net.FromPod(p, frame)
				if check(t, err); (r.Verdict == Next) != passes || !passes && r.Reason != bpfgen.ReasonSpoofedAddress {
					t.Errorf("of %v: %v", target, r)
				}
			}
		}
		r, err := net.FromPod(p, Eth(p.MAC, all6).IP(p.IP6, all).ICMP(136, 0, 0x60000000).Payload(8).Frame())
		if check(t, err); r.Verdict != Drop {
			t.Errorf("of half an address: %v", r)
		}
	}
}

var all6 = [6]byte{0x33, 0x33, 0, 0, 0, 1}

func TestControlPacketsAreTheKernels(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		p, to := net.Pods[1], net.Pods[2]
		eth := func() *Packet { return Eth(p.MAC, p.NodeMAC) }
		frames := map[string][]byte{"arp": eth().Raw(0x0806, make([]byte, 28))}
		if v6 {
			group, all := netip.MustParseAddr("ff02::1:ff00:2"), netip.MustParseAddr("ff02::1")
			frames["neighbour solicitation"] = eth().IP(p.IP6, group).ICMP(135, 0, 0).Payload(24).Frame()
			frames["duplicate address detection"] = eth().IP(netip.IPv6Unspecified(), group).ICMP(135, 0, 0).Payload(16).Frame()
			frames["neighbour advertisement"] = eth().IP(p.IP6, to.IP6).ICMP(136, 0, 0).Data(p.IP6.AsSlice()).Byte(hopLimitAt, 255).Frame()
			frames["router solicitation"] = eth().IP(p.IP6, all).ICMP(133, 0, 0).Frame()
			frames["listener report"] = eth().IP(p.IP6, all).Ext(oracle.HopByHop, 8).ICMP(143, 0, 0).Frame()
			frames["multicast datagram"] = eth().IP(p.IP6, all).UDP(1, 2).Frame()
		} else {
			group := netip.MustParseAddr("224.0.0.251")
			frames["igmp"] = eth().IP(p.IP4, group).Proto(2).Payload(8).Frame()
			frames["multicast datagram"] = eth().IP(p.IP4, group).UDP(1, 2).Frame()
			frames["broadcast"] = eth().IP(p.IP4, netip.MustParseAddr("255.255.255.255")).UDP(68, 67).Frame()
		}
		for name, frame := range frames {
			for dir, run := range map[string]func(Pod, []byte) (Result, error){"from": net.FromPod, "to": net.ToPod} {
				r, err := run(p, frame)
				check(t, err)
				if r.Verdict != Next || string(r.Packet) != string(frame) {
					t.Errorf("%s, %s pod: %v", name, dir, r)
				}
			}
		}
		if n := len(net.Flows(t)); n != 0 {
			t.Errorf("%d flow entries, want none", n)
		}
	})
}

func TestAnUnknownEndpointsPacketsAreDropped(t *testing.T) {
	eachHook(t, func(t *testing.T, h hook) {
		frame := start(false).UDP(1, 2).Frame()
		for i, id := range []uint32{0, 9, 4095, 4096, 1 << 31} {
			r, err := h.net.Run(h.prog, frame, Context{Endpoint: id})
			check(t, err)
			if r.Verdict != Drop || r.Reason != bpfgen.ReasonNoEndpoint {
				t.Errorf("endpoint %d: %v", id, r)
			}
			if n := h.net.Drops(t, bpfgen.ReasonNoEndpoint, h.dir); n != uint64(i+1) {
				t.Errorf("%d counted, want %d", n, i+1)
			}
		}
	})
}

// both runs a test on a direct and on a translated flow that is open.
func both(t *testing.T, f func(t *testing.T, s scene, to netip.AddrPort)) {
	for name, direct := range map[string]bool{"direct": true, "translated": false} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, oracle.TCP)
				to := s.vip
				if direct {
					to = s.b
				}
				s.open(to, s.b)
				f(t, s, to)
			})
		})
	}
}

func TestFlowsGoOnWhenAnEndpointIsJudgedAgain(t *testing.T) {
	both(t, func(t *testing.T, s scene, to netip.AddrPort) {
		before := s.flow(s.c, s.b).Entry.Responder.Generation
		s.net.SetPod(t, s.server)
		s.talk(to, s.c, s.b)
		if after := s.flow(s.c, s.b).Entry.Responder.Generation; after <= before && !s.net.InPod {
			t.Errorf("generation %d, was %d", after, before)
		}
		s.net.SetPod(t, s.client)
		s.talk(to, s.c, s.b)
	})
}

func TestFlowsFollowAnEndpointToAnotherID(t *testing.T) {
	both(t, func(t *testing.T, s scene, to netip.AddrPort) {
		for _, old := range []Pod{s.server, s.client} {
			moved := old
			moved.ID, moved.Ifindex = old.ID+100, old.Ifindex+100
			s.net.RemovePod(t, old)
			s.net.SetPod(t, moved)
			delete(s.net.Pods, old.ID)
			s.net.Pods[moved.ID] = moved
			if old.ID == s.server.ID {
				s.server = moved
			} else {
				s.client = moved
			}
			s.talk(to, s.c, s.b)
		}
	})
}

func TestPacketsToAPodThatIsGoneGoToTheKernel(t *testing.T) {
	both(t, func(t *testing.T, s scene, to netip.AddrPort) {
		s.net.RemovePod(t, s.server)
		r, err := s.net.FromPod(s.client, s.packet(s.client, s.c, to, ack).Frame())
		check(t, err)
		if h, _ := oracle.Parse(r.Packet); r.Verdict != Next || h.Dst != s.b.Addr() {
			t.Errorf("%v, to %v", r, h.Dst)
		}
		s.dropped(s.send(s.server, s.b, s.c, ack), bpfgen.ReasonNoEndpoint)
	})
}

func TestAnotherPodWithTheSameIDGetsNothingOfTheOldFlows(t *testing.T) {
	both(t, func(t *testing.T, s scene, to netip.AddrPort) {
		s.net.RemovePod(t, s.server)
		stranger := NewPod(50)
		stranger.ID, stranger.Ifindex = s.server.ID, s.server.Ifindex
		s.net.SetPod(t, stranger)
		r, err := s.net.FromPod(s.client, s.packet(s.client, s.c, to, ack).Frame())
		check(t, err)
		if r.Verdict != Next {
			t.Errorf("%v, want the kernel's routing to decide", r)
		}
		s.net.RemovePod(t, s.client)
		other := NewPod(51)
		other.ID, other.Ifindex = s.client.ID, s.client.Ifindex
		s.net.SetPod(t, other)
		s.net.SetPod(t, Pod{ID: 9, IP4: s.server.IP4, IP6: s.server.IP6, MAC: s.server.MAC, Ifindex: 9, MTU: 1500})
		r, err = s.net.Run(s.net.PodPrograms.FromPod, s.packet(s.server, s.b, s.c, ack).Frame(), Context{Endpoint: 9})
		check(t, err)
		if r.Verdict != Next {
			t.Errorf("%v, want the kernel's routing to decide", r)
		}
	})
}

func TestHairpinShowsThePodTheServicesAddress(t *testing.T) {
	for name, proto := range map[string]uint8{"tcp": oracle.TCP, "udp": oracle.UDP, "sctp": oracle.SCTP} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, proto)
				own := end(s.client.IP(v6), 8080)
				net.SetService(t, proto, s.vip, own)
				seen := end(s.vip.Addr(), s.c.Port())
				for _, flags := range []uint8{syn, ack, ack} {
					a := s.send(s.client, s.c, s.vip, flags)
					s.sees(a, s.client, seen, own)
					if !a.Direct {
						t.Errorf("%v, want redirected", a)
					}
					s.sees(s.send(s.client, own, seen, flags|ack), s.client, s.vip, s.c)
				}
				s.wantFlow(seen, own, bpfgen.CTPostNAT, true, map[uint8]int{oracle.TCP: 86400, oracle.UDP: 180, oracle.SCTP: 180}[proto])
			})
		})
	}
}

// The Service's port, the backend's and the source port all the same, as with
// SIP or IKE: both halves would sort to one key.
func TestHairpinWithOnePortEverywhere(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.UDP)
		vip, own := end(VIP(2, v6), 5060), end(s.client.IP(v6), 5060)
		net.SetService(t, s.proto, vip, own)
		a := s.send(s.client, own, vip, 0)
		seen := a.Tuple().Src
		s.sees(a, s.client, end(vip.Addr(), seen.Port()), own)
		s.sees(s.send(s.client, own, seen, 0), s.client, vip, own)
	})
}

func TestHairpinInsideThePodGoesBackIntoItsInterface(t *testing.T) {
	runtime.LockOSThread() // and never unlocked: the thread ends with the test
	ns, err := netns.New()
	check(t, err)
	defer ns.Close()
	check(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0", Index: 42}, PeerName: "peer"}))
	net := NewNetwork(t, Options{InPod: true}, 1)
	s := speaker{t, net, oracle.TCP}
	p := net.Pods[1]
	vip := end(VIP(1, false), 80)
	net.SetService(t, s.proto, vip, end(p.IP4, 8080))
	frame := s.packet(p, end(p.IP4, 1000), vip, syn).Frame()
	r, err := net.Run(net.PodPrograms.FromPod, frame, Context{Endpoint: p.ID, Ifindex: 42})
	check(t, err)
	if r.Verdict != Redirect || r.RedirectKind != bpfgen.RedirectIngress || r.RedirectIfindex != 42 {
		t.Errorf("%v, want back into interface 42", r)
	}
	if [6]byte(r.Packet) != p.MAC {
		t.Errorf("to %x, want the pod's own address", r.Packet[:6])
	}
}

// A broadcast to a network is for all there: each pod is asked about by itself, and what is sent next goes to all
// again, whoever has had the first.
func TestABroadcastLeadsItsFlowToNobody(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		if v6 {
			return // it has none
		}
		from := net.Pods[1]
		frame := Eth(from.MAC, [6]byte{255, 255, 255, 255, 255, 255}).IP(from.IP4, netip.MustParseAddr("10.9.255.255")).UDP(4000, 137).Payload(24).Frame()
		for range 3 {
			r, err := net.Run(net.PodPrograms.FromPod, frame, Context{Endpoint: from.ID})
			check(t, err)
			if r.Verdict != Next || !bytes.Equal(r.Packet, frame) {
				t.Fatalf("sent: %v to %x", r, r.Packet[:6])
			}
			for _, to := range []Pod{net.Pods[2], net.Pods[3]} {
				r, err := net.Run(net.PodPrograms.ToPod, frame, Context{Endpoint: to.ID})
				check(t, err)
				if r.Verdict != Next {
					t.Errorf("at %s: %v", to.IP4, r)
				}
			}
		}
	})
}
