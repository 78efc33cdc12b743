// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Tuple is both ends of a flow, in one direction.
type Tuple struct {
	Proto    uint8
	Src, Dst netip.AddrPort
}

// Reverse is the tuple of the answers.
func (t Tuple) Reverse() Tuple { return Tuple{t.Proto, t.Dst, t.Src} }

func (t Tuple) String() string { return fmt.Sprintf("%d %v>%v", t.Proto, t.Src, t.Dst) }

// Flow is one entry of a flow table.
type Flow struct {
	Key         bpfgen.PodCtKey
	Entry       bpfgen.PodCtEntry
	Established bool // answered
	big         bool // in mst_ct_v1
	near        bool // at its place in mst_ct_near_v1
}

// Tuple is the entry's tuple in the flow's original direction.
func (f Flow) Tuple() Tuple {
	t := Tuple{f.Key.Proto, addrPort(f.Key.Lo, f.Key.LoPort), addrPort(f.Key.Hi, f.Key.HiPort)}
	if f.Entry.Flags&bpfgen.CTOriginIsHi != 0 {
		return t.Reverse()
	}
	return t
}

func addrPort(a bpfgen.PodAddr, p uint16) netip.AddrPort {
	return netip.AddrPortFrom(fromAddr(a), port(p))
}

// keyOf sorts a tuple's ends as the programs do: as little-endian words,
// because any fixed order serves them.
func keyOf(t Tuple, scope uint8) bpfgen.PodCtKey {
	src, dst := t.Src.Addr().As16(), t.Dst.Addr().As16()
	order := bytes.Compare(reverseQuads(src), reverseQuads(dst))
	if order == 0 {
		order = int(port(t.Src.Port())) - int(port(t.Dst.Port()))
	}
	if order > 0 {
		t = t.Reverse()
	}
	return bpfgen.PodCtKey{
		Lo: toAddr(t.Src.Addr()), Hi: toAddr(t.Dst.Addr()),
		LoPort: port(t.Src.Port()), HiPort: port(t.Dst.Port()),
		Proto: t.Proto, Scope: scope,
	}
}

func reverseQuads(a [16]byte) []byte {
	out := make([]byte, 16)
	for i := range 8 {
		out[i], out[8+i] = a[7-i], a[15-i]
	}
	return out
}

func (d *Datapath) flowTables() map[bool]*ebpf.Map {
	return map[bool]*ebpf.Map{true: d.MstCtV1, false: d.MstCtNewV1}
}

// Flow finds the living entry of a tuple, in either direction of it; nil when there is none.
func (d *Datapath) Flow(t testing.TB, tuple Tuple, scope uint8) *Flow {
	t.Helper()
	if f := d.nearFlow(t, keyOf(tuple, scope)); f != nil && f.Left() >= 0 {
		return f
	}
	for _, big := range []bool{true, false} {
		f := Flow{Key: keyOf(tuple, scope), big: big}
		err := d.flowTables()[big].Lookup(f.Key, &f.Entry)
		if err == nil && f.Left() >= 0 {
			f.Established = f.Entry.Opening == bpfgen.CTAnswered
			return &f
		}
		check(t, ignoreAbsent(err))
	}
	return nil
}

// Flows are all entries of all tables.
func (d *Datapath) Flows(t testing.TB) []Flow {
	t.Helper()
	all := d.nearFlows(t)
	for big, table := range d.flowTables() {
		f := Flow{big: big}
		it := table.Iterate()
		for it.Next(&f.Key, &f.Entry) {
			f.Established = f.Entry.Opening == bpfgen.CTAnswered
			all = append(all, f)
		}
		check(t, it.Err())
	}
	return all
}

// DeleteFlow removes one entry, as an eviction would.
func (d *Datapath) DeleteFlow(t testing.TB, tuple Tuple, scope uint8) {
	t.Helper()
	key := keyOf(tuple, scope)
	for _, table := range d.flowTables() {
		check(t, ignoreAbsent(table.Delete(key)))
	}
	d.eachNear(t, func(n *bpfgen.PodNearFlow) {
		if n.Key == key {
			*n = bpfgen.PodNearFlow{Others: n.Others}
		}
	})
	d.VoidFlows(t)
}

// rewrite puts what was changed of an entry where it lies.
func (d *Datapath) rewrite(t testing.TB, f Flow) {
	t.Helper()
	if !f.near {
		check(t, d.flowTables()[f.big].Update(f.Key, f.Entry, ebpf.UpdateExist))
	}
	d.eachNear(t, func(n *bpfgen.PodNearFlow) {
		if n.Key == f.Key {
			n.E = f.Entry
		}
	})
}

// eachNear calls fn for each entry that lies near, and each place that remembers something.
func (d *Datapath) eachNear(t testing.TB, fn func(n *bpfgen.PodNearFlow)) {
	t.Helper()
	for i := range d.nearTable(t) {
		if n := &d.near[i]; n.E.Expires != 0 || n.Others != 0 {
			fn(n)
		}
	}
}

// nearTable is the table of flows that lie near, mapped.
func (d *Datapath) nearTable(t testing.TB) []bpfgen.PodNearFlow {
	t.Helper()
	if d.near == nil {
		raw, err := mapArray(d.MstCtNearV1)
		check(t, err)
		d.mapped = raw
		d.near = unsafe.Slice((*bpfgen.PodNearFlow)(unsafe.Pointer(&raw[0])), 2*d.MstCtNearV1.MaxEntries())
	}
	return d.near
}

// fillNear leaves no room at any place, so that flows go to the tables for all.
func (d *Datapath) fillNear(t testing.TB) {
	t.Helper()
	taken := bpfgen.PodNearFlow{E: bpfgen.PodCtEntry{Expires: Now() + 1<<20}}
	near := d.nearTable(t)
	for i := range near {
		near[i] = taken
	}
}

// lookElsewhere makes the programs look for flows in the tables for all at each place.
func (d *Datapath) lookElsewhere(t testing.TB) {
	t.Helper()
	near := d.nearTable(t)
	for i := range near {
		near[i].Others = Now() + 1<<20
	}
}

// nearFlow is what lies near under a key, living or not; nil when nothing does.
func (d *Datapath) nearFlow(t testing.TB, key bpfgen.PodCtKey) *Flow {
	t.Helper()
	word := func(a bpfgen.PodAddr) uint32 { return binary.NativeEndian.Uint32(a.Bytes[12:]) }
	mixed := (word(key.Lo) ^ word(key.Hi)) * 0x9e3779b1
	var place bpfgen.PodNearPlace
	check(t, d.MstCtNearV1.Lookup((mixed>>16^uint32(port(key.LoPort^key.HiPort)))%bpfgen.NearPlaces, &place))
	for _, n := range place.Flows {
		if n.Key == key && n.E.Expires != 0 {
			return &Flow{Key: n.Key, Entry: n.E, Established: n.E.Opening == bpfgen.CTAnswered, near: true}
		}
	}
	return nil
}

func (d *Datapath) nearFlows(t testing.TB) (all []Flow) {
	t.Helper()
	d.eachNear(t, func(n *bpfgen.PodNearFlow) {
		if n.Key == (bpfgen.PodCtKey{}) { // an empty place, or one that fillNear took
			return
		}
		all = append(all, Flow{Key: n.Key, Entry: n.E, Established: n.E.Opening == bpfgen.CTAnswered, near: true})
	})
	return all
}

// VoidFlows makes void what the programs keep of flows, as the engine does after it wrote them.
func (d *Datapath) VoidFlows(t testing.TB) {
	t.Helper()
	d.flowGeneration++
	check(t, d.MstMetaV1.Put(uint32(0), bpfgen.PodMeta{NextGeneration: d.flowGeneration}))
}

// putRemote writes a node's slot as the engine does.
func (d *Datapath) putRemote(t testing.TB, slot uint32, r bpfgen.PodRemote) {
	t.Helper()
	check(t, d.MstRemotesV1.Put(slot, r))
	d.VoidFlows(t)
}

// Age lets seconds pass for all flows, fragments and affinities: their expiry comes nearer.
func (d *Datapath) Age(t testing.TB, seconds uint32) {
	t.Helper()
	d.eachNear(t, func(n *bpfgen.PodNearFlow) {
		n.E.Expires -= seconds
		n.Others -= seconds
	})
	for _, f := range d.Flows(t) {
		if f.near {
			continue
		}
		f.Entry.Expires -= seconds
		check(t, d.flowTables()[f.big].Update(f.Key, f.Entry, ebpf.UpdateExist))
	}
	d.ageAffinity(t, seconds)
	var facts bpfgen.PodFacts
	check(t, d.MstFactsV1.Lookup(uint32(0), &facts))
	facts.Shadowed -= seconds
	check(t, d.MstFactsV1.Put(uint32(0), facts))
	var key bpfgen.PodFragKey
	var ports bpfgen.PodFragPorts
	keys := map[bpfgen.PodFragKey]bpfgen.PodFragPorts{}
	it := d.MstFragsV1.Iterate()
	for it.Next(&key, &ports) {
		keys[key] = ports
	}
	check(t, it.Err())
	for key, ports := range keys {
		ports.Expires -= seconds
		check(t, d.MstFragsV1.Update(key, ports, ebpf.UpdateExist))
	}
	d.VoidFlows(t)
}

// ageAffinity lets seconds pass for clients' affinities.
func (d *Datapath) ageAffinity(t testing.TB, seconds uint32) {
	t.Helper()
	var key bpfgen.PodAffinityKey
	var value bpfgen.PodAffinity
	all := map[bpfgen.PodAffinityKey]bpfgen.PodAffinity{}
	it := d.MstAffinityV1.Iterate()
	for it.Next(&key, &value) {
		all[key] = value
	}
	check(t, it.Err())
	for key, value := range all {
		value.Expires -= seconds
		check(t, d.MstAffinityV1.Update(key, value, ebpf.UpdateExist))
	}
}

// ClearFlows empties the flow tables.
func (d *Datapath) ClearFlows(t testing.TB) {
	t.Helper()
	d.loseFlows(t)
	d.VoidFlows(t)
}

// loseFlows empties the flow tables as evictions do: nobody says so.
func (d *Datapath) loseFlows(t testing.TB) {
	t.Helper()
	clearTable(t, d.MstCtV1)
	clearTable(t, d.MstCtNewV1)
	d.eachNear(t, func(n *bpfgen.PodNearFlow) {
		if n.Key != (bpfgen.PodCtKey{}) { // what fillNear took stays so
			*n = bpfgen.PodNearFlow{Others: n.Others}
		}
	})
}

// Left is how many seconds an entry has to live.
func (f Flow) Left() int { return int(int32(f.Entry.Expires - Now())) }

// Now is the programs' clock: CLOCK_MONOTONIC in their seconds, of 2³⁰ ns each.
func Now() uint32 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts); err != nil {
		panic(errors.Join(errors.New("read the monotonic clock"), err))
	}
	return uint32(ts.Nano() >> bpfgen.SecondShift)
}
