// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

var update = flag.Bool("update", false, "write budget.json anew")

const budgetFile = "budget.json"

// budget is what the programs may cost the verifier. Only the instructions are
// held to, and what writes nothing where headers lie; the rest is a record.
// Another kernel's verifier counts otherwise.
type budget struct {
	Kernel   string                `json:"kernel"`
	Programs map[string]costRecord `json:"programs"`
}

type costRecord struct {
	Instructions uint32 `json:"verified_instructions"`
	Limit        uint32 `json:"limit"`
	JitedBytes   uint32 `json:"jited_bytes"`
	Stack        string `json:"stack_bytes"`
	VerifyMicros int    `json:"verify_us"` // best of several
	Writes       bool   `json:"writes,omitempty"`
}

const loads = 3

func TestProgramsStayWithinTheVerifierBudget(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("loading programs needs root")
	}
	check(t, rlimit.RemoveMemlock())
	now := budget{Kernel: kernel(t), Programs: map[string]costRecord{}}
	for prefix, load := range map[string]func() (*ebpf.CollectionSpec, error){
		"pod_host":  func() (*ebpf.CollectionSpec, error) { return Spec(Options{}) },
		"pod_inner": func() (*ebpf.CollectionSpec, error) { return Spec(Options{InPod: true}) },
		"pod_wire":  func() (*ebpf.CollectionSpec, error) { return toPodAlone(Options{FromWire: true}) },
		"pod_edge":  func() (*ebpf.CollectionSpec, error) { return toPodAlone(Options{FromEdge: true}) },
		"netdev":    bpfgen.LoadNetdev,
		"overlay":   bpfgen.LoadOverlay,
		"entry":     bpfgen.LoadEntry,
		"sock":      bpfgen.LoadSock,
		"edge":      bpfgen.LoadEdge,
		"edge_door": func() (*ebpf.CollectionSpec, error) {
			spec, err := bpfgen.LoadEdge()
			if err == nil {
				delete(spec.Programs, bpfgen.EdgeProgToOutside)
				err = spec.Variables[bpfgen.EdgeVarFromDoor].Set(uint8(1))
			}
			return spec, err
		},
		"parent": bpfgen.LoadParent,
	} {
		spec, err := load()
		check(t, err)
		for name := range spec.Programs {
			now.Programs[prefix+"/"+name] = cost(t, load, name)
		}
	}
	if *update {
		text, err := json.MarshalIndent(now, "", "  ")
		check(t, err)
		check(t, os.WriteFile(budgetFile, append(text, '\n'), 0o644))
		return
	}
	text, err := os.ReadFile(budgetFile)
	check(t, err)
	var recorded budget
	check(t, json.Unmarshal(text, &recorded))
	for name, c := range now.Programs {
		limit := recorded.Programs[name].Limit
		t.Logf("%-24s %6d instructions (limit %d), %5d bytes, stack %s, %d µs", name, c.Instructions, limit, c.JitedBytes, c.Stack, c.VerifyMicros)
		if c.Writes && !recorded.Programs[name].Writes {
			t.Errorf("%s writes where headers lie, so the kernel makes each packet of a connection the program's own first", name)
		}
		if c.Instructions > limit && recorded.Kernel == now.Kernel {
			t.Errorf("%s: %d verified instructions, the budget is %d; if it is worth them: go test ./internal/datapath/dptest -run Budget -update", name, c.Instructions, limit)
		}
	}
}

// cost loads one program several times.
func cost(t *testing.T, load func() (*ebpf.CollectionSpec, error), name string) costRecord {
	t.Helper()
	var best costRecord
	for range loads {
		spec, err := load()
		check(t, err)
		for other := range spec.Programs {
			if other != name {
				delete(spec.Programs, other)
			}
		}
		for _, m := range spec.Maps {
			m.MaxEntries = min(m.MaxEntries, 128)
		}
		datapath.Specialize(spec)
		c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
			Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}})
		check(t, err)
		r := record(t, c.Programs[name])
		c.Close()
		if best.Instructions == 0 || r.VerifyMicros < best.VerifyMicros {
			best = r
		}
	}
	return best
}

var (
	stackRE = regexp.MustCompile(`stack depth ([0-9+]+)`)
	timeRE  = regexp.MustCompile(`verification time (\d+) usec`)
)

func record(t *testing.T, p *ebpf.Program) costRecord {
	t.Helper()
	info, err := p.Info()
	check(t, err)
	insns, ok := info.VerifiedInstructions()
	if !ok {
		t.Skip("this kernel does not tell the verified instructions")
	}
	r := costRecord{Instructions: insns, Limit: insns + insns/20, Writes: beginsWithItsOwn(t, info)}
	if size, err := info.JitedSize(); err == nil {
		r.JitedBytes = size
	}
	if m := stackRE.FindStringSubmatch(p.VerifierLog); m != nil {
		r.Stack = m[1]
	}
	if m := timeRE.FindStringSubmatch(p.VerifierLog); m != nil {
		r.VerifyMicros, err = strconv.Atoi(m[1])
		check(t, err)
	}
	return r
}

// beginsWithItsOwn tells whether the kernel begins a program with making the packet its own: it
// reads whether others hold it, and asks for a copy then (bpf_unclone_prologue in net/core/filter.c).
func beginsWithItsOwn(t *testing.T, info *ebpf.ProgramInfo) bool {
	t.Helper()
	insns, err := info.Instructions()
	check(t, err)
	first, second := insns[0], insns[1]
	return first.OpCode == asm.LoadMemOp(asm.Byte) && first.Dst == asm.R6 && first.Src == asm.R1 &&
		second.OpCode.ALUOp() == asm.And && second.Dst == asm.R6
}

// kernel is the running one's version, without its patch level.
func kernel(t *testing.T) string {
	t.Helper()
	var u unix.Utsname
	check(t, unix.Uname(&u))
	parts := strings.SplitN(unix.ByteSliceToString(u.Release[:]), ".", 3)
	return fmt.Sprintf("%s.%s", parts[0], parts[1])
}
