// SPDX-License-Identifier: Apache-2.0

package load

// Several connections at once: a thread each at either end, as that many
// processes would be.

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// widen lets so many threads sit in raw calls, each of which the Go scheduler
// takes for running code.
func widen(flows int) { runtime.GOMAXPROCS(flows + 2) }

// onThreads starts a goroutine for each flow, in the place, on a thread of its own.
func onThreads(o Options, do func(i int) error) <-chan error {
	widen(o.Flows)
	ended := make(chan error, o.Flows)
	for i := range o.Flows {
		go func() {
			err := o.Place.enterThread()
			if err == nil {
				err = holdOffPreemption()
			}
			if err == nil {
				err = do(i)
			}
			ended <- err
		}()
	}
	return ended
}

// many serves so many connections at once, until stdin ends.
func (s server) many() error {
	var ended <-chan error
	if s.o.Mode == CRR {
		ended = onThreads(s.o, func(int) error { return s.crrShared() })
	} else {
		conns := make(chan int)
		ended = onThreads(s.o, func(int) error { return s.serveOn(<-conns) })
		for range s.o.Flows {
			if err := s.rest(s.fd); err != nil {
				return err
			}
			conn, e := rawAccept(s.fd)
			if e != 0 {
				return fmt.Errorf("server: accept: %w", errno(e))
			}
			conns <- conn
		}
	}
	if err := s.untilEnd(); err != nil {
		return err
	}
	select {
	case err := <-ended:
		if errors.Is(err, errEnd) {
			return nil
		}
		return err
	default:
		return nil
	}
}

// untilEnd sleeps until stdin ends.
func (s server) untilEnd() error {
	fds := []unix.PollFd{{Fd: int32(s.stdin), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(fds, -1); err != unix.EINTR {
			return err
		}
	}
}

// crrShared serves connections of a listening socket that others serve too.
func (s server) crrShared() error {
	buf := make([]byte, 1)
	for {
		conn, e := rawAccept(s.fd)
		if errno(e) == errTimeout { // between turns
			if err := s.rest(s.fd); err != nil {
				return err
			}
			continue
		}
		if e != 0 {
			return fmt.Errorf("server: accept: %w", e)
		}
		if n, e := rawRead(conn, buf); n == 1 && e == 0 {
			if _, e := rawWrite(conn, buf); e == 0 {
				_, _ = rawRead(conn, buf) // the client closes first
			}
		}
		rawClose(conn)
	}
}

// part is one connection's share of a turn.
type part struct {
	count int64
	err   error
}

// order asks a connection for a part of a turn.
type order struct {
	long time.Duration
	last byte // of the last message: more in the warm-up, rest at the end of the turn
	to   chan<- part
}

// crowd is the connections of a client.
type crowd struct {
	o       Options
	clients []*client
	orders  []chan order
	parts   chan part
}

// dialMany is dial with several connections.
func dialMany(o Options, in *os.File, out io.Writer, ready func()) error {
	w := &crowd{o: o, clients: make([]*client, o.Flows), orders: make([]chan order, o.Flows), parts: make(chan part, o.Flows)}
	for i := range w.orders {
		w.orders[i] = make(chan order, 1)
	}
	up := make(chan error, o.Flows)
	onThreads(o, func(i int) error {
		c, err := newClient(o)
		w.clients[i] = c
		up <- err
		if err == nil {
			for ask := range w.orders[i] {
				n, err := c.part(ask)
				ask.to <- part{n, err}
			}
		}
		return err
	})
	for range o.Flows {
		if err := <-up; err != nil {
			return err
		}
	}
	ready()
	sum := Result{CC: w.clients[0].r.CC}
	encoder := json.NewEncoder(out)
	for lines := bufio.NewScanner(in); lines.Scan(); {
		t, err := w.turn()
		if err != nil {
			return err
		}
		sum.add(t)
		if err := encoder.Encode(t); err != nil {
			return err
		}
	}
	h := newHistogram()
	for _, c := range w.clients {
		h.Merge(c.h)
		sum.PortWaits += c.r.PortWaits
	}
	if h.TotalCount() > 0 {
		sum.Latency = latencyOf(h)
	}
	return encoder.Encode(sum)
}

// turn lets all connections work at once. The window is from the first one's
// start to the last one's end, and all of its work counts.
func (w *crowd) turn() (t Turn, err error) {
	// A stream's warm-up would end with the emptying of so many buffers.
	if w.o.Warmup > 0 && w.o.Mode != Stream {
		if t.All, err = w.all(w.o.Warmup, more); err != nil {
			return t, err
		}
	}
	win := newWindow(w.o)
	if err := win.open(); err != nil {
		return t, err
	}
	if t.Count, err = w.all(w.o.Duration, rest); err != nil {
		return t, err
	}
	t.All += t.Count
	t.Bytes = t.Count * int64(w.o.messageSize())
	return t, win.close(&t)
}

func (w *crowd) all(long time.Duration, last byte) (n int64, err error) {
	for _, to := range w.orders {
		to <- order{long, last, w.parts}
	}
	for range w.orders {
		p := <-w.parts
		n += p.count
		err = errors.Join(err, p.err)
	}
	return n, err
}

// part loads one connection for a time. A part of a stream ends when the
// receiver has read all of it.
func (c *client) part(ask order) (n int64, err error) {
	began := time.Now()
	do := c.request
	if c.o.Mode == Stream {
		do = func(last byte) error { return c.push(c.buf, last) }
		if ask.last == more {
			ask.last = answer
		}
	}
	for start := time.Duration(0); start < ask.long; n++ {
		if err := do(more); err != nil {
			return n, err
		}
		end := time.Since(began)
		if c.o.Mode != Stream && ask.last == rest {
			_ = c.h.RecordValue(int64(end - start))
		}
		start = end
	}
	if ask.last == more {
		return n, nil
	}
	return n + 1, do(ask.last)
}
