// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Sizes are the numbers of entries of tables when they are created, or of those
// that grow, the most that they may have; 0 is the size that bpf/maps.h gives, or
// what growsTo does. Tables that exist keep theirs.
type Sizes struct {
	CT, CTNew, Services, Slots, Backends uint32
	Identities, Prefixes, Peers, Ports   uint32
}

func (s Sizes) of(name string) uint32 {
	return map[string]uint32{
		bpfgen.PodMapMstCtV1:       s.CT,
		bpfgen.PodMapMstCtNewV1:    s.CTNew,
		bpfgen.PodMapMstServicesV2: s.Services,
		bpfgen.PodMapMstSlotsV1:    s.Slots,
		bpfgen.PodMapMstBackendsV1: s.Backends,

		bpfgen.PodMapMstIdentitiesV1: s.Identities,
		bpfgen.PodMapMstPrefixesV1:   s.Prefixes,
		bpfgen.PodMapMstPeersV1:      s.Peers,
		bpfgen.PodMapMstPortsV1:      s.Ports,
	}[name]
}

// Subdirectories of a scope's bpffs directory.
const (
	mapsDir     = "maps"
	programsDir = "programs"
	linksDir    = "links"
)

// Datapath is one node's tables and programs, pinned under a bpffs directory.
type Datapath struct {
	dir  string
	open sync.Mutex // held while maps is looked at
	maps map[string]*ebpf.Map
	// looking: somebody else owns the tables, and may put a larger one in a table's place.
	looking bool
	ids     map[*ebpf.Map]uint32 // the kernel's numbers of tables that grow
	sizes   Sizes
	// sockets is the iterator over sockets, loaded at its first use.
	sockets *ebpf.Program
	// noIterator is why there is none.
	noIterator error
	// NoTCX makes Attach use clsact, as on kernels before 6.6.
	NoTCX bool

	Frontends  FrontendTable
	Slots      *Table[SlotKey, uint32]
	Backends   *Table[uint32, Backend]
	Sources    *Table[SourceKey, uint8]
	Edge       *Table[uint32, EdgeConfig]
	Wear       *Table[uint32, Wear]
	Masquerade *Table[uint32, uint32]
	Routers    *Table[uint32, Addr]
	Inside     *Table[InsideKey, uint8]
	Endpoints  EndpointTable
	Addrs      AddrTable
	Netns      *Table[uint64, NetnsInfo]
	Parents    *Table[uint32, Parent]
	Children   *Table[ChildKey, uint32]
	Meta       *Table[uint32, Meta]

	Policies       *Table[uint32, EndpointPolicy]
	Identities     *Table[Addr, Identity]
	PolicyPrefixes *Table[PrefixKey, uint64]
	PolicyPeers    *Table[PeerKey, PeerRules]
	Ports          *Table[PortKey, uint32]

	Node     *Table[uint32, NodeConfig]
	Remotes  *Table[uint32, Remote]
	Nets     *Table[Prefix, uint32]
	Peers    *Table[Addr, uint32]
	Drops    *PerCPU[bpfgen.PodCounter]
	Counters *PerCPU[bpfgen.PodEndpointCounters]

	Readers    *Table[uint32, Reader]
	EventRooms *PerCPU[bpfgen.PodEventRoom]
	stopped    *PerCPU[Event]
	affinity   *Table[bpfgen.PodAffinityKey, bpfgen.PodAffinity]
	voucher    *Table[uint32, bpfgen.PodVoucherKey]
}

// Exists reports whether any table is pinned under dir.
func Exists(dir string) bool {
	entries, err := os.ReadDir(filepath.Join(dir, mapsDir))
	return err == nil && len(entries) > 0
}

// Open opens the tables pinned under dir, and creates those that are missing.
func Open(dir string, sizes Sizes) (*Datapath, error) {
	if d := openKnown(dir); d != nil {
		d.sizes = sizes
		return d, nil
	}
	for _, sub := range []string{mapsDir, programsDir, linksDir} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return nil, fmt.Errorf("make directories for pins: %w", err)
		}
	}
	tables, err := tableSpecs()
	if err != nil {
		return nil, err
	}
	if err := refuseOtherLayouts(dir, tables); err != nil {
		return nil, err
	}
	d := &Datapath{dir: dir, maps: make(map[string]*ebpf.Map), sizes: sizes}
	d.bind()
	if err := d.openTables(tables); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	d.bind() // those of each CPU hold their map
	return d, nil
}

// openTables opens or creates all tables: that which says their layout first, so
// that tables of another version get none of ours beside them.
func (d *Datapath) openTables(specs map[string]*ebpf.MapSpec) (err error) {
	open := func(name string) {
		if err != nil || d.maps[name] != nil {
			return
		}
		size := d.sizes.of(name)
		if growing[name] != "" && size > 0 {
			size = min(size, specs[name].MaxEntries)
		}
		d.maps[name], err = openMap(filepath.Join(d.dir, mapsDir, name), specs[name], size)
	}
	open(bpfgen.PodMapMstMetaV1)
	if err == nil {
		err = d.checkLayout()
	}
	for name := range specs {
		open(name)
	}
	if err == nil {
		err = d.roomForReasons(specs[bpfgen.PodMapMstDropsV1])
	}
	for name := range growing {
		if err == nil {
			err = d.putInForce(name, d.maps[name])
		}
	}
	for _, name := range retired {
		pin := filepath.Join(d.dir, mapsDir, name)
		if _, gone := os.Lstat(pin); err == nil && gone == nil {
			if err = d.beginUpgrade(); err == nil {
				err = removePin(pin)
			}
		}
	}
	return err
}

// retired are tables that earlier builds had. Their programs hold them until ours take
// their place.
var retired = []string{"mst_refusals_v1", "mst_sock_asked_v1"}

// atOnce are the tables that openKnown opens; the others are opened when they
// are used. To add a pod takes a few of them.
var atOnce = []string{
	bpfgen.PodMapMstProgramsV1, bpfgen.PodMapMstEndpointsV1, bpfgen.PodMapMstDropsV1, bpfgen.PodMapMstEndpointCountersV1,
	bpfgen.PodMapMstMetaV1, bpfgen.PodMapMstVoucherV1,
}

// table is the pinned table called name.
func (d *Datapath) table(name string) (*ebpf.Map, error) {
	d.open.Lock()
	defer d.open.Unlock()
	known := d.maps[name]
	if known != nil && d.looking && growing[name] != "" {
		same, err := d.isInForce(name, known)
		if err != nil {
			return nil, err
		}
		if !same {
			delete(d.maps, name)
			delete(d.ids, known)
		}
	}
	m, err := d.opened(name)
	if err == nil && known == nil && !d.looking {
		err = d.putInForce(name, m)
	}
	return m, err
}

// held is the table called name, if it is open: others open more meanwhile.
func (d *Datapath) held(name string) *ebpf.Map {
	d.open.Lock()
	defer d.open.Unlock()
	return d.maps[name]
}

// tables are those that are open by now.
func (d *Datapath) tables() map[string]*ebpf.Map {
	d.open.Lock()
	defer d.open.Unlock()
	return maps.Clone(d.maps)
}

// opened is the same, with open held.
func (d *Datapath) opened(name string) (*ebpf.Map, error) {
	if m := d.maps[name]; m != nil {
		return m, nil
	}
	m, err := ebpf.LoadPinnedMap(filepath.Join(d.dir, mapsDir, name), nil)
	if err != nil {
		return nil, fmt.Errorf("open table %s: %w", name, err)
	}
	d.maps[name] = m
	return m, nil
}

// pinned are the names of all tables.
func (d *Datapath) pinned() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(d.dir, mapsDir))
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

// openKnown opens a node whose programs are this build's: this build has made
// or checked its tables before. nil: it is not one, or something is not as it
// was, which Open finds out.
func openKnown(dir string) *Datapath {
	d := &Datapath{dir: dir, maps: make(map[string]*ebpf.Map)}
	meta, err := ebpf.LoadPinnedMap(filepath.Join(dir, mapsDir, bpfgen.PodMapMstMetaV1), nil)
	if err != nil {
		return nil
	}
	d.maps[bpfgen.PodMapMstMetaV1] = meta
	d.bind()
	m, err := d.GetMeta()
	if err != nil || m.Layout != bpfgen.MstLayout || !isBuild(m.Build) || d.openAtOnce() != nil {
		d.Close()
		return nil
	}
	d.bind()
	return d
}

// ErrNoNode is about a directory that holds no node's tables.
var ErrNoNode = errors.New("no node is set up here")

// OpenPinned opens a node's tables for looking, without the scope's lock: it
// creates nothing, and whoever holds the lock goes on.
func OpenPinned(dir string) (*Datapath, error) {
	d := &Datapath{dir: dir, maps: make(map[string]*ebpf.Map), looking: true}
	err := d.openAll()
	switch {
	case errors.Is(err, fs.ErrNotExist) && !Exists(dir):
		err = fmt.Errorf("%s: %w; `mustang pod add` or `mustang svc add` sets one up, and --bpffs names another directory", dir, ErrNoNode)
	case errors.Is(err, errOtherTables):
		err = fmt.Errorf("%s: %w; use the version that made them, or let this one take over with the next `mustang ep add` or `mustang svc ls`", dir, err)
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	d.bind()
	return d, nil
}

// StillPinned says whether these tables are still the node's: a reset removes
// them, and what is set up afterwards has others.
func (d *Datapath) StillPinned() bool {
	m, err := ebpf.LoadPinnedMap(filepath.Join(d.dir, mapsDir, bpfgen.PodMapMstMetaV1), nil)
	if err != nil {
		return false
	}
	defer m.Close()
	return sameMap(m, d.maps[bpfgen.PodMapMstMetaV1])
}

func sameMap(a, b *ebpf.Map) bool {
	x, err := a.Info()
	if err != nil {
		return false
	}
	y, err := b.Info()
	if err != nil {
		return false
	}
	left, _ := x.ID()
	right, _ := y.ID()
	return left == right
}

var errOtherTables = errors.New("the tables are not those of this build")

// openAll opens every table, which must be what tableNames says.
func (d *Datapath) openAll() error {
	if err := d.openAtOnce(); err != nil {
		return err
	}
	for _, name := range tableNames {
		if _, err := d.table(name); err != nil {
			return err
		}
	}
	return nil
}

// openAtOnce opens atOnce. All that tableNames says must be pinned, and of these
// no other versions: what else there is belongs to a later mustang.
func (d *Datapath) openAtOnce() error {
	names, err := d.pinned()
	if err != nil {
		return err
	}
	ours := make(map[string]bool, len(tableNames))
	for _, name := range tableNames {
		if !slices.Contains(names, name) {
			return errOtherTables
		}
		ours[unversioned(name)] = true
	}
	for _, name := range names {
		if ours[unversioned(name)] && !slices.Contains(tableNames, name) {
			return errOtherTables
		}
	}
	for _, name := range atOnce {
		if _, err := d.table(name); err != nil {
			return err
		}
	}
	return nil
}

func (d *Datapath) bind() {
	d.Frontends = frontendTable(d)
	d.Slots = bindTable[SlotKey, uint32](d, bpfgen.PodMapMstSlotsV1)
	d.Backends = bindTable[uint32, Backend](d, bpfgen.PodMapMstBackendsV1)
	d.voucher = bindTable[uint32, bpfgen.PodVoucherKey](d, bpfgen.PodMapMstVoucherV1)
	d.affinity = bindTable[bpfgen.PodAffinityKey, bpfgen.PodAffinity](d, bpfgen.PodMapMstAffinityV1)
	d.Sources = bindTable[SourceKey, uint8](d, bpfgen.PodMapMstSourcesV1)
	d.Edge = bindTable[uint32, EdgeConfig](d, bpfgen.EdgeMapMstEdgeV2)
	d.Wear = bindTable[uint32, Wear](d, bpfgen.PodMapMstWearV1)
	d.Masquerade = bindTable[uint32, uint32](d, bpfgen.PodMapMstMasqueradeV1)
	d.Routers = bindTable[uint32, Addr](d, bpfgen.PodMapMstRoutersV1)
	d.Inside = bindTable[InsideKey, uint8](d, bpfgen.PodMapMstInsideV1)
	d.Endpoints = EndpointTable{bindTable[uint32, EndpointSlot](d, bpfgen.PodMapMstEndpointsV1)}
	d.Addrs = addrTable(d)
	d.Netns = bindTable[uint64, NetnsInfo](d, bpfgen.PodMapMstNetnsV1)
	d.Parents = bindTable[uint32, Parent](d, bpfgen.ParentMapMstParentsV1)
	d.Children = bindTable[ChildKey, uint32](d, bpfgen.ParentMapMstChildrenV1)
	d.Meta = bindTable[uint32, Meta](d, bpfgen.PodMapMstMetaV1)
	d.Policies = bindTable[uint32, EndpointPolicy](d, bpfgen.PodMapMstPoliciesV1)
	d.Identities = bindTable[Addr, Identity](d, bpfgen.PodMapMstIdentitiesV1)
	d.PolicyPrefixes = bindTable[PrefixKey, uint64](d, bpfgen.PodMapMstPrefixesV1)
	d.PolicyPeers = bindTable[PeerKey, PeerRules](d, bpfgen.PodMapMstPeersV1)
	d.Ports = bindTable[PortKey, uint32](d, bpfgen.PodMapMstPortsV1)
	d.Node = bindTable[uint32, NodeConfig](d, bpfgen.PodMapMstNodeV1)
	d.Remotes = bindTable[uint32, Remote](d, bpfgen.PodMapMstRemotesV1)
	d.Nets = bindTable[Prefix, uint32](d, bpfgen.PodMapMstRemoteNetsV1)
	d.Peers = bindTable[Addr, uint32](d, bpfgen.PodMapMstTunnelPeersV1)
	d.Drops = &PerCPU[bpfgen.PodCounter]{bpfgen.PodMapMstDropsV1, d.maps[bpfgen.PodMapMstDropsV1]}
	d.Readers = bindTable[uint32, Reader](d, bpfgen.PodMapMstReadersV1)
	d.EventRooms = &PerCPU[bpfgen.PodEventRoom]{bpfgen.PodMapMstEventRoomV1, d.maps[bpfgen.PodMapMstEventRoomV1]}
	d.stopped = &PerCPU[Event]{bpfgen.PodMapMstStoppedV1, d.maps[bpfgen.PodMapMstStoppedV1]}
	d.Counters = &PerCPU[bpfgen.PodEndpointCounters]{bpfgen.PodMapMstEndpointCountersV1, d.maps[bpfgen.PodMapMstEndpointCountersV1]}
}

func bindTable[K, V comparable](d *Datapath, name string) *Table[K, V] {
	return &Table[K, V]{name, d}
}

// GetMeta reads the meta table.
func (d *Datapath) GetMeta() (Meta, error) {
	m, _, err := d.Meta.Get(0)
	return m, err
}

// PutMeta writes the meta table.
func (d *Datapath) PutMeta(m Meta) error { return d.Meta.Put([]uint32{0}, []Meta{m}) }

// ComingGeneration is the number that the tables get with the next change: a new
// endpoint's own. It is never 0, which marks a free slot.
func (d *Datapath) ComingGeneration() (uint32, error) {
	m, err := d.coming()
	return m.NextGeneration, err
}

func (d *Datapath) coming() (Meta, error) {
	m, err := d.GetMeta()
	m.NextGeneration = max(m.NextGeneration+1, 1)
	return m, err
}

// VoidFlows makes void what the programs keep of flows (bpf/lib/fast.h, near.h): each is
// judged again. To be called after that was written which it was taken from.
func (d *Datapath) VoidFlows() error {
	m, err := d.coming()
	if err != nil {
		return err
	}
	return d.PutMeta(m)
}

// MaxEndpoints is the number of endpoint slots; slot 0 is never used.
func (d *Datapath) MaxEndpoints() uint32 { return d.held(bpfgen.PodMapMstEndpointsV1).MaxEntries() }

// MaxRemotes is the number of slots for other nodes; slot 0 is the outside's.
func (d *Datapath) MaxRemotes() (uint32, error) {
	m, err := d.table(bpfgen.PodMapMstRemotesV1)
	if err != nil {
		return 0, err
	}
	return m.MaxEntries(), nil
}

// Map is the table called name, for tests and tools; nil when there is none.
func (d *Datapath) Map(name string) *ebpf.Map {
	m, err := d.table(name)
	if err != nil {
		return nil
	}
	return m
}

// Close lets go of the tables; pinned, they stay.
func (d *Datapath) Close() error {
	var errs []error
	for _, m := range d.maps {
		errs = append(errs, m.Close())
	}
	if d.sockets != nil {
		errs = append(errs, d.sockets.Close())
		d.sockets = nil
	}
	return errors.Join(errs...)
}

// replacements are the node's tables for the maps that spec names, whose sizes
// in spec are adapted to the real ones, and whose contents stay what they are.
func (d *Datapath) replacements(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	out := make(map[string]*ebpf.Map)
	for name, s := range spec.Maps {
		if m := d.Map(name); m != nil {
			s.MaxEntries, s.Contents = m.MaxEntries(), nil
			out[name] = m
		}
	}
	return out
}
