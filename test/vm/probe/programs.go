// SPDX-License-Identifier: Apache-2.0

// Features of BPF itself: helpers, instructions, maps. The programs are
// assembled here, so that the probe needs no compiler.

package main

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
)

const (
	actOK  = 0 // TC_ACT_OK, TCX_PASS and NETKIT_PASS
	xdpOK  = 2 // XDP_PASS
	pktLen = 64
)

func load(t ebpf.ProgramType, insns asm.Instructions) (*ebpf.Program, error) {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: t, Instructions: insns, License: "Dual MIT/GPL"})
	if err != nil {
		return nil, fmt.Errorf("load a %s program: %w", t, err)
	}
	return prog, nil
}

// A counter is a program that counts how often it ran.
type counter struct {
	prog *ebpf.Program
	runs *ebpf.Map
}

// newCounter loads a counter that returns verdict.
func newCounter(t ebpf.ProgramType, verdict int32) (*counter, error) {
	runs, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("create an array: %w", err)
	}
	prog, err := load(t, asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, runs.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0),
		asm.Mov.Imm(asm.R0, verdict).WithSymbol("out"),
		asm.Return(),
	})
	if err != nil {
		runs.Close()
		return nil, err
	}
	return &counter{prog, runs}, nil
}

// ran says whether the program has run.
func (c *counter) ran() error {
	var n uint64
	if err := c.runs.Lookup(uint32(0), &n); err != nil {
		return fmt.Errorf("read the count: %w", err)
	}
	if n == 0 {
		return errors.New("attached, but no packet reached the program")
	}
	return nil
}

func (c *counter) close() {
	c.prog.Close()
	c.runs.Close()
}

// testRun loads a tc program, runs it once on an empty packet and returns its verdict.
func testRun(insns asm.Instructions) (uint32, error) {
	prog, err := load(ebpf.SchedCLS, insns)
	if err != nil {
		return 0, err
	}
	defer prog.Close()
	verdict, _, err := prog.Test(make([]byte, pktLen))
	if err != nil {
		return 0, fmt.Errorf("run the program: %w", err)
	}
	return verdict, nil
}

// wantVerdict runs the program and compares.
func wantVerdict(want uint32, insns asm.Instructions) error {
	got, err := testRun(insns)
	if err == nil && got != want {
		err = fmt.Errorf("the program returned %d, not %d", got, want)
	}
	return err
}

func kernelBTF() error {
	_, err := btf.LoadKernelSpec()
	return err
}

func coarseTime() error {
	return wantVerdict(1, asm.Instructions{
		asm.FnKtimeGetCoarseNs.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R0, 1),
		asm.Return().WithSymbol("out"),
	})
}

// cmpxchg swaps 5 for 7 on the stack and returns what it finds there.
func cmpxchg() error {
	swap := asm.CmpXchg.Mem(asm.RFP, asm.R1, asm.DWord, -8)
	// cilium/ebpf v0.22.0 marshals the operation of an assembled atomic as 0, an
	// addition; one read from an object file keeps its constant and is right.
	swap.Constant = int64(asm.CmpXchg >> 8)
	return wantVerdict(7, asm.Instructions{
		asm.Mov.Imm(asm.R0, 5),
		asm.StoreMem(asm.RFP, -8, asm.R0, asm.DWord),
		asm.Mov.Imm(asm.R1, 7),
		swap,
		asm.LoadMem(asm.R0, asm.RFP, -8, asm.DWord),
		asm.Return(),
	})
}

// checkMTU asks whether the packet fits lo (device 1 of every namespace).
func checkMTU() error {
	return wantVerdict(0, asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.Mov.Imm(asm.R2, 1),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, -4),
		asm.Mov.Imm(asm.R4, 0),
		asm.Mov.Imm(asm.R5, 0),
		asm.FnCheckMtu.Call(),
		asm.Return(),
	})
}

func redirectNeigh() error {
	const tcActRedirect = 7
	return wantVerdict(tcActRedirect, asm.Instructions{
		asm.Mov.Imm(asm.R1, 1),
		asm.Mov.Imm(asm.R2, 0),
		asm.Mov.Imm(asm.R3, 0),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnRedirectNeigh.Call(),
		asm.Return(),
	})
}

func loopHelper() error { return features.HaveProgramHelper(ebpf.SchedCLS, asm.FnLoop) }
func timers() error     { return features.HaveProgramHelper(ebpf.SchedCLS, asm.FnTimerInit) }

// sockDestroy looks for the kfunc: calling it takes a TCP iterator.
func sockDestroy() error {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return err
	}
	var f *btf.Func
	return spec.TypeByName("bpf_sock_destroy", &f)
}

func ringBuffer() error {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.RingBuf, MaxEntries: 4096})
	if err != nil {
		return err
	}
	return m.Close()
}

const lruSize = 128

// filledLRU returns an LRU hash that was offered four times what it holds.
func filledLRU() (*ebpf.Map, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.LRUHash, KeySize: 4, ValueSize: 4, MaxEntries: lruSize})
	if err != nil {
		return nil, err
	}
	for i := range uint32(4 * lruSize) {
		if err := m.Put(i, i); err != nil {
			m.Close()
			return nil, fmt.Errorf("put into the full map: %w", err)
		}
	}
	return m, nil
}

// lruHash checks that a full map takes the newest entry and forgets others.
func lruHash() error {
	m, err := filledLRU()
	if err != nil {
		return err
	}
	defer m.Close()
	var k, v uint32
	n := 0
	for it := m.Iterate(); it.Next(&k, &v); {
		n++
	}
	if n == 0 || n > lruSize {
		return fmt.Errorf("%d entries in a map of %d", n, lruSize)
	}
	return m.Lookup(uint32(4*lruSize-1), &v)
}

func lruBatch() error {
	m, err := filledLRU()
	if err != nil {
		return err
	}
	defer m.Close()
	keys, values := make([]uint32, 2*lruSize), make([]uint32, 2*lruSize)
	n, err := m.BatchLookup(new(ebpf.MapBatchCursor), keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	if n == 0 {
		return errors.New("the batch is empty")
	}
	return nil
}
