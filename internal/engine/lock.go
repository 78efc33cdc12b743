// SPDX-License-Identifier: Apache-2.0

package engine

// Who has a scope. Its two directories belong together: with another's state directory,
// a tool would take over that one's pods.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/store"
)

const (
	lockDeadline = 60 * time.Second
	lockNotice   = 2 * time.Second
)

// hold is what a process has locked of a scope, nil where it does not exist.
type hold struct{ state, pins *os.File }

// Close lets go of the scope.
func (h *hold) Close() error {
	var errs []error
	for _, f := range []*os.File{h.pins, h.state} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// claim is how a scope is locked.
type claim struct {
	Scope
	existing bool // no state directory is made where there is none
	bare     bool // the directory of pins is gone, and none is made
}

// Check refuses a scope whose state directory is that of another bpffs where tables are still.
func (s Scope) Check() error {
	s = s.withDefaults()
	other, err := store.At(s.StateDir).BPFFS()
	if err != nil || other == "" || !datapath.Exists(other) || sameDir(other, s.BPFFS) {
		return err
	}
	return fmt.Errorf("%s is the state directory of %s, whose tables are at work; give --bpffs %s, or another --state-dir, or end that one by `mustang reset --bpffs %s --state-dir %s`",
		s.StateDir, other, other, other, s.StateDir)
}

func sameDir(a, b string) bool {
	one, errOne := os.Stat(a)
	two, errTwo := os.Stat(b)
	return errOne == nil && errTwo == nil && os.SameFile(one, two)
}

// acquire is lock, or one attempt where that is asked for.
func (s Scope) acquire(ctx context.Context, opts Options) (*hold, error) {
	c := claim{Scope: s, existing: opts.ReadOnly}
	if !opts.NoWait {
		return c.lock(ctx, opts.Notify)
	}
	h, err := c.tryLock(unix.LOCK_NB)
	if h == nil && err == nil {
		err = fmt.Errorf("%s: %w", s.BPFFS, ErrBusy)
	}
	return h, err
}

// lock takes the scope for this process: two tools that write at once would
// undo each other. The kernel drops the lock when the process ends, however.
// Waiting tools stand in line in the kernel, so that none starves, and none
// sleeps past its turn.
func (c claim) lock(ctx context.Context, notify func(string)) (*hold, error) {
	ctx, cancel := context.WithTimeout(ctx, lockDeadline)
	defer cancel()
	for {
		if h, err := c.tryLock(unix.LOCK_NB); h != nil || err != nil {
			return h, err
		}
		h, err := c.waitLock(ctx, notify)
		if h != nil || err != nil {
			return h, err
		}
	}
}

// waitLock blocks in the kernel, on a thread of its own. When ctx ends first,
// that thread lets go of the lock as soon as it gets it.
func (c claim) waitLock(ctx context.Context, notify func(string)) (*hold, error) {
	type answer struct {
		h   *hold
		err error
	}
	got := make(chan answer)
	go func() {
		h, err := c.tryLock(0)
		select {
		case got <- answer{h, err}:
		case <-ctx.Done():
			if h != nil {
				h.Close()
			}
		}
	}()
	notice := time.NewTimer(lockNotice)
	defer notice.Stop()
	for {
		select {
		case a := <-got:
			return a.h, a.err
		case <-ctx.Done():
			return nil, fmt.Errorf("another mustang works on %s, or with %s, and does not finish: %w; wait for it, or stop it", c.BPFFS, c.StateDir, ctx.Err())
		case <-notice.C:
			notify(fmt.Sprintf("waiting for another mustang that works on %s", c.BPFFS))
		}
	}
}

// tryLock is one attempt, which waits unless how is LOCK_NB; nil without an
// error: it has to be done again. Everybody takes the state directory first.
func (c claim) tryLock(how int) (*hold, error) {
	state, again, err := c.lockState(how)
	if err != nil || again {
		return nil, err
	}
	h := &hold{state: state}
	if c.bare {
		return h, nil
	}
	h.pins, err = c.lockPins(how)
	if err == nil && h.pins != nil && state != nil && !c.existing {
		err = store.SetBPFFS(state, absolute(c.BPFFS))
	}
	if err != nil || h.pins == nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

// lockState is nil where there is no state directory, and none is made.
func (c claim) lockState(how int) (f *os.File, again bool, err error) {
	if err := c.Check(); err != nil {
		return nil, false, err // nobody waits for what is refused
	}
	f, err = store.At(c.StateDir).OpenScope(c.existing)
	if f == nil || err != nil {
		return nil, false, err
	}
	locked, err := flock(f, how)
	if err == nil && locked {
		err = c.Check() // now nobody makes it another's
	}
	if err != nil || !locked {
		f.Close()
		return nil, err == nil, err
	}
	return f, false, nil
}

// lockPins is nil when it has to be done again.
func (c claim) lockPins(how int) (*os.File, error) {
	f, err := os.Open(c.BPFFS)
	if errors.Is(err, os.ErrNotExist) {
		// A reset by another tool may have removed it a moment ago.
		if err := os.MkdirAll(c.BPFFS, 0o700); err != nil {
			return nil, fmt.Errorf("make the directory for pins: %w", err)
		}
		f, err = os.Open(c.BPFFS)
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open the directory for pins: %w", err)
	}
	err = checkOwner(f)
	locked := false
	if err == nil {
		locked, err = flock(f, how)
	}
	if err != nil || !locked {
		f.Close()
		return nil, err
	}
	return f, nil
}

// flock says whether f is locked, and is still what its path leads to.
func flock(f *os.File, how int) (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|how)
	if err == nil {
		return sameFile(f, f.Name()), nil
	}
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return false, nil
	}
	return false, fmt.Errorf("lock %s: %w", f.Name(), err)
}

// absolute is the path as it is for those who work elsewhere.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}
