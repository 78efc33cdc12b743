// SPDX-License-Identifier: Apache-2.0

package load

// The server: it answers within turns, and sleeps between them.

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// streamBuffer is the size of one write and one read of a stream, in bytes.
const streamBuffer = 128 << 10

// streamRoom is the receive buffer of a stream, in bytes as the kernel counts
// them. Left to grow by itself it puts a connection, for its whole life, into one
// of two states: the receiver acknowledges each two or three bundles, or each ten
// of them, and the second is 15 % faster. Which one is chance, on equal paths too.
const streamRoom = 4 << 20

// messageSize is that of one write.
func (o Options) messageSize() int {
	switch {
	case o.Size > 0:
		return o.Size
	case o.Mode == Stream:
		return streamBuffer
	case o.Mode == UDPRR:
		return 2 // a number, and what a request's last byte says
	}
	return 1
}

// errEnd says that the launcher closed the server's standard input.
var errEnd = errors.New("end of input")

// server is one that listens.
type server struct {
	o     Options
	fd    int // the listening socket
	stdin int
}

// serve listens, calls ready, and serves one client (CRR: one after the other)
// until that closes its connection or stdin ends.
func serve(o Options, stdin int, ready func()) error {
	kind := unix.SOCK_STREAM
	if o.Mode == UDPRR {
		kind = unix.SOCK_DGRAM
	}
	fd, err := listen(o, kind)
	if err != nil {
		return err
	}
	defer rawClose(fd)
	ready()
	s := server{o, fd, stdin}
	switch {
	case o.Flows > 1:
		err = s.many()
	case o.Mode == UDPRR:
		err = s.udp()
	case o.Mode == CRR:
		err = s.crr()
	default:
		err = s.connection()
	}
	if errors.Is(err, errEnd) {
		return nil
	}
	return err
}

// rest sleeps until fd has something, without a deadline: the turns of other
// loads come between. It waits in a call that the Go runtime knows of, so that
// the runtime sleeps too.
func (s server) rest(fd int) error {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}, {Fd: int32(s.stdin), Events: unix.POLLIN}}
	for {
		switch _, err := unix.Poll(fds, -1); {
		case err == unix.EINTR:
		case err != nil:
			return fmt.Errorf("server: wait for a turn: %w", err)
		case fds[0].Revents != 0:
			return nil
		case fds[1].Revents != 0:
			return errEnd
		}
	}
}

// connection serves RR or a stream on one connection.
func (s server) connection() error {
	if err := s.rest(s.fd); err != nil {
		return err
	}
	conn, e := rawAccept(s.fd)
	if e != 0 {
		return fmt.Errorf("server: accept: %w", errno(e))
	}
	return s.serveOn(conn)
}

// serveOn serves the client of one connection and closes it.
func (s server) serveOn(conn int) error {
	defer rawClose(conn)
	if err := setDeadlines(conn, s.o.Timeout); err != nil {
		return err
	}
	if err := s.rest(conn); err != nil {
		return err
	}
	if s.o.Mode == Stream {
		return s.receive(conn)
	}
	return s.answer(conn)
}

// answer answers each message with one of its size until the client closes.
func (s server) answer(conn int) error {
	buf := make([]byte, s.o.messageSize())
	for {
		for got := 0; got < len(buf); {
			n, e := rawRead(conn, buf[got:])
			if e != 0 {
				return fmt.Errorf("server: read request: %w", errno(e))
			}
			if n == 0 {
				return nil
			}
			got += n
		}
		if e := writeAll(conn, buf); e != 0 {
			return fmt.Errorf("server: write response: %w", errno(e))
		}
		if buf[len(buf)-1] == rest {
			if err := s.rest(conn); err != nil {
				return err
			}
		}
	}
}

// receive reads a stream until the client closes. Its answers tell the client
// that all it wrote has been read.
func (s server) receive(conn int) error {
	buf := make([]byte, streamBuffer)
	for {
		n, e := rawRead(conn, buf)
		if e != 0 {
			return fmt.Errorf("server: the stream stalled: %w", errno(e))
		}
		if n == 0 {
			return nil
		}
		last := buf[n-1]
		if last == more {
			continue
		}
		if _, e := rawWrite(conn, buf[n-1:n]); e != 0 {
			return fmt.Errorf("server: answer: %w", errno(e))
		}
		if last == rest {
			if err := s.rest(conn); err != nil {
				return err
			}
		}
	}
}

// crr serves one connection after the other until no client has come for the
// deadline within a turn. A connection that fails is the client's to report: it
// sees the same failure, with its name.
func (s server) crr() error {
	if err := s.rest(s.fd); err != nil {
		return err
	}
	buf := make([]byte, 1)
	for {
		conn, e := rawAccept(s.fd)
		if e != 0 {
			if errno(e) == errTimeout {
				return nil
			}
			return fmt.Errorf("server: accept: %w", e)
		}
		last := byte(more)
		if n, e := rawRead(conn, buf); n == 1 && e == 0 {
			last = buf[0]
			if _, e := rawWrite(conn, buf); e == 0 {
				// The client closes first: its end, not ours, keeps TIME_WAIT.
				_, _ = rawRead(conn, buf)
			}
		}
		rawClose(conn)
		if last == rest {
			if err := s.rest(s.fd); err != nil {
				return err
			}
		}
	}
}

// udp echoes datagrams until none comes for the deadline within a turn. It
// connects to its first client, so that each answer needs no address lookup, as
// the client's does.
func (s server) udp() error {
	if err := s.rest(s.fd); err != nil {
		return err
	}
	buf := make([]byte, s.o.messageSize())
	_, from, err := unix.Recvfrom(s.fd, buf, 0)
	if err != nil {
		return fmt.Errorf("server: no datagram came: %w", err)
	}
	if err := unix.Connect(s.fd, from); err != nil {
		return fmt.Errorf("server: connect to the client: %w", err)
	}
	for {
		if _, e := rawWrite(s.fd, buf); e != 0 && e != unix.ECONNREFUSED {
			return fmt.Errorf("server: answer: %w", errno(e))
		}
		if buf[len(buf)-1] == rest {
			if err := s.rest(s.fd); err != nil {
				return err
			}
		}
		if _, e := rawRead(s.fd, buf); e != 0 {
			if errno(e) == errTimeout || e == unix.ECONNREFUSED {
				return nil
			}
			return fmt.Errorf("server: read: %w", e)
		}
	}
}
