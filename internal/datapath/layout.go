// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// openMap opens a pinned map, or creates it with size entries.
func openMap(path string, spec *ebpf.MapSpec, size uint32) (*ebpf.Map, error) {
	spec = spec.Copy()
	spec.Contents = nil // what a table that holds another begins with, named only
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err == nil {
		spec.MaxEntries = m.MaxEntries()
		if err := spec.Compatible(m); err != nil {
			m.Close()
			return nil, layoutError(spec.Name, err)
		}
		return m, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open table %s: %w", spec.Name, err)
	}
	if size > 0 {
		spec.MaxEntries = size
	}
	m, err = ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("create table %s: %w", spec.Name, err)
	}
	if err := m.Pin(path); err != nil {
		m.Close()
		return nil, fmt.Errorf("pin table %s: %w", spec.Name, err)
	}
	return m, nil
}

// roomForReasons makes the table of drops anew, with what it counted, where one of a build that knew fewer reasons is
// pinned: what is dropped for a later one would be counted nowhere. Programs of that build count into the old one for
// the moment until ours take their place.
func (d *Datapath) roomForReasons(spec *ebpf.MapSpec) error {
	old := PerCPU[bpfgen.PodCounter]{spec.Name, d.maps[spec.Name]}
	if old.Len() >= spec.MaxEntries {
		return nil
	}
	counted := make([][]bpfgen.PodCounter, old.Len())
	for slot := range counted {
		var err error
		if counted[slot], err = old.Get(uint32(slot)); err != nil {
			return err
		}
	}
	pin := filepath.Join(d.dir, mapsDir, spec.Name)
	if err := d.beginUpgrade(); err != nil {
		return err
	}
	if err := os.Remove(pin); err != nil {
		return fmt.Errorf("make room for more reasons: %w", err)
	}
	m, err := openMap(pin, spec, 0)
	if err != nil {
		return err
	}
	old.m.Close()
	d.maps[spec.Name] = m
	for slot, cpus := range counted {
		if err := m.Put(uint32(slot), cpus); err != nil {
			return fmt.Errorf("write table %s: %w", spec.Name, err)
		}
	}
	return nil
}

func layoutError(table string, err error) error {
	return fmt.Errorf("table %s has another layout than this mustang's (%w); use the version that made it, or `mustang reset` and add everything again", table, err)
}

// refuseOtherLayouts looks for our tables in other versions: running beside them
// would split the node's state in two. A table that has no counterpart is of a later
// mustang, for what this one does not do.
func refuseOtherLayouts(dir string, tables map[string]*ebpf.MapSpec) error {
	entries, err := os.ReadDir(filepath.Join(dir, mapsDir))
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	known := map[string]bool{}
	for name := range tables {
		known[unversioned(name)] = true
	}
	for _, e := range entries {
		if _, ok := tables[e.Name()]; !ok && known[unversioned(e.Name())] {
			return layoutError(e.Name(), errors.New("another version of it"))
		}
	}
	return nil
}

var tableVersion = regexp.MustCompile(`_v[0-9]+(_|$)`)

// unversioned is a table's name without its version: mst_services_v2_now is
// mst_services_now.
func unversioned(name string) string { return tableVersion.ReplaceAllString(name, "$1") }

func (d *Datapath) checkLayout() error {
	meta, _, err := d.Meta.Get(0)
	if err != nil {
		return err
	}
	switch meta.Layout {
	case bpfgen.MstLayout:
		return nil
	case 0:
		meta.Layout = bpfgen.MstLayout
		return d.PutMeta(meta)
	}
	return layoutError(bpfgen.PodMapMstMetaV1, fmt.Errorf("layout %d, not %d", meta.Layout, bpfgen.MstLayout))
}
