// SPDX-License-Identifier: Apache-2.0

package dptest

// The kernel looks at a set of programs for longer than most tests take. So a set
// goes from test to test, with its tables, and each test finds them as they are
// when they have just been made.

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// loaded is what the kernel has of a Datapath.
type loaded struct {
	bpfgen.PodObjects
	beside map[string]*ebpf.Collection // other programs on the same tables, by what they are
	mapped []byte                      // the table of flows that lie near; nil: not yet
	near   []bpfgen.PodNearFlow        // what is in it
}

// Close frees the programs and the tables.
func (l *loaded) Close() error {
	var err error
	if l.mapped != nil {
		err = unix.Munmap(l.mapped)
		l.mapped, l.near = nil, nil
	}
	for _, c := range l.beside {
		c.Close()
	}
	return errors.Join(err, l.PodObjects.Close())
}

// idleSets is how many sets of one kind wait for a test: most tests need one, and
// each has some 20 MiB of tables.
const idleSets = 3

// kindOfSet is what sets differ in that tests may share.
type kindOfSet struct{ inPod, fromWire, fromEdge bool }

// shared says whether tests may share sets that were loaded with o, and of which kind these are.
func (o Options) shared() (kindOfSet, bool) {
	return kindOfSet{o.InPod, o.FromWire, o.FromEdge}, o.Timeouts == nil && o.Sizes == nil && o.Types == nil
}

var idle struct {
	sync.Mutex
	sets map[kindOfSet][]*loaded
}

// take is a set for one test alone.
func take(o Options) (*loaded, error) {
	idle.Lock()
	defer idle.Unlock()
	kind, shared := o.shared()
	n := len(idle.sets[kind]) - 1
	if !shared || n < 0 {
		return load(o)
	}
	l := idle.sets[kind][n]
	idle.sets[kind] = idle.sets[kind][:n]
	return l, nil
}

// giveBack empties a set for the next test. Nobody knows what a test that failed
// has left running: its set is no longer used.
func giveBack(t testing.TB, o Options, l *loaded) {
	t.Helper()
	kind, shared := o.shared()
	idle.Lock()
	defer idle.Unlock()
	if !shared || t.Failed() || len(idle.sets[kind]) >= idleSets {
		check(t, l.Close())
		return
	}
	check(t, l.empty())
	if idle.sets == nil {
		idle.sets = map[kindOfSet][]*loaded{}
	}
	idle.sets[kind] = append(idle.sets[kind], l)
}

// tables are all of a set, by name.
func (l *loaded) tables() map[string]*ebpf.Map {
	all := map[string]*ebpf.Map{}
	for maps, i := reflect.ValueOf(l.PodMaps), 0; i < maps.NumField(); i++ {
		all[maps.Type().Field(i).Tag.Get("ebpf")] = maps.Field(i).Interface().(*ebpf.Map)
	}
	return all
}

// loadBeside is the programs of spec, by name, on this set's tables, all of them. What
// says which programs, and with which constants: they are loaded once, and stay with the set.
func (l *loaded) loadBeside(t testing.TB, what string, spec func() (*ebpf.CollectionSpec, error)) map[string]*ebpf.Program {
	t.Helper()
	if c := l.beside[what]; c != nil {
		return c.Programs
	}
	s, err := spec()
	check(t, err)
	used := l.tables()
	for name, m := range s.Maps {
		switch {
		case used[name] != nil:
			m.MaxEntries = used[name].MaxEntries()
		case name != constants:
			t.Fatalf("%s has a table of its own, %s, which nobody empties", what, name)
		}
	}
	for name := range used {
		if s.Maps[name] == nil {
			delete(used, name)
		}
	}
	datapath.Specialize(s)
	c, err := ebpf.NewCollectionWithOptions(s, ebpf.CollectionOptions{MapReplacements: used})
	check(t, err)
	if l.beside == nil {
		l.beside = map[string]*ebpf.Collection{}
	}
	l.beside[what] = c
	return c.Programs
}

// constants is the section of load-time constants, which the kernel has frozen.
const constants = ".rodata"

// empty brings all tables back to what they were when the set had been loaded.
func (l *loaded) empty() error {
	tables := l.tables()
	for name, m := range tables {
		var err error
		switch m.Type() {
		case ebpf.Hash, ebpf.LRUHash, ebpf.LPMTrie, ebpf.ProgramArray:
			err = deleteAll(m)
		case ebpf.Array, ebpf.PerCPUArray:
			err = zeroAll(m)
		case ebpf.ArrayOfMaps:
			var first *ebpf.Map // mst_x_v1_now begins with mst_x_v1
			if x, ok := strings.CutSuffix(name, "_now"); ok {
				first = tables[x]
			}
			err = holdOnly(m, first)
		case ebpf.SkStorage: // an entry ends with its socket
		default:
			err = fmt.Errorf("nobody knows how to empty a table of type %v", m.Type())
		}
		if err != nil {
			return fmt.Errorf("empty %s: %w", name, err)
		}
	}
	return nil
}

// deleteAll removes all entries of a table that nobody writes to meanwhile.
func deleteAll(m *ebpf.Map) error {
	var keys [][]byte
	key, err := m.NextKeyBytes(nil)
	for ; key != nil && err == nil; key, err = m.NextKeyBytes(key) {
		keys = append(keys, key)
	}
	for _, key := range keys {
		err = errors.Join(err, ignoreAbsent(m.Delete(key)))
	}
	return err
}

// zeroAll writes zeros over all entries of an array, for each CPU where it has them.
func zeroAll(m *ebpf.Map) error {
	if m.Flags()&unix.BPF_F_MMAPABLE != 0 {
		raw, err := mapArray(m)
		if err != nil {
			return err
		}
		clear(raw)
		return unix.Munmap(raw)
	}
	keys := make([]uint32, m.MaxEntries())
	for i := range keys {
		keys[i] = uint32(i)
	}
	zero := make([]byte, m.ValueSize())
	if m.Type() == ebpf.PerCPUArray {
		_, err := m.BatchUpdate(keys, slices.Repeat([][]byte{zero}, len(keys)*ebpf.MustPossibleCPU()), nil)
		return err
	}
	value := reflect.ArrayOf(len(zero), reflect.TypeFor[byte]())
	_, err := m.BatchUpdate(keys, reflect.MakeSlice(reflect.SliceOf(value), len(keys), len(keys)).Interface(), nil)
	return err
}

// mapArray maps the memory of an array.
func mapArray(m *ebpf.Map) ([]byte, error) {
	size := (m.ValueSize() + 7) &^ 7 * m.MaxEntries()
	return unix.Mmap(m.FD(), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
}

// holdOnly leaves an array of tables with first in its first slot, nil for none, and
// nothing in the others. Each change would wait for all programs that run.
func holdOnly(m, first *ebpf.Map) error {
	var want ebpf.MapID
	if first != nil {
		info, err := first.Info()
		if err != nil {
			return err
		}
		want, _ = info.ID()
	}
	for slot := range m.MaxEntries() {
		var have ebpf.MapID
		if err := ignoreAbsent(m.Lookup(slot, &have)); err != nil {
			return err
		}
		var err error
		switch {
		case have == want:
		case want == 0:
			err = m.Delete(slot)
		default:
			err = m.Put(slot, first)
		}
		if err != nil {
			return err
		}
		want = 0
	}
	return nil
}
