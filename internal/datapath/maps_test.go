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
		looked, err := OpenPinned(d.dir)
		if (err != nil) != refused {
			t.Errorf("%s, to look: %v", name, err)
		}
		if err == nil {
			looked.Close()
		}
	}
}

// A table that earlier builds had goes with the upgrade.
func TestRetiredTablesGo(t *testing.T) {
	for _, name := range retired {
		d := tables(t)
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		pin := filepath.Join(d.dir, mapsDir, name)
		if err := m.Pin(pin); err != nil {
			t.Fatal(err)
		}
		again, err := Open(d.dir, Sizes{})
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		if _, err := os.Stat(pin); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is there still: %v", name, err)
		}
	}
}

// After an upgrade that brings reasons to drop, what is dropped for them is counted, and nothing that was is lost.
func TestDropsHaveRoomForReasonsOfALaterBuild(t *testing.T) {
	d := tables(t)
	pin := filepath.Join(d.dir, mapsDir, bpfgen.PodMapMstDropsV1)
	size := d.Drops.Len()
	cpus := make([]bpfgen.PodCounter, ebpf.MustPossibleCPU())
	for i := range cpus {
		cpus[i] = bpfgen.PodCounter{Packets: 2, Bytes: 100 + uint64(i)}
	}
	smaller := d.maps[bpfgen.PodMapMstDropsV1]
	spec := &ebpf.MapSpec{Name: bpfgen.PodMapMstDropsV1, Type: smaller.Type(), KeySize: smaller.KeySize(), ValueSize: smaller.ValueSize(), MaxEntries: size - bpfgen.DirCount}
	older, err := ebpf.NewMap(spec)
	if err != nil {
		t.Fatal(err)
	}
	defer older.Close()
	last := older.MaxEntries() - 1
	meta, err := d.GetMeta()
	meta.Build = [32]byte{1} // the programs that count there are its own
	if err := errors.Join(err, d.PutMeta(meta), os.Remove(pin), older.Put(last, cpus), older.Pin(pin)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		again, err := Open(d.dir, Sizes{})
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		got, err := again.Drops.Get(last)
		if diff := cmp.Diff(cpus, got); err != nil || diff != "" || again.Drops.Len() != size {
			t.Errorf("%d slots, want %d; %v: %s", again.Drops.Len(), size, err, diff)
		}
		if err := again.maps[bpfgen.PodMapMstDropsV1].Put(size-1, cpus); err != nil {
			t.Errorf("the last reason: %v", err)
		}
		// Back at that build before ours has replaced its programs, they must be loaded anew.
		if now, err := again.GetMeta(); err != nil || now.Build == meta.Build {
			t.Errorf("programs that count elsewhere are still said to be the other build's: %v", err)
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
