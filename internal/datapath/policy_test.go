// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"net/netip"
	"testing"
)

// A kernel that takes an entry that it has for one more must have room for it, with as
// many prefixes as policy may have.
func TestPrefixesNeverFillTheirTable(t *testing.T) {
	d := tables(t)
	_, prefixes, _, _, err := d.PolicySizes()
	if err != nil {
		t.Fatal(err)
	}
	var keys []PrefixKey
	for i := range prefixes + 1 {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], uint32(10<<24+i))
		keys = append(keys, PrefixKeyOf(netip.PrefixFrom(netip.AddrFrom4(a), 32)))
	}
	for i := 1; i <= 2; i++ {
		values := make([]uint64, prefixes)
		for k := range values {
			values[k] = uint64(i)
		}
		if err := d.PolicyPrefixes.Put(keys[:prefixes], values); err != nil {
			t.Fatalf("write %d: %v", i, err)
		}
	}
	if err := d.PolicyPrefixes.Put(keys[prefixes:], []uint64{3}); err != nil {
		t.Error(err)
	}
}
