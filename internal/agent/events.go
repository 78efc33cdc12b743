// SPDX-License-Identifier: Apache-2.0

package agent

// Problems as events on their objects, within limits: each node judges each
// object, and who may change an object could have all nodes write at will.

import (
	"container/list"
	"context"
	"maps"
	"slices"
	"time"

	"golang.org/x/time/rate"
)

const (
	// waiting is how many sentences may wait for the API server.
	waiting = 1000

	// Of one object, as client-go's own events; more are in the log, in the metric
	// and in /healthz.
	burstOfOne = 25
	afterBurst = 5 * time.Minute

	// Of all objects: writes a second, and at once.
	pace, burst = 10, 100

	// remembered is how many objects' limits are kept before those that would hold
	// nothing back are forgotten.
	remembered = 1000
)

// told is a sentence about an object, that it may be told.
type told struct {
	object   object
	sentence string
}

// queue is what waits, in the order in which it came, each once. Problems come by ten
// thousands when a table is full, so nothing here looks through it.
type queue struct {
	order *list.List // of told
	at    map[told]*list.Element
}

func newQueue() queue { return queue{list.New(), map[told]*list.Element{}} }

func (q queue) has(t told) bool { return q.at[t] != nil }

func (q queue) push(t told) { q.at[t] = q.order.PushBack(t) }

func (q queue) remove(t told) {
	if e := q.at[t]; e != nil {
		q.order.Remove(e)
		delete(q.at, t)
	}
}

// pop takes what came first.
func (q queue) pop() (told, bool) {
	e := q.order.Front()
	if e == nil {
		return told{}, false
	}
	t := e.Value.(told)
	q.remove(t)
	return t, true
}

// note has a sentence wait for its turn, once. When too many wait, it is not told.
func (p *problems) note(t told) {
	if p.news.has(t) {
		return
	}
	if len(p.news.at) >= waiting {
		p.log.Debug("no event is written: too many wait", "object", t.object)
		return
	}
	p.news.push(t)
	select {
	case p.tell <- struct{}{}:
	default:
	}
}

// holds says whether a sentence is true of its object still.
func (p *problems) holds(t told) bool {
	all := p.by[t.object]
	return all != nil && slices.ContainsFunc(all[:], func(list []string) bool { return slices.Contains(list, t.sentence) })
}

// next is the first sentence that waits and may be told.
func (p *problems) next() (told, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for t, ok := p.news.pop(); ok; t, ok = p.news.pop() {
		if p.allowed(t.object) {
			return t, true
		}
	}
	return told{}, false
}

// allowed takes one event off an object's allowance, which outlives its problems
// and itself: what comes and goes does not begin anew.
func (p *problems) allowed(o object) bool {
	limit := p.limits[o]
	if limit == nil {
		if len(p.limits) >= remembered {
			maps.DeleteFunc(p.limits, func(_ object, l *rate.Limiter) bool { return l.Tokens() >= burstOfOne })
		}
		limit = rate.NewLimiter(rate.Every(afterBurst), burstOfOne)
		p.limits[o] = limit
	}
	return limit.Allow()
}

// run writes events until ctx ends.
func (p *problems) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.tell:
		}
		for t, ok := p.next(); ok && ctx.Err() == nil; t, ok = p.next() {
			p.write(ctx, t)
		}
	}
}

func (p *problems) write(ctx context.Context, t told) {
	uid := p.uid(t.object)
	if uid == "" || p.pace.Wait(ctx) != nil {
		return
	}
	if err := p.warn(ctx, t.object.kind, t.object.key, uid, t.sentence); err != nil && ctx.Err() == nil {
		p.log.Debug("an event could not be written", "object", t.object, "error", err)
	}
}
