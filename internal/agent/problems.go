// SPDX-License-Identifier: Apache-2.0

package agent

// Objects that cannot be brought into force, in whole or in part: each is named
// in the log, in a metric and, where RBAC allows it, in an event on the object.

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"golang.org/x/time/rate"

	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// Where a sentence comes from: each source replaces its own.
const (
	fromObject = iota // the API objects
	fromEngine        // the engine's view: conflicts, what it does not support
	fromWrite         // a change that failed
	sources
)

// object is a Service or a NetworkPolicy.
type object struct {
	kind k8s.Kind
	key  k8s.Key
}

func (o object) String() string { return string(o.kind) + " " + o.key.String() }

func serviceAt(k k8s.Key) object { return object{k8s.Services, k} }

// problems are the sentences about each object, as they are now.
type problems struct {
	log  *slog.Logger
	uid  func(object) string // of the object as it is now; "": it is gone
	warn warn
	pace *rate.Limiter // of all events
	tell chan struct{} // something waits

	mu     sync.Mutex
	by     map[object]*[sources][]string
	news   queue // what waits; all of it holds
	limits map[object]*rate.Limiter
}

// warn writes an event.
type warn func(ctx context.Context, kind k8s.Kind, object k8s.Key, uid, sentence string) error

func newProblems(log *slog.Logger, uid func(object) string, warn warn) *problems {
	return &problems{
		log: log, uid: uid, warn: warn, pace: rate.NewLimiter(pace, burst), tell: make(chan struct{}, 1),
		by: map[object]*[sources][]string{}, news: newQueue(), limits: map[object]*rate.Limiter{},
	}
}

// mostProblems is how many sentences each source may say of an object: who names a thousand addresses that
// are another's has as many problems, of one kind.
const mostProblems = 25

// bounded is list with the number of those that are too many in their place.
func bounded(list []string) []string {
	if len(list) <= mostProblems {
		return list
	}
	return append(slices.Clone(list[:mostProblems]), fmt.Sprintf("and %d more problems", len(list)-mostProblems))
}

// set replaces what a source says of an object, and tells what is new.
func (p *problems) set(o object, source int, now []string) {
	now = bounded(now)
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.by[o]
	if all == nil && len(now) == 0 {
		return
	}
	if all == nil {
		all = new([sources][]string)
		p.by[o] = all
	}
	before := all[source]
	all[source] = now
	for _, s := range before {
		if t := (told{o, s}); !p.holds(t) {
			p.news.remove(t)
		}
	}
	for _, s := range now {
		if !slices.Contains(before, s) {
			p.log.Warn("an object is not in force in whole", "object", o, "problem", s)
			p.note(told{o, s})
		}
	}
	if len(all[fromObject])+len(all[fromEngine])+len(all[fromWrite]) == 0 {
		delete(p.by, o)
		p.log.Info("an object has no problem any more", "object", o)
	}
}

func idOf(k k8s.Key) state.ServiceID {
	return state.ServiceID{Owner: state.OwnerKubernetes, Namespace: k.Namespace, Name: k.Name}
}

func (p *problems) object(o object, now []string) { p.set(o, fromObject, now) }
func (p *problems) failed(o object, err error)    { p.set(o, fromWrite, []string{err.Error()}) }
func (p *problems) works(o object)                { p.set(o, fromWrite, nil) }
func keyOf(id state.ServiceID) k8s.Key            { return k8s.Key{Namespace: id.Namespace, Name: id.Name} }

// faults replaces what the engine says of all Services.
func (p *problems) faults(list []service.Problem) {
	now := map[object][]string{}
	for _, f := range list {
		o := serviceAt(keyOf(f.Service))
		now[o] = append(now[o], f.Err.Error())
	}
	p.replace(k8s.Services, fromEngine, now)
}

// replace replaces what a source says of all objects of a kind.
func (p *problems) replace(kind k8s.Kind, source int, now map[object][]string) {
	p.mu.Lock()
	for o, all := range p.by {
		if o.kind == kind && len(all[source]) > 0 && now[o] == nil {
			now[o] = nil
		}
	}
	p.mu.Unlock()
	for o, list := range now {
		p.set(o, source, list)
	}
}

// retain forgets all objects of a kind but these.
func (p *problems) retain(kind k8s.Kind, these func(k8s.Key) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for o, all := range p.by {
		if o.kind != kind || these(o.key) {
			continue
		}
		delete(p.by, o)
		for _, s := range slices.Concat(all[:]...) {
			p.news.remove(told{o, s})
		}
	}
}

// count is how many objects of a kind have a problem.
func (p *problems) count(kind k8s.Kind) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for o := range p.by {
		if o.kind == kind {
			n++
		}
	}
	return n
}

// list is every object with its sentences.
func (p *problems) list() map[object][]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make(map[object][]string, len(p.by))
	for k, all := range p.by {
		out[k] = slices.Concat(all[:]...)
	}
	return out
}
