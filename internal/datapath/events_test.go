// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf/rlimit"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// tables are a node's, on a bpffs of their own.
func tables(t *testing.T) *Datapath {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("pinning tables needs root")
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	d, err := Open(filepath.Join(dir, "node"), Sizes{CT: 64, CTNew: 64, Services: 64, Slots: 64, Backends: 64})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func reader(t *testing.T, d *Datapath) *EventReader {
	t.Helper()
	r, err := d.ReadEvents(0)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// expire makes a reader look like one that was killed, or stopped, a while ago.
func expire(t *testing.T, d *Datapath, slot uint32) {
	t.Helper()
	if err := d.Readers.Put([]uint32{slot + 1}, []Reader{{Until: programSecond() - 1}}); err != nil {
		t.Fatal(err)
	}
}

func TestAReaderThatSleptThroughItsLeaseFindsAnotherPlace(t *testing.T) {
	defer goleak.VerifyNone(t)
	d := tables(t)
	sleeper := reader(t, d)
	expire(t, d, sleeper.slot)
	other := reader(t, d)
	if other.slot != sleeper.slot {
		t.Fatalf("the place %d of one that is gone was not taken, but %d", sleeper.slot, other.slot)
	}
	if err := sleeper.renewOnce(25 * time.Second); err != nil {
		t.Fatal(err)
	}
	if sleeper.slot == other.slot {
		t.Error("two readers have one place")
	}
	if _, gap, err := sleeper.Missed(); err != nil || gap != 15*time.Second {
		t.Errorf("it was not told for %s (%v), after 25 s with a lease of 10", gap, err)
	}
	if err := errors.Join(sleeper.Close(), other.Close()); err != nil {
		t.Error(err)
	}
	if all, err := d.Readers.All(); err != nil || len(all) != 0 {
		t.Errorf("left behind: %v (%v)", all, err)
	}
}

// What a reader missed never grows less, whatever place it has: who tells of what has
// come since would tell of 2^64 events.
func TestWhatAReaderMissedGoesOnAtAnotherPlace(t *testing.T) {
	d := tables(t)
	sleeper := reader(t, d)
	rooms, err := d.EventRooms.Get(0)
	if err != nil {
		t.Fatal(err)
	}
	rooms[0].Counts.Limited, rooms[0].Counts.Lost[sleeper.slot] = 100, 7
	if err := d.maps[bpfgen.PodMapMstEventRoomV1].Put(uint32(0), rooms); err != nil {
		t.Fatal(err)
	}
	expire(t, d, sleeper.slot)
	other := reader(t, d)
	if err := sleeper.renewOnce(25 * time.Second); err != nil {
		t.Fatal(err)
	}
	if missed, _, err := sleeper.Missed(); err != nil || missed.Limited != 100 || missed.Lost != 7 {
		t.Errorf("missed %+v (%v), and before 100 and 7", missed, err)
	}
	if err := errors.Join(sleeper.Close(), other.Close()); err != nil {
		t.Error(err)
	}
}

func TestTheLastReaderThatLeavesEndsItForAll(t *testing.T) {
	d := tables(t)
	first, second := reader(t, d), reader(t, d)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if all, _, err := d.Readers.Get(0); err != nil || over(all.Until) {
		t.Errorf("the programs think that nobody reads: %+v (%v)", all, err)
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	if all, _, err := d.Readers.Get(0); err != nil || all.Until != 0 {
		t.Errorf("the programs think that somebody reads: %+v (%v)", all, err)
	}
}

func TestOneReaderTooManyIsASentence(t *testing.T) {
	d := tables(t)
	var all []*EventReader
	for range bpfgen.EventReaders {
		all = append(all, reader(t, d))
	}
	if _, err := d.ReadEvents(0); !errors.Is(err, ErrTooManyReaders) {
		t.Errorf("one too many: %v", err)
	}
	expire(t, d, all[2].slot)
	late := reader(t, d)
	if late.slot != all[2].slot {
		t.Errorf("the free place is %d, not %d", all[2].slot, late.slot)
	}
	for _, r := range append(all, late) {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}
