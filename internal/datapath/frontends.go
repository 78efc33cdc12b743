// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// FrontendTable is the table of frontends, beside the ports that they have or
// once had: what comes to the node at another port is the node's own.
type FrontendTable struct {
	*Table[FrontendKey, Frontend]
	ports *Table[uint32, uint64]
}

// Put is Table.Put; their ports are told before.
func (t FrontendTable) Put(keys []FrontendKey, values []Frontend) error {
	if err := t.tell(keys); err != nil {
		return err
	}
	return t.Table.Put(keys, values)
}

func (t FrontendTable) tell(keys []FrontendKey) error {
	told := map[uint32]uint64{}
	for _, k := range keys {
		port := uint32(Port(k.Port))
		told[port/64] |= 1 << (port % 64)
	}
	for word, bits := range told {
		had, _, err := t.ports.Get(word)
		if err != nil {
			return err
		}
		if had|bits == had {
			continue
		}
		if err := t.ports.Put([]uint32{word}, []uint64{had | bits}); err != nil {
			return err
		}
	}
	return nil
}

// tellAll tells the ports of all frontends, of tables that were made before
// anybody was told.
func (t FrontendTable) tellAll() error {
	all, err := t.All()
	if err != nil {
		return fmt.Errorf("tell the ports of Services: %w", err)
	}
	keys := make([]FrontendKey, 0, len(all))
	for k := range all {
		keys = append(keys, k)
	}
	return t.tell(keys)
}

func frontendTable(d *Datapath) FrontendTable {
	return FrontendTable{bindTable[FrontendKey, Frontend](d, bpfgen.PodMapMstServicesV2),
		bindTable[uint32, uint64](d, bpfgen.EdgeMapMstFrontendPortsV1)}
}
