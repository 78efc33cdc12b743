// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"math"
	"net/netip"

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
	EndpointSlot = bpfgen.PodEndpoint
	NetnsInfo    = bpfgen.PodNetnsInfo
	Meta         = bpfgen.PodMeta
	NodeConfig   = bpfgen.PodNodeConfig
	Remote       = bpfgen.PodRemote
	Prefix       = bpfgen.PodPrefix
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

// KeyOf is the key of a frontend.
func KeyOf(f state.Frontend) FrontendKey {
	return FrontendKey{Addr: FromAddr(f.AddrPort.Addr()), Port: Port(f.AddrPort.Port()), Proto: uint8(f.Protocol)}
}

// FrontendOf is the reverse of KeyOf.
func FrontendOf(k FrontendKey) state.Frontend {
	return state.Frontend{
		AddrPort: netip.AddrPortFrom(ToAddr(k.Addr), Port(k.Port)),
		Protocol: state.Protocol(k.Proto),
	}
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
