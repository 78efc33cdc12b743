// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"
)

// newHistogram covers 1 ns to 60 s with three digits: at most 0.1 % off.
// Recording allocates nothing.
func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, int64(time.Minute), 3)
}

func dial(o Options) (Result, error) {
	switch o.Mode {
	case Stream:
		return sendStream(o)
	case CRR:
		return dialCRR(o)
	}
	return dialRR(o)
}

// transact runs do until the window closes and records how long each took.
func transact(o Options, r *Result, do func() error) error {
	h := newHistogram()
	w := newWindow(o)
	for start := w.now(); ; {
		if err := do(); err != nil {
			return err
		}
		end := w.now()
		switch {
		case w.isOpen:
			_ = h.RecordValue(int64(end - start))
			r.Count++
			if end >= w.closesAt {
				err := w.close(r)
				r.Latency = latencyOf(h) // walks the histogram: not within the window
				return err
			}
		case end >= w.opensAt:
			if err := w.open(); err != nil {
				return err
			}
			end = w.now()
		}
		start = end
	}
}

// dialRR sends one byte and waits for one, over TCP or connected UDP.
func dialRR(o Options) (Result, error) {
	r := Result{Mode: o.Mode}
	var fd int
	var err error
	if o.Mode == UDPRR {
		fd, err = connectUDP(o)
	} else {
		fd, r.CC, err = connectTCP(o)
	}
	if err != nil {
		return r, err
	}
	defer rawClose(fd)
	buf := []byte{1}
	exchange := func() error {
		if _, e := rawWrite(fd, buf); e != 0 {
			return fmt.Errorf("send request to %s: %w", o.Addr, errno(e))
		}
		n, e := rawRead(fd, buf)
		if e != 0 {
			return fmt.Errorf("wait for response of %s: %w", o.Addr, errno(e))
		}
		if n == 0 {
			return fmt.Errorf("%s closed the connection", o.Addr)
		}
		return nil
	}
	do := exchange
	if o.Mode == UDPRR {
		do = func() error { return resend(exchange, o, &r) }
	}
	err = transact(o, &r, do)
	r.Bytes = r.Count
	return r, err
}

// udpRetry is after how long a lost datagram is sent again. A UDP socket's
// receive deadline is this; Options.Timeout bounds the tries.
const udpRetry = 200 * time.Millisecond

func resend(exchange func() error, o Options, r *Result) error {
	for tries := int(o.Timeout/udpRetry) + 1; ; tries-- {
		err := exchange()
		if err == nil || tries <= 1 {
			return err
		}
		r.Lost++
	}
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
func dialCRR(o Options) (Result, error) {
	r := Result{Mode: CRR, CC: ProbeCC("")}
	// A namespace may take only an allowed algorithm as its default; a socket
	// of a privileged process may take any. Then each connection asks.
	cc := ""
	if o.CC != "" && o.CC != r.CC && ProbeCC(o.CC) == o.CC {
		cc, r.CC = o.CC, o.CC
	}
	to := newSockaddr(o.Addr)
	tv := unix.NsecToTimeval(int64(o.Timeout))
	buf := []byte{1}
	err := transact(o, &r, func() error { return connectOnce(o, cc, to, &tv, buf, &r) })
	r.Bytes = r.Count
	return r, err
}

func connectOnce(o Options, cc string, to *sockaddr, tv *unix.Timeval, buf []byte, r *Result) error {
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
		if e != unix.EADDRNOTAVAIL || waited > o.Timeout {
			return fmt.Errorf("connect to %s: %w", o.Addr, errno(e))
		}
		r.PortWaits++
		nap := unix.NsecToTimespec(int64(time.Millisecond))
		_ = unix.Nanosleep(&nap, nil)
	}
	if _, e := rawWrite(fd, buf); e != 0 {
		return fmt.Errorf("send request to %s: %w", o.Addr, errno(e))
	}
	n, e := rawRead(fd, buf)
	if e != 0 {
		return fmt.Errorf("wait for response of %s: %w", o.Addr, errno(e))
	}
	if n == 0 {
		return fmt.Errorf("%s closed the connection without an answer", o.Addr)
	}
	return nil
}

// sendStream writes until warm-up and window are over. The receiver measures.
func sendStream(o Options) (Result, error) {
	r := Result{Mode: Stream}
	fd, cc, err := connectTCP(o)
	if err != nil {
		return r, err
	}
	defer rawClose(fd)
	r.CC = cc
	buf := make([]byte, streamBuffer)
	w := newWindow(o)
	for w.now() < w.closesAt {
		n, e := rawWrite(fd, buf)
		if e != 0 {
			return r, fmt.Errorf("the stream to %s stalled: %w", o.Addr, errno(e))
		}
		r.Bytes += int64(n)
		r.Count++
	}
	r.Seconds = w.now().Seconds()
	return r, nil
}
