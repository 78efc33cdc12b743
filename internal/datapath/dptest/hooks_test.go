// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// entryOf is the program at one pod's interface, for one test.
func entryOf(t *testing.T, d *Datapath, endpoint, program uint32) *ebpf.Program {
	t.Helper()
	p, err := d.entry(endpoint, program)
	check(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func TestAnEntryWithoutItsProgramDropsAndCounts(t *testing.T) {
	d := New(t, Options{})
	frame := start(false).TCP(1, 2, syn).Frame()
	for dir, program := range []uint32{bpfgen.ProgFromPodHost, bpfgen.ProgToPodHost} {
		r, err := d.Run(entryOf(t, d, 1, program), frame, Context{})
		check(t, err)
		if r.Verdict != Drop || r.Reason != bpfgen.ReasonNoProgram {
			t.Errorf("direction %d: %v", dir, r)
		}
		if n := d.Drops(t, bpfgen.ReasonNoProgram, uint32(dir)); n != 1 {
			t.Errorf("direction %d: %d counted, want 1", dir, n)
		}
	}
}

// TestAPacketIsFollowedThroughAllHooks takes one request and its answer from
// entry program to entry program, byte by byte what the former let out.
func TestAPacketIsFollowedThroughAllHooks(t *testing.T) {
	type stop struct {
		pod      int
		incoming bool // the hook before the pod
		src, dst func(s scene) string
		verdict  Verdict
	}
	c := func(s scene) string { return s.c.String() }
	b := func(s scene) string { return s.b.String() }
	vip := func(s scene) string { return s.vip.String() }
	ways := map[bool][]stop{
		false: { // redirect_peer passes the receiver's hook by
			{1, false, c, b, Redirect}, {2, false, vip, c, Redirect},
			{1, false, c, b, Redirect}, {2, false, vip, c, Redirect}},
		true: {
			{1, false, c, b, Next}, {2, true, c, b, Next}, {2, false, vip, c, Next}, {1, true, vip, c, Next},
			{1, false, c, b, Next}, {2, true, c, b, Next}, {2, false, vip, c, Next}, {1, true, vip, c, Next}},
	}
	for name, proto := range map[string]uint8{"tcp": oracle.TCP, "udp": oracle.UDP, "sctp": oracle.SCTP} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				s := newScene(t, net, v6, proto)
				check(t, net.MstProgramsV1.Put(uint32(0), net.PodPrograms.FromPod))
				check(t, net.MstProgramsV1.Put(uint32(1), net.PodPrograms.ToPod))
				flags := []uint8{syn, syn | ack, ack, ack}
				var frame []byte
				for i, w := range ways[net.InPod] {
					program := uint32(0)
					if w.incoming {
						program = 1
					} else {
						frame = s.packet(s.client, s.c, s.vip, flags[0]).Frame()
						if w.pod == 2 {
							frame = s.packet(s.server, s.b, s.c, flags[0]).Frame()
						}
						flags = flags[1:]
					}
					r, err := net.Run(entryOf(t, net.Datapath, uint32(w.pod), program), frame, Context{})
					check(t, err)
					h, fault := oracle.Parse(r.Packet)
					tuple := TupleOf(h)
					if r.Verdict != w.verdict || fault != "" || tuple.Src.String() != w.src(s) || tuple.Dst.String() != w.dst(s) {
						t.Fatalf("stop %d: %v, %v; want %v, %s>%s", i, r, tuple, w.verdict, w.src(s), w.dst(s))
					}
					if ip, l4 := oracle.Sums(r.Packet, h); ip == oracle.SumBad || l4 != oracle.SumGood {
						t.Errorf("stop %d: checksums %v, %v", i, ip, l4)
					}
					frame = r.Packet
				}
				if f := s.flow(s.c, s.vip); f == nil || !f.Established {
					t.Error("the flow is not established")
				}
			})
		})
	}
}
