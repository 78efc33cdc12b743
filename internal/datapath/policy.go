// SPDX-License-Identifier: Apache-2.0

package datapath

// Policy's tables in terms of Go's types.

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

const v4Bits = 96 // that an IPv4 address has before it where it is held as IPv6

// PrefixKeyOf is p as the tables hold it.
func PrefixKeyOf(p netip.Prefix) PrefixKey {
	k := PrefixKey{Length: uint32(p.Bits())}
	if p.Addr().Is4() {
		k.Length += v4Bits
	}
	a := p.Addr().As16()
	for i := range k.Addr {
		k.Addr[i] = binary.NativeEndian.Uint32(a[4*i:])
	}
	return k
}

const bumped = 1 << 31

// NextGeneration is one that an endpoint has not had while any flow may
// remember it. Those of new endpoints are counted from 1; these have the highest
// bit and the milliseconds since boot, which come again after more than the
// longest life of a flow, or, where they change faster, one more than the last.
func NextGeneration(old uint32) uint32 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // fails for no clock that exists
	next := uint32(ts.Nano()/1e6) | bumped
	// The highest bit, which all of these have, is not of the number: 31 bits, by sign.
	if old&bumped != 0 && int32((next-old)<<1) <= 0 {
		next = (old + 1) | bumped
	}
	return next
}

// PolicySizes are how many entries the tables of policy may have.
func (d *Datapath) PolicySizes() (identities, prefixes, peers, ports int, err error) {
	for _, t := range []struct {
		name string
		to   *int
	}{{d.Identities.name, &identities}, {d.PolicyPrefixes.name, &prefixes}, {d.PolicyPeers.name, &peers}, {d.Ports.name, &ports}} {
		m, err := d.table(t.name)
		if err != nil {
			return 0, 0, 0, 0, err
		}
		*t.to = int(d.limit(t.name, m))
	}
	prefixes-- // kernels before 6.13 replace no entry of a trie that is full
	return identities, prefixes, peers, ports, nil
}
