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
// takes the whole frame, cuts it, and calls the program under test.

// cbLength is where cut is told the length; the programs leave that word alone.
const cbLength = 4

const cbOffset = 48 // of cb[0] in struct __sk_buff

func cutProgram(programs *ebpf.Map, slot uint32) (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:    ebpf.SchedCLS,
		License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadMem(asm.R2, asm.R1, cbOffset+4*cbLength, asm.Word),
			asm.Mov.Imm(asm.R3, 0),
			asm.FnSkbChangeTail.Call(),
			asm.JNE.Imm(asm.R0, 0, "failed"),
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.LoadMapPtr(asm.R2, programs.FD()),
			asm.Mov.Imm(asm.R3, int32(slot)),
			asm.FnTailCall.Call(),
			asm.Mov.Imm(asm.R0, 99).WithSymbol("failed"),
			asm.Return(),
		},
	})
}

// RunCut is Run on the first n bytes of a frame.
func (d *Datapath) RunCut(prog *ebpf.Program, frame []byte, n int, c Context) (Result, error) {
	if err := d.MstProgramsV1.Put(uint32(bpfgen.ProgFromPodHost), prog); err != nil {
		return Result{}, fmt.Errorf("put the program into its table: %w", err)
	}
	cut, err := cutProgram(d.MstProgramsV1, bpfgen.ProgFromPodHost)
	if err != nil {
		return Result{}, fmt.Errorf("load the cutting program: %w", err)
	}
	defer cut.Close()
	r, err := d.run(cut, frame, uint32(n), c)
	if err == nil && r.Verdict == 99 {
		err = fmt.Errorf("cut %d bytes to %d: refused", len(frame), n)
	}
	return r, err
}
