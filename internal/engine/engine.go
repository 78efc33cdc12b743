// SPDX-License-Identifier: Apache-2.0

// Package engine is one node: it opens the node's scope (lock, pins, store),
// finishes what a killed tool left half done, and applies changes. It acts in
// the network namespace of the calling thread, which is the node's.
package engine

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
	"github.com/mustang-net/mustang/internal/store"
)

// ErrBusy says that another process works on the scope.
var ErrBusy = errors.New("another mustang works on it")

// ErrNotFound is about an object that does not exist.
var ErrNotFound = errors.New("not found")

// Options are how to open a scope. The zero value is right for a tool that
// writes.
type Options struct {
	// ReadOnly does not create what is absent. (A half-done operation is
	// finished all the same: readers, too, see the old state or the new.)
	ReadOnly bool
	// NoWait fails with ErrBusy when another has the scope.
	NoWait bool
	Sizes  datapath.Sizes // of tables that are created
	Notify func(string)   // gets progress and warnings, a sentence each
	NoTCX  bool           // attach by clsact, as on kernels without tcx
	// Fed says that the caller tells by FeedPolicies of pods, namespaces and
	// policies that the store does not know: an agent that watches Kubernetes.
	// Until it does, nothing in force about policy changes.
	Fed bool
	// Node is this node's name and zone, which hints of backends speak of.
	Node service.Node

	// Faults stands between the engine and the tables of Services, in tests.
	Faults func(reconcile.ServiceTables) reconcile.ServiceTables
}

// Engine is an open scope. It holds the scope's lock, so close it soon. It is
// not for concurrent use.
type Engine struct {
	scope       Scope
	opts        Options
	store       store.Store
	lock        *hold
	dp          *datapath.Datapath // nil: read-only, and there is nothing
	services    *reconcile.Services
	catalog     *service.Catalog
	undo        *operation // a change of Services that failed is to be undone by it
	known       map[uint32]state.Endpoint
	policies    *policy.Model // nil: not asked for yet
	fed         bool          // by FeedPolicies, once at least
	lender      func(string)  // its owner's Notify, while somebody else has it
	turning     bool          // answers are turned back wherever clients outside come in (turn.go)
	lingers     bool          // the kernel's masquerade, until the last flow that needs it has ended
	lingered    time.Time     // when that was looked for last
	gatherTried bool          // to make what puts datagrams together
	moved       time.Time     // when an endpoint last came or went, as far as this engine has seen
	settled     bool          // what another process began has been ended (endSettling)
	made        bool          // the scope was made by this opening

	// ResetRemoved says that what the next changes remove from Services is
	// gone: its established TCP is reset. Otherwise it goes on, as it must for
	// a backend that is terminating.
	ResetRemoved bool
}

// Open opens the scope, waiting for other tools up to ctx's deadline or a
// minute, whichever comes first.
func Open(ctx context.Context, scope Scope, opts Options) (*Engine, error) {
	if opts.Notify == nil {
		opts.Notify = func(string) {}
	}
	scope = scope.withDefaults()
	empty := &Engine{scope: scope, opts: opts, store: store.At(scope.StateDir)}
	if opts.ReadOnly && !datapath.Exists(scope.BPFFS) {
		if err := errors.Join(unreadable(scope.BPFFS), scope.Check()); err != nil {
			return nil, privilege(err)
		}
		return empty, nil
	}
	if err := scope.checkBPFFS(); err != nil {
		return nil, privilege(err)
	}
	// Before Linux 5.11, tables count as locked memory. Where the limit may not be
	// lifted, and counts, making a table says so.
	_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	for {
		e, again, err := open(ctx, scope, opts)
		if err != nil {
			return nil, privilege(err)
		}
		if !again {
			return e, nil
		}
		if opts.ReadOnly {
			return empty, nil
		}
	}
}

// unreadable tells a scope that may not be looked at from one that is empty.
func unreadable(dir string) error {
	if _, err := os.ReadDir(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// open is one attempt; again: a half-done reset was finished, and there is
// nothing left to have opened.
func open(ctx context.Context, scope Scope, opts Options) (e *Engine, again bool, err error) {
	h, err := scope.acquire(ctx, opts)
	if err != nil {
		return nil, false, err
	}
	e = &Engine{scope: scope, opts: opts, store: store.At(scope.StateDir), lock: h}
	op, pending, err := e.pending()
	if err == nil && pending && op.Kind == opReset {
		return nil, true, errors.Join(e.reset(), e.Close())
	}
	e.made = err == nil && !opts.ReadOnly && !datapath.Exists(scope.BPFFS)
	if err == nil && e.made {
		err = e.lostServices()
		if err == nil && !pending {
			op, pending, err = e.lostNodes()
		}
	}
	if err == nil {
		e.dp, err = datapath.Open(scope.BPFFS, opts.Sizes)
	}
	if err == nil {
		e.dp.NoTCX = opts.NoTCX
		if pending {
			err = e.recover(op)
		}
		if err == nil && e.made {
			err = e.loadEndpoints() // which restores those that went with the last tables
		}
	}
	if err != nil {
		return nil, false, errors.Join(err, e.Abandon())
	}
	return e, false, nil
}

// Abandon is Close of one whose change was refused, or was none: a scope that was made for
// it goes, too.
func (e *Engine) Abandon() error {
	if !e.made || e.lender != nil || !e.untouched() {
		return e.Close()
	}
	return errors.Join(datapath.Remove(e.scope.BPFFS), e.store.Remove(), e.Close())
}

// untouched says that the scope has tables, and nothing else.
func (e *Engine) untouched() bool {
	if e.dp != nil {
		if services, err := e.Services(); err != nil || len(services) > 0 {
			return false
		}
	}
	return datapath.Idle(e.scope.BPFFS) && e.store.Empty()
}

// Close releases the scope. What was applied stays.
func (e *Engine) Close() error {
	if e.giveBack() {
		return nil
	}
	var errs []error
	if e.dp != nil {
		errs = append(errs, e.dp.Close())
		e.dp = nil
	}
	if e.lock != nil {
		errs = append(errs, e.lock.Close())
		e.lock = nil
	}
	return errors.Join(errs...)
}

// Reset removes every trace of the scope: links, filters, pins, store, and the
// directories. The engine is closed by it.
func (e *Engine) Reset() error {
	if e.lock == nil {
		return Reset(context.Background(), e.scope, e.opts.Notify) // there was nothing to open
	}
	if err := e.store.WriteJournal(operation{Kind: opReset}); err != nil {
		return err
	}
	return errors.Join(e.reset(), e.Close())
}

// reset can be done again at any point of itself; the journal goes last.
func (e *Engine) reset() error {
	var errs []error
	records, err := e.store.Endpoints()
	if err != nil {
		// Damaged records only cost the filters of their endpoints.
		e.opts.Notify(err.Error())
	}
	for _, ep := range records {
		errs = append(errs, e.detachFilters(ep))
	}
	errs = append(errs, detachNodeFilters(), peers.RemoveRoutes(), peers.RemoveOverlay(), peers.RemoveDoor(), e.removeGather(),
		e.masqueradeTable().Delete(), datapath.Remove(e.scope.BPFFS), e.store.Remove())
	return errors.Join(errs...)
}

// detachNodeFilters takes our filters off the node's links: other than pinned links, they
// do not go with the scope's directory, and what says where they are may be lost.
func detachNodeFilters() error {
	links, err := netns.Links()
	for _, l := range links {
		err = errors.Join(err, datapath.DetachAllFilters(l))
	}
	return err
}

// Reset opens and resets a scope, even one whose tables this mustang cannot
// read, or whose pins are gone. A scope that does not exist is success.
func Reset(ctx context.Context, scope Scope, notify func(string)) error {
	return privilege(scope.withDefaults().reset(ctx, notify))
}

func (s Scope) reset(ctx context.Context, notify func(string)) error {
	c := claim{Scope: s}
	_, noPins := os.Stat(s.BPFFS)
	c.bare = errors.Is(noPins, os.ErrNotExist)
	if _, err := os.Stat(s.StateDir); c.bare && errors.Is(err, os.ErrNotExist) {
		return nil // what there may be on the node is another scope's
	}
	if !c.bare {
		if err := s.checkBPFFS(); err != nil {
			return err
		}
	}
	h, err := c.lock(ctx, notify)
	if err != nil {
		return err
	}
	e := &Engine{scope: s, opts: Options{Notify: notify}, store: store.At(s.StateDir), lock: h}
	if c.bare && e.store.Empty() {
		return errors.Join(e.store.Remove(), e.Close())
	}
	return e.Reset()
}
