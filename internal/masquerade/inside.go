// SPDX-License-Identifier: Apache-2.0

package masquerade

// What is inside for every group: the networks of all nodes' pods.

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/mustang-net/mustang/internal/nft"
)

// insideSet has the destinations of a family that are inside for every group.
func (t Table) insideSet(v4 bool) *nftables.Set {
	set := t.set("", v4)
	set.Name, set.Interval = map[bool]string{true: "inside4", false: "inside6"}[v4], true
	return set
}

// SetInside makes destinations inside for every group, those that are still to
// come included: other nodes' pods, which come and go with their nodes. They are
// sets, whatever their number: the kernel tells of each rule that it has taken, and
// what it tells of some hundreds finds no room in a socket.
func (t Table) SetInside(list []netip.Prefix) error {
	if err := nft.Check(); err != nil {
		return unlessNone(err) // without nftables there is no table that need know
	}
	c, err := nft.Connect()
	if err != nil {
		return err
	}
	table := c.AddTable(t.nft())
	chain := c.AddChain(&nftables.Chain{Name: insideChain, Table: table})
	c.FlushChain(chain)
	byFamily := map[bool][]netip.Prefix{}
	for _, p := range Join(list) {
		byFamily[p.Addr().Is4()] = append(byFamily[p.Addr().Is4()], p)
	}
	for _, v4 := range []bool{true, false} {
		set := t.insideSet(v4)
		if err := c.AddSet(set, nil); err != nil {
			return err
		}
		c.FlushSet(set)
		for part := range slices.Chunk(byFamily[v4], elementsAtOnce) {
			if err := c.SetAddElements(set, intervals(part)); err != nil {
				return err
			}
		}
		if len(byFamily[v4]) > 0 {
			c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(family(v4), address(v4, false),
				&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID}, &expr.Verdict{Kind: expr.VerdictAccept})})
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("tell nftables table %s what is inside: %w", t.Name, err)
	}
	return nil
}

// elementsAtOnce is how many prefixes a message to the kernel has: 16 bits say how long its list is.
const elementsAtOnce = 400

// intervals are prefixes as elements of a set, of which none lies in another.
func intervals(list []netip.Prefix) (out []nftables.SetElement) {
	for _, p := range list {
		out = append(out, nftables.SetElement{Key: p.Masked().Addr().AsSlice()})
		if end := last(p).Next(); end.IsValid() { // else it goes on to the end of all addresses
			out = append(out, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
		}
	}
	return out
}

// KnowsInside says whether somebody has said what is inside for every group.
func (t Table) KnowsInside() (bool, error) {
	c, err := nft.Connect()
	if err != nil {
		return false, err
	}
	has, _, err := t.look(c, func(string) bool { return true })
	return has.inside, err
}

// Join says the same with fewer prefixes: halves become the whole, and what lies
// in another goes.
func Join(list []netip.Prefix) []netip.Prefix {
	have := map[netip.Prefix]bool{}
	for _, p := range list {
		have[p.Masked()] = true
	}
	for again := true; again; {
		again = false
		for p := range have {
			parent, err := p.Addr().Prefix(max(p.Bits()-1, 0))
			if err != nil || p.Bits() == 0 {
				continue
			}
			lower := netip.PrefixFrom(parent.Addr(), p.Bits())
			if upper := netip.PrefixFrom(last(parent), p.Bits()).Masked(); have[lower] && have[upper] {
				delete(have, lower)
				delete(have, upper)
				have[parent] = true
				again = true
			}
		}
	}
	var out []netip.Prefix
	for p := range have {
		covered := false
		for bits := range p.Bits() {
			wide, err := p.Addr().Prefix(bits)
			covered = covered || err == nil && have[wide]
		}
		if !covered {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return out
}

// last is the prefix's last address.
func last(p netip.Prefix) netip.Addr {
	raw := p.Addr().AsSlice()
	for i := p.Bits(); i < len(raw)*8; i++ {
		raw[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(raw)
	return a
}
