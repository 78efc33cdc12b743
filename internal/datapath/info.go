// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"
)

// TableInfo describes one table for people.
type TableInfo struct {
	Name    string `json:"name"`
	Type    string `json:"type"`
	Entries int    `json:"entries"` // -1 when it cannot be counted
	Max     uint32 `json:"max"`
	Memory  uint64 `json:"memory"` // bytes, as the kernel accounts them
}

// Tables describes every table, by name.
func (d *Datapath) Tables() ([]TableInfo, error) {
	names, err := d.pinned()
	if err != nil {
		return nil, err
	}
	out := make([]TableInfo, 0, len(names))
	for _, name := range names {
		m, err := d.table(name)
		if err != nil {
			return nil, err
		}
		info, err := m.Info()
		if err != nil {
			return nil, fmt.Errorf("describe table %s: %w", name, err)
		}
		memory, _ := info.Memlock()
		entries, err := countEntries(m)
		if err != nil {
			return nil, fmt.Errorf("count table %s: %w", name, err)
		}
		out = append(out, TableInfo{name, m.Type().String(), entries, m.MaxEntries(), memory})
	}
	return out, nil
}

// countEntries counts a hash's entries and an array's non-zero ones.
func countEntries(m *ebpf.Map) (int, error) {
	switch m.Type() {
	case ebpf.Hash, ebpf.LRUHash:
	case ebpf.Array:
		n := 0
		for i := range m.MaxEntries() {
			v, err := m.LookupBytes(i)
			if err != nil {
				return 0, err
			}
			if slices.ContainsFunc(v, func(b byte) bool { return b != 0 }) {
				n++
			}
		}
		return n, nil
	default:
		return -1, nil
	}
	// The types of keys and values do not matter here, only their sizes.
	size := batchSize(m)
	keys := byteArrays(size, m.KeySize())
	values := byteArrays(size, m.ValueSize())
	var cursor ebpf.MapBatchCursor
	for n := 0; ; {
		got, err := m.BatchLookup(&cursor, keys, values, nil)
		n += got
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return n, nil
		}
		if errors.Is(err, ebpf.ErrNotSupported) {
			return -1, nil
		}
		if err != nil {
			return 0, err
		}
	}
}

// batchSize is the number of elements for one batch lookup: never less than
// what one bucket may hold.
func batchSize(m *ebpf.Map) int { return min(max(int(m.MaxEntries()), 256), batch/4) }

// byteArrays is a []([size]byte) of n elements.
func byteArrays(n int, size uint32) any {
	return reflect.MakeSlice(reflect.SliceOf(reflect.ArrayOf(int(size), reflect.TypeFor[byte]())), n, n).Interface()
}
