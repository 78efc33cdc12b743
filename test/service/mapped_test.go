// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"errors"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// What most servers and many clients have: IPv6 sockets that speak IPv4 too, by
// IPv4-mapped addresses. Go's own package has none, so these are the kernel's.

// socket is an IPv6 socket of the client, which waits no longer than is patient.
func (w *world) socket(kind int) (fd int) {
	w.t.Helper()
	w.must(w.client.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC, 0)
		return err
	}))
	w.t.Cleanup(func() { unix.Close(fd) })
	wait := unix.NsecToTimeval(int64(patience / time.Nanosecond))
	w.must(errors.Join(
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait)))
	return fd
}

// sockaddr6 is an address of either family as an IPv6 socket takes it.
func sockaddr6(a netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func fromSockaddr6(sa unix.Sockaddr) netip.AddrPort {
	a, ok := sa.(*unix.SockaddrInet6)
	if !ok {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
}

// mappedTCP: one that connects to a Service reaches it, and sees the Service.
func (w *world) mappedTCP() {
	fd := w.socket(unix.SOCK_STREAM)
	w.must(os.NewSyscallError("connect", unix.Connect(fd, sockaddr6(w.twin()))))
	w.saysWho(fd)
	peer, err := unix.Getpeername(fd)
	w.must(err)
	if got := fromSockaddr6(peer); got != w.twin() {
		w.t.Errorf("the peer is shown as %s, not as the Service", got)
	}
}

// mappedUDP: unconnected first, then connected.
func (w *world) mappedUDP() {
	fd := w.socket(unix.SOCK_DGRAM)
	for range 3 {
		w.must(os.NewSyscallError("sendto", unix.Sendto(fd, []byte("who\n"), 0, sockaddr6(w.twin()))))
		buf := make([]byte, 200)
		n, from, err := unix.Recvfrom(fd, buf, 0)
		w.must(os.NewSyscallError("recvfrom", err))
		if got := fromSockaddr6(from); got != w.twin() {
			w.t.Errorf("%q came from %s, not from the Service", buf[:n], got)
		}
	}
	w.must(os.NewSyscallError("connect", unix.Connect(fd, sockaddr6(w.twin()))))
	w.saysWho(fd)
	buf := make([]byte, 200)
	w.must(os.NewSyscallError("send", unix.Send(fd, []byte("who\n"), 0)))
	_, from, err := unix.Recvfrom(fd, buf, 0)
	w.must(os.NewSyscallError("recvfrom", err))
	if got := fromSockaddr6(from); got != w.twin() {
		w.t.Errorf("connected, a datagram came from %s, not from the Service", got)
	}
}

func (w *world) saysWho(fd int) {
	w.t.Helper()
	w.must(os.NewSyscallError("send", unix.Send(fd, []byte("who\n"), 0)))
	buf := make([]byte, 200)
	n, err := unix.Read(fd, buf)
	w.must(os.NewSyscallError("read", err))
	name, client, err := parseWho(string(buf[:n]))
	w.must(err)
	if name != w.servers[0].Name || client.Addr() != address(w.client, w.ipv6) {
		w.t.Errorf("%s answered and saw %s", name, client)
	}
}

// unconnectedRefusals: where the socket knows Services, sendmsg() says what
// connect() would. By packet nobody tells an unconnected socket.
func (w *world) unconnectedRefusals() {
	if !w.ownPath() {
		return
	}
	fd := w.socket(unix.SOCK_DGRAM)
	err := unix.Sendto(fd, []byte("x"), 0, sockaddr6(netip.AddrPortFrom(vip(w.ipv6), 9)))
	if !errors.Is(err, syscall.ECONNREFUSED) {
		w.t.Errorf("a datagram to a Service's unknown port: %v", err)
	}
}
