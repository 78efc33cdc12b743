// SPDX-License-Identifier: Apache-2.0

package service_test

// SCTP: a Service whose backends have another port, and one whose backends have
// its own. Sockets are bound to one address each: an association lists all those
// of a socket that is not, and the other end would use them past the Service.

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// sctpSocket is a one-to-one socket of a's family, bound to a.
func sctpSocket(a netip.AddrPort) (int, error) {
	family := unix.AF_INET
	if a.Addr().Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if err := syscall.Bind(fd, sockaddr(a)); err != nil {
		unix.Close(fd)
		return -1, os.NewSyscallError("bind", err)
	}
	return fd, nil
}

// noSCTP says that the kernel has none.
func noSCTP(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ESOCKTNOSUPPORT)
}

// listenSCTP listens at each of the namespace's addresses; nowhere without SCTP.
func listenSCTP() (list []net.Listener, err error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		ip, _ := netip.AddrFromSlice(a.(*net.IPNet).IP)
		if ip = ip.Unmap(); !ip.IsGlobalUnicast() {
			continue
		}
		fd, err := sctpSocket(netip.AddrPortFrom(ip, serverPort))
		if noSCTP(err) {
			return nil, nil
		}
		if err == nil {
			err = os.NewSyscallError("listen", unix.Listen(fd, 1000))
		}
		if err != nil {
			return nil, fmt.Errorf("sctp at %s: %w", ip, err)
		}
		f := os.NewFile(uintptr(fd), "sctp")
		l, err := net.FileListener(f) // as if it were TCP's, which for reading and writing it is
		f.Close()
		if err != nil {
			return nil, err
		}
		list = append(list, l)
	}
	return list, nil
}

func serveSCTP(name string) error {
	list, err := listenSCTP()
	for _, l := range list {
		go func() {
			for {
				c, err := l.Accept()
				exitOn(err)
				go serveTCP(struct{ net.Conn }{c}, name) // so that nobody splices, which SCTP cannot
			}
		}()
	}
	return err
}

// dialSCTP connects from a pod's own address.
func dialSCTP(p *lab.Pod, dst netip.AddrPort) (c net.Conn, err error) {
	from := netip.AddrPortFrom(address(p, dst.Addr().Is6()), 0)
	err = p.Do(func() error {
		fd, err := sctpSocket(from)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), "sctp")
		defer f.Close()
		if err := connect(fd, dst); err != nil {
			return os.NewSyscallError("connect", err)
		}
		c, err = net.FileConn(f)
		return err
	})
	return c, err
}

// connect does not block, for a signal would break it off.
func connect(fd int, dst netip.AddrPort) error {
	if err := unix.SetNonblock(fd, true); err != nil {
		return err
	}
	if err := syscall.Connect(fd, sockaddr(dst)); err != unix.EINPROGRESS {
		return err
	}
	for until := time.Now().Add(patience); time.Now().Before(until); {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 1000)
		if err != nil && err != unix.EINTR {
			return err
		}
		if n > 0 {
			code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			if err == nil && code != 0 {
				err = syscall.Errno(code)
			}
			return err
		}
	}
	return unix.ETIMEDOUT
}

func (w *world) sctp() {
	c, err := dialSCTP(w.client, w.direct(0))
	if noSCTP(err) {
		w.t.Skip("this kernel has no SCTP")
	}
	w.must(err)
	c.Close()
	same := netip.AddrPortFrom(vip(w.ipv6), serverPort)
	w.sctpBulk(w.direct(0))
	for _, dst := range []netip.AddrPort{w.service(), same} {
		seen := map[string]int{}
		for range 30 {
			seen[w.sctpWho(w.client, dst)]++
		}
		if len(seen) != len(w.servers) {
			w.t.Errorf("30 associations with %v went to %v", dst, seen)
		}
		w.sctpBulk(dst)
	}
	if name := w.sctpWho(w.servers[0], w.twin()); name != w.servers[0].Name {
		w.t.Errorf("hairpin: %s answered", name)
	}
	for what, port := range map[string]uint16{"a closed port": 8125, "a Service without backends": sctpEmptyPort} {
		if c, err := dialSCTP(w.client, netip.AddrPortFrom(vip(w.ipv6), port)); !refused(err) {
			w.t.Errorf("%s: %v, %v", what, c, err)
		}
	}
}

// sctpWho is who answers; it must see the pod's own address and port, or the
// Service's address when it is the pod itself.
func (w *world) sctpWho(p *lab.Pod, dst netip.AddrPort) string {
	w.t.Helper()
	c, err := dialSCTP(p, dst)
	w.must(err)
	defer c.Close()
	w.must(c.SetDeadline(deadline()))
	name, client, err := who(c)
	w.must(err)
	want := plain(c.LocalAddr())
	if name == p.Name {
		want = netip.AddrPortFrom(dst.Addr(), want.Port())
	}
	if client != want || plain(c.RemoteAddr()) != dst {
		w.t.Errorf("%s sees %v, want %v; the peer is %v, want %v", name, client, want, c.RemoteAddr(), dst)
	}
	return name
}

// sctpBulk sends messages that take many packets each, and gets them back.
func (w *world) sctpBulk(dst netip.AddrPort) { w.t.Helper(); w.sctpBulkFrom(w.client, dst) }

func (w *world) sctpBulkFrom(p *lab.Pod, dst netip.AddrPort) {
	w.t.Helper()
	c, err := dialSCTP(p, dst)
	w.must(err)
	defer c.Close()
	w.must(c.SetDeadline(deadline()))
	data, message := make([]byte, 1<<20), 50_000
	rand.NewChaCha8([32]byte{1}).Read(data)
	_, err = io.WriteString(c, "echo\n")
	w.must(err)
	go func() {
		for rest := data; len(rest) > 0; rest = rest[min(message, len(rest)):] {
			if _, err := c.Write(rest[:min(message, len(rest))]); err != nil {
				return // the reader meets it, too
			}
		}
	}()
	back := make([]byte, len(data))
	if n, err := io.ReadFull(c, back); err != nil || !bytes.Equal(back, data) {
		w.t.Errorf("%d of %d bytes came back from %v as they were sent: %v", n, len(data), dst, err)
	}
}
