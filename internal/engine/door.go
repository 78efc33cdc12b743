// SPDX-License-Identifier: Apache-2.0

package engine

// The door (internal/node): Services for what of the node's own sockets no
// program meets, which is SCTP. It is there while there is something behind it.

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// aboutDoor says whether op may change what is behind the door.
func aboutDoor(op operation) bool {
	return slices.ContainsFunc(op.Upserts, func(b state.Binding) bool { return b.Frontend.Protocol == state.SCTP }) ||
		slices.ContainsFunc(op.Removes, func(k state.BindingKey) bool { return k.Frontend.Protocol == state.SCTP })
}

// behind is what the door is the way to.
type behind struct {
	addrs []netip.Addr      // that are not the node's own
	own   []peers.DoorPorts // of those that are
}

// behindDoor is what the Services over SCTP have; nothing while the node's own
// sockets have none.
func (e *Engine) behindDoor(config datapath.EdgeConfig) (b behind, err error) {
	home, err := netns.Cookie()
	if err != nil {
		return b, err
	}
	_, host, err := e.dp.Netns.Get(home)
	if err != nil || !host {
		return b, err
	}
	bindings := e.services.BindingsOf(state.SCTP)
	if len(bindings) == 0 {
		return b, nil
	}
	own, err := peers.OwnAddresses()
	if err != nil {
		return b, err
	}
	isOwn := func(a netip.Addr) bool { return slices.Contains(own, a) }
	for _, s := range bindings {
		at, port := []netip.Addr{s.Frontend.AddrPort.Addr()}, s.Frontend.AddrPort.Port()
		if at[0].IsUnspecified() {
			is4 := at[0].Is4()
			at = slices.DeleteFunc(e.services.NodeAddresses(), func(a netip.Addr) bool { return a.Is4() != is4 || !isOwn(a) })
		}
		itself := slices.ContainsFunc(s.Backends, func(b netip.AddrPort) bool { return isOwn(b.Addr()) })
		for _, a := range at {
			if !isOwn(a) {
				b.addrs = append(b.addrs, a)
				continue
			}
			b.own = append(b.own, peers.DoorPorts{Addr: a, First: port, Last: port})
			if itself && config.PortCount > 0 { // what it answers goes to these (bpf/edge.bpf.c)
				b.own = append(b.own, peers.DoorPorts{Addr: a, First: config.PortFirst, Last: config.PortFirst + config.PortCount - 1})
			}
		}
	}
	slices.SortFunc(b.addrs, netip.Addr.Compare)
	b.addrs, b.own = slices.Compact(b.addrs), peers.MergeDoorPorts(b.own)
	return b, nil
}

func (b behind) ipv6() bool {
	return slices.ContainsFunc(b.addrs, netip.Addr.Is6) ||
		slices.ContainsFunc(b.own, func(p peers.DoorPorts) bool { return p.Addr.Is6() })
}

// syncDoor makes the door, brings it up to date or takes it away. It can be done
// again at any point of itself.
func (e *Engine) syncDoor() error {
	if err := e.loadServices(); err != nil || e.services == nil {
		return err
	}
	config, _, err := e.dp.Edge.Get(bpfgen.EdgeWire)
	if err != nil {
		return err
	}
	behind, err := e.behindDoor(config)
	if err != nil {
		return err
	}
	if len(behind.addrs)+len(behind.own) == 0 {
		if err := peers.RemoveDoor(); err != nil {
			return err
		}
		return e.putDoor(config, 0)
	}
	door, err := peers.EnsureDoor(behind.ipv6())
	if err != nil {
		return err
	}
	if err := e.putDoor(config, door.Outer()); err != nil {
		return err
	}
	var from []netip.Addr
	for _, a := range []netip.Addr{datapath.ToAddr(config.Ip4), datapath.ToAddr(config.Ip6)} {
		if a.IsValid() && !a.IsUnspecified() {
			from = append(from, a)
		}
	}
	return door.Lead(behind.addrs, behind.own, from)
}

// putDoor puts the program at the door's outer end, 0: there is none, and tells
// the others of it.
func (e *Engine) putDoor(config datapath.EdgeConfig, outer int) error {
	if err := e.dp.SyncDoor(outer); err != nil {
		return err
	}
	if config.Door == uint32(outer) {
		return nil
	}
	config.Door = uint32(outer)
	return e.dp.Edge.Put([]uint32{bpfgen.EdgeWire}, []datapath.EdgeConfig{config})
}

// tryDoor is syncDoor beside a change that is in force without it.
func (e *Engine) tryDoor() {
	if err := e.syncDoor(); err != nil {
		e.opts.Notify(fmt.Sprintf("the node's own processes do not reach SCTP Services as they should: %v; the next change of such a Service or of the edge is another try", err))
	}
}

// followDoor is syncDoor after this node's devices have changed, the door's perhaps.
func (e *Engine) followDoor() error {
	config, _, err := e.dp.Edge.Get(bpfgen.EdgeWire)
	if err != nil || config.Door == 0 {
		return err
	}
	return e.syncDoor()
}
