// SPDX-License-Identifier: Apache-2.0

package load

// The client: one connection, or one after the other, for one turn at a time.

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"
)

// What the last byte of a request tells the server. All other bytes are more.
const (
	more   = 0
	answer = 1 // a stream's: answer once this byte is read
	rest   = 2 // answer, and sleep until something comes: the turn is over
)

// newHistogram covers 1 ns to 60 s with three digits: at most 0.1 % off.
// Recording allocates nothing.
func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, int64(time.Minute), 3)
}

// client is a load between its turns.
type client struct {
	o       Options
	r       Result
	h       *hdrhistogram.Histogram
	fd      int                   // the connection; -1 when each transaction has its own
	buf     []byte                // of one message
	request func(last byte) error // one transaction
	turn    func() (Turn, error)
	number  byte // of the last datagram
}

func newClient(o Options) (*client, error) {
	c := &client{o: o, fd: -1, buf: make([]byte, o.messageSize()), h: newHistogram()}
	c.turn = c.transact
	var err error
	switch o.Mode {
	case CRR:
		c.dialCRR()
	case UDPRR:
		c.fd, err = connectUDP(o)
		c.request = c.resend
	default:
		c.fd, c.r.CC, err = connectTCP(o)
		c.request = c.exchange
		if err == nil && o.Mode == Stream {
			rawSetNoDelay(c.fd, false) // writes are gathered into full bundles, as iperf3's and any bulk sender's are
		}
		switch o.Mode {
		case Stream:
			c.turn = c.streamer()
		case Tail:
			c.turn = c.paced
		}
	}
	return c, err
}

// dial takes a turn for each line of in.
func dial(o Options, in *os.File, out io.Writer, ready func()) error {
	c, err := newClient(o)
	if err != nil {
		return err
	}
	defer func() {
		if c.fd >= 0 {
			rawClose(c.fd)
		}
	}()
	encoder := json.NewEncoder(out)
	ready()
	// Waiting here lets the Go runtime sleep as well: in a raw call it would
	// look every 10 ms whether the call has ended.
	for lines := bufio.NewScanner(in); lines.Scan(); {
		t, err := c.turn()
		if err != nil {
			return err
		}
		c.r.add(t)
		if err := encoder.Encode(t); err != nil {
			return err
		}
	}
	if c.h.TotalCount() > 0 {
		c.r.Latency = latencyOf(c.h)
	}
	return encoder.Encode(c.r)
}

// transact makes requests until the window closes, and records how long each
// took.
func (c *client) transact() (t Turn, err error) {
	w := newWindow(c.o)
	for start := w.now(); ; {
		if err := c.request(more); err != nil {
			return t, err
		}
		end := w.now()
		if c.o.Slow > 0 {
			end = w.spin(start, end)
		}
		t.All++
		switch {
		case w.isOpen:
			_ = c.h.RecordValue(int64(end - start))
			t.Count++
			if end >= w.closesAt {
				if err := w.close(&t); err != nil {
					return t, err
				}
				t.Bytes = t.Count
				t.All++
				return t, c.request(rest)
			}
		case end >= w.opensAt:
			if err := w.open(); err != nil {
				return t, err
			}
			end = w.now()
		}
		start = end
	}
}

// paced makes requests when they are due. One that is late because an earlier one
// took long counts from when it was due: what a user waits, who does not know of
// the others.
func (c *client) paced() (t Turn, err error) {
	w := newWindow(c.o)
	for w.now() < w.opensAt {
		if err := c.request(more); err != nil {
			return t, err
		}
		t.All++
	}
	if err := w.open(); err != nil {
		return t, err
	}
	interval := time.Second / time.Duration(c.o.Rate)
	for due := w.opened + interval; due <= w.closesAt; due += interval {
		for w.now() < due { // sleeping would add the timer's and the scheduler's delay
		}
		if err := c.request(more); err != nil {
			return t, err
		}
		_ = c.h.RecordValue(int64(w.now() - due))
		t.Count++
	}
	if err := w.close(&t); err != nil {
		return t, err
	}
	t.Bytes = t.Count
	t.All += t.Count + 1
	return t, c.request(rest)
}

// exchange sends a message and waits for one of its size.
func (c *client) exchange(last byte) error {
	c.buf[len(c.buf)-1] = last
	if e := writeAll(c.fd, c.buf); e != 0 {
		return fmt.Errorf("send request to %s: %w", c.o.Addr, errno(e))
	}
	return c.await(c.fd, c.buf)
}

// await waits for as much as buf holds.
func (c *client) await(fd int, buf []byte) error {
	for len(buf) > 0 {
		n, e := rawRead(fd, buf)
		if e != 0 {
			return fmt.Errorf("wait for response of %s: %w", c.o.Addr, errno(e))
		}
		if n == 0 {
			return fmt.Errorf("%s closed the connection without an answer", c.o.Addr)
		}
		buf = buf[n:]
	}
	return nil
}

// udpRetry is after how long a lost datagram is sent again. A UDP socket's
// receive deadline is this; Options.Timeout bounds the tries.
const udpRetry = 200 * time.Millisecond

func (c *client) resend(last byte) error {
	for tries := int(c.o.Timeout/udpRetry) + 1; ; tries-- {
		err := c.datagram(last)
		if err == nil || tries <= 1 {
			return err
		}
		c.r.Lost++
	}
}

// datagram sends a message with a number of its own and waits for its answer. One to a
// message that was given up, and was but late, is passed over: taken for this one's, it
// would leave two under way from then on.
func (c *client) datagram(last byte) error {
	c.number++
	c.buf[0] = c.number
	if err := c.exchange(last); err != nil {
		return err
	}
	for c.buf[0] != c.number {
		if err := c.await(c.fd, c.buf); err != nil {
			return err
		}
	}
	return nil
}

func connectUDP(o Options) (int, error) {
	to := newSockaddr(o.Addr)
	fd, e := rawSocket(to.family, unix.SOCK_DGRAM)
	if e != 0 {
		return -1, fmt.Errorf("socket: %w", e)
	}
	if err := setDeadlines(fd, min(udpRetry, o.Timeout)); err != nil {
		rawClose(fd)
		return -1, err
	}
	if err := errno(rawConnect(fd, to)); err != nil {
		rawClose(fd)
		return -1, fmt.Errorf("connect UDP to %s: %w", o.Addr, err)
	}
	return fd, nil
}

// dialCRR opens a connection for each request and closes it first. See
// Place.tune for what keeps it in source ports.
func (c *client) dialCRR() {
	c.r.CC = ProbeCC("")
	// A namespace may take only an allowed algorithm as its default; a socket
	// of a privileged process may take any. Then each connection asks.
	cc := ""
	if c.o.CC != "" && c.o.CC != c.r.CC && ProbeCC(c.o.CC) == c.o.CC {
		cc, c.r.CC = c.o.CC, c.o.CC
	}
	to := newSockaddr(c.o.Addr)
	tv := unix.NsecToTimeval(int64(c.o.Timeout))
	c.request = func(last byte) error { return c.connectOnce(last, cc, to, &tv) }
}

func (c *client) connectOnce(last byte, cc string, to *sockaddr, tv *unix.Timeval) error {
	fd, e := rawSocket(to.family, unix.SOCK_STREAM)
	if e != 0 {
		return fmt.Errorf("socket: %w", e)
	}
	defer rawClose(fd)
	// The send deadline bounds connect; a response is awaited under the
	// receive deadline. Two calls a connection, the same for every contestant.
	if cc != "" {
		rawSetCC(fd, cc)
	}
	rawSetTimeval(fd, unix.SO_SNDTIMEO, tv)
	rawSetTimeval(fd, unix.SO_RCVTIMEO, tv)
	for waited := time.Duration(0); ; waited += time.Millisecond {
		e := rawConnect(fd, to)
		if e == 0 {
			break
		}
		if e != unix.EADDRNOTAVAIL || waited > c.o.Timeout {
			return fmt.Errorf("connect to %s: %w", c.o.Addr, errno(e))
		}
		c.r.PortWaits++
		nap := unix.NsecToTimespec(int64(time.Millisecond))
		_ = unix.Nanosleep(&nap, nil)
	}
	c.buf[len(c.buf)-1] = last
	if _, e := rawWrite(fd, c.buf); e != 0 {
		return fmt.Errorf("send request to %s: %w", c.o.Addr, errno(e))
	}
	return c.await(fd, c.buf)
}

// streamer returns a stream's turn. The pipe is empty at both ends of the
// window, so what was written in it is what the receiver has read in it.
func (c *client) streamer() func() (Turn, error) {
	buf := c.buf
	return func() (t Turn, err error) {
		w := newWindow(c.o)
		if w.opensAt > 0 {
			for w.now() < w.opensAt {
				if err := c.push(buf, more); err != nil {
					return t, err
				}
			}
			if err := c.push(buf, answer); err != nil {
				return t, err
			}
		}
		if err := w.open(); err != nil {
			return t, err
		}
		for isLast := false; !isLast; {
			last, start := byte(more), w.now()
			if isLast = start >= w.closesAt; isLast {
				last = rest
			}
			if err := c.push(buf, last); err != nil {
				return t, err
			}
			if c.o.Slow > 0 {
				w.spin(start, w.now())
			}
			t.Count++
		}
		t.Bytes = t.Count * int64(len(buf))
		t.All = t.Count
		return t, w.close(&t)
	}
}

// push writes buf, and waits for the answer when its last byte asks for one.
func (c *client) push(buf []byte, last byte) error {
	buf[len(buf)-1] = last
	if last != more {
		rawSetNoDelay(c.fd, true) // what Nagle holds back would wait for a delayed acknowledgement
	}
	if e := writeAll(c.fd, buf); e != 0 {
		return fmt.Errorf("the stream to %s stalled: %w", c.o.Addr, errno(e))
	}
	if last == more {
		return nil
	}
	err := c.await(c.fd, make([]byte, 1))
	rawSetNoDelay(c.fd, false)
	return err
}
