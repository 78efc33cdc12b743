// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"math"
	"net/netip"
	"time"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// The tables' types, by the names the rest of the program uses.
type (
	Addr         = bpfgen.PodAddr
	FrontendKey  = bpfgen.PodServiceKey
	Frontend     = bpfgen.PodService
	SlotKey      = bpfgen.PodSlotKey
	Backend      = bpfgen.PodBackend
	SourceKey    = bpfgen.PodSourceKey
	EdgeConfig   = bpfgen.PodEdgeConfig
	Wear         = bpfgen.PodWear
	InsideKey    = bpfgen.PodInsideKey
	EndpointSlot = bpfgen.PodEndpoint
	NetnsInfo    = bpfgen.PodNetnsInfo
	Meta         = bpfgen.PodMeta

	EndpointPolicy = bpfgen.PodEndpointPolicy
	Identity       = bpfgen.PodIdentity
	PrefixKey      = bpfgen.PodPrefixKey
	PeerKey        = bpfgen.PodPeerKey
	PeerRules      = bpfgen.PodPeerRules
	PortKey        = bpfgen.PodPortKey
	NodeConfig     = bpfgen.PodNodeConfig
	Remote         = bpfgen.PodRemote
	Prefix         = bpfgen.PodPrefix
)

// Port is p in network byte order, as the tables hold it.
func Port(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}

// FromAddr is a as the tables hold it: IPv4 as ::ffff:a.b.c.d, and zero for
// the invalid address.
func FromAddr(a netip.Addr) Addr {
	if !a.IsValid() {
		return Addr{}
	}
	return Addr{Bytes: a.As16()}
}

// ToAddr is the reverse of FromAddr.
func ToAddr(a Addr) netip.Addr {
	if a == (Addr{}) {
		return netip.Addr{}
	}
	return netip.AddrFrom16(a.Bytes).Unmap()
}

// PrefixOf is the key of a network.
func PrefixOf(p netip.Prefix) Prefix {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return Prefix{Length: uint32(bits), Addr: p.Addr().As16()}
}

// KeyOf is the key of a binding.
func KeyOf(k state.BindingKey) FrontendKey {
	out := FrontendKey{Addr: FromAddr(k.Frontend.AddrPort.Addr()), Port: Port(k.Frontend.AddrPort.Port()), Proto: uint8(k.Frontend.Protocol)}
	switch {
	case k.Outside:
		out.Scope = bpfgen.ScopeOutside
	case k.Frontend.AddrPort.Addr().IsLoopback():
		out.Scope = bpfgen.ScopeNode
	}
	return out
}

// KeyFrom is the reverse of KeyOf.
func KeyFrom(k FrontendKey) state.BindingKey {
	addr := ToAddr(k.Addr)
	if !addr.IsValid() {
		addr = netip.IPv6Unspecified() // of a node port
	}
	return state.BindingKey{
		Frontend: state.Frontend{AddrPort: netip.AddrPortFrom(addr, Port(k.Port)), Protocol: state.Protocol(k.Proto)},
		Outside:  k.Scope == bpfgen.ScopeOutside,
	}
}

// frontendFlags is what of a binding each flag holds.
func frontendFlags(b *state.Binding) []struct {
	flag uint16
	is   *bool
} {
	return []struct {
		flag uint16
		is   *bool
	}{{bpfgen.SvcSplit, &b.SplitOutside}, {bpfgen.SvcDrop, &b.Drop}, {bpfgen.SvcKeepSource, &b.KeepSource}}
}

// FrontendOf is b's entry, but for what the tables give it: ids, slots, number.
func FrontendOf(b state.Binding) Frontend {
	f := Frontend{Owner: uint8(b.Owner), Kind: uint8(b.Kind), Group: b.Group, Affinity: uint32(b.Affinity / time.Second)}
	for _, v := range frontendFlags(&b) {
		if *v.is {
			f.Flags |= v.flag
		}
	}
	if b.Algorithm == state.Maglev {
		f.Flags |= bpfgen.SvcMaglev
	}
	if len(b.SourceRanges) > 0 {
		f.Flags |= bpfgen.SvcRanges
	}
	return f
}

// BindingFrom is what an entry says; backends and source ranges are in other
// tables.
func BindingFrom(k FrontendKey, f Frontend) state.Binding {
	key := KeyFrom(k)
	b := state.Binding{
		Number: f.Number, Owner: state.Owner(f.Owner), Frontend: key.Frontend, Outside: key.Outside,
		Kind: state.FrontendKind(f.Kind), Group: f.Group, Affinity: time.Duration(f.Affinity) * time.Second,
	}
	for _, v := range frontendFlags(&b) {
		*v.is = f.Flags&v.flag != 0
	}
	if f.Flags&bpfgen.SvcMaglev != 0 {
		b.Algorithm = state.Maglev
	}
	return b
}

// insideFixed is how many bits of an InsideKey come before its address.
const insideFixed = 32

// InsideKeyOf is the entry of a destination towards which a group of pods keeps
// its addresses.
func InsideKeyOf(group uint32, p netip.Prefix) InsideKey {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += v4Mapped
	}
	return InsideKey{Prefixlen: uint32(insideFixed + bits), Group: group, Addr: FromAddr(p.Masked().Addr())}
}

// InsideValueOf is that entry's value.
func InsideValueOf(k InsideKey) uint8 { return max(netValue(k.Addr, k.Prefixlen-insideFixed), 1) }

// SourceValueOf is the value of a range's entry.
func SourceValueOf(k SourceKey) uint8 { return netValue(k.Addr, k.Prefixlen-sourceFixed) }

// netValue is what the entry of a network says besides: IPv4 is not inside ::/0, though the tables have it there.
func netValue(a Addr, bits uint32) uint8 {
	mapped := netip.AddrFrom16(netip.IPv4Unspecified().As16())
	if bits < v4Mapped && netip.PrefixFrom(netip.AddrFrom16(a.Bytes), int(bits)).Contains(mapped) {
		return bpfgen.NetIpv6Only
	}
	return 0
}

// PrefixInside is the reverse of InsideKeyOf.
func PrefixInside(k InsideKey) netip.Prefix {
	a, bits := netip.AddrFrom16(k.Addr.Bytes), int(k.Prefixlen)-insideFixed
	if a.Is4In6() {
		a, bits = a.Unmap(), bits-v4Mapped
	}
	return netip.PrefixFrom(a, bits)
}

// sourceFixed is how many bits of a SourceKey come before its address, and
// v4Mapped how many of an address before an IPv4 one.
const (
	sourceFixed = 32 + 64
	v4Mapped    = 96
)

// SourceKeyOf is the entry of a range of clients of a group.
func SourceKeyOf(group uint64, p netip.Prefix) SourceKey {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += v4Mapped
	}
	return SourceKey{Prefixlen: uint32(sourceFixed + bits), Group: group, Addr: FromAddr(p.Masked().Addr())}
}

// SourceRange is the reverse of SourceKeyOf.
func SourceRange(k SourceKey) netip.Prefix {
	bits := int(k.Prefixlen) - sourceFixed
	addr := netip.AddrFrom16(k.Addr.Bytes)
	if addr.Is4In6() && bits >= v4Mapped {
		return netip.PrefixFrom(addr.Unmap(), bits-v4Mapped)
	}
	return netip.PrefixFrom(addr, bits)
}

// BackendOf is a backend's entry.
func BackendOf(a netip.AddrPort, p state.Protocol) Backend {
	return Backend{Addr: FromAddr(a.Addr()), Port: Port(a.Port()), Proto: uint8(p)}
}

// BackendAddr is where a backend is.
func BackendAddr(b Backend) netip.AddrPort {
	return netip.AddrPortFrom(ToAddr(b.Addr), Port(b.Port))
}

// SlotOf is an endpoint's slot.
func SlotOf(e state.Endpoint) EndpointSlot {
	s := EndpointSlot{
		Generation:  e.Generation,
		Ifindex:     uint32(e.IfIndex),
		Parent:      uint32(e.Parent),
		Mtu:         mtu16(e.MTU),
		LinkMtu:     mtu16(e.LinkMTU),
		NetnsCookie: e.NetnsCookie,
		Ip4:         FromAddr(e.IP4),
		Ip6:         FromAddr(e.IP6),
		Flags:       uint16(EndpointFlags(e)),
		Owner:       uint8(e.Owner),
	}
	copy(s.Mac[:], e.MAC)
	copy(s.NodeMac[:], e.NodeMAC)
	return s
}

// mtu16 is an MTU as the tables hold it. No packet is longer than 65,535 bytes
// (bundles of segments are not held against an MTU).
func mtu16(mtu int) uint16 { return uint16(min(mtu, math.MaxUint16)) }

// EndpointFlags is enum endpoint_flag for e.
func EndpointFlags(e state.Endpoint) uint32 {
	flags := uint32(bpfgen.EPHostEnd)
	if e.Placement == state.InPod {
		flags = bpfgen.EPInPod
	}
	if e.NodeRoutes {
		flags |= bpfgen.EPNodeRoutes
	}
	if e.ServicePath == state.PathBoth || e.ServicePath == state.PathTC {
		flags |= bpfgen.EPServiceTc
	}
	if e.ServicePath == state.PathBoth || e.ServicePath == state.PathSocket {
		flags |= bpfgen.EPServiceSocket
	}
	return flags
}

// EndpointOf is what a slot says; the rest is in the store.
func EndpointOf(id uint32, s EndpointSlot) state.Endpoint {
	e := state.Endpoint{
		ID:          id,
		Generation:  s.Generation,
		IfIndex:     int(s.Ifindex),
		Parent:      int(s.Parent),
		MTU:         int(s.Mtu),
		LinkMTU:     int(s.LinkMtu),
		NetnsCookie: s.NetnsCookie,
		IP4:         ToAddr(s.Ip4),
		IP6:         ToAddr(s.Ip6),
		MAC:         append([]byte(nil), s.Mac[:]...),
		NodeMAC:     append([]byte(nil), s.NodeMac[:]...),
		Owner:       state.Owner(s.Owner),
		Placement:   state.HostEnd,
		NodeRoutes:  s.Flags&bpfgen.EPNodeRoutes != 0,
		ServicePath: state.PathNone,
	}
	if s.Flags&bpfgen.EPInPod != 0 {
		e.Placement = state.InPod
	}
	switch tc, sock := s.Flags&bpfgen.EPServiceTc != 0, s.Flags&bpfgen.EPServiceSocket != 0; {
	case tc && sock:
		e.ServicePath = state.PathBoth
	case tc:
		e.ServicePath = state.PathTC
	case sock:
		e.ServicePath = state.PathSocket
	}
	return e
}
