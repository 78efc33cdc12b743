// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// EndpointTables are the tables of endpoints.
type EndpointTables struct {
	Endpoints Table[uint32, datapath.EndpointSlot]
	Addrs     Table[datapath.Addr, uint32]
	Netns     Table[uint64, datapath.NetnsInfo]
}

// Endpoints is the tables of endpoints.
type Endpoints struct{ t EndpointTables }

// NewEndpoints is the reconciler of t.
func NewEndpoints(t EndpointTables) Endpoints { return Endpoints{t} }

// List is every endpoint in the tables, by id. What only the store knows is empty.
func (e Endpoints) List() (map[uint32]state.Endpoint, error) {
	slots, err := e.t.Endpoints.All()
	if err != nil {
		return nil, err
	}
	out := make(map[uint32]state.Endpoint, len(slots))
	for id, s := range slots {
		if s.Generation != 0 {
			out[id] = datapath.EndpointOf(id, s)
		}
	}
	return out, nil
}

// Put writes ep: its slot before the addresses and the namespace that lead to
// it. A failure leaves nothing of it. others are the other endpoints: the sockets
// of a namespace belong to the first that came.
func (e Endpoints) Put(ep state.Endpoint, others map[uint32]state.Endpoint) error {
	err := e.t.Endpoints.Put([]uint32{ep.ID}, []datapath.EndpointSlot{datapath.SlotOf(ep)})
	if err == nil {
		addrs := addrsOf(ep)
		ids := make([]uint32, len(addrs))
		for i := range ids {
			ids[i] = ep.ID
		}
		err = e.t.Addrs.Put(addrs, ids)
	}
	if _, taken := sameNetns(ep, others); err == nil && !taken {
		err = e.putNetns(ep)
	}
	if err != nil {
		if undo := e.Delete(ep, others); undo != nil {
			return &UndoError{err, undo}
		}
	}
	return err
}

func (e Endpoints) putNetns(ep state.Endpoint) error {
	return e.t.Netns.Put([]uint64{ep.NetnsCookie},
		[]datapath.NetnsInfo{{Endpoint: ep.ID, Flags: datapath.EndpointFlags(ep)}})
}

// Delete removes ep, the slot last. others are the remaining endpoints: one in
// the same namespace takes its sockets over.
func (e Endpoints) Delete(ep state.Endpoint, others map[uint32]state.Endpoint) error {
	var netns error
	if heir, ok := sameNetns(ep, others); ok {
		netns = e.putNetns(heir)
	} else {
		netns = e.t.Netns.Delete([]uint64{ep.NetnsCookie})
	}
	// An address that another endpoint has taken meanwhile is not ours to delete.
	mine, err := e.t.Addrs.All()
	var addrs []datapath.Addr
	for a, id := range mine {
		if id == ep.ID {
			addrs = append(addrs, a)
		}
	}
	return errors.Join(netns, err, e.t.Addrs.Delete(addrs), e.t.Endpoints.Delete([]uint32{ep.ID}))
}

func sameNetns(ep state.Endpoint, others map[uint32]state.Endpoint) (state.Endpoint, bool) {
	for id, o := range others {
		if id != ep.ID && o.NetnsCookie == ep.NetnsCookie {
			return o, true
		}
	}
	return state.Endpoint{}, false
}

// Prune deletes addresses and namespaces that lead to no endpoint, or to one
// that does not have them. known is List's answer.
func (e Endpoints) Prune(known map[uint32]state.Endpoint) error {
	addrs, err := e.t.Addrs.All()
	if err != nil {
		return err
	}
	var deadAddrs []datapath.Addr
	for a, id := range addrs {
		if ep, ok := known[id]; !ok || a != datapath.FromAddr(ep.IP4) && a != datapath.FromAddr(ep.IP6) {
			deadAddrs = append(deadAddrs, a)
		}
	}
	netns, err := e.t.Netns.All()
	if err != nil {
		return err
	}
	var deadNetns []uint64
	for cookie, info := range netns {
		if info.Flags&bpfgen.EPNode != 0 {
			continue // the node's own
		}
		if ep, ok := known[info.Endpoint]; !ok || ep.NetnsCookie != cookie {
			deadNetns = append(deadNetns, cookie)
		}
	}
	return errors.Join(e.t.Addrs.Delete(deadAddrs), e.t.Netns.Delete(deadNetns))
}

func addrsOf(ep state.Endpoint) []datapath.Addr {
	var out []datapath.Addr
	for _, a := range ep.Addrs() {
		out = append(out, datapath.FromAddr(a))
	}
	return out
}
