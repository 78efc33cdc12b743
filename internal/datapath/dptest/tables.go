// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Pod is an endpoint as tests describe it.
type Pod struct {
	ID      uint32
	IP4     netip.Addr
	IP6     netip.Addr
	MAC     [6]byte
	NodeMAC [6]byte
	Ifindex uint32
	Parent  uint32
	MTU     uint16
	LinkMTU uint16 // 0: unknown
	Flags   uint16 // 0: by where the programs sit, with Services at tc
}

// IP is the pod's address of the family of like.
func (p Pod) IP(v6 bool) netip.Addr {
	if v6 {
		return p.IP6
	}
	return p.IP4
}

func toAddr(a netip.Addr) bpfgen.PodAddr {
	if !a.IsValid() {
		return bpfgen.PodAddr{}
	}
	return bpfgen.PodAddr{Bytes: a.As16()}
}

func fromAddr(a bpfgen.PodAddr) netip.Addr { return netip.AddrFrom16(a.Bytes).Unmap() }

// port converts between the host's order and the network's.
func port(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// NewPod is pod number n of the tests' network, not yet added.
func NewPod(n int) Pod {
	b := byte(n)
	return Pod{
		ID:      uint32(n),
		IP4:     netip.AddrFrom4([4]byte{10, 0, 0, b}),
		IP6:     netip.AddrFrom16([16]byte{0: 0xfd, 15: b}),
		MAC:     [6]byte{2, 0, 0, 0, 0, b},
		NodeMAC: [6]byte{2, 0xff, 0, 0, 0, b},
		Ifindex: 100 + uint32(n),
		Parent:  7,
		MTU:     1500,
	}
}

// AddPod adds pod n.
func (d *Datapath) AddPod(t testing.TB, n int) Pod {
	t.Helper()
	p := NewPod(n)
	d.SetPod(t, p)
	return p
}

// SetPod writes a pod's slot under a new generation, and its addresses.
func (d *Datapath) SetPod(t testing.TB, p Pod) {
	t.Helper()
	d.generation++
	flags := p.Flags
	if flags == 0 {
		flags = bpfgen.EPHostEnd | bpfgen.EPServiceTc
		if d.InPod {
			flags = bpfgen.EPInPod | bpfgen.EPServiceTc
		}
	}
	e := bpfgen.PodEndpoint{
		Generation: d.generation, Ifindex: p.Ifindex, Parent: p.Parent, Mtu: p.MTU, LinkMtu: p.LinkMTU,
		Ip4: toAddr(p.IP4), Ip6: toAddr(p.IP6), Mac: p.MAC, NodeMac: p.NodeMAC, Flags: flags,
	}
	d.putEndpoint(t, p.ID, e)
	for _, a := range []netip.Addr{p.IP4, p.IP6} {
		if a.IsValid() {
			setBit(t, d.MstEndpointBitsV1, datapath.EndpointBit(toAddr(a)))
			check(t, d.MstEndpointAddrsV1.Put(toAddr(a), p.ID))
		}
	}
}

// RemovePod frees a pod's slot.
func (d *Datapath) RemovePod(t testing.TB, p Pod) {
	t.Helper()
	for _, a := range []netip.Addr{p.IP4, p.IP6} {
		if a.IsValid() {
			check(t, ignoreAbsent(d.MstEndpointAddrsV1.Delete(toAddr(a))))
		}
	}
	d.putEndpoint(t, p.ID, bpfgen.PodEndpoint{})
}

// putEndpoint writes an endpoint's slot as the engine does.
func (d *Datapath) putEndpoint(t testing.TB, id uint32, e bpfgen.PodEndpoint) {
	t.Helper()
	check(t, d.MstEndpointsV1.Put(id, e))
	d.VoidFlows(t)
}

func ignoreAbsent(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

type serviceID struct {
	frontend netip.AddrPort
	proto    uint8
	scope    uint8 // enum frontend_scope
}

func (s serviceID) key() bpfgen.PodServiceKey {
	return bpfgen.PodServiceKey{Addr: toAddr(s.frontend.Addr()), Port: port(s.frontend.Port()), Proto: s.proto, Scope: s.scope}
}

// ServiceOptions are what a Service may have beside backends.
type ServiceOptions struct {
	Affinity uint32 // seconds
	Flags    uint16 // enum service_flag
	Kind     uint8  // enum frontend_kind
	Scope    uint8  // enum frontend_scope
	Group    uint64 // 0: one of its own
}

// SetService gives a frontend exactly these backends; none is a Service
// without backends. Backends of the same address, port and protocol share an id.
func (d *Datapath) SetService(t testing.TB, proto uint8, frontend netip.AddrPort, backends ...netip.AddrPort) {
	t.Helper()
	d.SetServiceWith(t, ServiceOptions{}, proto, frontend, backends...)
}

// SetServiceWith is SetService for one with options. A Maglev Service's slots are
// its backends, in their order.
func (d *Datapath) SetServiceWith(t testing.TB, o ServiceOptions, proto uint8, frontend netip.AddrPort, backends ...netip.AddrPort) {
	t.Helper()
	id := serviceID{frontend, proto, o.Scope}
	number, ok := d.services[id]
	if !ok {
		d.nextService++
		number = d.nextService
		d.services[id] = number
	}
	for _, backend := range d.members[number] {
		check(t, ignoreAbsent(d.MstSlotsV1.Delete(bpfgen.PodSlotKey{Service: number, Slot: bpfgen.SlotMember | backend})))
	}
	d.members[number] = nil
	for slot, b := range backends {
		backend := d.backend(t, b, proto)
		check(t, d.MstSlotsV1.Put(bpfgen.PodSlotKey{Service: number, Slot: uint32(slot)}, backend))
		if o.Affinity > 0 {
			check(t, d.MstSlotsV1.Put(bpfgen.PodSlotKey{Service: number, Slot: bpfgen.SlotMember | backend}, backend))
			d.members[number] = append(d.members[number], backend)
		}
	}
	if o.Group == 0 {
		o.Group = uint64(number)
	}
	d.TellPort(t, frontend.Port())
	check(t, d.MstServicesV2.Put(id.key(), bpfgen.PodService{Id: number, Number: number, Backends: uint32(len(backends)),
		Flags: o.Flags, Kind: o.Kind, Group: o.Group, Affinity: o.Affinity}))
	if mark := uint16(bpfgen.SvcAddress); o.Kind != bpfgen.KindNodePort {
		if o.Kind == bpfgen.KindClusterIp {
			mark |= bpfgen.SvcRefuse
		}
		d.mark(t, frontend.Addr(), mark)
	}
}

// TellPort says that a frontend has the port, as datapath.FrontendTable does.
func (d *Datapath) TellPort(t testing.TB, port uint16) {
	t.Helper()
	setBit(t, d.MstFrontendPortsV1, port)
}

func setBit(t testing.TB, table *ebpf.Map, bit uint16) {
	t.Helper()
	var had uint64
	word := uint32(bit) / 64
	check(t, table.Lookup(word, &had))
	check(t, table.Put(word, had|1<<(bit%64)))
}

func (d *Datapath) mark(t testing.TB, a netip.Addr, flags uint16) {
	t.Helper()
	check(t, d.MstServicesV2.Put(serviceID{frontend: netip.AddrPortFrom(a, 0)}.key(), bpfgen.PodService{Flags: flags}))
}

// RemoveService removes a frontend and, when it was the last one there, its address; its
// port is told, as datapath.FrontendTable does.
func (d *Datapath) RemoveService(t testing.TB, proto uint8, frontend netip.AddrPort) {
	t.Helper()
	id := serviceID{frontend: frontend, proto: proto}
	var was bpfgen.PodService
	if err := d.MstServicesV2.Lookup(id.key(), &was); err == nil && was.Kind != bpfgen.KindClusterIp {
		setBit(t, d.MstGonePortsV1, frontend.Port())
	}
	delete(d.services, id)
	check(t, ignoreAbsent(d.MstServicesV2.Delete(id.key())))
	for other := range d.services {
		if other.frontend.Addr() == frontend.Addr() {
			return
		}
	}
	address := serviceID{frontend: netip.AddrPortFrom(frontend.Addr(), 0)}
	check(t, ignoreAbsent(d.MstServicesV2.Delete(address.key())))
}

func (d *Datapath) backend(t testing.TB, a netip.AddrPort, proto uint8) uint32 {
	t.Helper()
	if id, ok := d.backends[a][proto]; ok {
		return id
	}
	d.nextBackend++
	if d.backends[a] == nil {
		d.backends[a] = map[uint8]uint32{}
	}
	d.backends[a][proto] = d.nextBackend
	check(t, d.MstBackendsV1.Put(d.nextBackend,
		bpfgen.PodBackend{Addr: toAddr(a.Addr()), Port: port(a.Port()), Proto: proto}))
	return d.nextBackend
}

// ForgetBackend removes a backend's own entry, as when no Service has it any longer.
func (d *Datapath) ForgetBackend(t testing.TB, proto uint8, a netip.AddrPort) {
	t.Helper()
	id, ok := d.backends[a][proto]
	if !ok {
		return
	}
	delete(d.backends[a], proto)
	check(t, ignoreAbsent(d.MstBackendsV1.Delete(id)))
}

// Drops is how many packets were dropped for a reason in a direction (enum direction).
func (d *Datapath) Drops(t testing.TB, reason, direction uint32) uint64 {
	t.Helper()
	var perCPU []bpfgen.PodCounter
	check(t, d.MstDropsV1.Lookup(reason*bpfgen.DirCount+direction, &perCPU))
	var sum uint64
	for _, c := range perCPU {
		sum += c.Packets
	}
	return sum
}

// Counters are a pod's packets and bytes, both ways.
func (d *Datapath) Counters(t testing.TB, p Pod) bpfgen.PodEndpointCounters {
	t.Helper()
	var perCPU []bpfgen.PodEndpointCounters
	check(t, d.MstEndpointCountersV1.Lookup(p.ID, &perCPU))
	var sum bpfgen.PodEndpointCounters
	for _, c := range perCPU {
		sum.FromPod.Packets += c.FromPod.Packets
		sum.FromPod.Bytes += c.FromPod.Bytes
		sum.ToPod.Packets += c.ToPod.Packets
		sum.ToPod.Bytes += c.ToPod.Bytes
	}
	return sum
}

// Clear empties all tables and counters, as if they had just been made. Only
// endpoints with small ids are looked at.
func (d *Datapath) Clear(t testing.TB) {
	t.Helper()
	for _, table := range []*ebpf.Map{d.MstCtV1, d.MstCtNewV1, d.MstFragsV1, d.MstServicesV2, d.MstSlotsV1,
		d.MstBackendsV1, d.MstEndpointAddrsV1, d.MstAffinityV1, d.MstSourcesV1,
		d.MstParentsV1, d.MstChildrenV1, d.MstNetnsV1} {
		clearTable(t, table)
	}
	d.eachNear(t, func(n *bpfgen.PodNearFlow) { *n = bpfgen.PodNearFlow{} })
	cpus, err := ebpf.PossibleCPU()
	check(t, err)
	for id := range uint32(256) {
		check(t, d.MstEndpointsV1.Put(id, bpfgen.PodEndpoint{}))
		check(t, d.MstEndpointCountersV1.Put(id, make([]bpfgen.PodEndpointCounters, cpus)))
		check(t, d.MstAnswersV1.Put(id, make([]bpfgen.PodAnswers, cpus)))
	}
	for slot := range d.MstDropsV1.MaxEntries() {
		check(t, d.MstDropsV1.Put(slot, make([]bpfgen.PodCounter, cpus)))
	}
	for slot := range d.MstPairsV1.MaxEntries() {
		check(t, d.MstPairsV1.Put(slot, make([]bpfgen.PodPair, cpus)))
	}
	check(t, d.MstCreditV1.Put(uint32(0), int32(0)))
	clear(d.services)
	clear(d.members)
	clear(d.backends)
}

func clearTable(t testing.TB, table *ebpf.Map) {
	t.Helper()
	check(t, deleteAll(table))
}
