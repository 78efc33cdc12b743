// SPDX-License-Identifier: Apache-2.0

package datapath

import "errors"

// EndpointTable is the table of endpoints. What the programs keep of flows holds what
// their packets ask of endpoints (bpf/lib/near.h), and is void after each change.
type EndpointTable struct {
	*Table[uint32, EndpointSlot]
}

// Put is [Table.Put].
func (t EndpointTable) Put(ids []uint32, slots []EndpointSlot) error {
	return errors.Join(t.Table.Put(ids, slots), t.d.VoidFlows())
}

// Delete is [Table.Delete].
func (t EndpointTable) Delete(ids []uint32) error {
	return errors.Join(t.Table.Delete(ids), t.d.VoidFlows())
}
