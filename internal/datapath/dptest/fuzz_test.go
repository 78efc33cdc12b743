// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// FuzzFrames: a frame that the independent parser calls malformed is dropped,
// untouched and for a parse reason; one that it calls well-formed never is.
func FuzzFrames(f *testing.F) {
	for _, s := range shapes() {
		f.Add(s.p().Frame())
	}
	nets := map[bool]*Network{}
	f.Fuzz(func(t *testing.T, frame []byte) {
		if len(frame) < 14 || len(frame) > 2000 {
			t.Skip()
		}
		if len(nets) == 0 {
			for _, inPod := range []bool{false, true} {
				net, err := Load(Options{InPod: inPod})
				check(t, err)
				nets[inPod] = &Network{Datapath: net}
				nets[inPod].addPods(t, 3)
			}
		}
		from := NewPod(2).MAC
		frame = bytes.Clone(frame)
		copy(frame[6:], from[:])
		h, fault := oracle.Parse(frame)
		for _, net := range nets {
			for id, prog := range []string{"", "to_pod", "from_pod"} {
				if prog != "" {
					fuzzOne(t, net, prog, uint32(id), frame, h, fault)
				}
			}
		}
	})
}

func fuzzOne(t *testing.T, net *Network, name string, endpoint uint32, frame []byte, h oracle.Headers, fault oracle.Fault) {
	prog := net.PodPrograms.FromPod
	if name == "to_pod" {
		prog = net.PodPrograms.ToPod
	}
	c := Context{Endpoint: endpoint}
	r, err := net.Run(prog, frame, c)
	if errors.Is(err, unix.EINVAL) && len(frame) < 54 {
		whole := append(bytes.Clone(frame), make([]byte, 54)...)
		r, err = net.RunCut(prog, whole, len(frame), c)
	}
	check(t, err)
	switch {
	case fault != "" && (r.Verdict != Drop || r.Reason != reasonNumber(string(fault))):
		t.Errorf("%s: %v, want drop %s", name, r, fault)
	case fault != "" && !bytes.Equal(r.Packet, frame):
		t.Errorf("%s: a malformed frame was changed", name)
	case fault == "" && !h.Error && r.Verdict == Drop && isParseReason(r.Reason):
		t.Errorf("%s: %v, but it is well-formed: %+v", name, r, h)
	}
}
