// SPDX-License-Identifier: Apache-2.0

// Package ipam gives out addresses from pools that belong to this node.
package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
)

// Pool is a range of addresses of one family. In JSON it is an object, or only
// the subnet.
type Pool struct {
	Subnet  netip.Prefix `json:"subnet"`
	Start   netip.Addr   `json:"start,omitzero"`   // first address given out; default: the first usable
	End     netip.Addr   `json:"end,omitzero"`     // last one; default: the last usable
	Gateway netip.Addr   `json:"gateway,omitzero"` // never given out; default: the first usable
	Exclude []string     `json:"exclude,omitempty"`

	exclude []netip.Prefix
	unknown []string
}

// Unknown are the fields of p's object in JSON that a pool does not have.
func (p Pool) Unknown() []string { return p.unknown }

// UnmarshalJSON takes a pool's object or its subnet alone.
func (p *Pool) UnmarshalJSON(text []byte) error {
	*p = Pool{}
	var subnet string
	if json.Unmarshal(text, &subnet) == nil {
		var err error
		if p.Subnet, err = netip.ParsePrefix(subnet); err != nil {
			return fmt.Errorf("pool %q is not a network: write one such as 10.1.0.0/24 or fd00::/64", subnet)
		}
		return nil
	}
	var given map[string]json.RawMessage
	if err := json.Unmarshal(text, &given); err != nil {
		return fmt.Errorf("pool %s is neither a network in quotes nor an object with subnet", text)
	}
	known := map[string]any{"subnet": &p.Subnet, "start": &p.Start, "end": &p.End, "gateway": &p.Gateway, "exclude": &p.Exclude}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		place, ok := known[name]
		if !ok {
			p.unknown = append(p.unknown, name)
			continue
		}
		if err := json.Unmarshal(given[name], place); err != nil {
			return fmt.Errorf("%s of a pool: %w", name, err)
		}
	}
	return nil
}

// Normalize checks p and fills its defaults.
func (p *Pool) Normalize() error {
	if !p.Subnet.IsValid() || p.Subnet != p.Subnet.Masked() || p.Subnet.Addr().Is4In6() {
		return fmt.Errorf("subnet %q is not a network: write one such as 10.1.0.0/24 or fd00::/64", p.Subnet)
	}
	first, last := p.Subnet.Addr(), lastOf(p.Subnet)
	if p.Subnet.Bits() < first.BitLen()-1 { // /31, /32 and their like have no address to spare
		first = first.Next()
		if first.Is4() {
			last = last.Prev() // broadcast
		}
	}
	if !p.Gateway.IsValid() {
		p.Gateway = first
	}
	if !p.Start.IsValid() {
		p.Start = first
	}
	if !p.End.IsValid() {
		p.End = last
	}
	for field, a := range map[string]netip.Addr{"gateway": p.Gateway, "start": p.Start, "end": p.End} {
		if !p.Subnet.Contains(a) {
			return fmt.Errorf("%s %s is outside %s: choose one inside", field, a, p.Subnet)
		}
	}
	if p.End.Less(p.Start) {
		return fmt.Errorf("end %s is before start %s: exchange them", p.End, p.Start)
	}
	for _, text := range p.Exclude {
		x, err := parseNet(text)
		if err != nil || x.Addr().Is4() != p.Subnet.Addr().Is4() {
			return fmt.Errorf("exclude %q is no address or network of %s: correct it", text, p.Subnet)
		}
		p.exclude = append(p.exclude, x)
	}
	return nil
}

func parseNet(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return a.Prefix(a.BitLen())
	}
	return netip.ParsePrefix(text)
}

// Normalize does all pools, and refuses two that overlap.
func Normalize(pools []Pool) error {
	if len(pools) == 0 {
		return errors.New("pools is empty: name at least one network")
	}
	for i := range pools {
		if err := pools[i].Normalize(); err != nil {
			return err
		}
		for _, other := range pools[:i] {
			if other.Subnet.Overlaps(pools[i].Subnet) {
				return fmt.Errorf("pools %s and %s overlap: make them apart", other.Subnet, pools[i].Subnet)
			}
		}
	}
	return nil
}

// Whole says whether p, normalized, gives out all of its subnet.
func (p Pool) Whole() bool {
	whole := Pool{Subnet: p.Subnet}
	return whole.Normalize() == nil && p.Start == whole.Start && p.End == whole.End && len(p.Exclude) == 0
}

// allowed says whether a may be a pod's at all.
func (p Pool) allowed(a netip.Addr) bool {
	return a != p.Gateway && !a.Less(p.Start) && !p.End.Less(a) && p.exclusion(a) < 0
}

// exclusion is which one has a; -1: none.
func (p Pool) exclusion(a netip.Addr) int {
	return slices.IndexFunc(p.exclude, func(x netip.Prefix) bool { return x.Contains(a) })
}

// maxTries bounds the search in one pool; no node has as many pods.
const maxTries = 1 << 20

// after are the addresses that p gives, from the one behind last around the end, up to maxTries.
// What is excluded is passed at once: it may be larger than any search.
func (p Pool) after(last netip.Addr) iter.Seq[netip.Addr] {
	first := p.Start
	if !last.Less(p.Start) && last.Less(p.End) { // one that is none is less than all
		first = last.Next()
	}
	return func(yield func(netip.Addr) bool) {
		tries := 0
		for _, part := range [][2]netip.Addr{{first, p.End}, {p.Start, first.Prev()}} {
			for a := part[0]; a.IsValid() && !part[1].Less(a); a = a.Next() {
				if i := p.exclusion(a); i >= 0 {
					a = lastOf(p.exclude[i])
					continue
				}
				if a == p.Gateway {
					continue
				}
				if tries++; tries > maxTries || !yield(a) {
					return
				}
			}
		}
	}
}

func (p Pool) prefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, p.Subnet.Bits()) }

func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
