// SPDX-License-Identifier: Apache-2.0

package path

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// The kernel's test run repeats a program on one packet, and a program that has
// rewritten it would meet its own work the second time: a translated packet is
// translated no more, and one whose link address was rewritten is a spoofed one.
// So a small program of ours, the restorer, writes all headers anew and calls
// the program under test. What it costs itself is measured with an empty program
// in the other's place, and taken off.

// restorer repeats a frame into programs.
type restorer struct {
	prog   *ebpf.Program
	target *ebpf.Map // one slot: what is called
	serial *ebpf.Map // the source port of the next frame, when it varies, and the class id
	frame  []byte
}

// notCalled is the verdict of a restorer whose call failed.
const notCalled = 99

// tc verdicts (linux/pkt_cls.h) that tell what a program did.
const (
	tcNext     = 0xffffffff // TC_ACT_UNSPEC
	tcShot     = 2
	tcRedirect = 7
)

// tcClassID is the offset of tc_classid in struct __sk_buff: a filter's program
// is told the filter's class id there.
const tcClassID = 72

// Of struct __sk_buff: its size, and where the words of the control block are.
const (
	skbSize    = 192
	skbControl = 48
)

// control is what one hook leaves in a packet's control block for the next.
type control [5]uint32

// out is what comes out of a program.
type out struct {
	frame []byte
	control
}

// newRestorer makes a restorer of the frame. newPort gives each packet another
// source port, so that each begins a flow.
func newRestorer(f frame, newPort bool) (r *restorer, err error) {
	r = &restorer{frame: f.bytes()}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	r.target, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("make the restorer's program table: %w", err)
	}
	r.serial, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 16, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("make the restorer's counter: %w", err)
	}
	r.prog, err = ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "bench_restore", Type: ebpf.SchedCLS, License: "GPL", Instructions: r.instructions(f, newPort)})
	if err != nil {
		return nil, fmt.Errorf("load the restorer: %w", err)
	}
	return r, nil
}

func (r *restorer) instructions(f frame, newPort bool) asm.Instructions {
	size := (len(r.frame) + 7) / 8 * 8
	padded := append(append([]byte{}, r.frame...), make([]byte, 8)...)
	insns := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	for off := 0; off < len(r.frame); off += 8 {
		insns = append(insns,
			asm.LoadImm(asm.R1, int64(binary.NativeEndian.Uint64(padded[off:])), asm.DWord),
			asm.StoreMem(asm.RFP, int16(off-size), asm.R1, asm.DWord))
	}
	if newPort {
		insns = append(insns,
			asm.LoadMapValue(asm.R1, r.serial.FD(), 0),
			asm.LoadMem(asm.R2, asm.R1, 0, asm.DWord),
			asm.Add.Imm(asm.R2, 1),
			asm.StoreMem(asm.R1, 0, asm.R2, asm.DWord),
			asm.HostTo(asm.BE, asm.R2, asm.Half),
			asm.StoreMem(asm.RFP, int16(f.portOffset()-size), asm.R2, asm.Half))
	}
	for i, word := range f.control {
		if f.control != (control{}) {
			insns = append(insns, asm.Mov.Imm32(asm.R1, int32(word)), asm.StoreMem(asm.R6, int16(skbControl+4*i), asm.R1, asm.Word))
		}
	}
	return append(insns,
		asm.LoadMapValue(asm.R1, r.serial.FD(), 8),
		asm.LoadMem(asm.R2, asm.R1, 0, asm.DWord),
		asm.StoreMem(asm.R6, tcClassID, asm.R2, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Imm(asm.R2, 0),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, -int32(size)),
		asm.Mov.Imm(asm.R4, int32(len(r.frame))),
		asm.Mov.Imm(asm.R5, 0),
		asm.FnSkbStoreBytes.Call(),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, r.target.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, notCalled),
		asm.Return())
}

func (r *restorer) close() {
	if r.prog != nil {
		r.prog.Close()
	}
	if r.target != nil {
		r.target.Close()
	}
	if r.serial != nil {
		r.serial.Close()
	}
}

// prepare sets what is called, and where the source ports of the next packets
// begin if they vary.
func (r *restorer) prepare(prog *program, firstPort uint16) error {
	if err := r.serial.Put(uint32(0), [2]uint64{uint64(firstPort) - 1, uint64(prog.class)}); err != nil {
		return fmt.Errorf("set the first source port: %w", err)
	}
	if err := r.target.Put(uint32(0), prog.Program); err != nil {
		return fmt.Errorf("put the program under test: %w", err)
	}
	return nil
}

// once sends one frame through prog and returns the verdict and what came out.
func (r *restorer) once(prog *program, firstPort uint16) (uint32, out, error) {
	if err := r.prepare(prog, firstPort); err != nil {
		return 0, out{}, err
	}
	var after [skbSize]byte
	opts := ebpf.RunOptions{Data: r.frame, DataOut: make([]byte, len(r.frame)+256), ContextOut: &after}
	verdict, err := r.prog.Run(&opts)
	if err != nil {
		return 0, out{}, fmt.Errorf("test run: %w", err)
	}
	o := out{frame: opts.DataOut}
	for i := range o.control {
		o.control[i] = binary.NativeEndian.Uint32(after[skbControl+4*i:])
	}
	return verdict, o, nil
}

// time returns what a packet takes on average, the restorer included.
func (r *restorer) time(prog *program, packets int, firstPort uint16) (time.Duration, error) {
	if err := r.prepare(prog, firstPort); err != nil {
		return 0, err
	}
	verdict, took, err := r.prog.Benchmark(r.frame, packets, nil)
	if err != nil {
		return 0, fmt.Errorf("test run: %w", err)
	}
	if verdict == notCalled {
		return 0, errors.New("test run: the program under test was not called")
	}
	if verdict == tcShot {
		return 0, errors.New("test run: the packets were dropped")
	}
	return took, nil
}

// newEmpty is the program that stands in for "nothing".
func newEmpty() (*program, error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "bench_empty", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	if err != nil {
		return nil, fmt.Errorf("load the empty program: %w", err)
	}
	return &program{Program: p}, nil
}
