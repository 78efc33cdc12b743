// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTableNamesAreThoseOfTheObjects(t *testing.T) {
	specs, err := tableSpecs()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(slices.Sorted(maps.Keys(specs)), slices.Sorted(slices.Values(tableNames))); d != "" {
		t.Error(d)
	}
}

func TestEveryTableIsSharedWithADryRunOrCopiedForIt(t *testing.T) {
	both := slices.Values(slices.Concat(scratchTables, sharedTables))
	if d := cmp.Diff(slices.Sorted(slices.Values(tableNames)), slices.Sorted(both)); d != "" {
		t.Errorf("a table that programs write belongs into scratchTables, any other into sharedTables (dryrun.go):\n%s", d)
	}
}
