// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"errors"
	"maps"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/policy"
)

// PolicyTables are the tables of policy, and that of the endpoints.
type PolicyTables struct {
	Ports      Table[datapath.PortKey, uint32]
	Peers      Table[datapath.PeerKey, datapath.PeerRules]
	Identities Table[datapath.Addr, datapath.Identity]
	Prefixes   Table[datapath.PrefixKey, uint64]
	Policies   Table[uint32, datapath.EndpointPolicy]
	Endpoints  Table[uint32, datapath.EndpointSlot]
}

// Policies writes changes of policy. Whatever packet comes at whatever moment
// gets from each of its ends the verdict of the old state or of the new one, or
// a stricter one:
//
//   - A verdict is the union of what its entries allow, so of entries that each
//     are old or new, none allows what neither state allows. What an entry
//     refers to is there before it, and goes after it.
//   - An address is seen under its longest prefix. New prefixes come longest
//     first and old ones go shortest first, so that the longest one that is there
//     is the old state's longest or the new one's.
//   - An endpoint's generation changes last: from then on its flows are judged
//     by the new state.
type Policies struct{ t PolicyTables }

// NewPolicies is the reconciler of t.
func NewPolicies(t PolicyTables) Policies { return Policies{t} }

// Apply writes a change. It answers the new generations of the endpoints whose
// flows are to be judged again. After an error the tables hold some mixture of
// both states, and only a full change brings them back in order.
func (p Policies) Apply(c policy.Change) (map[uint32]uint32, error) {
	w := p.writesOf(c)
	if c.Full {
		var err error
		if w, err = p.compare(w); err != nil {
			return nil, err
		}
	}
	err := p.write(w)
	if full := (*datapath.FullError)(nil); errors.As(err, &full) {
		err = p.makeRoom(w)
	}
	if err != nil {
		return nil, err
	}
	return p.bump(w.stricter)
}

// writes is a change in the tables' terms, each part in its order.
type writes struct {
	ports          pairs[datapath.PortKey, uint32]
	peers          pairs[datapath.PeerKey, datapath.PeerRules]
	identities     pairs[datapath.Addr, datapath.Identity]
	early, late    pairs[datapath.Addr, datapath.Identity]
	prefixes       pairs[datapath.PrefixKey, uint64]
	policies       pairs[uint32, datapath.EndpointPolicy]
	portsGone      []datapath.PortKey
	peersGone      []datapath.PeerKey
	identitiesGone []datapath.Addr
	prefixesGone   []datapath.PrefixKey
	policiesGone   []uint32
	stricter       []uint32
}

// pairs are keys with their values, by position.
type pairs[K, V comparable] struct {
	keys   []K
	values []V
}

func (p *pairs[K, V]) add(k K, v V) { p.keys, p.values = append(p.keys, k), append(p.values, v) }

func (p Policies) writesOf(c policy.Change) writes {
	var w writes
	for k, rule := range c.Put.Ports {
		w.ports.add(portKey(k), rule)
	}
	for k, r := range c.Put.Peers {
		w.peers.add(datapath.PeerKey{Set: k.Set, Identity: k.Identity}, datapath.PeerRules{Ports: r.Ports, Rule: r.Rule, Lengths: r.Lengths})
	}
	for a, who := range c.Put.Identities {
		w.identities.add(datapath.FromAddr(a), identity(who))
	}
	for a, who := range c.Early {
		w.early.add(datapath.FromAddr(a), identity(who))
	}
	for a, who := range c.Late {
		w.late.add(datapath.FromAddr(a), identity(who))
	}
	for _, prefix := range byLength(slices.Collect(maps.Keys(c.Put.Prefixes))) {
		w.prefixes.add(datapath.PrefixKeyOf(prefix), c.Put.Prefixes[prefix])
	}
	for id, i := range c.Put.Endpoints {
		w.policies.add(id, datapath.EndpointPolicy{Ingress: i.Ingress, Egress: i.Egress, IngressFlags: i.IngressFlags, EgressFlags: i.EgressFlags})
	}
	for _, k := range c.Gone.Ports {
		w.portsGone = append(w.portsGone, portKey(k))
	}
	for _, k := range c.Gone.Peers {
		w.peersGone = append(w.peersGone, datapath.PeerKey{Set: k.Set, Identity: k.Identity})
	}
	for _, a := range c.Gone.Identities {
		w.identitiesGone = append(w.identitiesGone, datapath.FromAddr(a))
	}
	for _, prefix := range slices.Backward(byLength(slices.Clone(c.Gone.Prefixes))) {
		w.prefixesGone = append(w.prefixesGone, datapath.PrefixKeyOf(prefix))
	}
	w.policiesGone, w.stricter = c.Gone.Endpoints, c.Stricter
	return w
}

// byLength sorts prefixes, the longest first.
func byLength(list []netip.Prefix) []netip.Prefix {
	slices.SortFunc(list, func(a, b netip.Prefix) int {
		return cmp.Compare(datapath.PrefixKeyOf(b).Length, datapath.PrefixKeyOf(a).Length)
	})
	return list
}

func portKey(k policy.PortKey) datapath.PortKey {
	return datapath.PortKey{Ports: k.Ports, Port: k.Port, Proto: k.Protocol, Length: k.Length}
}

func identity(who policy.Identity) datapath.Identity {
	return datapath.Identity{Pod: who.Pod, Prefix: who.Prefix}
}

func (p Policies) write(w writes) error {
	if err := p.put(w); err != nil {
		return err
	}
	if err := p.t.Identities.Put(w.early.keys, w.early.values); err != nil {
		return err
	}
	if err := p.t.Policies.Put(w.policies.keys, w.policies.values); err != nil {
		return err
	}
	return p.remove(w)
}

func (p Policies) put(w writes) error {
	t := p.t
	if err := t.Ports.Put(w.ports.keys, w.ports.values); err != nil {
		return err
	}
	if err := t.Peers.Put(w.peers.keys, w.peers.values); err != nil {
		return err
	}
	if err := t.Identities.Put(w.identities.keys, w.identities.values); err != nil {
		return err
	}
	return t.Prefixes.Put(w.prefixes.keys, w.prefixes.values)
}

func (p Policies) remove(w writes) error {
	t := p.t
	for _, step := range []func() error{
		func() error { return t.Peers.Delete(w.peersGone) },
		func() error { return t.Prefixes.Delete(w.prefixesGone) },
		func() error { return t.Identities.Put(w.late.keys, w.late.values) },
		func() error { return t.Identities.Delete(w.identitiesGone) },
		func() error { return t.Policies.Delete(w.policiesGone) },
		func() error { return t.Ports.Delete(w.portsGone) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// makeRoom is for a change that fits only when what it replaces is gone: until
// then isolated endpoints are closed to everybody but the node.
func (p Policies) makeRoom(w writes) error {
	after, err := p.t.Policies.All()
	if err != nil {
		return err
	}
	for i, id := range w.policies.keys {
		after[id] = w.policies.values[i]
	}
	for _, id := range w.policiesGone {
		delete(after, id)
	}
	var closed, open pairs[uint32, datapath.EndpointPolicy]
	for id, e := range after {
		open.add(id, e)
		e.IngressFlags, e.EgressFlags = bpfgen.SetIncomplete, bpfgen.SetIncomplete
		closed.add(id, e)
	}
	if err := p.t.Policies.Put(closed.keys, closed.values); err != nil {
		return err
	}
	if err := errors.Join(p.remove(w), p.put(w)); err != nil {
		return err
	}
	return p.t.Policies.Put(open.keys, open.values)
}

// bump gives endpoints new generations.
func (p Policies) bump(ids []uint32) (map[uint32]uint32, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	slots, err := p.t.Endpoints.All()
	if err != nil {
		return nil, err
	}
	out := make(map[uint32]uint32, len(ids))
	var change pairs[uint32, datapath.EndpointSlot]
	for _, id := range ids {
		slot, ok := slots[id]
		if !ok || slot.Generation == 0 {
			continue // it is not in force yet, so no flow knows it
		}
		slot.Generation = datapath.NextGeneration(slot.Generation)
		out[id] = slot.Generation
		change.add(id, slot)
	}
	return out, p.t.Endpoints.Put(change.keys, change.values)
}
