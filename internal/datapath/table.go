// SPDX-License-Identifier: Apache-2.0

// Package datapath is the kernel side of a node: the tables by their types,
// the programs (load, pin, attach, replace in place), and what this kernel can.
package datapath

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// batch is how many elements one batch call carries, and from batchMin on it
// pays to use one.
const (
	batch    = 16384
	batchMin = 16
)

// FullError is a table that takes no more entries, and cannot grow.
type FullError struct {
	Table string
	Max   uint32
}

func (e *FullError) Error() string {
	return fmt.Sprintf("table %s is full (%d entries, the most it can have); remove objects", e.Table, e.Max)
}

// Table is a map with the types of its keys and values. In an array the zero
// value stands for an absent entry.
type Table[K, V comparable] struct {
	name string
	d    *Datapath
}

// NewTable is map m as a table that errors call name, for tests.
func NewTable[K, V comparable](name string, m *ebpf.Map) *Table[K, V] {
	return &Table[K, V]{name, &Datapath{maps: map[string]*ebpf.Map{name: m}}}
}

func (t Table[K, V]) open() (*ebpf.Map, error) { return t.d.table(t.name) }

// Put writes all pairs; keys and values correspond by position. A table that is
// full grows, where it can. When it fails, some may have been written.
func (t Table[K, V]) Put(keys []K, values []V) error {
	m, err := t.open()
	if err != nil {
		return err
	}
	for {
		done, err := t.put(m, keys, values)
		if full := (*FullError)(nil); !errors.As(err, &full) {
			return err
		}
		keys, values = keys[done:], values[done:]
		if m, err = t.grow(m, len(keys)); err != nil {
			return err
		}
	}
}

// put writes pairs to m in their order. It answers how many it has written.
func (t Table[K, V]) put(m *ebpf.Map, keys []K, values []V) (done int, err error) {
	if len(keys) >= batchMin {
		for err == nil && done < len(keys) {
			n := min(done+batch, len(keys))
			var written int
			written, err = m.BatchUpdate(keys[done:n], values[done:n], nil)
			if err == nil {
				written = n - done
			}
			done = min(done+written, n)
		}
	}
	// Where there are no batches, or they report less exactly than single updates do.
	for ; done < len(keys); done++ {
		if err := m.Put(keys[done], values[done]); err != nil {
			if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) {
				return done, &FullError{t.name, m.MaxEntries()}
			}
			return done, fmt.Errorf("write table %s: %w", t.name, err)
		}
	}
	return done, nil
}

// Delete removes keys; an absent one is success.
func (t Table[K, V]) Delete(keys []K) error {
	m, err := t.open()
	if err != nil {
		return err
	}
	if array(m) {
		return t.Put(keys, make([]V, len(keys)))
	}
	for len(keys) >= batchMin {
		n := min(len(keys), batch)
		done, err := m.BatchDelete(keys[:n], nil)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			done++ // the batch stopped at that one
		} else if err != nil {
			break // there are no batches: one by one
		}
		keys = keys[min(done, n):]
	}
	for _, k := range keys {
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete from table %s: %w", t.name, err)
		}
	}
	return nil
}

// Get reads one entry; false: it is absent.
func (t Table[K, V]) Get(k K) (V, bool, error) {
	var v, zero V
	m, err := t.open()
	if err != nil {
		return v, false, err
	}
	err = m.Lookup(k, &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return v, false, nil
	}
	if err != nil {
		return v, false, fmt.Errorf("read table %s: %w", t.name, err)
	}
	return v, !array(m) || v != zero, nil
}

// All reads the whole table.
func (t Table[K, V]) All() (map[K]V, error) {
	m, err := t.open()
	if err != nil {
		return nil, err
	}
	out := make(map[K]V)
	var zero V
	keep := func(k K, v V) {
		if !array(m) || v != zero {
			out[k] = v
		}
	}
	err = t.eachChunk(func(keys []K, values []V) error {
		for i := range keys {
			keep(keys[i], values[i])
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// Count is how many entries are such as is says, without a copy of the table: who asks
// every few seconds must not need as much memory as it has.
func (t Table[K, V]) Count(is func(K, V) bool) (n int, err error) {
	m, err := t.open()
	if err != nil {
		return 0, err
	}
	var zero V
	err = t.eachChunk(func(keys []K, values []V) error {
		for i, k := range keys {
			if (!array(m) || values[i] != zero) && is(k, values[i]) {
				n++
			}
		}
		return nil
	})
	return n, err
}

// eachChunk reads the whole table, some thousand entries at a time where the
// kernel has batches. fn may delete what it is given.
func (t Table[K, V]) eachChunk(fn func([]K, []V) error) error {
	m, err := t.open()
	if err != nil {
		return err
	}
	err = t.eachBatch(m, fn)
	if errors.Is(err, ebpf.ErrNotSupported) {
		err = t.eachOne(m, fn)
	}
	if err != nil {
		return fmt.Errorf("read table %s: %w", t.name, err)
	}
	return nil
}

func (t Table[K, V]) eachOne(m *ebpf.Map, fn func([]K, []V) error) error {
	var keys []K
	var values []V
	var k K
	var v V
	it := m.Iterate()
	for it.Next(&k, &v) {
		keys, values = append(keys, k), append(values, v)
	}
	return errors.Join(it.Err(), fn(keys, values))
}

func (t Table[K, V]) eachBatch(m *ebpf.Map, fn func([]K, []V) error) error {
	size := batchSize(m)
	keys, values := make([]K, size), make([]V, size)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		end := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !end {
			return err
		}
		if err := fn(keys[:n], values[:n]); err != nil || end {
			return err
		}
	}
}

func array(m *ebpf.Map) bool { return m.Type() == ebpf.Array }

// withMapped gives fn the values of an array, where they lie.
func withMapped[V any](d *Datapath, name string, fn func([]V) error) error {
	m, err := d.table(name)
	if err != nil {
		return err
	}
	var v V
	n := int(m.MaxEntries())
	raw, err := unix.Mmap(m.FD(), 0, n*int(unsafe.Sizeof(v)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map table %s: %w", name, err)
	}
	err = fn(unsafe.Slice((*V)(unsafe.Pointer(&raw[0])), n))
	if e := unix.Munmap(raw); e != nil {
		err = errors.Join(err, fmt.Errorf("unmap table %s: %w", name, e))
	}
	return err
}

// PerCPU is a per-CPU array.
type PerCPU[V any] struct {
	name string
	m    *ebpf.Map
}

// Get reads the values of slot k, one for each CPU.
func (t PerCPU[V]) Get(k uint32) ([]V, error) {
	var v []V
	if err := t.m.Lookup(k, &v); err != nil {
		return nil, fmt.Errorf("read table %s: %w", t.name, err)
	}
	return v, nil
}

// Zero clears slot k.
func (t PerCPU[V]) Zero(k uint32) error {
	n, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	if err := t.m.Put(k, make([]V, n)); err != nil {
		return fmt.Errorf("clear table %s: %w", t.name, err)
	}
	return nil
}

// Len is the number of slots.
func (t PerCPU[V]) Len() uint32 { return t.m.MaxEntries() }
