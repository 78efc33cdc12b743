// SPDX-License-Identifier: Apache-2.0

package nodes_test

// Servers in pods and what clients ask them.

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// serve answers in pod p: a TCP connection is told the pod's name and the
// client's address as it sees them, then hears what it says; a short datagram
// likewise, a long one comes back.
func (w *world) serve(p *lab.Pod) {
	w.t.Helper()
	var ln net.Listener
	var pcs []net.PacketConn
	w.must(p.Do(func() (err error) {
		if ln, err = net.Listen("tcp", fmt.Sprintf(":%d", serverPort)); err != nil {
			return err
		}
		for _, ip := range []netip.Addr{p.IPv4, p.IPv6} {
			pc, err := net.ListenPacket("udp", netip.AddrPortFrom(ip, serverPort).String())
			if err != nil {
				return err
			}
			pcs = append(pcs, pc)
		}
		return nil
	}))
	w.t.Cleanup(func() {
		ln.Close()
		for _, pc := range pcs {
			pc.Close()
		}
	})
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprintf(c, "%s %s\n", p.Name, plain(c.RemoteAddr()).Addr())
				io.Copy(c, c)
			}()
		}
	}()
	for _, pc := range pcs {
		go func() {
			buf := make([]byte, 65536)
			for {
				n, from, err := pc.ReadFrom(buf)
				if err != nil {
					return
				}
				if n > 100 {
					pc.WriteTo(buf[:n], from)
					continue
				}
				pc.WriteTo(fmt.Appendf(nil, "%s %s", p.Name, plain(from).Addr()), from)
			}
		}()
	}
}

// plain is an address without the ::ffff: of a dual-stack socket.
func plain(a net.Addr) netip.AddrPort {
	ap := netip.MustParseAddrPort(a.String())
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

func (w *world) dial(network string, to netip.AddrPort) (net.Conn, error) {
	return w.dialWith(net.Dialer{Timeout: patience}, network, to)
}

func (w *world) dialWith(d net.Dialer, network string, to netip.AddrPort) (c net.Conn, err error) {
	err = w.from.space.Do(func() (err error) {
		c, err = d.Dial(network, to.String())
		return err
	})
	if err == nil {
		c.SetDeadline(time.Now().Add(2 * patience))
	}
	return c, err
}

// greeting reads what the server says first.
func greeting(c net.Conn) (name, client string, err error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err = c.Read(b); err != nil || b[0] == '\n' {
			break
		}
		line = append(line, b[0])
	}
	fmt.Sscan(string(line), &name, &client)
	return name, client, err
}

// tcp connects, and checks who answers and whom it sees.
func (w *world) tcp(to *lab.Pod, at netip.AddrPort) {
	w.t.Helper()
	c, err := w.dial("tcp", at)
	w.must(err)
	defer c.Close()
	name, client, err := greeting(c)
	if err != nil || name != to.Name || client != w.seen(to, at).String() {
		w.t.Errorf("%q answered, who sees %q, %v; want %s and %s", name, client, err, to.Name, w.seen(to, at))
	}
}

// onePort connects by a Service and by the pod's own address from one source port, at once and in turn.
func (w *world) onePort(to *lab.Pod, at netip.AddrPort) {
	w.t.Helper()
	d := net.Dialer{
		Timeout:   patience,
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(w.me(), 20001)),
		Control: func(_, _ string, c syscall.RawConn) (err error) {
			c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
			return err
		},
	}
	for turn := range 6 {
		by := [2]netip.AddrPort{at, w.direct(to)}
		if turn%2 == 1 {
			by[0], by[1] = by[1], by[0]
		}
		var conns [2]net.Conn
		for i := range conns {
			c, err := w.dialWith(d, "tcp", by[i])
			if err != nil {
				w.t.Fatalf("turn %d, to %s: %v", turn, by[i], err)
			}
			defer c.Close()
			w.must(c.(*net.TCPConn).SetLinger(0)) // nobody keeps the port
			conns[i] = c
		}
		for i, c := range conns {
			name, _, err := greeting(c)
			if err != nil || name != to.Name {
				w.t.Errorf("turn %d, to %s: %q answered, %v, want %s", turn, by[i], name, err, to.Name)
			}
			said, heard := noise(100), make([]byte, 100)
			if _, err = c.Write(said); err == nil {
				_, err = io.ReadFull(c, heard)
			}
			if !bytes.Equal(said, heard) {
				w.t.Errorf("turn %d, to %s: what came back is not what was said, %v", turn, by[i], err)
			}
		}
		for _, c := range conns {
			w.must(c.Close())
		}
	}
}

func noise(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

// bulk sends 8 MiB there and back at once.
func (w *world) bulk(_ *lab.Pod, at netip.AddrPort) {
	w.t.Helper()
	c, err := w.dial("tcp", at)
	w.must(err)
	defer c.Close()
	_, _, err = greeting(c)
	w.must(err)
	data := noise(8 << 20)
	go func() {
		c.Write(data)
		c.(*net.TCPConn).CloseWrite()
	}()
	h := sha256.New()
	n, err := io.Copy(h, c)
	w.must(err)
	if want := sha256.Sum256(data); int(n) != len(data) || !bytes.Equal(h.Sum(nil), want[:]) {
		w.t.Errorf("%d bytes came back, not the %d that were sent", n, len(data))
	}
}

func (w *world) listenUDP() net.PacketConn {
	w.t.Helper()
	var u net.PacketConn
	w.must(w.from.space.Do(func() (err error) {
		u, err = net.ListenPacket("udp", netip.AddrPortFrom(w.me(), 0).String())
		return err
	}))
	w.t.Cleanup(func() { u.Close() })
	return u
}

// exchange sends a datagram and returns the answer.
func (w *world) exchange(u net.PacketConn, at netip.AddrPort, data []byte) []byte {
	w.t.Helper()
	_, err := u.WriteTo(data, net.UDPAddrFromAddrPort(at))
	w.must(err)
	u.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, 65536)
	n, from, err := u.ReadFrom(buf)
	if err != nil {
		w.t.Fatalf("%d bytes: %v", len(data), err)
	}
	if plain(from) != at {
		w.t.Errorf("%d bytes to %s: answered from %s", len(data), at, from)
	}
	return buf[:n]
}

func (w *world) udp(to *lab.Pod, at netip.AddrPort) {
	w.t.Helper()
	u := w.listenUDP()
	for range 3 {
		want := fmt.Sprintf("%s %s", to.Name, w.seen(to, at))
		if got := w.exchange(u, at, []byte("who")); string(got) != want {
			w.t.Errorf("%q answered, want %q", got, want)
		}
	}
}

// datagrams are as long as the wire takes at once, longer, and 64 kB. Clients outside
// learn first what a tunnel over IPv6 takes: docs/services.md, Limits.
func (w *world) datagrams(to *lab.Pod, at netip.AddrPort) {
	w.t.Helper()
	u := w.listenUDP()
	if w.from.name == "outside" && to == w.far && at.Addr() != w.ip(to) && w.join.Underlay == "ipv6" {
		w.learns(at)
	}
	for _, size := range []int{1350, 1400, 1473, 4000, 65000} {
		data := noise(size)
		if back := w.exchange(u, at, data); !bytes.Equal(back, data) {
			w.t.Errorf("%d bytes: %d others came back", size, len(back))
		}
	}
}

// learns sends datagrams that do not fit the way to a server until the client is told,
// and one is answered.
func (w *world) learns(at netip.AddrPort) {
	w.t.Helper()
	u, data, buf := w.listenUDP(), noise(1440), make([]byte, 65536)
	for range 5 {
		if _, err := u.WriteTo(data, net.UDPAddrFromAddrPort(at)); err != nil {
			continue // it is told by this
		}
		u.SetReadDeadline(time.Now().Add(slow(time.Second)))
		if n, _, err := u.ReadFrom(buf); err == nil && bytes.Equal(buf[:n], data) {
			return
		}
	}
	w.t.Errorf("%s: nobody says that %d bytes are too long", at, len(data))
}

func (w *world) refused(to *lab.Pod, _ netip.AddrPort) {
	w.t.Helper()
	// A busy machine may be late; who waits for a segment that is sent again is late each time.
	took := time.Duration(math.MaxInt64)
	for try := 0; try < 5 && took > slow(time.Second); try++ {
		start := time.Now()
		c, err := w.dial("tcp", netip.AddrPortFrom(w.ip(to), 9))
		took = time.Since(start)
		if err == nil {
			c.Close()
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			w.t.Fatalf("tcp to a closed port: %v", err)
		}
	}
	if took > slow(time.Second) {
		w.t.Errorf("the refusal of a closed port took %s, and no less before", took)
	}
	// The answer is an ICMP error.
	u, err := w.dial("udp", netip.AddrPortFrom(w.ip(to), 9))
	w.must(err)
	defer u.Close()
	u.Write([]byte("x"))
	if _, err := u.Read(make([]byte, 10)); !errors.Is(err, unix.ECONNREFUSED) {
		w.t.Errorf("udp to a closed port: %v", err)
	}
}

func (w *world) ping(to *lab.Pod, _ netip.AddrPort) {
	w.t.Helper()
	for _, size := range []int{56, 3000, 60000} {
		w.run(w.from.space, "ping -c 2 -i 0.01 -W 30 -s %d %s", size, w.ip(to))
	}
}
