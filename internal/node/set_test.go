// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

func TestASetOfNodesAgreesWithTheObviousWay(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	prefix := func() netip.Prefix {
		p, _ := netip.AddrFrom4([4]byte{10, byte(r.IntN(4)), byte(r.IntN(8) * 32), 0}).Prefix(14 + r.IntN(11))
		if r.IntN(4) == 0 {
			p, _ = netip.AddrFrom16([16]byte{0xfd, 0, 0, byte(r.IntN(4)), 0, byte(r.IntN(4))}).Prefix(30 + r.IntN(20))
		}
		return p
	}
	refused := 0
	for range 2000 {
		var set Set
		var in []state.Node
		for range 8 {
			n := state.Node{Name: fmt.Sprint("n", r.IntN(20)), Mode: []state.NodeMode{state.NodeDirect, state.NodeVXLAN}[r.IntN(2)]}
			for range 1 + r.IntN(2) {
				a := netip.AddrFrom4([4]byte{10, byte(r.IntN(8)), byte(r.IntN(256)), byte(r.IntN(2))})
				if !slices.Contains(n.Addrs, a) {
					n.Addrs = append(n.Addrs, a)
				}
			}
			for range r.IntN(3) {
				if p := prefix(); !slices.ContainsFunc(n.PodCIDRs, p.Overlaps) {
					n.PodCIDRs = append(n.PodCIDRs, p)
				}
			}
			want, got := conflict(n, in), set.Add(n)
			if (want == nil) != (got == nil) {
				t.Fatalf("%+v beside %+v: %v, want %v", n, in, got, want)
			}
			if want == nil {
				in = append(in, n)
			} else {
				refused++
			}
		}
	}
	if refused < 1000 || refused > 15000 {
		t.Errorf("%d of 16000 were refused", refused)
	}
}

// Were each asked of all others, this would not end.
func TestASetOfManyNodes(t *testing.T) {
	var set Set
	for i := range 1 << 18 {
		n := state.Node{Name: fmt.Sprint("n", i), Mode: state.NodeVXLAN, Addrs: []netip.Addr{netip.AddrFrom4([4]byte{172, byte(16 + i>>16), byte(i >> 8), byte(i)})},
			PodCIDRs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 14), byte(i >> 6), byte(i << 2)}), 30)}}
		if err := set.Add(n); err != nil {
			t.Fatal(err)
		}
	}
	if err := set.Conflict(state.Node{Name: "x", PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.7.0.0/16")}}); err == nil {
		t.Error("a network of many's pods is another's, too")
	}
}

// conflict is the slow, obvious way to ask: it refuses n when one of others has its name, an address or a part of
// its pods' networks, or when a tunnel would be led into itself.
func conflict(n state.Node, others []state.Node) error {
	if err := leadsInto(n, n); err != nil {
		return err
	}
	for _, o := range others {
		if o.Name == n.Name {
			return fmt.Errorf("node %s is there twice: remove one", n.Name)
		}
		for _, a := range n.Addrs {
			if slices.Contains(o.Addrs, a) {
				return fmt.Errorf("node %s: address %s is node %s's: give each its own", n.Name, a, o.Name)
			}
		}
		for _, p := range n.PodCIDRs {
			for _, q := range o.PodCIDRs {
				if p.Overlaps(q) {
					return fmt.Errorf("node %s: pod CIDR %s overlaps %s of node %s: give each its own", n.Name, p, q, o.Name)
				}
			}
		}
		if err := errors.Join(leadsInto(n, o), leadsInto(o, n)); err != nil {
			return err
		}
	}
	return nil
}

// leadsInto refuses pods' networks of n that have an address of the node o, when a
// tunnel leads to them: what the tunnel sends to o would be sent into the tunnel.
func leadsInto(n, o state.Node) error {
	if n.Mode != state.NodeVXLAN {
		return nil
	}
	for _, p := range n.PodCIDRs {
		if i := slices.IndexFunc(o.Addrs, p.Contains); i >= 0 {
			return fmt.Errorf("node %s: pod CIDR %s has the address %s of node %s, to which the tunnel itself must find: give pods another", n.Name, p, o.Addrs[i], o.Name)
		}
	}
	return nil
}
