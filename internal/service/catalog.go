// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/internal/state"
)

// Catalog knows every Service of a node, whole, and which of them holds each
// frontend. Of two that claim one, the first keeps it, for clients outside as
// for all others; when it lets go, the next has it.
type Catalog struct {
	node    Node
	objects map[state.ServiceID]*object
	claims  map[state.Frontend][]state.ServiceID // the first holds it
	// What is not as somebody wants it.
	contested map[state.Frontend]bool
	invalid   map[state.ServiceID][]error
}

// object is one Service. service is nil when only its bindings are known, as
// after a restart; Kubernetes's are not kept either, whose watch has them.
// Bindings that are in force are without their backends, which the tables have.
type object struct {
	service  *state.Service
	bindings []state.Binding // by frontend, those for clients outside last: see of
	errs     []error
	// rest: in a plan, it is what is left of this one, and what both have is the same.
	rest *object
}

func (o *object) binding(k state.BindingKey) (state.Binding, bool) {
	for _, b := range o.of(k.Frontend) {
		if b.Outside == k.Outside {
			return b, true
		}
	}
	return state.Binding{}, false
}

// of are the bindings of one frontend: none, one, or one more for clients outside.
func (o *object) of(f state.Frontend) []state.Binding {
	if o == nil {
		return nil
	}
	first, _ := slices.BinarySearchFunc(o.bindings, f, atFrontend)
	n := first
	for n < len(o.bindings) && o.bindings[n].Frontend == f {
		n++
	}
	return o.bindings[first:n:n]
}

func atFrontend(b state.Binding, f state.Frontend) int { return b.Frontend.Compare(f) }

// clusterIP says that f is o's cluster IP.
func (o *object) clusterIP(f state.Frontend) bool {
	b, ok := o.binding(state.BindingKey{Frontend: f})
	return ok && b.Kind == state.ClusterIP
}

// inForce lets go of what the tables hold now.
func (o *object) inForce(f state.Frontend) {
	at := o.of(f)
	for i := range at {
		at[i].Backends = nil
	}
}

// Problem is something of a Service that could not be brought into force; the
// rest of it is.
type Problem struct {
	Service state.ServiceID
	Err     error
}

func (p Problem) Error() string { return fmt.Sprintf("service %s: %v", p.Service, p.Err) }
func (p Problem) Unwrap() error { return p.Err }

// ConflictError is about a frontend that another Service holds.
type ConflictError struct {
	Frontend state.Frontend
	Holder   state.ServiceID
	Refused  bool // nothing is changed: who asks is to ask for something else
}

func (e *ConflictError) Error() string {
	mend := "it takes effect when that one lets go of it"
	if e.Refused {
		mend = "choose another, or remove that Service"
	}
	return fmt.Sprintf("%s belongs to %s's Service %s; %s", e.Frontend, e.Holder.Owner, e.Holder, mend)
}

// NewCatalog is a catalog of what the tables and the records say. A binding that
// no record accounts for makes a Service of its own, named by its frontend. One
// for clients outside, which another Service may have been given once, is the
// holder's of its frontend, and goes with the holder's next change.
func NewCatalog(node Node, bound []state.Binding, records []state.Service) *Catalog {
	c := &Catalog{
		node:      node,
		objects:   make(map[state.ServiceID]*object),
		claims:    make(map[state.Frontend][]state.ServiceID, len(bound)),
		contested: make(map[state.Frontend]bool),
		invalid:   make(map[state.ServiceID][]error),
	}
	recorded := make(map[state.BindingKey]state.ServiceID)
	for _, s := range records {
		o := c.bind(s)
		c.objects[s.ServiceID] = o
		for _, b := range o.bindings {
			recorded[b.Key()] = s.ServiceID
		}
	}
	for _, outside := range []bool{false, true} {
		for _, b := range bound {
			if b.Outside != outside {
				continue
			}
			id, held := c.Holder(b.Frontend)
			if !held {
				var ok bool
				if id, ok = recorded[b.Key()]; !ok || id.Owner != b.Owner {
					id = PlainID(b.Owner, b.Frontend)
				}
				c.claim(b.Frontend, id)
			}
			c.restore(id, b)
		}
	}
	for _, s := range records {
		for _, b := range c.objects[s.ServiceID].bindings {
			c.claim(b.Frontend, s.ServiceID)
		}
	}
	return c
}

// SetNode has what is planned from now on be for node.
func (c *Catalog) SetNode(node Node) { c.node = node }

// PlainID names a Service that is known by its frontend alone.
func PlainID(owner state.Owner, f state.Frontend) state.ServiceID {
	return state.ServiceID{Owner: owner, Name: f.String()}
}

// PlainGroup is the group of such a Service's frontend.
func PlainGroup(owner state.Owner, f state.Frontend) uint64 {
	return groupOf(PlainID(owner, f), state.ServicePort{Protocol: f.Protocol})
}

// restore notes that a binding of id's is in force, which its record may know.
func (c *Catalog) restore(id state.ServiceID, b state.Binding) {
	o := c.objects[id]
	if o == nil {
		o = &object{}
		c.objects[id] = o
	}
	if _, known := o.binding(b.Key()); known {
		return
	}
	b.Service, b.Backends = id, nil
	i, _ := slices.BinarySearchFunc(o.bindings, b.Key(), state.Binding.CompareKey)
	o.bindings = slices.Insert(o.bindings, i, b)
}

// nameless is what is known of b's frontend since before a restart, and of no
// Service but one of Kubernetes's: whichever has b's frontend now takes its place.
func (c *Catalog) nameless(b state.Binding) (*object, state.ServiceID) {
	if b.Owner != state.OwnerKubernetes {
		return nil, state.ServiceID{}
	}
	id := PlainID(b.Owner, b.Frontend)
	if id == b.Service {
		return nil, id
	}
	return c.objects[id], id
}

func (c *Catalog) claim(f state.Frontend, id state.ServiceID) {
	if !slices.Contains(c.claims[f], id) {
		c.claims[f] = append(c.claims[f], id)
	}
	if len(c.claims[f]) > 1 {
		c.contested[f] = true
	}
}

func (c *Catalog) bind(s state.Service) *object {
	list, errs := Bind(s, c.node)
	slices.SortStableFunc(list, func(a, b state.Binding) int { return a.CompareKey(b.Key()) })
	o := &object{bindings: make([]state.Binding, 0, len(list)), errs: errs}
	if s.Owner != state.OwnerKubernetes {
		o.service = &s
	}
	for i, b := range list {
		if i > 0 && list[i-1].Key() == b.Key() {
			o.errs = append(o.errs, invalid("it names the frontend %s twice; give it once", b.Frontend))
			continue
		}
		o.bindings = append(o.bindings, b)
	}
	return o
}

// Change is what a plan does to the bindings.
type Change struct {
	Upserts []state.Binding // some may be in force already
	Removes []state.BindingKey

	objects map[state.ServiceID]*object // nil: removed
	claims  map[state.Frontend][]state.ServiceID
}

// Plan says what setting upserts and removing removes comes to. Nothing changes
// before Commit. A later one of two upserts of a Service counts.
func (c *Catalog) Plan(upserts []state.Service, removes []state.ServiceID) Change {
	ch := Change{
		objects: make(map[state.ServiceID]*object, len(upserts)+len(removes)),
		claims:  make(map[state.Frontend][]state.ServiceID),
	}
	var affected []state.Frontend // of Services in the order given
	affect := func(o *object) {
		if o == nil {
			return
		}
		for _, b := range o.bindings {
			if _, known := ch.claims[b.Frontend]; !known {
				ch.claims[b.Frontend] = nil
				affected = append(affected, b.Frontend)
			}
		}
	}
	for _, id := range removes {
		ch.objects[id] = nil
		affect(c.objects[id])
	}
	for _, s := range upserts {
		ch.objects[s.ServiceID] = c.bind(s)
		affect(c.objects[s.ServiceID])
		affect(ch.objects[s.ServiceID])
		for _, b := range ch.objects[s.ServiceID].bindings {
			if o, id := c.nameless(b); o != nil && (b.Kind == state.ClusterIP || !o.clusterIP(b.Frontend)) {
				ch.objects[id] = nil
				affect(o)
			}
		}
	}
	for _, f := range affected {
		for _, id := range c.claims[f] {
			o, changed := ch.objects[id]
			if !changed || len(o.of(f)) > 0 {
				ch.claims[f] = append(ch.claims[f], id)
			}
		}
	}
	for _, s := range upserts {
		for _, b := range ch.objects[s.ServiceID].bindings {
			if f := b.Frontend; !slices.Contains(ch.claims[f], s.ServiceID) {
				ch.claims[f] = append(ch.claims[f], s.ServiceID)
			}
		}
	}
	c.keepOut(&ch, affected)
	c.resolve(&ch, affected)
	return ch
}

// now is an object as it is after ch.
func (c *Catalog) now(ch *Change, id state.ServiceID) *object {
	if o, changed := ch.objects[id]; changed {
		return o
	}
	return c.objects[id]
}

// keepOut takes frontends from Kubernetes's Services that only name them as an external address,
// when they are one's cluster IP: the API server gives that to one, and anybody may name any other.
func (c *Catalog) keepOut(ch *Change, frontends []state.Frontend) {
	out := map[state.ServiceID]map[state.Frontend]state.ServiceID{} // and whose each is
	for _, f := range frontends {
		ids := ch.claims[f]
		i := slices.IndexFunc(ids, func(id state.ServiceID) bool { return id.Owner == state.OwnerKubernetes && c.now(ch, id).clusterIP(f) })
		if i < 0 || len(ids) == 1 {
			continue
		}
		owner := ids[i]
		ch.claims[f] = slices.DeleteFunc(ids, func(id state.ServiceID) bool {
			if id.Owner != state.OwnerKubernetes || c.now(ch, id).clusterIP(f) {
				return false
			}
			if out[id] == nil {
				out[id] = map[state.Frontend]state.ServiceID{}
			}
			out[id][f] = owner
			return true
		})
	}
	for id, owners := range out {
		ch.objects[id] = c.now(ch, id).without(owners)
	}
}

// without is what is left of o beside frontends that are others' cluster IPs.
func (o *object) without(owners map[state.Frontend]state.ServiceID) *object {
	left := *o
	left.rest, left.bindings, left.errs = o, nil, slices.Clone(o.errs)
	for _, b := range o.bindings {
		owner, others := owners[b.Frontend]
		if !others {
			left.bindings = append(left.bindings, b)
		} else if !b.Outside {
			left.errs = append(left.errs, invalid("%s is the cluster IP of Service %s; give another address", b.Frontend, owner))
		}
	}
	return &left
}

// resolve fills in what becomes of the bindings of frontends: all of a holder's
// are in force, and nobody else's.
func (c *Catalog) resolve(ch *Change, frontends []state.Frontend) {
	for _, f := range frontends {
		var old, now *object
		if ids := c.claims[f]; len(ids) > 0 {
			old = c.objects[ids[0]]
		}
		if ids := ch.claims[f]; len(ids) > 0 {
			now = c.now(ch, ids[0])
		}
		if now == old || now != nil && now.rest == old && old != nil {
			continue // it is in force
		}
		for _, b := range old.of(f) {
			if _, stays := now.binding(b.Key()); !stays {
				ch.Removes = append(ch.Removes, b.Key())
			}
		}
		ch.Upserts = append(ch.Upserts, now.of(f)...)
	}
}

// Commit makes ch, which is in force now, what the catalog knows.
func (c *Catalog) Commit(ch Change) {
	for id, o := range ch.objects {
		delete(c.invalid, id)
		if o == nil {
			delete(c.objects, id)
			continue
		}
		c.objects[id], o.rest = o, nil
		if len(o.errs) > 0 {
			c.invalid[id] = o.errs
		}
	}
	for f, ids := range ch.claims {
		delete(c.contested, f)
		if len(ids) == 0 {
			delete(c.claims, f)
			continue
		}
		c.claims[f] = ids
		c.objects[ids[0]].inForce(f)
		if len(ids) > 1 {
			c.contested[f] = true
		}
	}
}

// Retain is Plan for removing every Service of an owner that is not among list.
func (c *Catalog) Retain(owner state.Owner, list []state.ServiceID) Change {
	wanted := make(map[state.ServiceID]bool, len(list))
	for _, id := range list {
		wanted[id] = true
	}
	var removes []state.ServiceID
	for id := range c.objects {
		if id.Owner == owner && !wanted[id] {
			removes = append(removes, id)
		}
	}
	return c.Plan(nil, removes)
}

// Problems are those of an owner's Services, in a stable order, each once.
func (c *Catalog) Problems(owner state.Owner) []Problem {
	by := map[state.ServiceID]map[string]error{}
	add := func(id state.ServiceID, err error) {
		if id.Owner != owner {
			return
		}
		if by[id] == nil {
			by[id] = map[string]error{}
		}
		by[id][err.Error()] = err
	}
	for f := range c.contested {
		ids := c.claims[f]
		for _, id := range ids[1:] {
			add(id, &ConflictError{Frontend: f, Holder: ids[0]})
		}
	}
	for id, errs := range c.invalid {
		for _, err := range errs {
			add(id, err)
		}
	}
	var out []Problem
	for _, id := range slices.SortedFunc(maps.Keys(by), state.ServiceID.Compare) {
		for _, sentence := range slices.Sorted(maps.Keys(by[id])) {
			out = append(out, Problem{id, by[id][sentence]})
		}
	}
	return out
}

// Service is a Service by its name; false when it is not known, or only by its
// bindings.
func (c *Catalog) Service(id state.ServiceID) (state.Service, bool) {
	if o := c.objects[id]; o != nil && o.service != nil {
		return *o.service, true
	}
	return state.Service{}, false
}

// Has says whether a Service of this name is known.
func (c *Catalog) Has(id state.ServiceID) bool { return c.objects[id] != nil }

// Holder is the Service that holds a frontend.
func (c *Catalog) Holder(f state.Frontend) (state.ServiceID, bool) {
	if ids := c.claims[f]; len(ids) > 0 {
		return ids[0], true
	}
	return state.ServiceID{}, false
}

// Refused is why ch could not bring everything into force that it was to; nil
// when it does.
func (ch Change) Refused() error {
	var errs []error
	for id, o := range ch.objects {
		if o == nil {
			continue
		}
		for _, err := range o.errs {
			errs = append(errs, Problem{id, err})
		}
		for _, b := range o.bindings {
			if holder := ch.claims[b.Frontend][0]; holder != id {
				errs = append(errs, Problem{id, &ConflictError{b.Frontend, holder, true}})
			}
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(slices.CompactFunc(errs, func(a, b error) bool { return a.Error() == b.Error() })...)
}

// Plain says that the tables hold all there is to know of s: one ClusterIP of
// every port, and nothing else.
func Plain(s state.Service) bool {
	if len(s.Ports) != 1 || s.Affinity != 0 || s.External != 0 || s.Internal != 0 || s.Algorithm != 0 || len(s.SourceRanges) > 0 {
		return false
	}
	p := s.Ports[0]
	plain := len(p.Frontends) == 1 && p.Frontends[0].Kind == state.ClusterIP
	return plain && s.ServiceID == PlainID(s.Owner, state.Frontend{AddrPort: p.Frontends[0].AddrPort, Protocol: p.Protocol})
}
