// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// streamBuffer is the size of one write and one read of a stream, in bytes.
const streamBuffer = 128 << 10

// serve listens, calls ready, and serves one client. The result matters for a
// stream only, which is counted here, at the receiver.
func serve(o Options, ready func()) (Result, error) {
	kind := unix.SOCK_STREAM
	if o.Mode == UDPRR {
		kind = unix.SOCK_DGRAM
	}
	fd, err := listen(o, kind)
	if err != nil {
		return Result{}, err
	}
	defer rawClose(fd)
	ready()
	switch o.Mode {
	case UDPRR:
		return serveUDP(fd)
	case CRR:
		return serveCRR(fd)
	}
	conn, e := rawAccept(fd)
	if e != 0 {
		return Result{}, fmt.Errorf("server %s: no client came: %w", o.Addr, errno(e))
	}
	defer rawClose(conn)
	if err := setDeadlines(conn, o.Timeout); err != nil {
		return Result{}, err
	}
	if o.Mode == Stream {
		return receiveStream(conn, o)
	}
	return serveRR(conn)
}

// serveRR answers each byte with a byte until the client closes.
func serveRR(conn int) (Result, error) {
	r := Result{Mode: RR, CC: setCC(conn, "")}
	buf := make([]byte, 1)
	for {
		n, e := rawRead(conn, buf)
		if e != 0 {
			return r, fmt.Errorf("server: read request: %w", errno(e))
		}
		if n == 0 {
			return r, nil
		}
		if _, e := rawWrite(conn, buf); e != 0 {
			return r, fmt.Errorf("server: write response: %w", errno(e))
		}
		r.Count++
	}
}

// serveCRR serves one connection after the other until no client has come for
// the deadline, or until the launcher ends the process. A connection that
// fails is the client's to report: it sees the same failure, with its name.
func serveCRR(fd int) (Result, error) {
	r := Result{Mode: CRR}
	buf := make([]byte, 1)
	for {
		conn, e := rawAccept(fd)
		if e != 0 {
			if errno(e) == errTimeout {
				return r, nil
			}
			return r, fmt.Errorf("server: accept: %w", e)
		}
		if n, e := rawRead(conn, buf); n == 1 && e == 0 {
			if _, e := rawWrite(conn, buf); e == 0 {
				// The client closes first: its end, not ours, keeps TIME_WAIT.
				_, _ = rawRead(conn, buf)
				r.Count++
			}
		}
		rawClose(conn)
	}
}

// receiveStream counts what arrives after the warm-up, up to the end of the
// connection.
func receiveStream(conn int, o Options) (Result, error) {
	r := Result{Mode: Stream, CC: setCC(conn, "")}
	buf := make([]byte, streamBuffer)
	w := newWindow(o)
	for {
		n, e := rawRead(conn, buf)
		if e != 0 {
			return r, fmt.Errorf("server: the stream stalled: %w", errno(e))
		}
		if n == 0 {
			break
		}
		if w.isOpen {
			r.Bytes += int64(n)
			r.Count++
		} else if w.now() >= w.opensAt {
			if err := w.open(); err != nil {
				return r, err
			}
		}
	}
	if !w.isOpen {
		return r, fmt.Errorf("server: the stream ended within its warm-up")
	}
	return r, w.close(&r)
}

// serveUDP echoes datagrams to whoever sent them until none comes for the
// deadline, or until the launcher ends the process. It connects to its first
// client, so that each answer needs no address lookup, as the client's does.
func serveUDP(fd int) (Result, error) {
	r := Result{Mode: UDPRR}
	buf := make([]byte, 1)
	_, from, err := unix.Recvfrom(fd, buf, 0)
	if err != nil {
		return r, fmt.Errorf("server: no datagram came: %w", err)
	}
	if err := unix.Connect(fd, from); err != nil {
		return r, fmt.Errorf("server: connect to the client: %w", err)
	}
	for {
		if _, e := rawWrite(fd, buf); e != 0 && e != unix.ECONNREFUSED {
			return r, fmt.Errorf("server: answer: %w", errno(e))
		}
		r.Count++
		if _, e := rawRead(fd, buf); e != 0 {
			if errno(e) == errTimeout || e == unix.ECONNREFUSED {
				return r, nil
			}
			return r, fmt.Errorf("server: read: %w", e)
		}
	}
}
