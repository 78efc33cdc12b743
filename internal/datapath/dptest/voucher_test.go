// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// vouchers is a node inside whose pods programs vouch for packets, and before
// whose pods nothing but a voucher lets one pass.
func vouchers(t *testing.T) *Network {
	t.Helper()
	net := NewNetwork(t, Options{InPod: true}, 4)
	net.Vouch(t)
	check(t, net.MstProgramsV1.Delete(uint32(bpfgen.ProgToPodInner)))
	return net
}

// passes says whether a packet that brings these words passes the entry before pod p.
func (n *Network) passes(t *testing.T, p Pod, frame []byte, brought [5]uint32) bool {
	t.Helper()
	r, err := n.before(p, Result{Packet: frame, Left: brought})
	check(t, err)
	if r.Verdict != Next && (r.Verdict != Drop || r.Reason != bpfgen.ReasonNoProgram) {
		t.Fatalf("neither passed nor left to the program: %v", r)
	}
	return r.Verdict == Next
}

func TestAVoucherIsForOnePacketToOnePod(t *testing.T) {
	net := vouchers(t)
	for _, proto := range []uint8{oracle.TCP, oracle.UDP} {
		for _, v6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d/v6=%t", proto, v6), func(t *testing.T) {
				net.Reset(t, 4)
				s := newScene(t, net, v6, proto)
				sent, err := net.FromPod(s.client, s.packet(s.client, s.c, s.vip, syn).Payload(20).Frame())
				check(t, err)
				frame, brought := sent.Packet, sent.Left
				if sent.Verdict != Next || !net.passes(t, s.server, frame, brought) {
					t.Fatalf("%v: its receiver's entry does not take it", sent)
				}
				if c := net.Counters(t, s.server); c.ToPod.Packets != 1 || c.ToPod.Bytes != uint64(len(frame)) {
					t.Errorf("counted %+v, want one packet of %d bytes", c.ToPod, len(frame))
				}
				r, err := net.before(s.server, sent)
				check(t, err)
				if net.passes(t, s.server, frame, r.Left) {
					t.Error("a voucher that was spent passes again")
				}
				if net.passes(t, s.second, frame, brought) {
					t.Error("passes to another pod")
				}

				l4, sealed := 34, map[string][2]int{"protocol": {23, 24}, "source": {26, 30}, "destination": {30, 34}}
				open := map[string][2]int{"link addresses": {0, 12}, "TOS": {15, 16}, "hop limit": {22, 23}, "header checksum": {24, 26}}
				if v6 {
					l4, sealed = 54, map[string][2]int{"protocol": {20, 21}, "source": {22, 38}, "destination": {38, 54}}
					open = map[string][2]int{"link addresses": {0, 12}, "flow label": {17, 18}, "hop limit": {21, 22}}
				}
				sealed["ethertype"] = [2]int{12, 14}
				sealed["ports"] = [2]int{l4, l4 + 4}
				open["payload"] = [2]int{len(frame) - 20, len(frame)}
				if proto == oracle.TCP {
					sealed["flags"] = [2]int{l4 + 13, l4 + 14}
					open["sequence"] = [2]int{l4 + 4, l4 + 8}
				}
				for _, c := range []struct {
					places map[string][2]int
					passes bool
				}{{sealed, false}, {open, true}} {
					for name, place := range c.places {
						for at := place[0]; at < place[1]; at++ {
							for bit := range 8 {
								changed := slices.Clone(frame)
								changed[at] ^= 1 << bit
								if net.passes(t, s.server, changed, brought) != c.passes {
									t.Errorf("bit %d of byte %d changed (%s): passes is %t", bit, at, name, !c.passes)
								}
							}
						}
					}
				}
				for _, word := range []int{bpfgen.CbVoucher, bpfgen.CbVoucherRest} {
					for bit := range 32 {
						other := brought
						other[word] ^= 1 << bit
						if net.passes(t, s.server, frame, other) {
							t.Errorf("bit %d of word %d of the voucher changed: passes", bit, word)
						}
					}
				}
				net.SetPod(t, s.server)
				if net.passes(t, s.server, frame, brought) {
					t.Error("passes although the pod has another generation, and so perhaps another policy")
				}
				again, err := net.FromPod(s.client, s.packet(s.client, s.c, s.vip, ack).Frame())
				check(t, err)
				if !net.passes(t, s.server, again.Packet, again.Left) {
					t.Error("the next packet, sent after the change, does not pass")
				}
				net.RemovePod(t, s.server)
				if net.passes(t, s.server, again.Packet, again.Left) {
					t.Error("passes to a pod that is gone")
				}
			})
		}
	}
}

func TestWithoutAKeyNobodyVouches(t *testing.T) {
	net := vouchers(t)
	check(t, net.MstVoucherV1.Put(uint32(0), bpfgen.PodVoucherKey{}))
	s := newScene(t, net, false, oracle.TCP)
	sent, err := net.FromPod(s.client, s.packet(s.client, s.c, s.b, syn).Frame())
	check(t, err)
	if sent.Verdict != Next || net.passes(t, s.server, sent.Packet, sent.Left) {
		t.Errorf("%v passes", sent)
	}
	if net.passes(t, s.server, sent.Packet, [5]uint32{}) {
		t.Error("passes with nothing at all")
	}
}

// What the receiver's program must see gets no voucher.
func TestWhatNobodyVouchesFor(t *testing.T) {
	net := vouchers(t)
	for _, v6 := range []bool{false, true} {
		from, to := NewPod(2), NewPod(1)
		elsewhere, small := NewPod(1), NewPod(1)
		elsewhere.Parent, small.MTU = 8, 100
		usual := func() *Packet { return start(v6).TCP(1, 2, syn) }
		for name, c := range map[string]struct {
			to Pod
			p  *Packet
		}{
			"an echo":                    {to, start(v6).Echo(1, false)},
			"SCTP":                       {to, start(v6).SCTP(1, 2, 1)},
			"a fragment":                 {to, start(v6).Fragment(0, true, 7).UDP(1, 2).Payload(64)},
			"a pod on another parent":    {elsewhere, usual()},
			"more than the pod can take": {small, usual().Payload(200)},
			"options, extension headers": {to, map[bool]func() *Packet{false: func() *Packet { return start(v6).Options([]byte{1, 1, 1, 1}).TCP(1, 2, syn) }, true: func() *Packet { return start(v6).Ext(60, 8).TCP(1, 2, syn) }}[v6]()},
		} {
			t.Run(fmt.Sprintf("%s/v6=%t", name, v6), func(t *testing.T) {
				net.Reset(t, 4)
				net.SetPod(t, c.to)
				sent, err := net.FromPod(from, c.p.Frame())
				check(t, err)
				if sent.Verdict != Next || net.passes(t, c.to, sent.Packet, sent.Left) {
					t.Errorf("%v: passes unseen", sent)
				}
			})
		}
		net.Reset(t, 4)
		sent, err := net.FromPod(from, usual().Frame())
		check(t, err)
		if !net.passes(t, to, sent.Packet, sent.Left) {
			t.Error("what all of them begin with does not pass")
		}
	}
}

// What the vouchers of a flow between two pods have in common lies in its entry, for each direction, until
// either end is another.
func TestVouchersOfAFlowHaveAPartInCommon(t *testing.T) {
	net := vouchers(t)
	eachFamily(t, func(t *testing.T, v6 bool) {
		net.Reset(t, 4)
		s := newScene(t, net, v6, oracle.TCP)
		passes := func(p, to Pod, from, dst netip.AddrPort, flags uint8) bool {
			t.Helper()
			r, err := net.FromPod(p, s.packet(p, from, dst, flags).Payload(20).Frame())
			check(t, err)
			return net.passes(t, to, r.Packet, r.Left)
		}
		both := func(what string, flags uint8, want bool) {
			t.Helper()
			if got := passes(s.client, s.server, s.c, s.b, flags); got != want {
				t.Errorf("%s, there: passes is %t", what, got)
			}
			if got := passes(s.server, s.client, s.b, s.c, flags); got != want {
				t.Errorf("%s, back: passes is %t", what, got)
			}
		}
		if !passes(s.client, s.server, s.c, s.b, syn) || !passes(s.server, s.client, s.b, s.c, syn|ack) {
			t.Error("the first of each direction do not pass")
		}
		for range 2 {
			both("ACK", ack, true)
			both("PSH", ack|8, true)
		}
		net.eachNear(t, func(n *bpfgen.PodNearFlow) {
			for i := range n.E.Other.Dst.Bytes { // where struct near_siblings has it
				n.E.Other.Dst.Bytes[i]++
			}
		})
		both("after what they have in common was changed", ack, false)
		for _, p := range []Pod{s.client, s.server} {
			net.SetPod(t, p)
			both(fmt.Sprintf("after pod %d was changed", p.ID), ack, true)
			both(fmt.Sprintf("after pod %d was changed, again", p.ID), ack|8, true)
		}
	})
}
