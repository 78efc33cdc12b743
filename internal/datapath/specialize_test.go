// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/go-cmp/cmp"
)

// address is a load of a place in the section of constants.
func address(to asm.Register, off uint32) asm.Instruction {
	ins := asm.LoadImm(to, int64(off)<<32, asm.DWord)
	ins.Src = asm.PseudoMapValue
	return ins.WithReference(constantsSection)
}

func tableAddress(to asm.Register, name string) asm.Instruction {
	ins := asm.LoadImm(to, 0, asm.DWord)
	ins.Src = asm.PseudoMapFD
	return ins.WithReference(name)
}

// jump is by a distance, as the compiler leaves it.
func jump(op asm.JumpOp, on asm.Register, distance int16) asm.Instruction {
	return asm.Instruction{OpCode: op.Op(asm.ImmSource), Dst: on, Offset: distance}
}

func lines(insns asm.Instructions) []string {
	var out []string
	for _, ins := range insns {
		line := fmt.Sprintf("%v", ins)
		if ins.OpCode == nothing.OpCode && ins.Offset == 0 {
			line = "nothing"
		}
		out = append(out, line)
	}
	return out
}

func width(insns asm.Instructions) (n asm.RawInstructionOffset) {
	for i := range insns {
		n += insns[i].Width()
	}
	return n
}

// specOf is a program with tables and constants.
func specOf(insns asm.Instructions) *ebpf.CollectionSpec {
	return &ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{
			"one":  {Type: ebpf.Array, MaxEntries: 1},
			"two":  {Type: ebpf.Array, MaxEntries: 2},
			"hash": {Type: ebpf.Hash, MaxEntries: 1},
		},
		Variables: map[string]*ebpf.VariableSpec{
			"byte":  {SectionName: constantsSection, Offset: 4, Value: []byte{7}},
			"words": {SectionName: constantsSection, Offset: 8, Value: []byte{1, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff}},
			"long":  {SectionName: constantsSection, Offset: 16, Value: []byte{0, 0, 0, 0, 1, 0, 0, 0}},
			"other": {SectionName: ".data", Offset: 24, Value: []byte{9}},
		},
		Programs: map[string]*ebpf.ProgramSpec{"p": {Instructions: insns}},
	}
}

func TestSpecialize(t *testing.T) {
	load := func(to, from asm.Register, off int16, size asm.Size) asm.Instruction {
		return asm.LoadMem(to, from, off, size)
	}
	lookup := asm.FnMapLookupElem.Call()
	only := tableAddress(asm.R0, "one")
	only.Src = asm.PseudoMapValue
	for name, c := range map[string]struct{ in, want asm.Instructions }{
		"a constant": {
			asm.Instructions{address(asm.R1, 4), load(asm.R1, asm.R1, 0, asm.Byte), jump(asm.JNE, asm.R1, 0), asm.Return()},
			asm.Instructions{nothing, nothing, asm.Mov.Imm32(asm.R1, 7), jump(asm.JNE, asm.R1, 0), asm.Return()},
		},
		"one inside another, by its distance": {
			asm.Instructions{address(asm.R1, 8), load(asm.R1, asm.R1, 4, asm.Word), asm.Return()},
			asm.Instructions{nothing, nothing, asm.Mov.Imm32(asm.R1, -2), asm.Return()},
		},
		"whose address is of further use": {
			asm.Instructions{address(asm.R1, 8), load(asm.R2, asm.R1, 0, asm.Word), load(asm.R3, asm.R1, 4, asm.Word), asm.Return()},
			asm.Instructions{address(asm.R1, 8), asm.Mov.Imm32(asm.R2, 1), load(asm.R3, asm.R1, 4, asm.Word), asm.Return()},
		},
		"reached from elsewhere, too": {
			asm.Instructions{jump(asm.JEq, asm.R2, 2), address(asm.R1, 4), load(asm.R1, asm.R1, 0, asm.Byte), asm.Return()},
			asm.Instructions{jump(asm.JEq, asm.R2, 2), address(asm.R1, 4), load(asm.R1, asm.R1, 0, asm.Byte), asm.Return()},
		},
		"more than a register takes at once": {
			asm.Instructions{address(asm.R1, 16), load(asm.R1, asm.R1, 0, asm.DWord), asm.Return()},
			asm.Instructions{address(asm.R1, 16), load(asm.R1, asm.R1, 0, asm.DWord), asm.Return()},
		},
		"no constant lies there": {
			asm.Instructions{address(asm.R1, 24), load(asm.R1, asm.R1, 0, asm.Byte), asm.Return()},
			asm.Instructions{address(asm.R1, 24), load(asm.R1, asm.R1, 0, asm.Byte), asm.Return()},
		},
		"of another register": {
			asm.Instructions{address(asm.R1, 4), load(asm.R1, asm.R6, 0, asm.Byte), asm.Return()},
			asm.Instructions{address(asm.R1, 4), load(asm.R1, asm.R6, 0, asm.Byte), asm.Return()},
		},
		"the only entry of a table": {
			asm.Instructions{tableAddress(asm.R1, "one"), lookup, asm.Return()},
			asm.Instructions{only, nothing, asm.Return()},
		},
		"of one with more, and of no array": {
			asm.Instructions{tableAddress(asm.R1, "two"), lookup, tableAddress(asm.R1, "hash"), lookup, asm.Return()},
			asm.Instructions{tableAddress(asm.R1, "two"), lookup, tableAddress(asm.R1, "hash"), lookup, asm.Return()},
		},
		"another helper's": {
			asm.Instructions{tableAddress(asm.R1, "one"), asm.FnMapUpdateElem.Call(), asm.Return()},
			asm.Instructions{tableAddress(asm.R1, "one"), asm.FnMapUpdateElem.Call(), asm.Return()},
		},
		"jumps across what was replaced": {
			asm.Instructions{jump(asm.JEq, asm.R2, 3), address(asm.R1, 4), load(asm.R1, asm.R1, 0, asm.Byte), jump(asm.JNE, asm.R1, -4), asm.Return()},
			asm.Instructions{jump(asm.JEq, asm.R2, 3), nothing, nothing, asm.Mov.Imm32(asm.R1, 7), jump(asm.JNE, asm.R1, -4), asm.Return()},
		},
	} {
		t.Run(name, func(t *testing.T) {
			spec := specOf(c.in)
			before := lines(c.in)
			Specialize(spec)
			got := spec.Programs["p"].Instructions
			if diff := cmp.Diff(lines(c.want), lines(got)); diff != "" {
				t.Error(diff)
			}
			if width(got) != width(c.in) {
				t.Errorf("%d raw instructions became %d: jumps lead elsewhere", width(c.in), width(got))
			}
			if diff := cmp.Diff(before, lines(c.in)); diff != "" {
				t.Errorf("the parsed program, which others load, has changed: %s", diff)
			}
		})
	}
}
