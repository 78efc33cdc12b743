// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// fill writes backends from-to, each under its number.
func fill(d *Datapath, from, to uint32) error {
	var keys []uint32
	var values []Backend
	for id := from; id <= to; id++ {
		keys, values = append(keys, id), append(values, Backend{Port: uint16(id)})
	}
	return d.Backends.Put(keys, values)
}

// hasBackends fails unless d's backends are those of fill from 1 to n, and the
// programs look into the same table.
func hasBackends(t *testing.T, d *Datapath, n int) {
	t.Helper()
	all, err := d.Backends.All()
	if err != nil || len(all) != n {
		t.Fatalf("%d backends, want %d: %v", len(all), n, err)
	}
	for id, b := range all {
		if b.Port != uint16(id) {
			t.Fatalf("backend %d has port %d", id, b.Port)
		}
	}
	m := d.Map(bpfgen.PodMapMstBackendsV1)
	if same, err := d.isInForce(bpfgen.PodMapMstBackendsV1, m); err != nil || !same {
		t.Errorf("the programs look into another table: %v", err)
	}
}

// Who writes and who only looks, at once or later, see a table that has grown, by
// one entry or by many.
func TestATableGrowsForAllWhoSeeIt(t *testing.T) {
	d := tables(t)
	d.sizes.Backends = 1 << 18
	looking, err := OpenPinned(d.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer looking.Close()
	last := uint32(0)
	for _, n := range []uint32{60, 64, 65, 300, 20_000} { // it began with 64
		if err := fill(d, last+1, n); err != nil {
			t.Fatal(err)
		}
		last = n
		hasBackends(t, d, int(n))
		hasBackends(t, looking, int(n))
	}
	later, err := Open(d.dir, Sizes{})
	if err != nil {
		t.Fatal(err)
	}
	defer later.Close()
	hasBackends(t, later, int(last))
}

func TestATableThatMayNotGrowFurtherIsFull(t *testing.T) {
	d := tables(t)
	d.sizes.Backends = 100
	err := fill(d, 1, 101)
	if full := (*FullError)(nil); !errors.As(err, &full) || full.Max != 100 {
		t.Errorf("%v, want full with 100", err)
	}
	hasBackends(t, d, 100)
}

// Nobody but its maker gives a table less than all begin with.
func TestATableMadeSmallerKeepsItsSize(t *testing.T) {
	d := tables(t)
	d.sizes = Sizes{}
	err := fill(d, 1, 65)
	if full := (*FullError)(nil); !errors.As(err, &full) || full.Max != 64 {
		t.Errorf("%v, want full with 64", err)
	}
	hasBackends(t, d, 64)
}

// Programs of another build may look into the table itself.
func TestATableOfOtherProgramsDoesNotGrow(t *testing.T) {
	d := tables(t)
	d.sizes.Backends = 1 << 18
	meta, err := d.GetMeta()
	if err != nil {
		t.Fatal(err)
	}
	meta.Build = [32]byte{1}
	err = errors.Join(d.PutMeta(meta), fill(d, 1, 65))
	if full := (*FullError)(nil); err == nil || errors.As(err, &full) { // it is not: nothing need make room
		t.Errorf("%v, want that it waits", err)
	}
	hasBackends(t, d, 64)
}

// A process that dies between a table's two places leaves the next one to finish.
func TestATableHalfPutInForceIsFinished(t *testing.T) {
	for _, open := range []func(dir string) (*Datapath, error){
		func(dir string) (*Datapath, error) { return openKnown(dir), nil },
		func(dir string) (*Datapath, error) { return Open(dir, Sizes{}) },
	} {
		d := tables(t)
		meta, err := d.GetMeta()
		if err != nil {
			t.Fatal(err)
		}
		meta.Build = Build() // which openKnown wants
		if err := errors.Join(d.PutMeta(meta), fill(d, 1, 50)); err != nil {
			t.Fatal(err)
		}
		spec := &ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: d.Map(bpfgen.PodMapMstBackendsV1).ValueSize(), MaxEntries: 256, Flags: unix.BPF_F_NO_PREALLOC}
		larger, err := ebpf.NewMap(spec)
		if err != nil {
			t.Fatal(err)
		}
		defer larger.Close()
		if err := errors.Join(d.Backends.copyTo(larger), replacePin(d, larger, filepath.Join(d.dir, mapsDir, bpfgen.PodMapMstBackendsV1))); err != nil {
			t.Fatal(err)
		}
		next, err := open(d.dir)
		if err != nil {
			t.Fatal(err)
		}
		defer next.Close()
		if err := fill(next, 51, 200); err != nil {
			t.Fatal(err)
		}
		hasBackends(t, next, 200)
		if got := next.Map(bpfgen.PodMapMstBackendsV1).MaxEntries(); got != 256 {
			t.Errorf("%d entries, want those of the table that was pinned", got)
		}
	}
}

// The bar: 48 MiB, room for 128,000 connections included.
func TestTablesOfANodeTakeNoMoreThanTheyMay(t *testing.T) {
	d, err := Open(filepath.Join(filepath.Dir(tables(t).dir), "whole"), Sizes{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	list, err := d.Tables()
	if err != nil {
		t.Fatal(err)
	}
	var sum uint64
	for _, x := range list {
		sum += x.Memory
		if x.Name == bpfgen.PodMapMstCtV1 && x.Max < 128_000 {
			t.Errorf("room for %d connections", x.Max)
		}
		if growing[x.Name] != "" && d.maps[x.Name].MaxEntries() != growsFrom {
			t.Errorf("%s begins with %d entries, want %d", x.Name, d.maps[x.Name].MaxEntries(), growsFrom)
		}
	}
	if mib := float64(sum) / (1 << 20); mib > 48 {
		t.Errorf("%.1f MiB, want 48 at most", mib)
	} else {
		t.Logf("%.1f MiB", mib)
	}
}
