// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Verdict is what a tc program answers.
type Verdict int32

const (
	Next     Verdict = datapath.VerdictNext
	Drop     Verdict = datapath.VerdictDrop
	Redirect Verdict = datapath.VerdictRedirect
)

func (v Verdict) String() string {
	switch v {
	case Next:
		return "next"
	case Drop:
		return "drop"
	case Redirect:
		return "redirect"
	}
	return fmt.Sprintf("verdict %d", int32(v))
}

// Context is what a packet brings along beside its bytes.
type Context struct {
	Endpoint uint32
	Ifindex  uint32 // of the caller's namespace; 0: loopback
	CameIn   uint32 // ifindex where the host got it; 0: the host itself sent it
	Mark     uint32
	GSOSize  uint32
	GSOSegs  uint32
	// Linear, when not 0: so many bytes are in the linear part (kernels that can).
	Linear uint32
	// Brought are the words of the control block as the last hook left them.
	Brought [5]uint32
}

// Result is what became of a packet.
type Result struct {
	Verdict         Verdict
	Packet          []byte
	Reason          uint32 // enum drop_reason
	RedirectKind    uint32 // enum redirect_kind
	RedirectIfindex uint32
	Mark            uint32
	Left            [5]uint32 // in the control block
}

func (r Result) String() string {
	switch r.Verdict {
	case Drop:
		return "drop " + ReasonName(r.Reason)
	case Redirect:
		return fmt.Sprintf("redirect kind %d ifindex %d", r.RedirectKind, r.RedirectIfindex)
	}
	return r.Verdict.String()
}

// ReasonName is the short name of a drop reason.
func ReasonName(reason uint32) string {
	if int(reason) < len(bpfgen.Reasons) {
		return bpfgen.Reasons[reason].Name
	}
	return fmt.Sprintf("reason %d", reason)
}

// Run sends a frame of at least 14 bytes through prog. The kernel refuses what
// no device could hand to a program; that comes back as an error.
func (d *Datapath) Run(prog *ebpf.Program, frame []byte, c Context) (Result, error) {
	return d.run(prog, frame, 0, c)
}

// Repeat runs prog n times on one frame, in one system call, which must be one
// that it leaves as it is.
func (d *Datapath) Repeat(prog *ebpf.Program, frame []byte, c Context, n int) (Verdict, error) {
	in := datapath.SkBuff{Ifindex: c.Ifindex, IngressIfindex: c.CameIn}
	in.Cb[bpfgen.CbEndpoint] = c.Endpoint
	ret, err := prog.Run(&ebpf.RunOptions{Data: frame, Context: in, Repeat: uint32(n)})
	return Verdict(int32(ret)), err
}

func (d *Datapath) run(prog *ebpf.Program, frame []byte, length uint32, c Context) (Result, error) {
	in := datapath.SkBuff{Ifindex: c.Ifindex, Mark: c.Mark, IngressIfindex: c.CameIn, GsoSize: c.GSOSize, GsoSegs: c.GSOSegs, DataEnd: c.Linear, Cb: c.Brought}
	if c.Endpoint != 0 {
		in.Cb[bpfgen.CbEndpoint] = c.Endpoint
	}
	if length != 0 {
		in.Cb[cbLength] = length
	}
	var out datapath.SkBuff
	opts := ebpf.RunOptions{Data: frame, DataOut: d.out[:len(frame)+256], Context: in, ContextOut: &out}
	ret, err := prog.Run(&opts)
	if err != nil {
		return Result{}, err
	}
	return Result{
		Verdict:         Verdict(int32(ret)),
		Packet:          append([]byte(nil), opts.DataOut...),
		Reason:          out.Cb[bpfgen.CbReason],
		RedirectKind:    out.Cb[bpfgen.CbRedirectKind],
		RedirectIfindex: out.Cb[bpfgen.CbRedirectIfindex],
		Mark:            out.Mark,
		Left:            out.Cb,
	}, nil
}
