// SPDX-License-Identifier: Apache-2.0

package reconcile

// Writes that must not meet: two of one change could together allow what neither state does.

import (
	"maps"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// joining are the endpoints at which old and new could meet in a verdict that neither state has: an address is to be somebody
// else, or nobody, and an endpoint is to have another set, or what is allowed to that somebody, or by that set, is to go.
// after is what endpoints have then.
func (w *writes) joining(after map[uint32]datapath.EndpointPolicy) []uint32 {
	comes, changes := w.comes(), len(w.policies.keys) > 0
	if changes && len(comes)+len(w.identitiesGone) > 0 {
		return slices.Concat(w.stricter, w.policies.keys)
	}
	stays := map[uint64]bool{}
	if changes {
		for _, e := range after {
			stays[e.Ingress], stays[e.Egress] = true, true
		}
	}
	if slices.ContainsFunc(w.peersGone, func(k datapath.PeerKey) bool { return comes[k.Identity] || stays[k.Set] }) {
		return w.stricter
	}
	return nil
}

// comes are the identities that some address gets.
func (w *writes) comes() map[uint64]bool {
	out := map[uint64]bool{}
	for _, list := range [][]datapath.Identity{w.identities.values, w.late.values} {
		for _, who := range list {
			out[who.Pod] = true
		}
	}
	return out
}

// after is now as the change leaves it.
func (w *writes) after(now map[uint32]datapath.EndpointPolicy) map[uint32]datapath.EndpointPolicy {
	out := maps.Clone(now)
	for i, id := range w.policies.keys {
		out[id] = w.policies.values[i]
	}
	for _, id := range w.policiesGone {
		delete(out, id)
	}
	return out
}

// closed are the endpoints that take no new flow while the change is written, and opened the others that it changes, all as
// they are afterwards.
func (w *writes) closed(now map[uint32]datapath.EndpointPolicy) (closed, opened pairs[uint32, datapath.EndpointPolicy]) {
	after, shut := w.after(now), map[uint32]bool{}
	for _, id := range w.joining(after) {
		if e, ok := after[id]; ok && !shut[id] {
			shut[id] = true
			closed.add(id, e)
		}
	}
	for i, id := range w.policies.keys {
		if !shut[id] {
			opened.add(id, w.policies.values[i])
		}
	}
	return closed, opened
}

// incomplete are policies by which an isolated endpoint is closed to everybody but the node.
func incomplete(list []datapath.EndpointPolicy) []datapath.EndpointPolicy {
	out := slices.Clone(list)
	for i := range out {
		out[i].IngressFlags, out[i].EgressFlags = bpfgen.SetIncomplete, bpfgen.SetIncomplete
	}
	return out
}
