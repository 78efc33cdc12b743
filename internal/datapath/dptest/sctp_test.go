// SPDX-License-Identifier: Apache-2.0

// SCTP to a Service: its checksum, its associations, what cannot be translated.

package dptest

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package dptest -no-global-types -target bpfel -cc clang-16 -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I/usr/include/x86_64-linux-gnu" crc crc/crc.bpf.c

// lengths of whole SCTP packets in bytes: the shortest, every low bit of a
// length, those around its higher bits.
func lengths(longest int) []int {
	var all []int
	for n := 16; n < 80; n++ {
		all = append(all, n)
	}
	for n := 128; n < longest; n *= 2 {
		all = append(all, n-1, n, n+1)
	}
	return append(all, longest)
}

// The change of a CRC by the first four bytes of a packet, up to the longest
// that IP can carry.
func TestTheChangeOfAChecksum(t *testing.T) {
	spec, err := loadCrc()
	check(t, err)
	var program struct {
		Change *ebpf.Program `ebpf:"change"`
	}
	check(t, spec.LoadAndAssign(&program, nil))
	defer program.Change.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	castagnoli := crc32.MakeTable(crc32.Castagnoli)
	for _, n := range append(lengths(65535), 12, 1452, 9000) {
		for _, bits := range []uint32{0, 1, 1 << 31, 0xffffffff, rng.Uint32(), rng.Uint32()} {
			packet := make([]byte, n)
			for i := range packet {
				packet[i] = byte(rng.Uint32())
			}
			before := crc32.Checksum(packet, castagnoli)
			binary.LittleEndian.PutUint32(packet, binary.LittleEndian.Uint32(packet)^bits)
			want := before ^ crc32.Checksum(packet, castagnoli)
			frame := binary.LittleEndian.AppendUint32(make([]byte, 14), bits)
			got, err := program.Change.Run(&ebpf.RunOptions{Data: binary.LittleEndian.AppendUint32(frame, uint32(n))})
			check(t, err)
			if got != want {
				t.Errorf("%#x at the beginning of %d bytes: changed by %#x, want %#x", bits, n, got, want)
			}
		}
	}
}

// What the programs make of a checksum is compared with that of the whole
// packet that came out, by another's implementation. What is wrong by some bits
// is wrong by the same ones afterwards.
func TestTheSCTPChecksumFollowsThePorts(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.SCTP)
		s.open(s.vip, s.b)
		for _, n := range lengths(3500) {
			for _, wrong := range []uint32{0, 1, 0xdeadbeef} {
				frame := s.packet(s.client, s.c, s.vip, ack).Payload(n - 16).Frame()
				h, _ := oracle.Parse(frame)
				segment := frame[h.L4:]
				binary.LittleEndian.PutUint32(segment[8:], oracle.SumSCTP(segment)^wrong)
				a, err := net.Send(s.client, frame)
				check(t, err)
				segment = a.Frame[a.Headers.L4:a.Headers.End]
				if a.Headers.Dst != s.b.Addr() || a.Headers.Dport != s.b.Port() || len(segment) != n {
					t.Fatalf("%d bytes: %v with %d bytes", n, a, len(segment))
				}
				if got, want := binary.LittleEndian.Uint32(segment[8:]), oracle.SumSCTP(segment)^wrong; got != want {
					t.Errorf("%d bytes, wrong by %#x: checksum %#x, want %#x", n, wrong, got, want)
				}
			}
		}
	})
}

// Any two pairs of ports: the change depends on what differs between them.
func TestTheSCTPChecksumIsRightForAnyPorts(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		for i, ports := range [][3]uint16{{1, 65535, 1}, {0x8000, 1, 0x8000}, {40000, 2905, 2905}, {12345, 36412, 38412}, {0xaaaa, 0x5555, 0xffff}} {
			s := newScene(t, net, v6, oracle.SCTP)
			s.c, s.vip, s.b = end(s.c.Addr(), ports[0]), end(VIP(2, v6), ports[1]), end(s.b.Addr(), ports[2])
			net.SetService(t, oracle.SCTP, s.vip, s.b)
			s.open(s.vip, s.b)
			for _, a := range []Arrival{s.send(s.client, s.c, s.vip, ack), s.send(s.server, s.b, s.c, ack)} {
				if _, l4 := oracle.Sums(a.Frame, a.Headers); l4 != oracle.SumGood {
					t.Errorf("%d: %v, checksum %v", i, a, l4)
				}
			}
		}
	})
}

// A packet that is cut up keeps its checksum where it keeps its ports; where it
// cannot, no fragment of it goes on.
func TestSCTPFragmentsPassWithTheirPortsOnly(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.SCTP)
		same := end(VIP(2, v6), s.b.Port())
		net.SetService(t, s.proto, same, s.b)
		s.open(same, s.b)
		var datagram []byte
		for i, frame := range s.fragments(s.client, Tuple{s.proto, s.c, same}, 77) {
			a, err := net.Send(s.client, frame)
			check(t, err)
			if a.Pod != s.server.ID || a.Headers.Dst != s.b.Addr() {
				t.Fatalf("fragment %d: %v, want it at %v", i, a, s.b)
			}
			datagram = append(datagram, a.Frame[a.Headers.L4:a.Headers.End]...)
		}
		if got := binary.LittleEndian.Uint32(datagram[8:]); got != oracle.SumSCTP(datagram) {
			t.Errorf("put together, the checksum is %#x, want %#x", got, oracle.SumSCTP(datagram))
		}
		net.ClearFlows(t)
		s.open(s.vip, s.b)
		for _, frame := range s.fragments(s.client, Tuple{s.proto, s.c, s.vip}, 78) {
			a, err := net.Send(s.client, frame)
			check(t, err)
			s.dropped(a, bpfgen.ReasonSctpFragment)
		}
	})
}

// RFC 9260 5.1, 8.5: INIT opens, ABORT and SHUTDOWN COMPLETE end.
func TestChunksOpenAndEndAFlow(t *testing.T) {
	for name, chunk := range map[string]uint8{"abort": oracle.Abort, "shutdown complete": oracle.ShutdownComplete} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, oracle.SCTP)
				s.open(s.vip, s.b)
				other := end(s.second.IP(v6), 8080)
				net.SetService(t, s.proto, s.vip, other)
				s.sees(s.send(s.client, s.c, s.vip, syn), s.server, s.c, s.b) // a restart (RFC 9260 5.2)
				last := Eth(s.server.MAC, s.server.NodeMAC).IP(s.b.Addr(), s.c.Addr()).SCTP(s.b.Port(), s.c.Port(), chunk)
				s.sees(s.sent(s.server, last), s.client, s.vip, s.c)
				s.wantFlow(s.c, s.vip, bpfgen.CTPreNAT, true, 10)
				s.wantFlow(s.c, s.b, bpfgen.CTPostNAT, true, 10)
				s.sees(s.send(s.client, s.c, s.vip, ack), s.server, s.c, s.b) // was under way
				s.sees(s.send(s.client, s.c, s.vip, syn), s.second, s.c, other)
			})
		})
	}
}

func TestAnAssociationNobodyKnowsIsAborted(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		s := newScene(t, net, v6, oracle.SCTP)
		for _, chunk := range []uint8{oracle.Data, oracle.InitAck} {
			a := s.sent(s.client, Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.vip.Addr()).SCTP(s.c.Port(), s.vip.Port(), chunk))
			s.dropped(a, bpfgen.ReasonMidstreamNAT)
			s.abortedWith(a, 9, 1)
		}
		for _, chunk := range []uint8{oracle.Abort, oracle.ShutdownComplete} { // RFC 9260 8.4: in silence
			a := s.sent(s.client, Eth(s.client.MAC, s.client.NodeMAC).IP(s.c.Addr(), s.vip.Addr()).SCTP(s.c.Port(), s.vip.Port(), chunk))
			s.dropped(a, bpfgen.ReasonMidstreamNAT)
			if a.Refused {
				t.Errorf("chunk %d is answered by %v", chunk, a)
			}
		}
	})
}

// aborted fails unless the frame is an ABORT that ends the attempt of an INIT.
func (s scene) aborted(a Arrival, from, to string) {
	s.t.Helper()
	if tuple := a.Tuple(); tuple.Src.String() != from || tuple.Dst.String() != to {
		s.t.Errorf("answer %v, want it from %s to %s", tuple, from, to)
	}
	s.abortedWith(a, 8, 0) // the tag that the INIT asks for
}

// abortedWith fails unless a is an ABORT with that tag and those flags (RFC 9260 8.5.1).
func (s scene) abortedWith(a Arrival, tag uint32, flags byte) {
	s.t.Helper()
	if !a.Refused {
		s.t.Fatalf("%v, want an answer", a)
	}
	segment := a.Frame[a.Headers.L4:a.Headers.End]
	if _, l4 := oracle.Sums(a.Frame, a.Headers); l4 != oracle.SumGood {
		s.t.Errorf("the answer's checksum is %v", l4)
	}
	got := fmt.Sprintf("tag %d, chunk % x", binary.BigEndian.Uint32(segment[4:]), segment[12:])
	if want := fmt.Sprintf("tag %d, chunk 06 %02x 00 04", tag, flags); got != want {
		s.t.Errorf("answer with %s, want %s", got, want)
	}
}

// No program sees an SCTP socket connect: where Services are done at the socket
// alone, they are done by packet all the same; where they are not done, not.
func TestSCTPOfSocketPods(t *testing.T) {
	for name, c := range map[string]struct {
		flags uint16
		proto uint8
		moved bool
	}{
		"sctp, at the socket": {bpfgen.EPServiceSocket, oracle.SCTP, true},
		"tcp, at the socket":  {bpfgen.EPServiceSocket, oracle.TCP, false},
		"sctp, without":       {0, oracle.SCTP, false},
	} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, c.proto)
				s.client.Flags = map[bool]uint16{false: bpfgen.EPHostEnd, true: bpfgen.EPInPod}[net.InPod] | c.flags
				net.SetPod(t, s.client)
				a := s.send(s.client, s.c, s.vip, syn)
				if want := map[bool]Tuple{true: {c.proto, s.c, s.b}, false: {c.proto, s.c, s.vip}}[c.moved]; a.Dropped != "" || a.Tuple() != want {
					t.Errorf("%v, want %v", a, want)
				}
			})
		})
	}
}
