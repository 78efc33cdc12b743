// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Linux before 6.8 counts each frame of a chain of calls in steps of 32 bytes.
const (
	stackLimit = 512
	frameStep  = 32
)

// frame is what a function needs of the stack, and whom it calls.
type frame struct {
	bytes int
	calls map[string]bool
}

// frames reads the functions of a program. A frame ends at the lowest address
// that is written, read or handed on.
func frames(insns asm.Instructions) map[string]*frame {
	all := map[string]*frame{}
	var now *frame
	var base [11]bool // registers that hold the frame's address
	for _, ins := range insns {
		if name := ins.Symbol(); name != "" && !strings.HasPrefix(name, "LBB") {
			now = &frame{calls: map[string]bool{}}
			all[name] = now
			base = [11]bool{}
		}
		op, depth := ins.OpCode, 0
		switch {
		case ins.IsFunctionCall():
			now.calls[ins.Reference()] = true
		case op.Class() == asm.LdXClass && ins.Src == asm.R10, op.Class().IsStore() && ins.Dst == asm.R10:
			depth = -int(ins.Offset)
		case op.Class() == asm.ALU64Class && op.ALUOp() == asm.Mov:
			base[ins.Dst] = op.Source() == asm.RegSource && ins.Src == asm.R10
		case op.Class() == asm.ALU64Class && op.ALUOp() == asm.Add && op.Source() == asm.ImmSource && base[ins.Dst]:
			depth = -int(ins.Constant)
			base[ins.Dst] = false
		}
		now.bytes = max(now.bytes, depth)
	}
	return all
}

// deepest is the chain of calls from a function that needs most.
func deepest(all map[string]*frame, name string) (bytes int, chain []string) {
	f := all[name]
	if f == nil {
		return 0, nil
	}
	for callee := range f.calls {
		if b, c := deepest(all, callee); b > bytes {
			bytes, chain = b, c
		}
	}
	return bytes + max(frameStep, (f.bytes+frameStep-1)/frameStep*frameStep), append([]string{name}, chain...)
}

// Here the kernel counts exactly, and takes what 6.1 refuses.
func TestChainsOfCallsFitTheStackOfOldKernels(t *testing.T) {
	for _, load := range []func() (*ebpf.CollectionSpec, error){
		bpfgen.LoadPod, bpfgen.LoadSock, bpfgen.LoadEdge, bpfgen.LoadNetdev, bpfgen.LoadOverlay, bpfgen.LoadParent, bpfgen.LoadEntry,
	} {
		spec, err := load()
		check(t, err)
		for name, p := range spec.Programs {
			bytes, chain := deepest(frames(p.Instructions), name)
			if bytes > stackLimit {
				t.Errorf("%s: %d bytes of stack for %s, %d are there", name, bytes, strings.Join(chain, " → "), stackLimit)
			}
			if bytes == 0 {
				t.Errorf("%s: no frames found", name)
			}
		}
	}
}
