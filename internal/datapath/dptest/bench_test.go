// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// BenchmarkPacket is nanoseconds of a program for a packet of an established
// flow, measured in the kernel without the system call.
//
// The kernel repeats a program on one packet, and a packet can be translated
// only once. So a small program of ours puts all headers back and calls the
// program under test; "restore" is what that costs alone, without the call.
func BenchmarkPacket(b *testing.B) {
	for _, inPod := range []bool{false, true} {
		for _, v6 := range []bool{false, true} {
			net := NewNetwork(b, Options{InPod: inPod}, 3)
			client, server := net.Pods[1], net.Pods[2]
			c, s, vip := end(client.IP(v6), 1000), end(server.IP(v6), 8080), end(VIP(1, v6), 80)
			net.SetService(b, oracle.TCP, vip, s)
			there := Eth(client.MAC, client.NodeMAC)
			back := Eth(server.MAC, server.NodeMAC)
			name := fmt.Sprintf("%s/%s/", map[bool]string{false: "host", true: "inner"}[inPod], map[bool]string{false: "v4", true: "v6"}[v6])

			direct := end(client.IP(v6), 1001)
			frames := map[string][]byte{
				"direct":           there.IP(direct.Addr(), s.Addr()).TCP(direct.Port(), s.Port(), ack).Frame(),
				"direct_reply":     back.IP(s.Addr(), direct.Addr()).TCP(s.Port(), direct.Port(), ack).Frame(),
				"translated":       there.IP(c.Addr(), vip.Addr()).TCP(c.Port(), vip.Port(), ack).Frame(),
				"translated_reply": back.IP(s.Addr(), c.Addr()).TCP(s.Port(), c.Port(), ack).Frame(),
			}
			openForBench(b, net, client, server, frames)
			for _, kind := range []string{"direct", "direct_reply", "translated", "translated_reply"} {
				from := client
				if strings.HasSuffix(kind, "_reply") {
					from = server
				}
				b.Run(name+kind, func(b *testing.B) {
					measure(b, newRestore(b, net.Datapath, frames[kind], from.ID, net.PodPrograms.FromPod), frames[kind])
				})
			}
			b.Run(name+"restore", func(b *testing.B) {
				measure(b, newRestore(b, net.Datapath, frames["direct"], client.ID, nil), frames["direct"])
			})
		}
	}
}

func openForBench(b *testing.B, net *Network, client, server Pod, frames map[string][]byte) {
	for _, way := range []string{"direct", "translated"} {
		for range 2 {
			for _, p := range []struct {
				pod   Pod
				frame []byte
			}{{client, withFlags(frames[way], syn)}, {server, frames[way+"_reply"]}, {client, frames[way]}} {
				a, err := net.Send(p.pod, p.frame)
				check(b, err)
				if a.Dropped != "" {
					b.Fatalf("%s: %v", way, a)
				}
			}
		}
	}
	for _, f := range net.Flows(b) {
		if !f.Established {
			b.Fatalf("%v is not established", f.Tuple())
		}
	}
}

// withFlags changes TCP's flags; the programs do not look at the checksum.
func withFlags(frame []byte, flags uint8) []byte {
	out := append([]byte{}, frame...)
	h, _ := oracle.Parse(out)
	out[h.L4+13] = flags
	return out
}

// restored is how much of a frame is put back: all headers of the bench's.
const restored = 80

// newRestore makes a program that writes the frame's start, as it was sent,
// and the endpoint's id; then it calls prog, if there is one.
func newRestore(b *testing.B, d *Datapath, frame []byte, endpoint uint32, prog *ebpf.Program) *ebpf.Program {
	b.Helper()
	length := min(len(frame), restored)
	padded := append(append([]byte{}, frame[:length]...), make([]byte, 8)...)
	insns := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	for off := 0; off < length; off += 8 {
		insns = append(insns,
			asm.LoadImm(asm.R1, int64(binary.NativeEndian.Uint64(padded[off:])), asm.DWord),
			asm.StoreMem(asm.RFP, int16(off-restored), asm.R1, asm.DWord))
	}
	insns = append(insns,
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Imm(asm.R2, 0),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, -restored),
		asm.Mov.Imm(asm.R4, int32(length)),
		asm.Mov.Imm(asm.R5, 0),
		asm.FnSkbStoreBytes.Call(),
		asm.Mov.Imm(asm.R1, int32(endpoint)),
		asm.StoreMem(asm.R6, cbOffset, asm.R1, asm.Word))
	if prog != nil {
		check(b, d.MstProgramsV1.Put(uint32(0), prog))
		insns = append(insns,
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.LoadMapPtr(asm.R2, d.MstProgramsV1.FD()),
			asm.Mov.Imm(asm.R3, 0),
			asm.FnTailCall.Call())
	}
	insns = append(insns, asm.Mov.Imm(asm.R0, 99), asm.Return())
	restore, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: insns})
	check(b, err)
	b.Cleanup(func() { restore.Close() })
	return restore
}

// measure reports the kernel's own figure: the average over a run of repeats.
func measure(b *testing.B, prog *ebpf.Program, frame []byte) {
	b.Helper()
	verdict, took, err := prog.Benchmark(frame, b.N, nil)
	check(b, err)
	if Verdict(int32(verdict)) == Drop {
		b.Fatal("dropped")
	}
	b.ReportMetric(float64(took.Nanoseconds()), "ns/packet")
	b.ReportMetric(0, "ns/op")
}
