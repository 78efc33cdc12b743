// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// AddrTable is the table of endpoints' addresses, beside bits for those that
// endpoints have or once had: what comes to another one is for no pod here.
type AddrTable struct {
	*Table[Addr, uint32]
	bits told
}

// Put is Table.Put; their bits are told before.
func (t AddrTable) Put(keys []Addr, ids []uint32) error {
	bits := make([]uint16, len(keys))
	for i, a := range keys {
		bits[i] = EndpointBit(a)
	}
	if err := t.bits.tell(bits); err != nil {
		return err
	}
	return t.Table.Put(keys, ids)
}

// EndpointBit is endpoint_bit() of bpf/lib/common.h.
func EndpointBit(a Addr) uint16 {
	var mixed uint32
	for i := 0; i < len(a.Bytes); i += 4 {
		mixed ^= binary.NativeEndian.Uint32(a.Bytes[i:])
	}
	return uint16(mixed * 0x9e3779b1 >> 16)
}

func addrTable(d *Datapath) AddrTable {
	return AddrTable{bindTable[Addr, uint32](d, bpfgen.PodMapMstEndpointAddrsV1),
		told{bindTable[uint32, uint64](d, bpfgen.NetdevMapMstEndpointBitsV1)}}
}
