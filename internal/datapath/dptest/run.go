// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Verdict is what a tc program answers.
type Verdict int32

const (
	Next     Verdict = -1 // TC_ACT_UNSPEC: the kernel goes on with it
	Drop     Verdict = 2  // TC_ACT_SHOT
	Redirect Verdict = 7  // TC_ACT_REDIRECT
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
	Mark     uint32
	GSOSize  uint32
	GSOSegs  uint32
	// Linear, when not 0: so many bytes are in the linear part (kernels that can).
	Linear uint32
}

// Result is what became of a packet.
type Result struct {
	Verdict         Verdict
	Packet          []byte
	Reason          uint32 // enum drop_reason
	RedirectKind    uint32 // enum redirect_kind
	RedirectIfindex uint32
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

// skBuff is struct __sk_buff of linux/bpf.h.
type skBuff struct {
	Len            uint32
	PktType        uint32
	Mark           uint32
	QueueMapping   uint32
	Protocol       uint32
	VlanPresent    uint32
	VlanTci        uint32
	VlanProto      uint32
	Priority       uint32
	IngressIfindex uint32
	Ifindex        uint32
	TcIndex        uint32
	Cb             [5]uint32
	Hash           uint32
	TcClassid      uint32
	Data           uint32
	DataEnd        uint32
	NapiID         uint32
	Family         uint32
	RemoteIP4      uint32
	LocalIP4       uint32
	RemoteIP6      [4]uint32
	LocalIP6       [4]uint32
	RemotePort     uint32
	LocalPort      uint32
	DataMeta       uint32
	FlowKeys       uint64
	Tstamp         uint64
	WireLen        uint32
	GsoSegs        uint32
	Sk             uint64
	GsoSize        uint32
	TstampType     uint8
	Pad            [3]uint8
	Hwtstamp       uint64
}

// Run sends a frame of at least 14 bytes through prog. The kernel refuses what
// no device could hand to a program; that comes back as an error.
func (d *Datapath) Run(prog *ebpf.Program, frame []byte, c Context) (Result, error) {
	return d.run(prog, frame, 0, c)
}

func (d *Datapath) run(prog *ebpf.Program, frame []byte, length uint32, c Context) (Result, error) {
	in := skBuff{Ifindex: c.Ifindex, Mark: c.Mark, GsoSize: c.GSOSize, GsoSegs: c.GSOSegs, DataEnd: c.Linear}
	in.Cb[bpfgen.CbEndpoint] = c.Endpoint
	in.Cb[cbLength] = length
	var out skBuff
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
	}, nil
}
