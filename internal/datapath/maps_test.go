// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

func TestTableNamesAreThoseOfTheObjects(t *testing.T) {
	specs, err := tableSpecs()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(slices.Sorted(maps.Keys(specs)), slices.Sorted(slices.Values(tableNames))); d != "" {
		t.Errorf("a table that programs write belongs into scratchTables, any other into sharedTables (dryrun.go):\n%s", d)
	}
}

// Who refuses the tables of another version leaves nothing among them: that version
// would refuse a table that it does not know.
func TestTablesOfAnotherLayoutGetNoneBesideThem(t *testing.T) {
	d := tables(t)
	pin := filepath.Join(d.dir, mapsDir, bpfgen.NetdevMapMstEndpointBitsV1)
	if err := errors.Join(d.PutMeta(Meta{Layout: bpfgen.MstLayout - 1}), os.Remove(pin)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(d.dir, Sizes{}); err == nil || !strings.Contains(err.Error(), "mustang reset") {
		t.Errorf("%v, want tables of another layout refused", err)
	}
	if _, err := os.Stat(pin); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a table was made beside them: %v", err)
	}
}

// Tables of a later mustang, for what this one does not do, are in nobody's way, so
// that an upgrade can be taken back; our own in another version are.
func TestTablesThatAreNotKnown(t *testing.T) {
	for name, refused := range map[string]bool{"mst_later_v1": false, "mst_later_v1_now": false, "mst_ct_v99": true, "mst_services_v99_now": true} {
		d := tables(t)
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
		if err == nil {
			err = m.Pin(filepath.Join(d.dir, mapsDir, name))
		}
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		again, err := Open(d.dir, Sizes{})
		if (err != nil) != refused || refused && !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			again.Close()
		}
	}
}

// status shows both of each slot.
func TestEachProgramHasANameAndAHook(t *testing.T) {
	for slot, name := range programNames {
		if name == "" || programHooks[slot] == "" {
			t.Errorf("slot %d: name %q, hook %q", slot, name, programHooks[slot])
		}
	}
}

func TestRemoveLeavesTheMountItself(t *testing.T) {
	d := tables(t)
	mount := filepath.Dir(d.dir)
	here, err := Open(mount, Sizes{CT: 64, CTNew: 64, Services: 64, Slots: 64, Backends: 64})
	if err != nil {
		t.Fatal(err)
	}
	here.Close()
	if err := Remove(mount); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(mount, mapsDir)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the tables: %v", err)
	}
}
