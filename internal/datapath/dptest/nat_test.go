// SPDX-License-Identifier: Apache-2.0

// Translating packets: checksums, sizes, fragments, ICMP errors, refusals.

package dptest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

func TestTranslationKeepsWhatTheChecksumsSay(t *testing.T) {
	good, bad, none := oracle.SumGood, oracle.SumBad, oracle.SumNone
	for _, c := range []struct {
		name   string
		proto  uint8
		change func(*Packet) *Packet
		ip, l4 oracle.SumState
	}{
		{"tcp good", oracle.TCP, func(p *Packet) *Packet { return p }, good, good},
		{"tcp bad", oracle.TCP, (*Packet).BadSum, good, bad},
		{"tcp zero", oracle.TCP, (*Packet).NoSum, good, bad},
		{"udp good", oracle.UDP, func(p *Packet) *Packet { return p }, good, good},
		{"udp bad", oracle.UDP, (*Packet).BadSum, good, bad},
		{"udp none", oracle.UDP, (*Packet).NoSum, good, none},
		{"sctp good", oracle.SCTP, func(p *Packet) *Packet { return p }, good, good},
		{"sctp bad", oracle.SCTP, (*Packet).BadSum, good, bad},
		{"sctp the device's", oracle.SCTP, (*Packet).NoSum, good, none},
		{"header bad", oracle.UDP, (*Packet).BadIPSum, bad, good},
		{"odd length", oracle.TCP, func(p *Packet) *Packet { return p.Payload(33) }, good, good},
		{"sctp, padded", oracle.SCTP, func(p *Packet) *Packet { return p.Payload(1).Pad(9) }, good, good},
		{"options", oracle.TCP, func(p *Packet) *Packet {
			if p.v6 {
				return p.Ext(oracle.HopByHop, 8)
			}
			return p.Options(make([]byte, 12))
		}, good, good},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, c.proto)
				wantIP := c.ip
				if v6 {
					wantIP = oracle.SumNone
				}
				for name, a := range map[string]Arrival{
					"there": s.sent(s.client, c.change(s.packet(s.client, s.c, s.vip, syn))),
					"back":  s.sent(s.server, c.change(s.packet(s.server, s.b, s.c, syn|ack))),
				} {
					ip, l4 := oracle.Sums(a.Frame, a.Headers)
					if a.Dropped != "" || ip != wantIP || l4 != c.l4 {
						t.Errorf("%s: %v, checksums %v %v, want %v %v", name, a, ip, l4, wantIP, c.l4)
					}
				}
			})
		})
	}
}

// sent sends a packet whose checksums the caller looks at.
func (s speaker) sent(p Pod, packet *Packet) Arrival {
	s.t.Helper()
	a, err := s.net.Send(p, packet.Frame())
	check(s.t, err)
	return a
}

// A UDP checksum that comes out as zero must be written as all ones (RFC 768).
func TestAUDPChecksumNeverBecomesNone(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.UDP)
		for word := range 65536 {
			data := binary.BigEndian.AppendUint16(nil, uint16(word))
			after := Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.b.Addr()).UDP(s.c.Port(), s.b.Port()).Data(data).Frame()
			if sum := after[len(after)-4:]; sum[0] != 0xff || sum[1] != 0xff {
				continue
			}
			a := s.sent(s.client, Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.vip.Addr()).UDP(s.c.Port(), s.vip.Port()).Data(data))
			if _, l4 := oracle.Sums(a.Frame, a.Headers); l4 != oracle.SumGood {
				t.Errorf("%v, checksum %v", a, l4)
			}
			return
		}
		t.Fatal("no data gives that checksum")
	})
}

func TestPacketsOverTheMTUAreTheKernels(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		s.open(s.vip, s.b)
		head := len(s.packet(s.client, s.c, s.vip, ack).Payload(0).Frame()) - 14
		for _, c := range []struct {
			name   string
			length int
			gso    uint32
			direct bool
		}{{"just fits", 1500, 0, true}, {"one too long", 1501, 0, false}, {"a bundle", 3000, 1400, true}} {
			frame := s.packet(s.client, s.c, s.vip, ack).Payload(c.length - head).Frame()
			r, err := net.Run(net.PodPrograms.FromPod, frame, Context{Endpoint: s.client.ID, GSOSize: c.gso, GSOSegs: 7})
			check(t, err)
			h, _ := oracle.Parse(r.Packet)
			if h.Dst != s.b.Addr() {
				t.Errorf("%s: to %v, want translated", c.name, h.Dst)
			}
			handed := r.Verdict == Redirect
			if net.InPod { // there, a sibling's link address is what makes the way direct
				handed = [6]byte(r.Packet) == s.server.MAC
			}
			if handed != c.direct {
				t.Errorf("%s: %v, want handed over: %v", c.name, r, c.direct)
			}
		}
	})
}

// fragments cuts a datagram of the flow into three.
func (s scene) fragments(p Pod, tuple Tuple, id uint32) [][]byte {
	whole := s.packet(p, tuple.Src, tuple.Dst, 0).Payload(64).Frame()
	h, _ := oracle.Parse(whole)
	datagram := whole[h.L4:h.End]
	var out [][]byte
	for off := 0; off < len(datagram); off += 24 {
		rest := datagram[off:min(off+24, len(datagram))]
		b := Eth(p.MAC, p.NodeMAC).IP(tuple.Src.Addr(), tuple.Dst.Addr())
		out = append(out, b.Fragment(off, off+24 < len(datagram), id).Proto(s.proto).Data(rest).Frame())
	}
	return out
}

func TestFragmentsFollowTheirFirst(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.UDP)
		for _, way := range []struct {
			from  Pod
			tuple Tuple
			seen  Tuple
			at    Pod
		}{
			{s.client, Tuple{s.proto, s.c, s.vip}, Tuple{s.proto, s.c, s.b}, s.server},
			{s.server, Tuple{s.proto, s.b, s.c}, Tuple{s.proto, s.vip, s.c}, s.client},
		} {
			var datagram []byte
			for i, frame := range s.fragments(way.from, way.tuple, 77) {
				a, err := net.Send(way.from, frame)
				check(t, err)
				if a.Pod != way.at.ID || a.Headers.Src != way.seen.Src.Addr() || a.Headers.Dst != way.seen.Dst.Addr() {
					t.Fatalf("fragment %d: %v, want %v", i, a, way.seen)
				}
				datagram = append(datagram, a.Frame[a.Headers.L4:a.Headers.End]...)
			}
			whole := Eth(way.from.MAC, way.at.MAC).IP(way.seen.Src.Addr(), way.seen.Dst.Addr()).Proto(s.proto).Data(datagram).Frame()
			h, fault := oracle.Parse(whole)
			if _, l4 := oracle.Sums(whole, h); fault != "" || l4 != oracle.SumGood || TupleOf(h) != way.seen {
				t.Errorf("put together: %v %q, checksum %v", TupleOf(h), fault, l4)
			}
		}
	})
}

func TestFragmentsWithoutTheirFirstAreDropped(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.UDP)
		there := Tuple{s.proto, s.c, s.vip}
		frames := s.fragments(s.client, there, 78)
		for _, i := range []int{1, 2} {
			a, err := net.Send(s.client, frames[i])
			check(t, err)
			s.dropped(a, bpfgen.ReasonFragNoFirst)
		}
		a, err := net.Send(s.client, frames[0])
		check(t, err)
		if a.Dropped != "" {
			t.Fatal(a)
		}
		net.Age(t, bpfgen.FragLifetime+1)
		a, err = net.Send(s.client, frames[1])
		check(t, err)
		s.dropped(a, bpfgen.ReasonFragNoFirst)
		other := s.fragments(s.client, there, 79)
		a, err = net.Send(s.client, other[1])
		check(t, err)
		s.dropped(a, bpfgen.ReasonFragNoFirst)
	})
}

// The pod puts a datagram together when its first fragment has come too: what overtook that one may
// wait there, but not where policy isolates the pod.
func TestAFragmentThatOvertookItsFirstWaitsInThePod(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.UDP)
		src := netip.AddrPortFrom(External(1, v6), 4000)
		sender := Pod{MAC: s.server.NodeMAC, NodeMAC: s.server.MAC}
		frames := s.fragments(sender, Tuple{s.proto, src, s.b}, 80)
		for _, i := range []int{2, 0, 1} {
			a, err := net.Receive(s.server, frames[i])
			check(t, err)
			if a.Pod != s.server.ID || !bytes.Equal(a.Frame, frames[i]) {
				t.Errorf("fragment %d: %v", i, a)
			}
		}
		check(t, net.MstPoliciesV1.Put(s.server.ID, bpfgen.PodEndpointPolicy{Ingress: 7}))
		t.Cleanup(func() { check(t, net.MstPoliciesV1.Put(s.server.ID, bpfgen.PodEndpointPolicy{})) })
		a, err := net.Receive(s.server, s.fragments(sender, Tuple{s.proto, src, s.b}, 81)[2])
		check(t, err)
		s.dropped(a, bpfgen.ReasonFragNoFirst)
	})
}

// RFC 8200 4.5: a later fragment names the first header of the part that was
// cut up, which need not be the transport's.
func TestIPv6FragmentsWithOptionsInsideFollowTheirFirst(t *testing.T) {
	for name, inPod := range map[string]bool{"host": false, "inner": true} {
		t.Run(name, func(t *testing.T) {
			net := usualNetwork(t, way{inPod: inPod})
			s := newScene(t, net, true, oracle.UDP)
			base := func() *Packet { return Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.vip.Addr()) }
			first := base().Fragment(0, true, 5).Ext(oracle.DestOpts, 8).UDP(s.c.Port(), s.vip.Port()).Payload(8).UDPLen(40)
			later := base().Fragment(24, false, 5).Proto(oracle.DestOpts).Payload(24)
			for i, p := range []*Packet{first, later} {
				if a := s.sent(s.client, p); a.Pod != s.server.ID || a.Headers.Dst != s.b.Addr() {
					t.Errorf("fragment %d: %v", i, a)
				}
			}
		})
	}
}

// quote is the start of a packet, as an ICMP error carries it.
func quote(p *Packet, length int) []byte {
	frame := p.Frame()
	return frame[14:min(14+length, len(frame))]
}

func TestICMPErrorsSpeakOfWhatTheirReceiverKnows(t *testing.T) {
	for name, proto := range map[string]uint8{"tcp": oracle.TCP, "udp": oracle.UDP, "sctp": oracle.SCTP} {
		for _, length := range []int{28, 60, 500, 1000} {
			t.Run(fmt.Sprintf("%s_%d", name, length), func(t *testing.T) {
				eachWay(t, func(t *testing.T, net *Network, v6 bool) {
					s := newScene(t, net, v6, proto)
					quoted := length
					kind, code := uint8(3), uint8(3)
					if v6 {
						quoted += 20
						kind, code = 1, 4
					}
					s.open(s.vip, s.b)
					there := s.packet(s.server, s.c, s.b, ack).Payload(600)
					e := Eth(s.server.MAC, s.server.NodeMAC).IP(s.b.Addr(), s.c.Addr()).ICMP(kind, code, 0).Data(quote(there, quoted))
					a := s.checked(net.Send(s.server, e.Frame()))
					s.quotes(a, s.client, Tuple{proto, s.c, s.vip}, s.vip.Addr().String())

					back := s.packet(s.client, s.vip, s.c, ack).Payload(600)
					e = Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.vip.Addr()).ICMP(kind, code, 0).Data(quote(back, quoted))
					a = s.checked(net.Send(s.client, e.Frame()))
					s.quotes(a, s.server, Tuple{proto, s.b, s.c}, s.c.Addr().String())

					router := External(9, v6)
					e = Eth(Router, s.client.MAC).IP(router, s.c.Addr()).ICMP(kind, code, 0).Data(quote(there, quoted))
					a = s.checked(net.Receive(s.client, e.Frame()))
					s.quotes(a, s.client, Tuple{proto, s.c, s.vip}, router.String())
				})
			})
		}
	}
}

// Policy may have changed since: what an error is about was judged on its way, by one half, and the error finds the other.
func TestICMPErrorsPassAfterAnEndHasChanged(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		kind, code := uint8(3), uint8(3)
		if v6 {
			kind, code = 1, 4
		}
		for _, changed := range []func(s scene) Pod{func(s scene) Pod { return s.client }, func(s scene) Pod { return s.server }} {
			s := newScene(t, net, v6, oracle.UDP)
			s.open(s.vip, s.b)
			fails := func(what string, drop bool) {
				t.Helper()
				there := s.packet(s.server, s.c, s.b, 0)
				a, err := net.Send(s.server, Eth(s.server.MAC, s.server.NodeMAC).IP(s.b.Addr(), s.c.Addr()).ICMP(kind, code, 0).Data(quote(there, 60)).Frame())
				check(t, err)
				router, err := net.Receive(s.client, Eth(Router, s.client.MAC).IP(External(9, v6), s.c.Addr()).ICMP(kind, code, 0).Data(quote(there, 60)).Frame())
				check(t, err)
				if drop && (a.Dropped != ReasonName(bpfgen.ReasonICMPErrorFlow) || router.Dropped != a.Dropped) {
					t.Errorf("%s: %v; from a router: %v", what, a, router)
				}
				if !drop {
					s.quotes(s.checked(a, nil), s.client, Tuple{s.proto, s.c, s.vip}, s.vip.Addr().String())
					s.quotes(s.checked(router, nil), s.client, Tuple{s.proto, s.c, s.vip}, External(9, v6).String())
				}
			}
			fails("as it was judged", false)
			net.SetPod(t, changed(s))
			fails("before a packet", true)
			s.sees(s.send(s.client, s.c, s.vip, 0), s.server, s.c, s.b)
			fails("after a packet", false)
			back := s.packet(s.client, s.vip, s.c, 0)
			net.SetPod(t, changed(s))
			s.sees(s.send(s.server, s.b, s.c, 0), s.client, s.vip, s.c)
			a, err := net.Send(s.client, Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.vip.Addr()).ICMP(kind, code, 0).Data(quote(back, 60)).Frame())
			s.quotes(s.checked(a, err), s.server, Tuple{s.proto, s.b, s.c}, s.c.Addr().String())
		}
	})
}

// quotes fails unless an ICMP error came to pod, from that address, about that tuple.
func (s scene) quotes(a Arrival, pod Pod, about Tuple, from string) {
	s.t.Helper()
	if a.Pod != pod.ID || a.Headers.Src.String() != from {
		s.t.Fatalf("%v, want at pod %d from %s", a, pod.ID, from)
	}
	inner := append(make([]byte, 12, 14), 0x08, 0x00)
	if a.Headers.V6 {
		inner = append(inner[:12], 0x86, 0xdd)
	}
	body := a.Frame[a.Headers.L4+8 : a.Headers.End]
	// A quote that is cut short is made long enough for the parser, which then
	// may stumble over what comes after the ports.
	inner = append(append(inner, body...), make([]byte, 2000)...)
	h, _ := oracle.Parse(inner)
	if TupleOf(h) != about {
		s.t.Errorf("about %v, want %v", TupleOf(h), about)
	}
	if whole := h.End <= 14+len(body); whole && s.proto != oracle.SCTP { // whose quotes keep theirs
		if _, l4 := oracle.Sums(inner, h); l4 != oracle.SumGood {
			s.t.Errorf("the quoted packet's checksum is %v", l4)
		}
	}
	if !h.V6 && oracle.Sum(body[:20]) != 0 {
		s.t.Error("the quoted header's checksum is wrong")
	}
}

func TestAnICMPErrorAboutNoFlowIsDropped(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.UDP)
		about := s.packet(s.server, s.c, s.b, 0)
		e := Eth(s.server.MAC, s.server.NodeMAC).IP(s.b.Addr(), s.c.Addr()).ICMP(1, 4, 0)
		if !v6 {
			e.ICMP(3, 3, 0)
		}
		s.dropped(s.sent(s.server, e.Data(quote(about, 100))), bpfgen.ReasonICMPErrorFlow)
	})
}

func TestARefusalTellsTheSender(t *testing.T) {
	for name, reason := range map[string]uint32{"no_backend": bpfgen.ReasonNoBackend, "service_port": bpfgen.ReasonServicePort} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				for _, proto := range []uint8{oracle.TCP, oracle.UDP, oracle.SCTP} {
					s := newScene(t, net, v6, proto)
					to := end(VIP(4, v6), 80)
					net.SetService(t, proto, to)
					if reason == bpfgen.ReasonServicePort {
						to = end(to.Addr(), 81)
					}
					before := net.Drops(t, reason, bpfgen.DirFromPod)
					a := s.send(s.client, s.c, to, syn)
					s.dropped(a, reason)
					if n := net.Drops(t, reason, bpfgen.DirFromPod); n != before+1 {
						t.Errorf("%d counted, want %d", n, before+1)
					}
					s.refused(a, to.String(), s.c.String())
				}
				if n := len(net.Flows(t)); n != 0 {
					t.Errorf("%d flow entries, want none", n)
				}
			})
		})
	}
}

// refused fails unless the frame is an answer that ends the attempt.
func (s scene) refused(a Arrival, from, to string) {
	s.t.Helper()
	if !a.Refused {
		s.t.Fatalf("%v, want an answer", a)
	}
	if _, l4 := oracle.Sums(a.Frame, a.Headers); l4 != oracle.SumGood {
		s.t.Errorf("the answer's checksum is %v", l4)
	}
	if s.proto == oracle.UDP {
		if !a.Headers.Error || a.Headers.Dst != s.c.Addr() {
			s.t.Errorf("answer %v, want an ICMP error to %s", a.Tuple(), to)
		}
		return
	}
	if s.proto == oracle.SCTP {
		s.aborted(a, from, to)
		return
	}
	tuple := a.Tuple()
	if tuple.Src.String() != from || tuple.Dst.String() != to || a.Headers.Flags != rst|ack {
		s.t.Errorf("answer %v flags %#x, want a reset from %s to %s", tuple, a.Headers.Flags, from, to)
	}
	// Acknowledges the SYN and what came with it: sequence 1, 24 bytes of data.
	if got := binary.BigEndian.Uint32(a.Frame[a.Headers.L4+8:]); got != 1+1+24 {
		s.t.Errorf("acknowledges %d, want 26", got)
	}
}

func TestAFragmentOrAnEchoIsRefusedInSilence(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.UDP)
		to := end(VIP(4, v6), 80)
		net.SetService(t, s.proto, to)
		for _, p := range []*Packet{
			Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), to.Addr()).Fragment(0, true, 9).UDP(1, 80).Payload(24),
			Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), to.Addr()).Echo(80, false),
		} {
			if a := s.sent(s.client, p); a.Dropped == "" || a.Refused {
				t.Errorf("%v, answered %v", a, a.Refused)
			}
		}
	})
}

func TestRefusalsAreLimited(t *testing.T) {
	net := usualNetwork(t, way{})
	s := newScene(t, net, false, oracle.TCP)
	to := end(VIP(4, false), 80)
	net.SetService(t, s.proto, to)
	answers := 0
	const tries = 20000
	for range tries {
		if s.sent(s.client, s.packet(s.client, s.c, to, syn)).Refused {
			answers++
		}
	}
	if answers == 0 || answers == tries {
		t.Errorf("%d of %d answered", answers, tries)
	}
	if n := net.Drops(t, bpfgen.ReasonNoBackend, bpfgen.DirFromPod); n != tries {
		t.Errorf("%d counted, want %d", n, tries)
	}
	if a := s.sent(s.server, s.packet(s.server, s.b, to, syn)); !a.Refused {
		t.Errorf("another pod's, %v, is not answered", a)
	}
}

func TestAFloodOfHalfOpenFlowsLeavesTheEstablishedAlone(t *testing.T) {
	net := NewNetwork(t, Options{}, 4)
	s := newScene(t, net, false, oracle.TCP)
	s.open(s.vip, s.b)
	for i := range 50_000 {
		src := end(External(1+i/50_000, false), uint16(10_000+i))
		frame := Eth(Router, s.server.MAC).IP(src.Addr(), s.b.Addr()).TCP(src.Port(), s.b.Port()+uint16(i/50_000), syn).Frame()
		if a, err := net.Receive(s.server, frame); err != nil || a.Dropped != "" {
			t.Fatalf("SYN %d: %v %v", i, a, err)
		}
	}
	s.talk(s.vip, s.c, s.b)
	s.wantFlow(s.c, s.vip, bpfgen.CTPreNAT, true, 86400)
	s.wantFlow(s.c, s.b, bpfgen.CTPostNAT, true, 86400)
	open := 0
	for _, f := range net.Flows(t) {
		if !f.Established {
			open++
		}
	}
	if open < 8000 {
		t.Errorf("only %d half-open flows are held", open)
	}
}

func TestAFullFlowTableIsACountedDrop(t *testing.T) {
	// The real tables evict and never refuse; a plain one shows the way out.
	net := NewNetwork(t, Options{
		Sizes: map[string]uint32{"mst_ct_new_v1": 1},
		Types: map[string]ebpf.MapType{"mst_ct_new_v1": ebpf.Hash},
	}, 4)
	net.fillNear(t)
	s := newScene(t, net, false, oracle.TCP)
	s.dropped(s.send(s.client, s.c, s.vip, syn), bpfgen.ReasonCTFull) // it needs two
	net.ClearFlows(t)
	s.sees(s.send(s.client, s.c, s.b, syn), s.server, s.c, s.b)
	s.dropped(s.send(s.client, end(s.c.Addr(), 2000), s.b, syn), bpfgen.ReasonCTFull)
	s.dropped(s.receive(s.server, end(External(1, false), 2), s.b, syn), bpfgen.ReasonCTFull)
	if n := net.Drops(t, bpfgen.ReasonCTFull, bpfgen.DirFromPod); n != 2 {
		t.Errorf("%d counted, want 2", n)
	}
	if n := net.Drops(t, bpfgen.ReasonCTFull, bpfgen.DirToPod); n != 1 {
		t.Errorf("%d counted, want 1", n)
	}
}
