// SPDX-License-Identifier: Apache-2.0

package datapath

import "github.com/mustang-net/mustang/internal/datapath/bpfgen"

// FrontendTable is the table of frontends, beside the ports that they have or
// once had: what comes to the node at another port is the node's own. And beside
// those at which clients outside may have connections that outlived their frontend.
type FrontendTable struct {
	*Table[FrontendKey, Frontend]
	ports, gone told
}

// Put is Table.Put; their ports are told before.
func (t FrontendTable) Put(keys []FrontendKey, values []Frontend) error {
	ports := make([]uint16, len(keys))
	for i, k := range keys {
		ports[i] = Port(k.Port)
	}
	if err := t.ports.tell(ports); err != nil {
		return err
	}
	return t.Table.Put(keys, values)
}

// Delete is Table.Delete; the ports of those that clients outside use are told before.
func (t FrontendTable) Delete(keys []FrontendKey) error {
	var ports []uint16
	for _, k := range keys {
		f, ok, err := t.Get(k)
		if err != nil {
			return err
		}
		if ok && f.Flags&bpfgen.SvcAddress == 0 && f.Kind != bpfgen.KindClusterIp {
			ports = append(ports, Port(k.Port))
		}
	}
	if err := t.gone.tell(ports); err != nil {
		return err
	}
	return t.Table.Delete(keys)
}

// Worn tells the ports of an edge that is to have others: flows go on wearing them.
func (t FrontendTable) Worn(c EdgeConfig) error {
	ports := make([]uint16, c.PortCount)
	for i := range ports {
		ports[i] = c.PortFirst + uint16(i)
	}
	return t.ports.tell(ports)
}

func frontendTable(d *Datapath) FrontendTable {
	return FrontendTable{bindTable[FrontendKey, Frontend](d, bpfgen.PodMapMstServicesV2),
		told{bindTable[uint32, uint64](d, bpfgen.EdgeMapMstFrontendPortsV1)},
		told{bindTable[uint32, uint64](d, bpfgen.EdgeMapMstGonePortsV1)}}
}
