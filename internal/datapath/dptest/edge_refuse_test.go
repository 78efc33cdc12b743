// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

func TestEdgeRefusesOrDrops(t *testing.T) {
	eachEdge(t, func(o outside) {
		o.f = end(VIP(1, o.v6), 80)
		for name, c := range map[string]struct {
			opts    ServiceOptions
			port    uint16
			reason  uint32
			refused bool
		}{
			"no backend":         {ServiceOptions{}, 80, bpfgen.ReasonNoBackend, true},
			"unknown port":       {ServiceOptions{}, 81, bpfgen.ReasonServicePort, true},
			"no local backend":   {ServiceOptions{Flags: bpfgen.SvcDrop}, 80, bpfgen.ReasonNoLocalBackend, false},
			"not in the ranges":  {ServiceOptions{Flags: bpfgen.SvcRanges, Kind: bpfgen.KindLoadBalancer}, 80, bpfgen.ReasonSourceRange, false},
			"an external's port": {ServiceOptions{Kind: bpfgen.KindExternalIp}, 80, bpfgen.ReasonNoBackend, true},
		} {
			o.edge.SetServiceWith(o.t, c.opts, o.proto, o.f)
			before := o.edge.Drops(o.t, c.reason, bpfgen.DirEdge)
			r, err := o.edge.Run(o.edge.FromOutside, o.frame(o.c, end(o.f.Addr(), c.port), syn).Frame(), Context{Ifindex: o.edge.Ifindex})
			if err != nil || r.Reason != c.reason || (r.Verdict == Redirect) != c.refused || o.edge.Drops(o.t, c.reason, bpfgen.DirEdge) != before+1 {
				o.t.Errorf("%s: %v, %v", name, r, err)
			}
			if !c.refused {
				// Nor do they hear of it who scan by what opens nothing.
				if a := o.arrive(o.c, end(o.f.Addr(), c.port), ack); a.Refused || a.Dropped != ReasonName(c.reason) {
					o.t.Errorf("%s, in the middle of a connection: %v", name, a)
				}
				continue
			}
			a := arrived(r, 0)
			if [6]byte(r.Packet) != Router || r.RedirectIfindex != o.edge.Ifindex {
				o.t.Errorf("%s: the answer goes to %x out of %d", name, r.Packet[:6], r.RedirectIfindex)
			}
			o.refusedTo(a, end(o.f.Addr(), c.port))
		}
		o.edge.RemoveService(o.t, o.proto, o.f)
	})
}

// Nobody can answer a client that has but a link-local address: it finds the node, and takes nothing.
func TestEdgeLeavesLinkLocalClientsAlone(t *testing.T) {
	eitherEdge(t, func(o outside) {
		if !o.v6 {
			return
		}
		o.nodePort(0, end(External(2, true), 8080))
		in := o.frame(end(netip.MustParseAddr("fe80::9"), 4000), o.f, syn).Frame()
		r, err := o.edge.Run(o.edge.FromOutside, in, Context{Ifindex: o.edge.Ifindex})
		if err != nil || r.Verdict != Next || string(r.Packet) != string(in) {
			o.t.Errorf("%v, %v", r, err)
		}
		if n := len(o.edge.Flows(o.t)); n > 0 {
			o.t.Errorf("%d flow entries", n)
		}
	})
}

// refusedTo fails unless a is an answer to the client, from the frontend.
func (o outside) refusedTo(a Arrival, f netip.AddrPort) {
	o.t.Helper()
	if _, l4 := oracle.Sums(a.Frame, a.Headers); l4 != oracle.SumGood || a.Headers.Dst != o.c.Addr() || a.Headers.Src != f.Addr() {
		o.t.Errorf("answer %v, checksum %v", a.Tuple(), l4)
	}
	if o.proto == oracle.TCP && a.Headers.Flags != rst|ack || o.proto == oracle.UDP && !a.Headers.Error ||
		o.proto == oracle.SCTP && a.Headers.Flags != rst {
		o.t.Errorf("answer flags %#x, error %v", a.Headers.Flags, a.Headers.Error)
	}
}

// Clients in a range pass, by their longest match or any, of their own Service only.
func TestEdgeSourceRanges(t *testing.T) {
	eachEdge(t, func(o outside) {
		o.f = end(VIP(1, o.v6), 80)
		b := end(External(2, o.v6), 8080)
		o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindLoadBalancer, Flags: bpfgen.SvcRanges, Group: 7}, o.proto, o.f, b)
		length := uint32(32 + 64 + 96 + 30)
		if o.v6 {
			length = 32 + 64 + 126
		}
		put := func(group uint64, client netip.Addr) {
			check(o.t, o.edge.MstSourcesV1.Put(bpfgen.PodSourceKey{Prefixlen: length, Group: group, Addr: toAddr(client)}, uint8(0)))
		}
		put(8, o.c.Addr())
		if a := o.arrive(o.c, o.f, syn); a.Dropped != ReasonName(bpfgen.ReasonSourceRange) {
			o.t.Errorf("another Service's range: %v", a)
		}
		put(7, o.c.Addr()) // 0 to 3
		o.worn(o.arrive(o.c, o.f, syn))
		o.worn(o.arrive(end(External(3, o.v6), 4000), o.f, syn))
		if a := o.arrive(end(External(4, o.v6), 4000), o.f, syn); a.Dropped != ReasonName(bpfgen.ReasonSourceRange) {
			o.t.Errorf("beside the range: %v", a)
		}
		clearTable(o.t, o.edge.MstSourcesV1)
	})
}
