// SPDX-License-Identifier: Apache-2.0

package datapath

// Services as the programs find them: what bpf/lib/lb.h does, for programs that
// cannot be asked, and for people.

import (
	"net/netip"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// FoundService is what lies behind an address, port and protocol.
type FoundService struct {
	Known   bool
	Key     FrontendKey // of the entry; a node port's has no address
	Entry   Frontend
	Refuses bool // not known, and the address takes nothing else
}

// FindService is service_find() for a client in the cluster.
func (d *Datapath) FindService(addr Addr, port uint16, proto uint8) (s FoundService, err error) {
	s.Key = FrontendKey{Addr: addr, Port: port, Proto: proto}
	if ToAddr(addr).IsUnspecified() { // where node ports have their entries
		return s, nil
	}
	if s.Entry, s.Known, err = d.Frontends.Get(s.Key); s.Known || err != nil {
		return s, err
	}
	mark, marked, err := d.Frontends.Get(FrontendKey{Addr: addr})
	if err != nil || !marked {
		return s, err
	}
	if mark.Flags&bpfgen.SvcNode != 0 {
		zero := netip.IPv6Unspecified()
		if ToAddr(addr).Is4() {
			zero = netip.IPv4Unspecified()
		}
		s.Key.Addr = FromAddr(zero)
		s.Entry, s.Known, err = d.Frontends.Get(s.Key)
	}
	s.Refuses = !s.Known && mark.Flags&bpfgen.SvcRefuse != 0
	return s, err
}

// ServiceClosed is service_closed(): why a Service takes nobody, or not this
// client; ReasonNone when it does.
func (d *Datapath) ServiceClosed(s Frontend, client netip.Addr) (uint32, error) {
	if s.Flags&bpfgen.SvcRanges != 0 {
		value, allowed, err := d.Sources.Get(SourceKey{Prefixlen: 32 + 64 + 128, Group: s.Group, Addr: FromAddr(client)})
		if err != nil || !allowed || value == bpfgen.NetIpv6Only && client.Unmap().Is4() {
			return bpfgen.ReasonSourceRange, err
		}
	}
	switch {
	case s.Flags&bpfgen.SvcDrop != 0:
		return bpfgen.ReasonNoLocalBackend, nil
	case s.Backends == 0:
		return bpfgen.ReasonNoBackend, nil
	}
	return bpfgen.ReasonNone, nil
}

// ServiceBackends are the ids of the backends that a new flow of client may be
// led to, each once: the one that it has an affinity to, or else all.
func (d *Datapath) ServiceBackends(s Frontend, client netip.Addr) ([]uint32, error) {
	if s.Affinity != 0 {
		mine, found, err := d.affinity.Get(bpfgen.PodAffinityKey{Client: FromAddr(client), Group: s.Group})
		if err != nil {
			return nil, err
		}
		left := int64(int32(mine.Expires - programSecond()))
		if longest := int64(s.Affinity)*1e9>>bpfgen.SecondShift + 2; found && left >= 0 && left <= longest {
			_, member, err := d.Slots.Get(SlotKey{Service: s.Id, Slot: bpfgen.SlotMember | mine.Backend})
			if err != nil || member {
				return []uint32{mine.Backend}, err
			}
		}
	}
	var out []uint32
	seen := make(map[uint32]bool) // a Maglev table names each many times
	for slot := range s.Backends {
		id, found, err := d.Slots.Get(SlotKey{Service: s.Id, Slot: slot})
		if err != nil {
			return nil, err
		}
		if found && !seen[id] {
			seen[id] = true
			out = append(out, id)
		}
	}
	return out, nil
}

// FindFrontend is FindService for a frontend as people name it.
func (d *Datapath) FindFrontend(f state.Frontend) (FoundService, error) {
	return d.FindService(FromAddr(f.AddrPort.Addr()), Port(f.AddrPort.Port()), uint8(f.Protocol))
}
