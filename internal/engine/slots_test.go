// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// A socket that connect() led to a backend is known by its slot, or, where another
// socket has that, by what is stored with it: to getpeername(), and to who removes the
// backend. Closing it frees the slot.
func TestASocketIsKnownByItsSlotOrByWhatIsStored(t *testing.T) {
	for _, stored := range []bool{false, true} {
		for _, v6 := range []bool{false, true} {
			for _, network := range []string{"tcp", "udp"} {
				name := fmt.Sprintf("%s %s %s", network, map[bool]string{false: "slot", true: "stored"}[stored],
					map[bool]string{false: "IPv4", true: "IPv6"}[v6])
				t.Run(name, func(t *testing.T) { testSlot(t, network, stored, v6) })
			}
		}
	}
}

func testSlot(t *testing.T, network string, stored, v6 bool) {
	n := newNode(t)
	path := n.pod(2)
	n.run("ip -n %s -6 route add default dev eth0", filepath.Base(path))
	n.run("ip -n %s link set lo up", filepath.Base(path))
	if _, err := n.add(path); err != nil {
		t.Fatal(err)
	}
	own, front := "10.9.0.2", netip.MustParseAddrPort("10.96.0.1:80")
	if v6 {
		own, front = "fd09::2", netip.MustParseAddrPort("[fd50::1]:80")
	}
	inside := func(fn func() error) {
		t.Helper()
		if err := netns.Do(path, fn); err != nil {
			t.Fatal(err)
		}
	}
	table, service := bpfgen.SockMapMstSockSlotsV1, svc
	if network == "udp" {
		table, service = bpfgen.SockMapMstUdpSlotsV1, udp
	}
	var backend netip.AddrPort
	inside(func() error {
		l, address, err := listen(network, net.JoinHostPort(own, "0"))
		if err == nil {
			backend = address
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	n.must(func(e *Engine) error { return e.AddServices(service(front.String(), backend.String())) })
	inCgroup(t)
	slots := n.table(table)
	if stored {
		fillSlots(t, slots)
	}
	dial := func(to netip.AddrPort) (c net.Conn) {
		t.Helper()
		inside(func() (err error) {
			c, err = net.Dial(network, to.String())
			return err
		})
		t.Cleanup(func() { c.Close() })
		return c
	}
	first, c, direct := dial(front), dial(front), dial(backend)
	for conn, want := range map[net.Conn]netip.AddrPort{first: front, c: front, direct: backend} {
		if got := conn.RemoteAddr().String(); got != want.String() {
			t.Errorf("getpeername: %v, want %v", got, want)
		}
	}
	has := func(cookie uint64) bool {
		t.Helper()
		var slot bpfgen.SockSockSlot
		if err := slots.Lookup(uint32(cookie%bpfgen.SockSlots), &slot); err != nil {
			t.Fatal(err)
		}
		return slot.Cookie == cookie
	}
	cookie := cookieOf(t, first)
	if has(cookie) == stored || has(cookieOf(t, direct)) {
		t.Errorf("the Service's has a slot: %t, the other one: %t", has(cookie), has(cookieOf(t, direct)))
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if has(cookie) {
		t.Error("it is closed and has its slot still")
	}
	n.must(func(e *Engine) error {
		return e.BackendsGone(state.Backend{AddrPort: netip.AddrPortFrom(backend.Addr(), 0)})
	})
	if err := pendingError(t, c); !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("its backend is gone: %v", err)
	}
	if err := pendingError(t, direct); err != nil {
		t.Errorf("it went there by itself: %v", err)
	}
}

// table is the node's table of that name.
func (n *node) table(name string) (m *ebpf.Map) {
	n.t.Helper()
	n.must(func(e *Engine) (err error) {
		m, err = e.dp.Map(name).Clone()
		return err
	})
	n.t.Cleanup(func() { m.Close() })
	return m
}

// fillSlots has other sockets take all slots: what a socket is told is stored with it.
func fillSlots(t *testing.T, slots *ebpf.Map) {
	t.Helper()
	for i := range slots.MaxEntries() {
		if err := slots.Put(i, bpfgen.SockSockSlot{Cookie: 1<<62 + uint64(i)}); err != nil {
			t.Fatal(err)
		}
	}
}

// listen opens a server's socket, which says where it is.
func listen(network, on string) (io.Closer, netip.AddrPort, error) {
	if network == "udp" {
		c, err := net.ListenPacket(network, on)
		if err != nil {
			return nil, netip.AddrPort{}, err
		}
		return c, c.LocalAddr().(*net.UDPAddr).AddrPort(), nil
	}
	l, err := net.Listen(network, on)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	return l, l.Addr().(*net.TCPAddr).AddrPort(), nil
}

func cookieOf(t *testing.T, c net.Conn) (cookie uint64) {
	t.Helper()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	ctl := raw.Control(func(fd uintptr) { cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE) })
	if ctl != nil || err != nil {
		t.Fatal(ctl, err)
	}
	return cookie
}
