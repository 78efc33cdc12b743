// SPDX-License-Identifier: Apache-2.0

package load

import (
	"time"

	"github.com/mustang-net/mustang/bench/cpu"
)

// window is the measured part of a turn: it opens after the warm-up and
// reads the CPU time at both ends.
type window struct {
	o        Options
	origin   time.Time // monotonic zero; time.Since costs one clock read
	opensAt  time.Duration
	closesAt time.Duration
	opened   time.Duration
	isOpen   bool
	before   cpu.Usage
}

func newWindow(o Options) *window {
	return &window{o: o, origin: time.Now(), opensAt: o.Warmup, closesAt: o.Warmup + o.Duration}
}

func (w *window) now() time.Duration { return time.Since(w.origin) }

// open starts the window at the present.
func (w *window) open() error {
	u, err := w.o.CPU.Read()
	if err != nil {
		return err
	}
	w.before, w.isOpen, w.opened = u, true, w.now()
	w.closesAt = w.opened + w.o.Duration
	return nil
}

// close ends it and fills the turn's time and CPU time.
func (w *window) close(t *Turn) error {
	t.Seconds = (w.now() - w.opened).Seconds()
	u, err := w.o.CPU.Read()
	if err != nil {
		return err
	}
	used := u.Sub(w.before)
	t.CPU, t.Softirqd = used.Load.Seconds(), used.Softirqd.Seconds()
	return nil
}

// spin keeps the CPU busy until what took from start to end has taken so long as
// it would on a path that is slower by Options.Slow, and returns the new end.
func (w *window) spin(start, end time.Duration) time.Duration {
	until := start + time.Duration(float64(end-start)/(1-w.o.Slow))
	for end < until {
		end = w.now()
	}
	return end
}
