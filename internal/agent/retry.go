// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"sync/atomic"
	"time"
)

// Something that failed is tried again after retryFirst, then twice as long up
// to retryMost.
const (
	retryFirst = 100 * time.Millisecond
	retryMost  = 30 * time.Second
)

// retrying is about something that may fail. But for failed, it is its goroutine's.
type retrying struct {
	failed atomic.Pointer[time.Time] // since when; nil: not at all
	pause  time.Duration             // before the next try
	due    time.Time                 // when that is; zero: nothing is to be tried
}

// wait notes a failure and sets the time of the next try.
func (r *retrying) wait(since time.Time) {
	r.note(since)
	r.plan()
}

// note notes a failure.
func (r *retrying) note(since time.Time) { r.failed.CompareAndSwap(nil, &since) }

// plan sets the time of the next try.
func (r *retrying) plan() {
	r.pause = min(max(2*r.pause, retryFirst), retryMost)
	r.due = time.Now().Add(r.pause)
}

// succeeded notes that nothing fails.
func (r *retrying) succeeded() {
	r.failed.Store(nil)
	r.pause, r.due = 0, time.Time{}
}

// isDue says whether what failed is to be tried again.
func (r *retrying) isDue() bool { return !time.Now().Before(r.due) }

// fails says that the last try failed.
func (r *retrying) fails() bool { return !r.due.IsZero() }

// rests says that the last try failed, and the time of the next has not come.
func (r *retrying) rests() bool { return r.fails() && !r.isDue() }

// again says that a try is to be made because the last one failed.
func (r *retrying) again() bool { return r.fails() && r.isDue() }

// earliest is the earlier of two times of the next try; zero is none.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
