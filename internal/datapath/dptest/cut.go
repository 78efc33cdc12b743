// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// The kernel's test run refuses a frame that says IP and is shorter than its
// header, but a device hands it to the programs. So a small program of our own
// takes the whole frame, cuts it, and calls the program under test. Nor does it take a VLAN's tag beside the frame.

// cbLength is where cut is told the length; the programs leave that word alone.
const cbLength = 4

const cbOffset = 48 // of cb[0] in struct __sk_buff

// before is a program that does something to a packet, which leaves 0 in R0 and the packet in R6, and calls what lies in slot.
func before(programs *ebpf.Map, slot uint32, something ...asm.Instruction) (*ebpf.Program, error) {
	insns := append(asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}, something...)
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:    ebpf.SchedCLS,
		License: "GPL",
		Instructions: append(insns,
			asm.JNE.Imm(asm.R0, 0, "failed"),
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.LoadMapPtr(asm.R2, programs.FD()),
			asm.Mov.Imm(asm.R3, int32(slot)),
			asm.FnTailCall.Call(),
			asm.Mov.Imm(asm.R0, 99).WithSymbol("failed"),
			asm.Return(),
		),
	})
}

// runBehind is run behind a program that does something first.
func (d *Datapath) runBehind(prog *ebpf.Program, frame []byte, length uint32, c Context, something ...asm.Instruction) (Result, error) {
	if err := d.MstProgramsV1.Put(uint32(bpfgen.ProgFromPodHost), prog); err != nil {
		return Result{}, fmt.Errorf("put the program into its table: %w", err)
	}
	first, err := before(d.MstProgramsV1, bpfgen.ProgFromPodHost, something...)
	if err != nil {
		return Result{}, fmt.Errorf("load the program that comes first: %w", err)
	}
	defer first.Close()
	r, err := d.run(first, frame, length, c)
	if err == nil && r.Verdict == 99 {
		err = fmt.Errorf("the program that comes first of %d bytes: refused", len(frame))
	}
	return r, err
}

// RunCut is Run on the first n bytes of a frame.
func (d *Datapath) RunCut(prog *ebpf.Program, frame []byte, n int, c Context) (Result, error) {
	return d.runBehind(prog, frame, uint32(n), c,
		asm.LoadMem(asm.R2, asm.R1, cbOffset+4*cbLength, asm.Word),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnSkbChangeTail.Call())
}

// RunTagged is Run on a frame whose 802.1Q tag, priority and VLAN, the device took off.
func (d *Datapath) RunTagged(prog *ebpf.Program, frame []byte, tci uint16, c Context) (Result, error) {
	return d.runBehind(prog, frame, 0, c,
		asm.Mov.Imm(asm.R2, int32(port(0x8100))),
		asm.Mov.Imm(asm.R3, int32(tci)),
		asm.FnSkbVlanPush.Call())
}
