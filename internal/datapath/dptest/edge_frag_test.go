// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// Fragments of one datagram go where its first goes.
func TestEdgeFragments(t *testing.T) {
	e := NewEdge(t, Options{}, 1)
	for _, v6 := range []bool{false, true} {
		o := outside{speaker{t, e.Network, oracle.UDP}, e, v6, end(External(1, v6), 4000), end(e.Node(v6), 30080)}
		b := end(External(2, v6), 8080)
		o.nodePort(0, b)
		first := Eth(Router, e.MAC).IP(o.c.Addr(), o.f.Addr()).Fragment(0, true, 9).UDP(o.c.Port(), o.f.Port()).Payload(16).UDPLen(8 + 40)
		later := Eth(Router, e.MAC).IP(o.c.Addr(), o.f.Addr()).Fragment(24, false, 9).Proto(oracle.UDP).Payload(24)
		for i, p := range []*Packet{first, later} {
			a, err := e.Arrive(p.Frame())
			if err != nil || !a.Direct || a.Headers.Src != e.Node(v6) || a.Headers.Dst != b.Addr() {
				t.Errorf("v6=%v, fragment %d: %v, %v", v6, i, a, err)
			}
		}
	}
}

// gatherMAC is the link address behind which datagrams are put together.
var gatherMAC = []byte{0x02, 0x6d, 0x73, 0x74, 0, 2}

// goesToGather says whether a packet goes to be put together with the rest of its datagram.
func goesToGather(r Result) bool {
	return r.Verdict == Redirect && r.RedirectKind == 0 && bytes.Equal(r.Packet[:6], gatherMAC)
}

// A fragment that overtakes its datagram's first is gathered, and so are those that follow; what comes
// back in order goes where its first goes.
func TestEdgeFragmentsOutOfOrder(t *testing.T) {
	e := NewEdge(t, Options{}, 1)
	for _, v6 := range []bool{false, true} {
		o := outside{speaker{t, e.Network, oracle.UDP}, e, v6, end(External(1, v6), 4000), end(e.Node(v6), 30080)}
		o.nodePort(0, end(External(2, v6), 8080))
		first := func(id uint32) *Packet {
			return Eth(Router, e.MAC).IP(o.c.Addr(), o.f.Addr()).Fragment(0, true, id).UDP(o.c.Port(), o.f.Port()).Payload(16).UDPLen(8 + 40)
		}
		later := func(id uint32) *Packet {
			return Eth(Router, e.MAC).IP(o.c.Addr(), o.f.Addr()).Fragment(24, false, id).Proto(oracle.UDP).Payload(24)
		}
		run := func(what string, frame []byte, verdict Verdict, gathers bool) {
			t.Helper()
			r, err := e.Run(e.FromOutside, frame, Context{Ifindex: e.Ifindex})
			if err != nil || r.Verdict != verdict || goesToGather(r) != gathers || r.Mark != 0 {
				t.Errorf("v6=%v, %s: %v with mark %#x to % x, %v; want %v, gathered: %v", v6, what, r, r.Mark, r.Packet[:6], err, verdict, gathers)
			}
		}
		// back is a frame as it comes back: to the link address that it went to, IPv6's by a new identification.
		back := func(what string, frame []byte, verdict Verdict) []byte {
			t.Helper()
			copy(frame, gatherMAC)
			r, err := e.Run(e.FromGather, frame, Context{})
			if err != nil || r.Verdict != verdict {
				t.Errorf("v6=%v, %s: %v, %v; want %v", v6, what, r, err, verdict)
			}
			return frame
		}
		again := func(id uint32) uint32 {
			if v6 {
				return id + 1000
			}
			return id
		}
		run("nobody gathers", later(20).Frame(), Next, false)
		check(t, e.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Gather: 1}))
		back("one that never went", later(21).Frame(), Drop)
		back("what is no fragment", Eth(Router, e.MAC).IP(o.c.Addr(), o.f.Addr()).UDP(o.c.Port(), o.f.Port()).Payload(16).Frame(), Drop)
		run("a later one", later(21).Frame(), Redirect, true)
		run("its first", first(21).Frame(), Redirect, true)
		run("one more", later(21).Frame(), Redirect, true)
		run("its first, in order", back("its first", first(again(21)).Frame(), Redirect), Redirect, false)
		run("the later one, in order", back("the later one", later(again(21)).Frame(), Redirect), Redirect, false)
		gone := later(22).Frame()
		copy(gone, gatherMAC)
		run("one back without its first", gone, Next, false)
		if r, err := e.Run(e.FromOutside, later(23).Frame(), Context{Ifindex: e.Ifindex, Mark: 7}); err != nil || r.Verdict != Next || r.Mark != 7 {
			t.Errorf("v6=%v, one that carries a mark: %v with %#x, %v", v6, r, r.Mark, err)
		}
		run("a later one", later(24).Frame(), Redirect, true)
		e.Age(t, 4)
		run("a first one that comes long after", first(24).Frame(), Redirect, false)
		back("one of an hour ago", later(24).Frame(), Redirect)
		e.Age(t, 3600)
		back("one of an hour ago", later(24).Frame(), Drop)
		check(t, e.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{}))
	}
}
