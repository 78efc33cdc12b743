// SPDX-License-Identifier: Apache-2.0

package datapath

// What is known when programs are loaded is written into their instructions: each
// line of memory and of code that a packet touches costs it some nanoseconds.
//
// Load-time constants (bpf/config.h): the verifier knows their values and takes out
// whole branches that nothing leads to, but leaves each load of one where it is.
//
// Tables of one entry: the kernel writes a lookup in an array as ten instructions
// that compare the key; where there is one entry its address is known.

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

const constantsSection = ".rodata"

// setConstants gives spec's programs their load-time constants; has_set_retval
// wherever it exists.
func setConstants(spec *ebpf.CollectionSpec, values map[string]any) error {
	all := map[string]any{}
	if Probe().SetRetval {
		all["has_set_retval"] = uint8(1)
	}
	maps.Copy(all, values)
	for name, value := range all {
		v := spec.Variables[name]
		if v == nil {
			continue // the compiler found no use for it
		}
		if err := v.Set(value); err != nil {
			return fmt.Errorf("set constant %s: %w", name, err)
		}
	}
	Specialize(spec)
	return nil
}

// Specialize writes the load-time constants of spec, as they are set, into the
// instructions that load them, and the addresses of tables' only entries into those
// that look them up. The length of the programs stays, so that no jump changes: what
// is left over does nothing, and the kernel takes it out. Branches stay too, for it
// refuses code that nothing leads to before it looks at values.
func Specialize(spec *ebpf.CollectionSpec) {
	constants := constantBytes(spec)
	for _, p := range spec.Programs {
		p.Instructions = eachPair(p.Instructions, func(a, b asm.Instruction) asm.Instructions {
			if value, ok := constantLoaded(a, b, constants); ok {
				return foldLoad(a, b, value)
			}
			if m := spec.Maps[a.Reference()]; m != nil && m.Type == ebpf.Array && m.MaxEntries == 1 && isLookup(a, b) {
				return onlyEntry(a, b)
			}
			return nil
		})
	}
}

// eachPair replaces instructions that follow each other, and are only reached so,
// by what fn makes of them, which is as long; nil leaves them.
func eachPair(insns asm.Instructions, fn func(a, b asm.Instruction) asm.Instructions) asm.Instructions {
	targets := jumpTargets(insns)
	out := make(asm.Instructions, 0, len(insns))
	var at asm.RawInstructionOffset
	for i := 0; i < len(insns); i++ {
		at += insns[i].Width()
		if i+1 < len(insns) && !targets[at] {
			if made := fn(insns[i], insns[i+1]); made != nil {
				out = append(out, made...)
				i++
				at += insns[i].Width()
				continue
			}
		}
		out = append(out, insns[i])
	}
	return out
}

// constantBytes are the values of all constants by their place in the section.
func constantBytes(spec *ebpf.CollectionSpec) map[uint32]byte {
	out := map[uint32]byte{}
	for _, v := range spec.Variables {
		if v.SectionName != constantsSection {
			continue
		}
		for i, b := range v.Value {
			out[v.Offset+uint32(i)] = b
		}
	}
	return out
}

// nothing is an instruction that the verifier takes out.
var nothing = asm.Instruction{OpCode: asm.Ja.Op(asm.ImmSource)}

// jumpTargets are the places that jumps lead to, in raw instructions from the start.
func jumpTargets(insns asm.Instructions) map[asm.RawInstructionOffset]bool {
	out := map[asm.RawInstructionOffset]bool{}
	var at asm.RawInstructionOffset
	for i := range insns {
		at += insns[i].Width()
		switch op := insns[i].OpCode.JumpOp(); op {
		case asm.InvalidJumpOp, asm.Call, asm.Exit:
		default:
			to := int64(at) + int64(insns[i].Offset)
			if op == asm.Ja && insns[i].OpCode.Class() == asm.Jump32Class {
				to = int64(at) + insns[i].Constant
			}
			out[asm.RawInstructionOffset(to)] = true
		}
	}
	return out
}

// constantLoaded is what load, right behind address, loads of the constants.
func constantLoaded(address, load asm.Instruction, constants map[uint32]byte) (int32, bool) {
	if !address.IsLoadFromMap() || address.Src != asm.PseudoMapValue || address.Reference() != constantsSection {
		return 0, false
	}
	if load.OpCode.Class() != asm.LdXClass || load.OpCode.Mode() != asm.MemMode || load.Src != address.Dst {
		return 0, false
	}
	var value [8]byte
	off := uint32(uint64(address.Constant)>>32) + uint32(load.Offset)
	for i := range load.OpCode.Size().Sizeof() {
		b, ok := constants[off+uint32(i)]
		if !ok {
			return 0, false
		}
		value[i] = b
	}
	v := binary.LittleEndian.Uint64(value[:]) // as the programs are
	return int32(v), v <= math.MaxUint32
}

func foldLoad(address, load asm.Instruction, value int32) asm.Instructions {
	set := asm.Mov.Imm32(load.Dst, value).WithMetadata(load.Metadata)
	if load.Dst != address.Dst { // the address may be of use to others
		return asm.Instructions{address, set}
	}
	return asm.Instructions{nothing.WithMetadata(address.Metadata).WithReference(""), nothing, set}
}

// isLookup says whether call looks something up in the table at address.
func isLookup(address, call asm.Instruction) bool {
	return address.IsLoadFromMap() && address.Src == asm.PseudoMapFD && address.Dst == asm.R1 &&
		call.IsBuiltinCall() && call.Constant == int64(asm.FnMapLookupElem)
}

// onlyEntry is the address of a table's only entry, where address and call would
// have looked it up.
func onlyEntry(address, call asm.Instruction) asm.Instructions {
	address.Dst, address.Src, address.Constant = asm.R0, asm.PseudoMapValue, 0
	return asm.Instructions{address, nothing.WithMetadata(call.Metadata)}
}
