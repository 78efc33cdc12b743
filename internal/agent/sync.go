// SPDX-License-Identifier: Apache-2.0

package agent

// From what Kubernetes says to the engine. One goroutine: a change is applied
// when it arrives, together with whatever else is waiting at that moment, and
// with nothing that is not.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// heartbeat is how often the loop says that it is alive without any work.
const heartbeat = 5 * time.Second

type syncer struct {
	a          *Agent
	translator *k8s.Translator
	zone       string
	whole      bool // the next step replaces everything
	unpruned   bool // Services that could not be brought into force may have left something
	retry      map[k8s.Key]kept
	retrying                    // of Services
	gone       []state.Backend  // may be gone: nobody has told the engine yet
	drain      map[k8s.Key]bool // the pods that gone waits for; nil: not looked at yet

	nodeList     []state.Node // in force
	nodeProblems []string
	nodesBeside  bool // there are others than Kubernetes's
	membersKnown bool // with node-mode none: that there are none
	membersRetry retrying

	edgeDevices  []string // in force
	edgeDefaults []string // that default routes led by
	edgeKnown    bool
	edgeRetry    retrying
	followRetry  retrying
	edgeAway     bool          // no device has this Node's addresses
	devices      chan struct{} // this node's devices may have changed

	network    network
	taint      taint
	unready    atomic.Pointer[string] // why the node is not ready for pods; nil: not looked at yet; "": it is
	readyRetry retrying

	synced atomic.Bool               // everything that there was has been applied
	alive  atomic.Pointer[time.Time] // the loop's last turn
}

// kept is a Service that could not be brought into force.
type kept struct {
	k8s.Affected
	unfit bool // the tables have no room for it
}

func newSyncer(a *Agent) *syncer {
	s := &syncer{a: a, translator: k8s.NewTranslator(a.watch, a.config.Node), whole: true, retry: map[k8s.Key]kept{},
		devices: make(chan struct{}, 1), taint: taint{ended: make(chan error, 1)}}
	s.lives()
	return s
}

func (s *syncer) run(ctx context.Context) error {
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	again := time.NewTimer(0)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.a.watch.Signal():
		case <-s.devices:
			s.followEdge(ctx)
		case <-s.a.policies.wake:
		case err := <-s.taint.ended:
			s.untainted(err)
		case <-beat.C:
			s.recheck()
			s.a.lookAtConfig()
		case <-again.C:
		}
		s.lives()
		s.step(ctx)
		var due time.Time
		if len(s.retry) > 0 || s.unpruned || s.whole {
			due = s.due
		}
		for _, r := range []*retrying{&s.a.policies.retrying, &s.membersRetry, &s.edgeRetry, &s.followRetry, &s.readyRetry} {
			due = earliest(due, r.due)
		}
		if !due.IsZero() {
			again.Reset(max(time.Until(due), 0))
		}
	}
}

// lives notes a turn of the loop. Times are kept whole, here and of failures: the
// clock may be set meanwhile.
func (s *syncer) lives() {
	now := time.Now()
	s.alive.Store(&now)
}

// step applies what there is. Before everything is known, nothing is: what is
// at work stays until then.
func (s *syncer) step(ctx context.Context) {
	if !s.a.watch.Synced(everything...) {
		return
	}
	changes := s.a.watch.Take()
	affected := s.translator.Affected(changes)
	s.ending(changes, s.a.watch.TakeGone())
	s.a.policies.step(ctx, changes)
	s.lives() // the first of each is long in a large cluster
	s.place(ctx, changes)
	s.members(ctx, changes)
	s.edge(ctx, changes)
	switch {
	case s.whole && s.isDue():
		s.replace(ctx, affected)
	case len(affected) > 0 || (len(s.retry) > 0 || s.unpruned) && s.isDue():
		s.change(ctx, affected)
	}
	s.end(ctx)
	inForce := !s.whole && s.a.policies.ready() && !s.membersRetry.fails() && !s.edgeRetry.fails()
	if inForce && s.synced.CompareAndSwap(false, true) {
		// From here on little is made anew beside what is kept: half as much garbage
		// as by default may wait. What the start has left does not come again.
		debug.SetGCPercent(50)
		debug.FreeOSMemory()
	}
	s.ready(ctx, changes)
}

// together is how many Services are brought into force at once when all are:
// what that takes beside what is kept does not grow with their number.
const together = 256

// replace makes everything what Kubernetes says, and removes what it does not
// say any more: after a start, or when this node's place has changed.
func (s *syncer) replace(ctx context.Context, affected []k8s.Affected) {
	start := time.Now()
	created := map[k8s.Key]time.Time{}
	for k, v := range s.a.watch.Services.All() {
		created[k] = v.Created
	}
	// Of two Services that claim one frontend, the older has it.
	keys := slices.SortedFunc(maps.Keys(created), func(a, b k8s.Key) int {
		return cmp.Or(created[a].Compare(created[b]), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	clear(s.retry)
	s.leaveChecks()
	s.a.problems.retain(k8s.Services, func(k k8s.Key) bool { _, ok := created[k]; return ok })
	for some := range slices.Chunk(keys, together) {
		list := make([]k8s.Affected, 0, len(some))
		for _, k := range some {
			list = append(list, k8s.Affected{Key: k, At: start})
		}
		s.attempt(ctx, list)
		s.lives()
	}
	err := s.prune(ctx)
	if ctx.Err() != nil {
		return // the agent stops
	}
	if err != nil {
		s.a.metrics.failures.Inc()
		s.wait(start)
		s.a.log.Error("Services that are gone could not be removed; what is at work stays, and everything is tried again", "error", err)
		return
	}
	s.ended(start, slices.DeleteFunc(affected, func(a k8s.Affected) bool { _, failed := s.retry[a.Key]; return failed }), len(s.retry) > 0, false)
	s.a.log.Info("Services are in force", "services", len(keys)-len(s.retry), "took", time.Since(start).Round(time.Millisecond))
}

// prune removes what is no Service's any more. What one that could not be brought into
// force has had since before a start, which is known by its frontends alone, stays.
func (s *syncer) prune(ctx context.Context) error {
	var names []state.ServiceID
	for k := range s.a.watch.Services.All() {
		names = append(names, idOf(k))
	}
	for k := range s.retry {
		want, _, _ := s.translator.Service(k)
		for _, p := range want.Ports {
			for _, f := range p.Frontends {
				names = append(names, service.PlainID(state.OwnerKubernetes, state.Frontend{AddrPort: f.AddrPort, Protocol: p.Protocol}))
			}
		}
	}
	var faults []service.Problem
	err := s.a.with(ctx, func(e *engine.Engine) (err error) {
		faults, err = e.RetainServices(state.OwnerKubernetes, names)
		return err
	})
	if s.unpruned = err != nil || len(s.retry) > 0; err == nil {
		s.whole = false // each was brought into force, or waits
		s.a.problems.faults(faults)
	}
	return err
}

// keep notes a Service that could not be brought into force, for another try.
func (s *syncer) keep(a k8s.Affected, err error) {
	unfit := errors.As(err, new(*datapath.FullError)) && !errors.As(err, new(*reconcile.UndoError))
	s.retry[a.Key] = kept{a, unfit}
	s.a.metrics.failures.Inc()
	s.a.problems.failed(serviceAt(a.Key), err)
}

// translate says what a Service wants, and tells what is wrong with it.
func (s *syncer) translate(k k8s.Key) (state.Service, bool) {
	want, wrong, ok := s.translator.Service(k)
	if !ok || want.HealthCheckNodePort == 0 {
		s.a.checks.remove(k)
	} else if err := s.a.checks.set(k, want); err != nil {
		wrong = append(wrong, fmt.Sprintf("healthCheckNodePort %d: %v", want.HealthCheckNodePort, err))
	}
	s.a.problems.object(serviceAt(k), wrong)
	return want, ok
}

// change applies what affected and the failures of before come to.
func (s *syncer) change(ctx context.Context, affected []k8s.Affected) {
	start, failing := time.Now(), len(s.retry)
	for _, a := range affected {
		delete(s.retry, a.Key)
	}
	tried := s.isDue()
	if tried {
		for _, k := range s.retry {
			affected = append(affected, k.Affected)
		}
		clear(s.retry)
	}
	done := s.attempt(ctx, affected)
	if ctx.Err() != nil {
		return
	}
	unpruned := false
	if s.unpruned && (tried || len(s.retry) < max(failing, 1)) { // else what waits keeps as much as before
		if err := s.prune(ctx); err != nil && ctx.Err() == nil {
			unpruned = true
			s.a.metrics.failures.Inc()
			s.a.log.Error("what Services that are gone have left could not be removed; it is tried again", "error", err)
		}
	}
	s.ended(start, done, tried && len(done) < len(affected), unpruned)
}

// attempt brings Services into force, and answers those that are. When together
// they cannot be, each is tried by itself, so that one that cannot stops no
// other; it is kept for another try.
func (s *syncer) attempt(ctx context.Context, affected []k8s.Affected) (done []k8s.Affected) {
	err := s.apply(ctx, affected)
	if err == nil {
		return affected
	}
	for _, a := range affected {
		s.lives() // with a table that is full, a try is long
		if len(affected) > 1 {
			err = s.apply(ctx, []k8s.Affected{a})
		}
		if ctx.Err() != nil {
			return done // the agent stops, and nobody is to blame
		}
		if err == nil {
			done = append(done, a)
		} else {
			s.keep(a, err)
		}
	}
	return done
}

// ended notes what took effect just now, and when to try again what failed; some: of Services,
// all that wait were tried, and some failed. One that fails before their time puts it off for
// no other. A Service that does not fit is no failure of the agent's.
func (s *syncer) ended(start time.Time, done []k8s.Affected, some, whole bool) {
	s.applied(start, done)
	fails := whole
	for _, k := range s.retry {
		fails = fails || !k.unfit
	}
	switch {
	case (some || whole) && fails:
		s.wait(start)
	case some:
		s.plan()
	case len(s.retry) == 0:
		s.succeeded()
	case fails:
		s.note(start)
	}
	if !fails {
		s.failed.Store(nil)
	}
}

// leaveChecks ends the health checks that are no Service's any more: each lets go
// of its port before a successor asks for it.
func (s *syncer) leaveChecks() {
	s.a.checks.retain(func(k k8s.Key, port uint16) bool {
		now := s.a.watch.Services.Get(k)
		return now != nil && now.HealthCheckNodePort == port
	})
}

// recheck asks again for the ports of health checks that somebody else had.
func (s *syncer) recheck() {
	for _, k := range s.a.checks.unserved() {
		s.translate(k)
	}
}

func (s *syncer) apply(ctx context.Context, affected []k8s.Affected) error {
	s.leaveChecks()
	var upserts []state.Service
	var removes []state.ServiceID
	for _, a := range affected {
		if want, ok := s.translate(a.Key); ok {
			upserts = append(upserts, want)
		} else {
			removes = append(removes, idOf(a.Key))
		}
	}
	var faults []service.Problem
	err := s.a.with(ctx, func(e *engine.Engine) (err error) {
		faults, err = e.ChangeServices(state.OwnerKubernetes, upserts, removes)
		return err
	})
	if err == nil {
		s.a.problems.faults(faults)
	}
	return err
}

// applied measures what took effect just now.
func (s *syncer) applied(start time.Time, affected []k8s.Affected) {
	now := time.Now()
	m := s.a.metrics
	m.syncDuration.Observe(now.Sub(start).Seconds())
	m.lastSync.Store(now.UnixNano())
	for _, a := range affected {
		s.a.problems.works(serviceAt(a.Key))
		m.applyDelay.Observe(now.Sub(a.At).Seconds())
		m.serviceChanges.Inc()
		for _, t := range a.Triggered {
			m.endpointChanges.Inc()
			// What a slice says when the agent starts was triggered long ago.
			if s.synced.Load() && t.After(m.started) {
				m.programming.Observe(now.Sub(t).Seconds())
			}
		}
	}
}

// ending notes what may have gone, and whether it is to be looked at: while pods drain, only
// what is told of one of them says anything new.
func (s *syncer) ending(changes []k8s.Change, gone []state.Backend) {
	s.gone = append(s.gone, gone...)
	if len(gone) > 0 || slices.ContainsFunc(changes, func(c k8s.Change) bool { return c.Kind == k8s.Pods && s.drain[c.Key] }) {
		s.drain = nil
	}
}

// end ends the connections to endpoints that are gone: they were terminating, are
// in no slice any more, and no pod drains there. One that left a slice without having
// been terminating may live on, and what goes there goes on.
func (s *syncer) end(ctx context.Context) {
	if len(s.gone) == 0 || s.whole || s.drain != nil {
		return
	}
	others, draining := s.withoutDraining(s.gone) // the Service went, or does not select the pod any more
	if gone := s.inNoSlice(others); len(gone) > 0 {
		err := s.a.with(ctx, func(e *engine.Engine) error { return e.BackendsGone(gone...) })
		if err != nil {
			s.drain = nil
			s.a.log.Error("connections to endpoints that are gone could not be ended; it is tried again", "endpoints", len(gone), "error", err)
			return
		}
	}
	s.gone = draining
}

// withoutDraining tells backends apart by whether a pod drains at their address, and notes
// which pods do. Of those where one does, each is answered once.
func (s *syncer) withoutDraining(list []state.Backend) (others, draining []state.Backend) {
	asked := make(map[netip.Addr]bool, len(list))
	for _, b := range list {
		asked[b.AddrPort.Addr()] = false
	}
	s.drain = map[k8s.Key]bool{}
	for k, p := range s.a.watch.Pods.All() {
		if !p.Draining() {
			continue
		}
		for _, a := range p.IPs {
			if _, yes := asked[a]; yes {
				asked[a], s.drain[k] = true, true
			}
		}
	}
	seen := make(map[state.Backend]bool, len(list))
	for _, b := range list {
		if !asked[b.AddrPort.Addr()] {
			others = append(others, b)
		} else if !seen[b] {
			seen[b] = true
			draining = append(draining, b)
		}
	}
	return others, draining
}

// inNoSlice are those of list that no slice has now. With a pod's address all its ports are
// gone; a node's has pods of the node's network beside, whose ports are not concerned.
func (s *syncer) inNoSlice(list []state.Backend) []state.Backend {
	if len(list) == 0 {
		return nil
	}
	shared := map[netip.Addr]bool{}
	for _, n := range s.a.watch.Nodes.All() {
		for _, a := range slices.Concat(n.Addrs, n.External) {
			shared[a] = true
		}
	}
	whole := func(a netip.Addr) state.Backend { return state.Backend{AddrPort: netip.AddrPortFrom(a, 0)} }
	gone := make(map[state.Backend]bool, len(list))
	for _, b := range list {
		if a := b.AddrPort.Addr(); !shared[a] {
			b = whole(a)
		}
		gone[b] = true
	}
	for _, slice := range s.a.watch.Slices.All() {
		for _, e := range slice.Endpoints {
			delete(gone, whole(e.Addr))
			for _, p := range slice.Ports {
				delete(gone, state.Backend{AddrPort: netip.AddrPortFrom(e.Addr, p.Port), Protocol: p.Protocol})
			}
		}
	}
	return slices.Collect(maps.Keys(gone))
}
