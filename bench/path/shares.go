// SPDX-License-Identifier: Apache-2.0

package path

// How much of a transaction is spent in BPF programs, and in how many runs of
// them: by the kernel's own statistics, whose cost is taken off.

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// ProgramShare is what the programs of one kind of attachment did in one
// transaction. What a program calls by tail call is in its own figure.
type ProgramShare struct {
	Program string  `json:"program"` // its name and, where it is known, its attach type
	Runs    float64 `json:"runs"`
	Cost    float64 `json:"cost"` // of all those runs, in the document's unit
}

// programUse is what the kernel's statistics say of one program.
type programUse struct {
	name string
	runs uint64
	time time.Duration
}

// shares runs a load under the kernel's statistics and divides what programs did
// by its number of transactions.
func shares(o Options, load func() (transactions int64, err error)) ([]ProgramShare, error) {
	off, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return nil, fmt.Errorf("turn on the statistics of programs: %w", err)
	}
	defer off.Close()
	overhead, err := statsOverhead()
	if err != nil {
		return nil, err
	}
	before, err := programsInUse()
	if err != nil {
		return nil, err
	}
	n, err := load()
	if err != nil {
		return nil, err
	}
	after, err := programsInUse()
	if err != nil {
		return nil, err
	}
	places := attachTypes()
	byName := map[string]*ProgramShare{}
	for id, a := range after {
		b := before[id]
		if a.runs == b.runs {
			continue
		}
		name := a.name
		if place := places[id]; place != "" {
			name += ", " + place
		}
		s := byName[name]
		if s == nil {
			s = &ProgramShare{Program: name}
			byName[name] = s
		}
		runs := a.runs - b.runs
		s.Runs += float64(runs) / float64(n)
		s.Cost += o.cost(a.time-b.time-time.Duration(float64(runs)*overhead)) / float64(n)
	}
	var list []ProgramShare
	for _, s := range slices.SortedFunc(maps.Values(byName), func(a, b *ProgramShare) int { return cmp.Compare(b.Cost, a.Cost) }) {
		if s.Runs >= 0.5 { // the rest is the setting up, and other things on the machine
			list = append(list, *s)
		}
	}
	return list, nil
}

// statsOverhead is what the statistics count of themselves in one run, in
// nanoseconds: all they say of an empty program.
func statsOverhead() (float64, error) {
	empty, err := newEmpty()
	if err != nil {
		return 0, err
	}
	defer empty.Close()
	if _, _, err := empty.Benchmark(make([]byte, 64), 1000, nil); err != nil {
		return 0, fmt.Errorf("test run: %w", err)
	}
	s, err := empty.Stats()
	if err != nil || s.RunCount == 0 {
		return 0, fmt.Errorf("read the statistics of an empty program: %w", err)
	}
	return float64(s.Runtime) / float64(s.RunCount), nil
}

func programsInUse() (map[ebpf.ProgramID]programUse, error) {
	all := map[ebpf.ProgramID]programUse{}
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, fs.ErrNotExist) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list programs: %w", err)
		}
		id = next
		use, err := useOf(id)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it may go while we look
			return nil, err
		}
		all[id] = use
	}
}

func useOf(id ebpf.ProgramID) (programUse, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return programUse{}, err
	}
	defer p.Close()
	s, err := p.Stats()
	if err != nil {
		return programUse{}, err
	}
	info, err := p.Info()
	if err != nil {
		return programUse{}, err
	}
	return programUse{info.Name, s.RunCount, s.Runtime}, nil
}

// attachTypes says where the programs of links are, as far as the kernel tells.
func attachTypes() map[ebpf.ProgramID]string {
	out := map[ebpf.ProgramID]string{}
	for it := new(link.Iterator); it.Next(); {
		info, err := it.Link.Info()
		if err != nil {
			continue
		}
		switch {
		case info.TCX() != nil:
			out[info.Program] = attachName(ebpf.AttachType(info.TCX().AttachType))
		case info.Netkit() != nil:
			out[info.Program] = attachName(ebpf.AttachType(info.Netkit().AttachType))
		}
	}
	return out
}

func attachName(t ebpf.AttachType) string {
	return map[ebpf.AttachType]string{
		ebpf.AttachTCXIngress: "tc ingress", ebpf.AttachTCXEgress: "tc egress",
		ebpf.AttachNetkitPeer: "netkit peer", ebpf.AttachNetkitPrimary: "netkit primary",
	}[t]
}
