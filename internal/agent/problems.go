// SPDX-License-Identifier: Apache-2.0

package agent

// Objects that cannot be brought into force, in whole or in part: each is named
// in the log, in a metric and, where RBAC allows it, in an event on the Service.

import (
	"context"
	"log/slog"
	"slices"
	"sync"

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

// problems are the sentences about each Service, as they are now.
type problems struct {
	log    *slog.Logger
	events *k8s.Events

	mu   sync.Mutex
	by   map[k8s.Key]*[sources][]string
	tell chan struct{}
	news []told
}

type told struct {
	key      k8s.Key
	sentence string
}

func newProblems(log *slog.Logger, events *k8s.Events) *problems {
	return &problems{log: log, events: events, by: map[k8s.Key]*[sources][]string{}, tell: make(chan struct{}, 1)}
}

// set replaces what a source says of a Service, and tells what is new.
func (p *problems) set(key k8s.Key, source int, now []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.by[key]
	if all == nil && len(now) == 0 {
		return
	}
	if all == nil {
		all = new([sources][]string)
		p.by[key] = all
	}
	for _, s := range now {
		if slices.Contains(all[source], s) {
			continue
		}
		p.log.Warn("a Service is not in force in whole", "service", key, "problem", s)
		p.news = append(p.news, told{key, s})
		select {
		case p.tell <- struct{}{}:
		default:
		}
	}
	all[source] = now
	if len(all[fromObject])+len(all[fromEngine])+len(all[fromWrite]) == 0 {
		delete(p.by, key)
		p.log.Info("a Service has no problem any more", "service", key)
	}
}

func (p *problems) object(key k8s.Key, now []string) { p.set(key, fromObject, now) }
func (p *problems) failed(key k8s.Key, err error)    { p.set(key, fromWrite, []string{err.Error()}) }
func (p *problems) works(key k8s.Key)                { p.set(key, fromWrite, nil) }
func keyOf(id state.ServiceID) k8s.Key               { return k8s.Key{Namespace: id.Namespace, Name: id.Name} }

// faults replaces what the engine says of all Services.
func (p *problems) faults(list []service.Problem) {
	now := map[k8s.Key][]string{}
	for _, f := range list {
		k := keyOf(f.Service)
		now[k] = append(now[k], f.Err.Error())
	}
	p.mu.Lock()
	for k, all := range p.by {
		if len(all[fromEngine]) > 0 && now[k] == nil {
			now[k] = nil
		}
	}
	p.mu.Unlock()
	for k, list := range now {
		p.set(k, fromEngine, list)
	}
}

// count is how many Services have a problem.
func (p *problems) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.by)
}

// list is every Service with its sentences.
func (p *problems) list() map[k8s.Key][]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make(map[k8s.Key][]string, len(p.by))
	for k, all := range p.by {
		out[k] = slices.Concat(all[:]...)
	}
	return out
}

// run writes events until ctx ends.
func (p *problems) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.tell:
		}
		p.mu.Lock()
		news := p.news
		p.news = nil
		p.mu.Unlock()
		for _, n := range news {
			if err := p.events.Warn(ctx, n.key, n.sentence); err != nil && ctx.Err() == nil {
				p.log.Debug("an event could not be written", "service", n.key, "error", err)
			}
		}
	}
}
