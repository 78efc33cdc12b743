// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"testing"

	"github.com/cilium/ebpf"
)

// A set that has been used is, emptied, as one that has just been loaded, whatever was in its tables.
func TestASetThatWasUsedIsAsNew(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("loading programs needs root")
	}
	var sets []*loaded
	for range 2 {
		l, err := load(Options{})
		check(t, err)
		t.Cleanup(func() { l.Close() })
		sets = append(sets, l)
	}
	used, fresh := sets[0], sets[1]
	want := contents(t, fresh)
	for name, m := range used.tables() {
		fill(t, used, name, m)
	}
	full := contents(t, used)
	for name, m := range used.tables() {
		if m.Type() != ebpf.SkStorage && full[name] == want[name] {
			t.Errorf("%s was not filled", name)
		}
	}
	check(t, used.empty())
	for name, have := range contents(t, used) {
		if have != want[name] {
			t.Errorf("%s has %d bytes of contents, a fresh one %d", name, len(have), len(want[name]))
		}
	}
}

// fill puts something into a table, of arrays into the first and the last entry.
func fill(t *testing.T, l *loaded, name string, m *ebpf.Map) {
	t.Helper()
	var err error
	switch m.Type() {
	case ebpf.Hash, ebpf.LRUHash:
		err = m.Put(bytes.Repeat([]byte{0xa5}, int(m.KeySize())), bytes.Repeat([]byte{0xa5}, int(m.ValueSize())))
	case ebpf.LPMTrie:
		key := bytes.Repeat([]byte{0xa5}, int(m.KeySize()))
		binary.NativeEndian.PutUint32(key, 8*(m.KeySize()-4))
		err = m.Put(key, bytes.Repeat([]byte{0xa5}, int(m.ValueSize())))
	case ebpf.Array, ebpf.PerCPUArray:
		value := bytes.Repeat([]byte{0xa5}, int(m.ValueSize()))
		for _, slot := range []uint32{0, m.MaxEntries() - 1} {
			if m.Type() == ebpf.Array {
				check(t, m.Put(slot, value))
				continue
			}
			perCPU := make([][]byte, ebpf.MustPossibleCPU())
			for cpu := range perCPU {
				perCPU[cpu] = value
			}
			check(t, m.Put(slot, perCPU))
		}
	case ebpf.ProgramArray:
		err = m.Put(uint32(1), l.PodPrograms.ToPod)
	case ebpf.ArrayOfMaps:
		var spec *ebpf.CollectionSpec
		spec, err = Spec(Options{})
		check(t, err)
		inner, failed := ebpf.NewMap(spec.Maps[name].InnerMap)
		check(t, failed)
		defer inner.Close()
		err = m.Put(uint32(0), inner)
	}
	if err != nil {
		t.Fatalf("fill %s: %v", name, err)
	}
}

// contents is what is in each table: of a table of tables, by their names.
func contents(t *testing.T, l *loaded) map[string]string {
	t.Helper()
	names := map[ebpf.MapID]string{}
	for name, m := range l.tables() {
		info, err := m.Info()
		check(t, err)
		id, _ := info.ID()
		names[id] = name
	}
	all := map[string]string{}
	for name, m := range l.tables() {
		var out bytes.Buffer
		switch m.Type() {
		case ebpf.SkStorage:
		case ebpf.ArrayOfMaps:
			for slot := range m.MaxEntries() {
				var id ebpf.MapID
				check(t, ignoreAbsent(m.Lookup(slot, &id)))
				if id != 0 {
					fmt.Fprintf(&out, "%d: %q", slot, names[id])
				}
			}
		case ebpf.PerCPUArray:
			var key uint32
			var perCPU [][]byte
			for i := m.Iterate(); i.Next(&key, &perCPU); {
				out.Write(bytes.Join(perCPU, nil))
			}
		default:
			var key, value []byte
			i := m.Iterate()
			for i.Next(&key, &value) {
				if m.Type() != ebpf.Array {
					out.Write(key)
				}
				out.Write(value)
			}
			check(t, i.Err())
		}
		all[name] = out.String()
	}
	return all
}
