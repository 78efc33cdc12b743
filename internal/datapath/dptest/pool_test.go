// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// TestASetComesEmptyToTheNextTest: whatever a test has written, and whatever else
// it had loaded, the next one finds each table, and what is known of them, as when
// a set has just been loaded.
func TestASetComesEmptyToTheNextTest(t *testing.T) {
	fresh := New(t, Options{Sizes: map[string]uint32{}}) // a set that tests do not share
	want := contents(t, fresh)
	var used *loaded
	t.Run("use", func(t *testing.T) {
		e := NewEdge(t, Options{NIC: true}, 2)
		e.LoadParent(t, 1)
		e.SetService(t, oracle.TCP, end(VIP(1, false), 80), end(e.Pods[1].IP4, 8080))
		e.fillNear(t)
		used = e.loaded
		fill(t, e.Datapath)
		for name, has := range contents(t, e.Datapath) {
			if e.tables()[name].Type() != ebpf.SkStorage && maps.Equal(has, want[name]) {
				t.Errorf("%s is not filled", name)
			}
		}
	})
	next := New(t, Options{})
	if next.loaded != used {
		t.Fatal("the next test gets another set")
	}
	for name, has := range contents(t, next) {
		for key, value := range has {
			if want[name][key] != value {
				t.Errorf("%s: at %x is not what a fresh set has there", name, key)
				break
			}
		}
		if len(has) != len(want[name]) {
			t.Errorf("%s: %d entries, in a fresh set %d", name, len(has), len(want[name]))
		}
	}
	known := *next
	known.loaded = fresh.loaded
	if !reflect.DeepEqual(known, *fresh) {
		t.Error("something is known of what the test before wrote")
	}
}

// contents are all entries of a set's tables, by table and key; an entry that is a
// table goes by its name.
func contents(t *testing.T, d *Datapath) map[string]map[string]string {
	t.Helper()
	names := map[ebpf.MapID]string{}
	for name, m := range d.tables() {
		info, err := m.Info()
		check(t, err)
		id, _ := info.ID()
		names[id] = name
	}
	all := map[string]map[string]string{}
	for name, m := range d.tables() {
		all[name] = map[string]string{}
		if m.Type() == ebpf.SkStorage {
			continue
		}
		key, err := m.NextKeyBytes(nil)
		for ; key != nil; key, err = m.NextKeyBytes(key) {
			check(t, err)
			value, err := lookup(m, key)
			if errors.Is(err, ebpf.ErrKeyNotExist) { // an empty slot
				continue
			}
			check(t, err)
			if m.Type() == ebpf.ArrayOfMaps {
				value = names[ebpf.MapID(binary.NativeEndian.Uint32([]byte(value)))]
			}
			all[name][string(key)] = value
		}
		check(t, err)
	}
	return all
}

func lookup(m *ebpf.Map, key []byte) (string, error) {
	if m.Type() == ebpf.PerCPUArray {
		var each [][]byte
		err := m.Lookup(key, &each)
		return string(slices.Concat(each...)), err
	}
	var value []byte
	err := m.Lookup(key, &value)
	return string(value), err
}

// fill writes to each place of each array, and many entries into each other table.
func fill(t *testing.T, d *Datapath) {
	t.Helper()
	spec, err := Spec(Options{})
	check(t, err)
	for name, m := range d.tables() {
		value := bytes.Repeat([]byte{0xff}, int(m.ValueSize()))
		switch m.Type() {
		case ebpf.SkStorage:
		case ebpf.Array:
			for i := range m.MaxEntries() {
				check(t, m.Put(i, value))
			}
		case ebpf.PerCPUArray:
			for i := range m.MaxEntries() {
				check(t, m.Put(i, slices.Repeat([][]byte{value}, ebpf.MustPossibleCPU())))
			}
		case ebpf.ProgramArray:
			for i := range m.MaxEntries() {
				check(t, m.Put(i, d.PodPrograms.FromPod))
			}
		case ebpf.ArrayOfMaps:
			for i := range m.MaxEntries() {
				another, err := ebpf.NewMap(spec.Maps[name].InnerMap)
				check(t, err)
				check(t, m.Put(i, another))
				check(t, another.Close())
			}
		default:
			for range 5000 {
				if err = m.Put(randomKey(m), value); errors.Is(err, unix.E2BIG) {
					break
				}
				check(t, err)
			}
		}
	}
}

func randomKey(m *ebpf.Map) []byte {
	key := make([]byte, m.KeySize())
	for i := range key {
		key[i] = byte(rand.Uint32())
	}
	if m.Type() == ebpf.LPMTrie { // the length of the prefix, all of it
		binary.NativeEndian.PutUint32(key, 8*(m.KeySize()-4))
	}
	return key
}

// failed is a test that has failed.
type failed struct{ testing.TB }

func (failed) Failed() bool { return true }

func TestASetOfATestThatFailedIsNobodysAnyMore(t *testing.T) {
	New(t, Options{}) // for root alone
	l, err := take(Options{})
	check(t, err)
	giveBack(failed{t}, Options{}, l)
	next, err := take(Options{})
	check(t, err)
	defer giveBack(t, Options{}, next)
	if next == l {
		t.Error("the next test gets it")
	}
}
