// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/internal/state"
)

// Catalog knows every Service of a node, whole, and which of them holds each
// frontend. Of two that claim one, the first keeps it; when it lets go, the
// next has it.
type Catalog struct {
	node    Node
	objects map[state.ServiceID]*object
	claims  map[state.BindingKey][]state.ServiceID // the first holds it
	// What is not as somebody wants it.
	contested map[state.BindingKey]bool
	invalid   map[state.ServiceID][]error
}

// object is one Service. service is nil when only its bindings are known, as
// after a restart; Kubernetes's are not kept either, whose watch has them.
// Bindings that are in force are without their backends, which the tables have.
type object struct {
	service  *state.Service
	bindings []state.Binding // few
	errs     []error
}

func (o *object) binding(k state.BindingKey) (state.Binding, bool) {
	if o == nil {
		return state.Binding{}, false
	}
	for _, b := range o.bindings {
		if b.Key() == k {
			return b, true
		}
	}
	return state.Binding{}, false
}

// inForce lets go of what the tables hold now.
func (o *object) inForce(k state.BindingKey) {
	for i := range o.bindings {
		if o.bindings[i].Key() == k {
			o.bindings[i].Backends = nil
		}
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
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("%s belongs to %s's Service %s; it takes effect when that one lets go of it", e.Frontend, e.Holder.Owner, e.Holder)
}

// NewCatalog is a catalog of what the tables and the records say. A binding that
// no record accounts for makes a Service of its own, named by its frontend.
func NewCatalog(node Node, bound []state.Binding, records []state.Service) *Catalog {
	c := &Catalog{
		node:      node,
		objects:   make(map[state.ServiceID]*object),
		claims:    make(map[state.BindingKey][]state.ServiceID, len(bound)),
		contested: make(map[state.BindingKey]bool),
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
	for _, b := range bound {
		id, ok := recorded[b.Key()]
		if !ok || id.Owner != b.Owner {
			id = c.restore(b)
		}
		c.claims[b.Key()] = append(c.claims[b.Key()], id)
	}
	for _, s := range records {
		for _, b := range c.objects[s.ServiceID].bindings {
			c.claim(b.Key(), s.ServiceID)
		}
	}
	return c
}

// PlainID names a Service that is known by its frontend alone.
func PlainID(owner state.Owner, f state.Frontend) state.ServiceID {
	return state.ServiceID{Owner: owner, Name: f.String()}
}

func (c *Catalog) restore(b state.Binding) state.ServiceID {
	id := PlainID(b.Owner, b.Frontend)
	o := c.objects[id]
	if o == nil {
		o = &object{}
		c.objects[id] = o
	}
	b.Service, b.Backends = id, nil
	o.bindings = append(o.bindings, b)
	return id
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

func (c *Catalog) claim(k state.BindingKey, id state.ServiceID) {
	if !slices.Contains(c.claims[k], id) {
		c.claims[k] = append(c.claims[k], id)
	}
	if len(c.claims[k]) > 1 {
		c.contested[k] = true
	}
}

func (c *Catalog) bind(s state.Service) *object {
	list, errs := Bind(s, c.node)
	o := &object{bindings: make([]state.Binding, 0, len(list)), errs: errs}
	if s.Owner != state.OwnerKubernetes {
		o.service = &s
	}
	for _, b := range list {
		if _, twice := o.binding(b.Key()); twice {
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
	claims  map[state.BindingKey][]state.ServiceID
}

// Plan says what setting upserts and removing removes comes to. Nothing changes
// before Commit. A later one of two upserts of a Service counts.
func (c *Catalog) Plan(upserts []state.Service, removes []state.ServiceID) Change {
	ch := Change{
		objects: make(map[state.ServiceID]*object, len(upserts)+len(removes)),
		claims:  make(map[state.BindingKey][]state.ServiceID),
	}
	var keys []state.BindingKey // in the order given
	affect := func(o *object) {
		if o == nil {
			return
		}
		for _, b := range o.bindings {
			if _, known := ch.claims[b.Key()]; !known {
				ch.claims[b.Key()] = nil
				keys = append(keys, b.Key())
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
			if o, id := c.nameless(b); o != nil {
				ch.objects[id] = nil
				affect(o)
			}
		}
	}
	for _, k := range keys {
		for _, id := range c.claims[k] {
			o, changed := ch.objects[id]
			if _, still := o.binding(k); still || !changed {
				ch.claims[k] = append(ch.claims[k], id)
			}
		}
	}
	for _, s := range upserts {
		for _, b := range ch.objects[s.ServiceID].bindings {
			if k := b.Key(); !slices.Contains(ch.claims[k], s.ServiceID) {
				ch.claims[k] = append(ch.claims[k], s.ServiceID)
			}
		}
	}
	c.resolve(&ch, keys)
	return ch
}

// resolve fills in what becomes of the bindings of keys.
func (c *Catalog) resolve(ch *Change, keys []state.BindingKey) {
	for _, k := range keys {
		if len(ch.claims[k]) == 0 {
			ch.Removes = append(ch.Removes, k)
			continue
		}
		holder := ch.claims[k][0]
		o, changed := ch.objects[holder]
		if !changed {
			if c.claims[k][0] == holder {
				continue // it is in force
			}
			o = c.objects[holder]
		}
		now, _ := o.binding(k)
		ch.Upserts = append(ch.Upserts, now)
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
		c.objects[id] = o
		if len(o.errs) > 0 {
			c.invalid[id] = o.errs
		}
	}
	for k, ids := range ch.claims {
		delete(c.contested, k)
		if len(ids) == 0 {
			delete(c.claims, k)
			continue
		}
		c.claims[k] = ids
		c.objects[ids[0]].inForce(k)
		if len(ids) > 1 {
			c.contested[k] = true
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

// Problems are those of an owner's Services, in a stable order.
func (c *Catalog) Problems(owner state.Owner) []Problem {
	var out []Problem
	for k := range c.contested {
		ids := c.claims[k]
		for _, id := range ids[1:] {
			if id.Owner == owner {
				out = append(out, Problem{id, &ConflictError{k.Frontend, ids[0]}})
			}
		}
	}
	for id, errs := range c.invalid {
		for _, err := range errs {
			if id.Owner == owner {
				out = append(out, Problem{id, err})
			}
		}
	}
	slices.SortFunc(out, func(a, b Problem) int {
		if d := a.Service.Compare(b.Service); d != 0 {
			return d
		}
		return strings.Compare(a.Err.Error(), b.Err.Error())
	})
	return slices.CompactFunc(out, func(a, b Problem) bool { return a.Error() == b.Error() })
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

// Holder is the Service that holds a binding.
func (c *Catalog) Holder(k state.BindingKey) (state.ServiceID, bool) {
	if ids := c.claims[k]; len(ids) > 0 {
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
			if holder := ch.claims[b.Key()][0]; holder != id {
				errs = append(errs, Problem{id, &ConflictError{b.Frontend, holder}})
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
