// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// TestOnlyTablesThatFillAreCounted: an alert on a table's fill means something only
// when a table that has just been made, or has counted flows for a week, is not "full".
func TestOnlyTablesThatFillAreCounted(t *testing.T) {
	n := newNode(t)
	n.must(func(e *Engine) error { return e.AddServices(udp("10.96.0.1:53", "10.1.0.1:53")) })
	n.must(func(e *Engine) error {
		counts := e.dp.Map(bpfgen.PodMapMstFastGenerationsV1)
		for slot := range counts.MaxEntries() { // as traffic does in time
			if err := counts.Put(slot, uint32(1)); err != nil {
				return err
			}
		}
		list, err := e.Tables()
		counted := map[string]bool{}
		for _, table := range list {
			counted[table.Name] = table.Entries >= 0
			if float64(table.Entries) > 0.1*float64(table.Max) {
				err = fmt.Errorf("%s has %d entries of %d", table.Name, table.Entries, table.Max)
			}
		}
		for _, name := range []string{"mst_services", "mst_backends", "mst_ct_v", "mst_endpoints", "mst_policies", "mst_peers"} {
			found := false
			for table, is := range counted {
				found = found || is && strings.HasPrefix(table, name)
			}
			if !found {
				err = fmt.Errorf("%s is not counted", name)
			}
		}
		return err
	})
}
