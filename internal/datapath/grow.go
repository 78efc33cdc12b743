// SPDX-License-Identifier: Apache-2.0

package datapath

// Tables that grow (GROWING in bpf/maps.h). Each is pinned under its name, and
// stands in the only slot of a second table, where the programs find it. A larger
// one takes its pin first and that slot then, so that the pin is the truth: whoever
// was killed in between left two tables with the same entries.

import (
	"errors"
	"fmt"
	"math/bits"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// growing are the tables that grow, by the names of those that hold them.
var growing = map[string]string{
	bpfgen.PodMapMstServicesV2:   bpfgen.PodMapMstServicesV2Now,
	bpfgen.PodMapMstSlotsV1:      bpfgen.PodMapMstSlotsV1Now,
	bpfgen.PodMapMstBackendsV1:   bpfgen.PodMapMstBackendsV1Now,
	bpfgen.PodMapMstIdentitiesV1: bpfgen.PodMapMstIdentitiesV1Now,
	bpfgen.PodMapMstPeersV1:      bpfgen.PodMapMstPeersV1Now,
	bpfgen.PodMapMstPortsV1:      bpfgen.PodMapMstPortsV1Now,
}

// growsFrom is how many entries a table begins with, GROWS_FROM in bpf/maps.h. One
// that has less was made so on purpose, and keeps its size where Sizes says nothing.
const growsFrom = 16384

// growsBy is how many times larger the next table is, at least.
const growsBy = 4

// growsTo is how many entries a table may come to have where Sizes says nothing:
// each takes some hundred bytes of the agent's memory. A Service has several slots.
func growsTo(name string) uint32 {
	if name == bpfgen.PodMapMstSlotsV1 {
		return 1 << 19
	}
	return 1 << 18
}

// limit is how many entries the table called name, which is m, may come to have.
func (d *Datapath) limit(name string, m *ebpf.Map) uint32 {
	if growing[name] == "" || d.dir == "" { // or it is no node's
		return m.MaxEntries()
	}
	if size := d.sizes.of(name); size > 0 {
		return max(size, m.MaxEntries())
	}
	if m.MaxEntries() < growsFrom {
		return m.MaxEntries()
	}
	return max(growsTo(name), m.MaxEntries())
}

// putInForce lets the programs look into m, the table called name, if it grows.
// For the owner of the tables alone; with open held, as isInForce.
func (d *Datapath) putInForce(name string, m *ebpf.Map) error {
	if growing[name] == "" {
		return nil
	}
	if same, err := d.isInForce(name, m); err != nil || same {
		return err
	}
	if err := d.maps[growing[name]].Put(uint32(0), m); err != nil {
		return fmt.Errorf("put table %s in force: %w", name, err)
	}
	return nil
}

// isInForce says whether m is where the programs look for the table called name.
func (d *Datapath) isInForce(name string, m *ebpf.Map) (bool, error) {
	now, err := d.opened(growing[name])
	if err != nil {
		return false, err
	}
	var id uint32
	if err := now.Lookup(uint32(0), &id); err != nil {
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return false, nil
		}
		return false, fmt.Errorf("read which table %s is in force: %w", name, err)
	}
	if _, known := d.ids[m]; !known { // to ask the kernel takes as long as many look-ups
		info, err := m.Info()
		if err != nil {
			return false, fmt.Errorf("describe table %s: %w", name, err)
		}
		if d.ids == nil {
			d.ids = make(map[*ebpf.Map]uint32)
		}
		have, _ := info.ID()
		d.ids[m] = uint32(have)
	}
	return d.ids[m] == id, nil
}

// grow puts a larger table with the entries of m in its place: one that takes
// more, too. Nobody else writes meanwhile. The programs see the one or the other.
func (t Table[K, V]) grow(m *ebpf.Map, more int) (*ebpf.Map, error) {
	limit := t.d.limit(t.name, m)
	if m.MaxEntries() >= limit {
		return nil, &FullError{t.name, limit}
	}
	meta, err := t.d.GetMeta()
	if err != nil {
		return nil, err
	}
	if ofAnother(meta.Build) { // its programs may know this very table
		return nil, fmt.Errorf("table %s has %d entries, and grows when the programs of another build have been replaced", t.name, m.MaxEntries())
	}
	specs, err := tableSpecs()
	if err != nil {
		return nil, err
	}
	spec := specs[t.name].Copy()
	wanted := max(uint64(m.MaxEntries())*growsBy, uint64(m.MaxEntries())+uint64(more))
	spec.MaxEntries = uint32(min(uint64(1)<<bits.Len64(wanted-1), uint64(limit)))
	larger, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("create table %s with %d entries: %w", t.name, spec.MaxEntries, err)
	}
	if err = t.copyTo(larger); err == nil {
		err = t.d.replace(t.name, larger)
	}
	if err != nil {
		return nil, errors.Join(err, larger.Close())
	}
	return larger, nil
}

func (t Table[K, V]) copyTo(larger *ebpf.Map) error {
	to := NewTable[K, V](t.name, larger)
	return t.eachChunk(func(keys []K, values []V) error { return to.Put(keys, values) })
}

// replace makes m the table called name. The one before is not closed: who reads
// it at this moment has no lock, and it goes when they let go of it.
func (d *Datapath) replace(name string, m *ebpf.Map) error {
	d.open.Lock()
	defer d.open.Unlock()
	if err := replacePin(d, m, filepath.Join(d.dir, mapsDir, name)); err != nil {
		return err
	}
	if err := d.putInForce(name, m); err != nil {
		return errors.Join(err, replacePin(d, d.maps[name], filepath.Join(d.dir, mapsDir, name)))
	}
	delete(d.ids, d.maps[name])
	d.maps[name] = m
	return nil
}
