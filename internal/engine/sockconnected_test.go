// SPDX-License-Identifier: Apache-2.0

package engine

// Connected sockets, in the world of sockflows_test.go.

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// To the kernel an IPv6 socket that is connected to IPv4 names its peer with each datagram: a backend's address is not the
// Service's of that address once more, whose answers it would not take.
func TestAConnectedIPv6SocketStaysWithItsBackend(t *testing.T) {
	w := newUDPWorld(t, state.PathBoth, false)
	w.n.must(func(e *Engine) error {
		return e.UpsertServices([]state.Service{udp(w.fronts[0].String(), w.fronts[1].String())}) // a Service of a Service
	})
	var c net.Conn
	err := netns.Do(w.path, func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), "udp")
		defer f.Close()
		to := &unix.SockaddrInet6{Port: int(w.fronts[0].Port()), Addr: w.fronts[0].Addr().As16()}
		if err := unix.Connect(fd, to); err != nil {
			return err
		}
		c, err = net.FileConn(f)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 2 {
		if _, err := c.Write([]byte("question")); err != nil {
			t.Fatal(err)
		}
		if got := w.answered(c.(*net.UDPConn), w.receive(w.server)); got != w.fronts[0] {
			t.Errorf("the answer comes from %v, want %v", got, w.fronts[0])
		}
	}
}

// A connected socket has one slot, or one entry, of its last connect(), until it closes.
func TestAClosedSocketLeavesNothing(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		w.slotOrStored(func(stored bool) {
			want := kept{Slots: 1}
			if stored {
				want = kept{Connected: 1}
			}
			for name, then := range map[string]func(c *net.UDPConn){
				"connected":    func(*net.UDPConn) {},
				"to another":   func(c *net.UDPConn) { w.connect(c, sockaddr(w.fronts[1])) },
				"disconnected": func(c *net.UDPConn) { w.connect(c, make([]byte, unix.SizeofSockaddrInet4)) }, // AF_UNSPEC
			} {
				c := w.socket()
				w.connect(c, sockaddr(w.fronts[0]))
				then(c)
				w.keep(name+", open", want)
				if err := c.Close(); err != nil {
					w.Fatal(err)
				}
				w.keep(name+", closed", kept{})
			}
		})
	})
}

// The kernel does not say when a socket of its own closes, as MPTCP's subflows are: such a one takes no slot.
func TestASocketOfTheKernelsOwnTakesNoSlot(t *testing.T) {
	const ipprotoMPTCP = 262
	w := newUDPWorld(t, state.PathBoth, false)
	slots := w.n.table(bpfgen.SockMapMstSockSlotsV1)
	front := netip.MustParseAddrPort("10.96.0.4:80")
	var c int
	err := netns.Do(w.serverPath, func() error {
		l, err := net.Listen("tcp4", net.JoinHostPort(w.backend.Addr().String(), "0"))
		if err != nil {
			return err
		}
		w.Cleanup(func() { l.Close() })
		w.n.must(func(e *Engine) error { return e.AddServices(svc(front.String(), l.Addr().String())) })
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	taken := func() (n int) {
		var i uint32
		var slot bpfgen.SockSockSlot
		it := slots.Iterate()
		for it.Next(&i, &slot) {
			if slot.Cookie != 0 {
				n++
			}
		}
		return n
	}
	for what, proto := range map[string]int{"TCP": unix.IPPROTO_TCP, "MPTCP": ipprotoMPTCP} {
		err = netns.Do(w.path, func() (err error) {
			if c, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, proto); err != nil {
				return err
			}
			return unix.Connect(c, &unix.SockaddrInet4{Port: int(front.Port()), Addr: front.Addr().As4()})
		})
		if err != nil {
			t.Fatal(what, err)
		}
		if want := map[bool]int{true: 1}[proto == unix.IPPROTO_TCP]; taken() != want {
			t.Errorf("%s: %d slots are taken, want %d", what, taken(), want)
		}
		if err := unix.Close(c); err != nil {
			t.Fatal(err)
		}
		if taken() != 0 {
			t.Errorf("%s: %d slots are taken by closed sockets", what, taken())
		}
	}
}

// connect is connect(2), any number of times.
func (w *udpWorld) connect(c *net.UDPConn, to []byte) {
	w.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		w.Fatal(err)
	}
	var errno syscall.Errno
	err = raw.Control(func(fd uintptr) {
		_, _, errno = unix.Syscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&to[0])), uintptr(len(to)))
	})
	if err != nil || errno != 0 {
		w.Fatal(err, errno)
	}
}

// sockaddr is a struct sockaddr_in or sockaddr_in6.
func sockaddr(a netip.AddrPort) []byte {
	b := make([]byte, unix.SizeofSockaddrInet4)
	family, at := uint16(unix.AF_INET), 4
	if a.Addr().Is6() {
		b = make([]byte, unix.SizeofSockaddrInet6)
		family, at = unix.AF_INET6, 8
	}
	binary.NativeEndian.PutUint16(b, family)
	binary.BigEndian.PutUint16(b[2:], a.Port())
	copy(b[at:], a.Addr().AsSlice())
	return b
}
