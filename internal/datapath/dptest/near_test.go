// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// Flows between two pods of the node that lie at places of their own (bpf/lib/near.h), and
// the SYN that is entered at once because its pair has just been judged (bpf/lib/near_path.h).

// lies says whether a flow's entry lies near; none fails.
func (s scene) lies(src, dst netip.AddrPort) bool {
	s.t.Helper()
	f := s.flow(src, dst)
	if f == nil {
		s.t.Fatalf("no entry for %v>%v", src, dst)
	}
	return f.near
}

// from is the client's end with another port.
func (s scene) from(port uint16) netip.AddrPort { return end(s.c.Addr(), port) }

// forgetAddress takes the server's address from the table of endpoints, and tells nobody: who
// judges a new flow to it does not find it any more.
func (s scene) forgetAddress() {
	s.t.Helper()
	check(s.t, s.net.MstEndpointAddrsV1.Delete(toAddr(s.b.Addr())))
}

// judged is a scene in which a connection has just been opened, by the Service or not.
func judged(t *testing.T, net *Network, v6, service bool) (s scene, to netip.AddrPort) {
	t.Helper()
	onOneCPU(t)
	s = newScene(t, net, v6, oracle.TCP)
	if to = s.b; service {
		to = s.vip
	}
	s.open(to, s.b)
	s.net.holdPairs(t)
	return s, to
}

func eachPair(t *testing.T, f func(t *testing.T, s scene, to netip.AddrPort)) {
	for by, service := range map[string]bool{"pod": false, "service": true} {
		t.Run(by, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s, to := judged(t, net, v6, service)
				f(t, s, to)
			})
		})
	}
}

// Where another CPU has taken a room, and writes to it, nobody else does, though a second begins meanwhile.
func TestARoomThatIsTakenIsNobodyElses(t *testing.T) {
	net := NewNetwork(t, Options{}, 3)
	s := newScene(t, net, false, oracle.TCP)
	const taken = 1 << 30
	for ago, near := range map[uint32]bool{0: false, 1: false, 5: false, 100: true} {
		net.ClearFlows(t)
		for i := range net.nearTable(t) {
			net.near[i] = bpfgen.PodNearFlow{E: bpfgen.PodCtEntry{Expires: Now() - taken - ago}}
		}
		s.sees(s.send(s.client, s.c, s.b, syn), s.server, s.c, s.b)
		if s.lies(s.c, s.b) != near {
			t.Errorf("taken %d s ago: lies near: %v", ago, !near)
		}
		// So with a dead entry of its own in the table for all.
		if f := s.flow(s.c, s.b); !near {
			f.Entry.Expires, f.Entry.Opening = Now()-taken-ago, bpfgen.CTAnswered
			check(t, net.MstCtNewV1.Delete(f.Key))
			check(t, net.MstCtV1.Put(f.Key, f.Entry))
			s.sees(s.send(s.client, s.c, s.b, syn), s.server, s.c, s.b)
			if f := s.flow(s.c, s.b); f.big {
				t.Errorf("taken %d s ago: begins in its place", ago)
			}
		}
	}
}

func TestASynOfAPairThatWasJudgedIsEnteredAtOnce(t *testing.T) {
	eachPair(t, func(t *testing.T, s scene, to netip.AddrPort) {
		s.forgetAddress()
		before := counted(t, s.net, s.client)
		for port := range uint16(3) {
			s.c = s.from(2000 + port)
			s.open(to, s.b)
			if !s.lies(s.c, to) || !s.lies(s.c, s.b) {
				t.Fatal("a flow between pods does not lie near")
			}
			s.talk(to, s.c, s.b)
			role := uint8(bpfgen.CTDirect)
			if to == s.vip {
				role = bpfgen.CTPreNAT
				s.wantFlow(s.c, s.b, bpfgen.CTPostNAT, true, 86400)
			}
			s.wantFlow(s.c, to, role, true, 86400)
			s.closeBoth(to, s.b)
			s.wantFlow(s.c, to, role, true, 120)
		}
		after := counted(t, s.net, s.client)
		if sent, got := after.FromPod.Packets-before.FromPod.Packets, after.ToPod.Packets-before.ToPod.Packets; sent != 3*5 || got != 3*3 {
			t.Errorf("counted %d packets from the client and %d to it, want 15 and 9", sent, got)
		}
	})
}

func TestWhatAPairRestsOn(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, s scene){
		"the sender's endpoint":   func(t *testing.T, s scene) { s.net.SetPod(t, s.client) },
		"the receiver's endpoint": func(t *testing.T, s scene) { s.net.SetPod(t, s.server) },
		"the tables":              func(t *testing.T, s scene) { s.net.VoidFlows(t) },
		"a new Service": func(t *testing.T, s scene) {
			var meta bpfgen.PodMeta
			check(t, s.net.MstMetaV1.Lookup(uint32(0), &meta))
			meta.NextService++
			check(t, s.net.MstMetaV1.Put(uint32(0), meta))
		},
		"time": func(t *testing.T, s scene) { s.net.agePairs(t) },
	} {
		t.Run(name, func(t *testing.T) {
			eachPair(t, func(t *testing.T, s scene, to netip.AddrPort) {
				change(t, s)
				s.forgetAddress()
				if a := s.send(s.client, s.from(2000), to, syn); a.Pod == s.server.ID && a.Direct {
					t.Errorf("%v: entered at once, though what was judged holds no more", a)
				}
				if f := s.flow(s.from(2000), to); f != nil && f.near {
					t.Error("a flow to nobody known lies near")
				}
			})
		})
	}
}

// Neither another pod nor another address or link address passes for the one that was judged.
func TestNobodyElseUsesAPair(t *testing.T) {
	eachPair(t, func(t *testing.T, s scene, to netip.AddrPort) {
		thief := s.second
		a, err := s.net.Send(thief, s.packet(thief, s.from(2000), to, syn).Frame())
		s.dropped(s.checked(a, err), bpfgen.ReasonSpoofedAddress)
		liar := s.client
		liar.MAC = thief.MAC
		a, err = s.net.Send(liar, s.packet(liar, s.from(2000), to, syn).Frame())
		s.dropped(s.checked(a, err), bpfgen.ReasonSpoofedMAC)
		a, err = s.net.Send(liar, s.packet(liar, s.c, to, ack).Frame())
		s.dropped(s.checked(a, err), bpfgen.ReasonSpoofedMAC)
	})
}

func TestASynOfALivingFlowDoesNotBeginItAnew(t *testing.T) {
	eachPair(t, func(t *testing.T, s scene, to netip.AddrPort) {
		s.sees(s.send(s.client, s.c, to, syn), s.server, s.c, s.b)
		if f := s.flow(s.c, to); !f.Established {
			t.Error("a SYN made a living flow half-open")
		}
		s.talk(to, s.c, s.b)
		if n := len(s.net.Flows(t)); n > 2 {
			t.Errorf("%d entries", n)
		}
	})
}

// The answer may have taken the long way, which tells its own half alone.
func TestAFlowIsProvedByAnAnswerOfTheLongWay(t *testing.T) {
	eachPair(t, func(t *testing.T, s scene, to netip.AddrPort) {
		s.c = s.from(2000)
		s.sees(s.send(s.client, s.c, to, syn), s.server, s.c, s.b)
		s.net.VoidFlows(t)
		s.sees(s.send(s.server, s.b, s.c, syn|ack), s.client, to, s.c)
		s.sees(s.send(s.client, s.c, to, syn), s.server, s.c, s.b) // once more: the answer was late
		s.sees(s.send(s.client, s.c, to, ack), s.server, s.c, s.b)
		role := uint8(bpfgen.CTDirect)
		if to == s.vip {
			role = bpfgen.CTPreNAT
			s.wantFlow(s.c, s.b, bpfgen.CTPostNAT, true, 86400)
		}
		s.wantFlow(s.c, to, role, true, 86400)
	})
}

// One that is proved while it closes lives no longer for it.
func TestAFlowThatClosesBeforeItIsProved(t *testing.T) {
	eachPair(t, func(t *testing.T, s scene, to netip.AddrPort) {
		s.c = s.from(2000)
		s.sees(s.send(s.client, s.c, to, syn), s.server, s.c, s.b)
		s.sees(s.send(s.server, s.b, s.c, fin|ack), s.client, to, s.c)
		s.sees(s.send(s.client, s.c, to, ack), s.server, s.c, s.b)
		if f := s.flow(s.c, to); f == nil || f.Left() > 121 {
			t.Errorf("entry %+v, want it to live for 120 s", f)
		}
	})
}

// A place is that of tuples whose ports and addresses come to the same: those of its flows here
// are made of a client's port and the server's, both moved by the same bits.
func (s scene) neighbour(i uint16) (from, to netip.AddrPort) {
	return end(s.c.Addr(), s.c.Port()^i<<8), end(s.b.Addr(), s.b.Port()^i<<8)
}

// connect opens a connection of the client's to the server.
func (s scene) connect(from, to netip.AddrPort) {
	s.t.Helper()
	s.sees(s.send(s.client, from, to, syn), s.server, from, to)
	s.sees(s.send(s.server, to, from, syn|ack), s.client, to, from)
	s.sees(s.send(s.client, from, to, ack), s.server, from, to)
}

func TestWhereThereIsNoRoomAFlowLiesElsewhere(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		for i := range uint16(4) {
			from, to := s.neighbour(i)
			s.connect(from, to)
			if near := s.lies(from, to); near != (i < 2) {
				t.Errorf("flow %d lies near: %v", i, near)
			}
		}
		for i := range uint16(4) {
			from, to := s.neighbour(i)
			s.sees(s.send(s.client, from, to, ack), s.server, from, to)
			s.sees(s.send(s.server, to, from, ack), s.client, to, from)
		}
	})
}

func TestAClosedFlowLeavesItsRoomAfterAMoment(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		for i := range uint16(2) {
			from, to := s.neighbour(i)
			s.sees(s.send(s.client, from, to, syn), s.server, from, to)
			s.sees(s.send(s.server, to, from, rst|ack), s.client, to, from)
		}
		from, to := s.neighbour(2)
		s.sees(s.send(s.client, from, to, syn), s.server, from, to)
		if s.lies(from, to) {
			t.Error("a flow took the room of one that has just closed")
		}
		net.Age(t, bpfgen.CTNearClosed)
		from, to = s.neighbour(3)
		s.sees(s.send(s.client, from, to, syn), s.server, from, to)
		if !s.lies(from, to) {
			t.Error("the room of a flow that closed long ago is not to be had")
		}
	})
}

// Anybody may send a RST of some number, which the ends do not heed: while they go on, their flow keeps its room.
func TestAFlowThatGoesOnAfterAResetKeepsItsRoom(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		for i := range uint16(2) {
			from, to := s.neighbour(i)
			s.connect(from, to)
			s.sees(s.send(s.server, to, from, rst), s.client, to, from)
		}
		for range bpfgen.CTNearClosed + 1 {
			net.Age(t, 1)
			for i := range uint16(2) {
				from, to := s.neighbour(i)
				s.sees(s.send(s.client, from, to, ack), s.server, from, to)
				s.sees(s.send(s.server, to, from, ack), s.client, to, from)
			}
		}
		from, to := s.neighbour(2)
		s.sees(s.send(s.client, from, to, syn), s.server, from, to)
		if s.lies(from, to) {
			t.Error("a flow took the room of one that goes on")
		}
	})
}

// It is a moment since its end, not since its last packet but that.
func TestAFlowThatClosesLateKeepsItsRoomForAMoment(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		for i := range uint16(2) {
			from, to := s.neighbour(i)
			s.sees(s.send(s.client, from, to, syn), s.server, from, to)
			s.sees(s.send(s.server, to, from, syn|ack), s.client, to, from)
			s.sees(s.send(s.client, from, to, fin|ack), s.server, from, to)
		}
		net.Age(t, bpfgen.CTNearClosed+1)
		net.VoidFlows(t) // the long way
		for i := range uint16(2) {
			from, to := s.neighbour(i)
			s.sees(s.send(s.server, to, from, fin|ack), s.client, to, from)
		}
		from, to := s.neighbour(2)
		s.sees(s.send(s.client, from, to, syn), s.server, from, to)
		if s.lies(from, to) {
			t.Error("a flow took the room of one that has just closed")
		}
	})
}

// What is left of a Service's flow must not lead its late packets into the next one, whose
// tuple is the same to the backend.
func TestALatePacketWhoseOtherHalfIsAnothersIsRefused(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		second := end(VIP(2, v6), 80)
		net.SetService(t, oracle.TCP, second, s.b)
		s.open(s.vip, s.b)
		s.closeBoth(s.vip, s.b)
		net.Age(t, bpfgen.CTNearClosed)
		net.DeleteFlow(t, Tuple{s.proto, s.c, s.b}, 0) // its room was another's, for a while
		s.open(second, s.b)
		s.dropped(s.send(s.client, s.c, s.vip, ack), bpfgen.ReasonMidstreamNAT)
		s.talk(second, s.c, s.b)
	})
}

// A connection by pod address, on the port of one by Service to the same backend: wherever that lies.
func TestAConnectionOfItsOwnKeepsOutOfAServicesFlow(t *testing.T) {
	for name, room := range map[string]bool{"near": true, "elsewhere": false} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s, _ := judged(t, net, v6, false) // so that a SYN to the pod's address may be entered at once
				s.c = s.from(2000)
				if !room {
					net.fillNear(t)
				}
				s.open(s.vip, s.b)
				if !room {
					net.freeNear(t)
				}
				a := s.send(s.client, s.c, s.b, syn)
				if a.Dropped != "" || a.Pod != s.server.ID || a.Tuple().Src == s.c {
					t.Fatalf("%v, want another source port: this one's answers are the Service's", a)
				}
				s.talk(s.vip, s.c, s.b)
			})
		})
	}
}

// A flow that found no room near is looked for elsewhere for as long as it lives, not only for as long as it had to
// when it was entered.
func TestAnIdleFlowElsewhereIsFound(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.TCP)
		net.fillNear(t)
		flows := []struct{ c, to netip.AddrPort }{{s.c, s.vip}, {s.from(2000), s.b}}
		for _, f := range flows {
			s.c = f.c
			s.open(f.to, s.b)
		}
		net.freeNear(t)
		for _, idle := range []uint32{70, 3600, 80_000} { // a half-open flow lives for 60, an established one for 86,400
			net.Age(t, idle)
			for _, f := range flows {
				s.c = f.c
				s.talk(f.to, f.c, s.b)
			}
		}
	})
}

// What has never lain elsewhere is not looked for there.
func TestNobodyLooksWhereNothingWasTold(t *testing.T) {
	net := NewNetwork(t, Options{}, 4)
	s := newScene(t, net, false, oracle.TCP)
	key := keyOf(Tuple{s.proto, s.c, s.b}, 0)
	check(t, net.MstCtV1.Put(key, bpfgen.PodCtEntry{Expires: Now() + 1000, Role: bpfgen.CTPostNAT, SeenReply: 1}))
	s.open(s.b, s.b)
}

func TestAFloodLeavesTheNearFlowsAlone(t *testing.T) {
	net := NewNetwork(t, Options{}, 4)
	s, to := judged(t, net, false, true)
	for port := range uint16(60000) {
		a, err := net.Send(s.second, s.packet(s.second, end(s.second.IP(false), 1024+port), s.b, syn).Frame())
		if err != nil || a.Dropped != "" {
			t.Fatalf("SYN %d: %v %v", port, a, err)
		}
	}
	if !s.lies(s.c, to) || !s.lies(s.c, s.b) {
		t.Error("a living flow lost its room")
	}
	s.talk(to, s.c, s.b)
}

// freeNear gives back the room that fillNear took.
func (n *Network) freeNear(t *testing.T) {
	t.Helper()
	n.eachNear(t, func(f *bpfgen.PodNearFlow) {
		if f.Key == (bpfgen.PodCtKey{}) {
			f.E.Expires = 0
		}
	})
}

// holdPairs lets what was judged of pairs hold for longer than a busy machine stops a test.
func (n *Network) holdPairs(t *testing.T) { n.movePairs(t, 1<<20) }

// agePairs lets what was judged of pairs be over.
func (n *Network) agePairs(t *testing.T) { n.movePairs(t, -1<<21) }

func (n *Network) movePairs(t *testing.T, ticks int32) {
	t.Helper()
	for slot := range n.MstPairsV1.MaxEntries() {
		var each []bpfgen.PodPair
		check(t, n.MstPairsV1.Lookup(slot, &each))
		for i := range each {
			each[i].Until += uint32(ticks)
		}
		check(t, n.MstPairsV1.Put(slot, each))
	}
}

// What a pod takes is kept with its flows: of two pods that differ the longer packets of either are judged by the pod
// that they are for.
func TestEachPodOfAFlowTakesItsOwnLength(t *testing.T) {
	eachPair(t, func(t *testing.T, s scene, to netip.AddrPort) {
		if s.net.InPod && s.net.entries == nil {
			return // nothing tells where a packet goes from there
		}
		s.server.MTU = 9000
		s.net.SetPod(t, s.server)
		s.net.Pods[s.server.ID] = s.server
		s.talk(to, s.c, s.b)
		for _, c := range []struct {
			from     Pod
			src, dst netip.AddrPort
			handed   bool
		}{{s.client, s.c, to, true}, {s.server, s.b, s.c, false}} {
			frame := s.packet(c.from, c.src, c.dst, ack).Payload(2000).Frame()
			r, err := s.net.FromPod(c.from, frame)
			check(t, err)
			handed := r.Verdict == Redirect
			if s.net.InPod { // there a voucher says it
				handed = r.Left[bpfgen.CbVoucherRest] != 0
			}
			if handed != c.handed {
				t.Errorf("2000 bytes and headers from pod %d: %v, want handed over: %v", c.from.ID, r, c.handed)
			}
		}
	})
}
