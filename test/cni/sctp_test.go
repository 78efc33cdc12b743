// SPDX-License-Identifier: Apache-2.0

package cni_test

// SCTP: servers in containers, and clients of the node itself, by its own address.

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// sctpSocket is bound, so that its associations name no address of the other family.
func sctpSocket(at netip.AddrPort) (int, error) {
	family := unix.AF_INET
	if at.Addr().Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return -1, err
	}
	if family == unix.AF_INET6 {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err == nil {
		err = syscall.Bind(fd, sockaddr(at))
	}
	if err != nil {
		unix.Close(fd)
	}
	return fd, err
}

func sockaddr(a netip.AddrPort) syscall.Sockaddr {
	if a.Addr().Is4() {
		return &syscall.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &syscall.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

// noSCTP says that the kernel has none.
func noSCTP(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ESOCKTNOSUPPORT)
}

// serveSCTP says hello to each association with a port of both families.
func serveSCTP(port uint16) error {
	for _, any := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		fd, err := sctpSocket(netip.AddrPortFrom(any, port))
		if noSCTP(err) {
			return nil
		}
		if err == nil {
			err = unix.Listen(fd, 100)
		}
		if err != nil {
			return fmt.Errorf("listen by SCTP: %w", err)
		}
		f := os.NewFile(uintptr(fd), "sctp")
		l, err := net.FileListener(f) // as if it were TCP's, which for reading and writing it is
		f.Close()
		if err != nil {
			return err
		}
		go func() {
			for c, err := l.Accept(); err == nil; c, err = l.Accept() {
				fmt.Fprintln(c, "hello", c.RemoteAddr())
				c.Close()
			}
		}()
	}
	return nil
}

// dialSCTP connects to an address of the node from that address.
func dialSCTP(address string, wait time.Duration) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	fd, err := sctpSocket(netip.AddrPortFrom(to.Addr(), 0))
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "sctp")
	defer f.Close()
	timeout := unix.NsecToTimeval(int64(wait))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout); err != nil {
		return nil, err
	}
	for {
		if err = syscall.Connect(fd, sockaddr(to)); err != syscall.EINTR { // the runtime's signals break it off
			break
		}
	}
	if err != nil && err != syscall.EISCONN {
		return nil, err
	}
	return net.FileConn(f)
}

func TestPorts_LeadTheNodesOwnSCTP(t *testing.T) {
	fd, err := sctpSocket(netip.MustParseAddrPort("127.0.0.1:0"))
	if noSCTP(err) {
		t.Skip("this kernel has no SCTP")
	}
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	for _, mode := range modesOnce(t) {
		t.Run(mode, func(t *testing.T) {
			if mode == "host-device" {
				t.Skip(ownNetwork)
			}
			n := newNode(t)
			rules := func() string { return run(t, "ip", "-n", n.name, "rule") + run(t, "ip", "-n", n.name, "-6", "rule") }
			pristine := rules()
			x := n.ported(mode, mapping(8081, "sctp", ""), mapping(8082, "sctp", "192.168.7.1"), mapping(8083, "sctp", "fd00:7::1"), mapping(8081, "tcp", ""))
			x.add()
			x.server(":80")
			for _, to := range []string{"192.168.7.1:8081", "[fd00:7::1]:8081", "192.168.7.1:8082", "[fd00:7::1]:8083"} {
				for _, network := range []string{"sctp ", "sctp ", ""} {
					if network == "" && !strings.HasSuffix(to, "8081") {
						continue
					}
					if out, err := n.dials(n.name, network+to, patience); err != nil || !strings.HasPrefix(out, "hello ") {
						t.Errorf("%s%s: %v %s", network, to, err, out)
					}
				}
			}
			for _, to := range []string{"sctp [fd00:7::1]:8082", "sctp 192.168.7.1:8083"} {
				if out, err := n.dials(n.name, to, patience); err == nil || !strings.Contains(out, "refused") {
					t.Errorf("%s, which no mapping names: %v %s", to, err, out)
				}
			}
			x.del()
			if out, err := n.dials(n.name, "sctp 192.168.7.1:8081", patience); err == nil || !strings.Contains(out, "refused") {
				t.Errorf("after DEL: %v %s", err, out)
			}
			if now := rules(); now != pristine {
				t.Errorf("rules stay:\n%s\nbefore:\n%s", now, pristine)
			}
		})
	}
}
