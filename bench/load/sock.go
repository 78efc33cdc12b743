// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls below are raw: the Go scheduler does not learn of them, so it
// neither hands the thread's processor away nor takes it back, each of which
// would cost more than the system call that is being measured.

// errTimeout is what a socket deadline (SO_RCVTIMEO, SO_SNDTIMEO) turns into.
var errTimeout = errors.New("timed out")

// errno returns nil, errTimeout for an expired socket deadline, or e.
func errno(e unix.Errno) error {
	switch e {
	case 0:
		return nil
	case unix.EAGAIN, unix.EINPROGRESS: // connect reports its deadline as EINPROGRESS
		return errTimeout
	}
	return e
}

func rawRead(fd int, buf []byte) (int, unix.Errno) {
	for {
		n, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
		if e != unix.EINTR {
			return int(n), e
		}
	}
}

func rawWrite(fd int, buf []byte) (int, unix.Errno) {
	for {
		n, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
		if e != unix.EINTR {
			return int(n), e
		}
	}
}

// writeAll writes the whole of buf.
func writeAll(fd int, buf []byte) unix.Errno {
	for len(buf) > 0 {
		n, e := rawWrite(fd, buf)
		if e != 0 {
			return e
		}
		buf = buf[n:]
	}
	return 0
}

// rawSetNoDelay sets TCP_NODELAY; on also sends what is held back.
func rawSetNoDelay(fd int, on bool) {
	var value int32
	if on {
		value = 1
	}
	_, _, _ = unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, uintptr(unsafe.Pointer(&value)), unsafe.Sizeof(value), 0)
}

func rawAccept(fd int) (int, unix.Errno) {
	for {
		n, _, e := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), 0, 0, unix.SOCK_CLOEXEC, 0, 0)
		if e != unix.EINTR {
			return int(n), e
		}
	}
}

func rawClose(fd int) { _, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

func rawSocket(family, kind int) (int, unix.Errno) {
	fd, _, e := unix.RawSyscall(unix.SYS_SOCKET, uintptr(family), uintptr(kind|unix.SOCK_CLOEXEC), 0)
	return int(fd), e
}

func rawConnect(fd int, to *sockaddr) unix.Errno {
	_, _, e := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&to.buf)), to.len)
	return e
}

// rawSetTimeval sets SO_RCVTIMEO or SO_SNDTIMEO; a failure leaves the launcher's
// deadline, which is longer.
func rawSetTimeval(fd, option int, tv *unix.Timeval) {
	_, _, _ = unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, uintptr(option),
		uintptr(unsafe.Pointer(tv)), unsafe.Sizeof(*tv), 0)
}

// rawSetCC sets a congestion control that is known to be granted.
func rawSetCC(fd int, cc string) {
	_, _, _ = unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION,
		uintptr(unsafe.Pointer(unsafe.StringData(cc))), uintptr(len(cc)), 0)
}

// sockaddr is an address in the form the kernel takes, made once.
type sockaddr struct {
	buf    unix.RawSockaddrInet6 // large enough for, and as aligned as, IPv4's
	len    uintptr
	family int
}

func newSockaddr(ap netip.AddrPort) *sockaddr {
	// The port is in network order whatever the machine's.
	var port uint16
	p := (*[2]byte)(unsafe.Pointer(&port))
	p[0], p[1] = byte(ap.Port()>>8), byte(ap.Port())
	if a := ap.Addr().Unmap(); a.Is4() {
		s := &sockaddr{len: unix.SizeofSockaddrInet4, family: unix.AF_INET}
		*(*unix.RawSockaddrInet4)(unsafe.Pointer(&s.buf)) = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: port, Addr: a.As4()}
		return s
	}
	return &sockaddr{
		buf: unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: port, Addr: ap.Addr().As16()},
		len: unix.SizeofSockaddrInet6, family: unix.AF_INET6,
	}
}

// setDeadlines bounds how long one call on fd may block. connect() obeys the
// send timeout.
func setDeadlines(fd int, d time.Duration) error {
	tv := unix.NsecToTimeval(int64(d))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return fmt.Errorf("set receive deadline: %w", err)
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv); err != nil {
		return fmt.Errorf("set send deadline: %w", err)
	}
	return nil
}

// setCC asks for a congestion control and returns the one in force: asking is
// refused where the kernel neither allows nor has it.
func setCC(fd int, cc string) string {
	if cc != "" {
		_ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, cc)
	}
	name, _ := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	return name
}

// ProbeCC returns the congestion control that a socket gets when it asks for
// want: on this machine, by this user.
func ProbeCC(want string) string {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	return setCC(fd, want)
}

// connectTCP opens a connection with the settings of every long-lived one.
func connectTCP(o Options) (fd int, cc string, err error) {
	to := newSockaddr(o.Addr)
	fd, e := rawSocket(to.family, unix.SOCK_STREAM)
	if e != 0 {
		return -1, "", fmt.Errorf("socket: %w", e)
	}
	cc = setCC(fd, o.CC)
	if err = setDeadlines(fd, o.Timeout); err == nil {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	if err == nil {
		if err = errno(rawConnect(fd, to)); err != nil {
			err = fmt.Errorf("connect to %s: %w", o.Addr, err)
		}
	}
	if err != nil {
		rawClose(fd)
	}
	return fd, cc, err
}

// listen binds a socket of kind to o.Addr and, for TCP, listens.
func listen(o Options, kind int) (fd int, err error) {
	at := newSockaddr(o.Addr)
	if fd, err = unix.Socket(at.family, kind|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	defer func() {
		if err != nil {
			rawClose(fd)
		}
	}()
	// The previous sample's connections may still be in TIME_WAIT here.
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fd, fmt.Errorf("reuse address: %w", err)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(&at.buf)), at.len); e != 0 {
		return fd, fmt.Errorf("bind %s: %w", o.Addr, e)
	}
	if o.Mode == Stream {
		// The kernel's own choice falls with a connection's first packets: see streamRoom.
		if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, streamRoom/2); err != nil {
			return fd, fmt.Errorf("set the receive buffer: %w", err)
		}
	}
	if kind == unix.SOCK_STREAM {
		setCC(fd, o.CC)
		// Inherited by accepted sockets.
		if err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err == nil {
			err = unix.Listen(fd, 1024)
		}
		if err != nil {
			return fd, fmt.Errorf("listen on %s: %w", o.Addr, err)
		}
	}
	return fd, setDeadlines(fd, o.Timeout)
}
