// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// TableInfo describes one table for people.
type TableInfo struct {
	Name    string `json:"name"`
	Type    string `json:"type"`
	Entries int    `json:"entries"` // -1 when it cannot be counted, or cannot be full
	Max     uint32 `json:"max"`     // how many it may have; a table that grows has room for fewer at first
	Memory  uint64 `json:"memory"`  // bytes, as the kernel accounts them
}

// Tables describes every table, by name. Those that cannot be are left out, and named by the error.
func (d *Datapath) Tables() ([]TableInfo, error) {
	names, err := d.pinned()
	if err != nil {
		return nil, err
	}
	out := make([]TableInfo, 0, len(names))
	var errs []error
	for _, name := range names {
		info, err := d.tableInfo(name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, info)
	}
	return out, errors.Join(errs...)
}

func (d *Datapath) tableInfo(name string) (TableInfo, error) {
	m, err := d.table(name)
	if err != nil {
		return TableInfo{}, err
	}
	info, err := m.Info()
	if err != nil {
		return TableInfo{}, fmt.Errorf("describe table %s: %w", name, err)
	}
	memory, _ := info.Memlock()
	entries, err := countEntries(name, m)
	if err != nil {
		return TableInfo{}, fmt.Errorf("count table %s: %w", name, err)
	}
	return TableInfo{name, m.Type().String(), entries, d.limit(name, m), memory}, nil
}

// Drop is how many packets were dropped for one reason in one direction.
type Drop struct {
	Reason    bpfgen.Reason
	Direction uint32 // enum direction
	Packets   uint64
	Bytes     uint64
}

// DirectionNames are what status, flows and metrics call the hooks, by enum direction.
var DirectionNames = [bpfgen.DirCount]string{"from_pod", "to_pod", "socket", "parent", "edge"}

// DropsByReason sums the drop counters over the CPUs. What never happened is
// left out.
func (d *Datapath) DropsByReason() ([]Drop, error) {
	var out []Drop
	for n, reason := range bpfgen.Reasons {
		for dir := range uint32(bpfgen.DirCount) {
			slot := uint32(n*bpfgen.DirCount) + dir
			if slot >= d.Drops.Len() {
				continue // tables of a build that knew fewer reasons
			}
			cpus, err := d.Drops.Get(slot)
			if err != nil {
				return nil, err
			}
			drop := Drop{Reason: reason, Direction: dir}
			for _, c := range cpus {
				drop.Packets += c.Packets
				drop.Bytes += c.Bytes
			}
			if drop.Packets > 0 {
				out = append(out, drop)
			}
		}
	}
	return out, nil
}

// Traffic is what endpoint id sent and received, over all CPUs.
func (d *Datapath) Traffic(id uint32) (from, to state.Counter, err error) {
	values, err := d.Counters.Get(id)
	for _, v := range values {
		from.Packets += v.FromPod.Packets
		from.Bytes += v.FromPod.Bytes
		to.Packets += v.ToPod.Packets
		to.Bytes += v.ToPod.Bytes
	}
	return from, to, err
}

// handedOut are the arrays whose slots are given to objects one by one. Each slot of
// any other array has its meaning from the start: there is nothing to fill.
var handedOut = []string{bpfgen.PodMapMstEndpointsV1, bpfgen.PodMapMstPoliciesV1, bpfgen.PodMapMstRemotesV1}

// countEntries counts a hash's entries, and the non-zero ones of an array that is handed out.
func countEntries(name string, m *ebpf.Map) (int, error) {
	switch m.Type() {
	case ebpf.Hash, ebpf.LRUHash:
	case ebpf.Array:
		if !slices.Contains(handedOut, name) {
			return -1, nil
		}
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
