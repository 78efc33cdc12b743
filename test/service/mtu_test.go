// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// Local MTU and BIG TCP: long packets between the pods of a node, and to
// everybody else the path's MTU as ever.

const (
	wireMTU  = 1500
	smallMTU = 1400       // of the narrow wire
	outPort  = 82         // a Service whose backend is outside
	hugeMSS  = 30_000     // no less between pods with a local MTU; a new connection's window halves it
	legacy   = "legacy"   // a pod that is not mustang's
	oneBunch = 12 << 20   // bytes of a stream that has time to make large bundles
	noBigTCP = 0xffff + 1 // the kernel's bundle without BIG TCP, in bytes
)

// localMTUModes are those that have one by default.
var localMTUModes = []lab.Mode{lab.Veth, lab.Bridge, lab.Netkit, lab.NetkitL3}

func TestLocalMTU(t *testing.T) {
	for _, mode := range localMTUModes {
		if !slices.Contains(chosen(modesVariable, mode), mode) {
			continue
		}
		for _, path := range chosen(pathsVariable, lab.MustangTC, lab.MustangSocket) {
			t.Run(string(mode)+"/"+string(path), func(t *testing.T) {
				w := newWorldOf(t, lab.Config{Mode: mode, Services: path})
				w.serveOutside()
				w.addLegacyPod(mode)
				for _, family := range []string{"ipv4", "ipv6"} {
					t.Run(family, func(t *testing.T) { w.on(t, family).localMTU() })
				}
			})
		}
	}
}

// serveOutside puts the server outside, and a Service before it.
func (w *world) serveOutside() {
	w.t.Helper()
	w.startServer(&lab.Pod{Space: w.lab.Outside().Space, Name: "outside"})
	var services []lab.Service
	for _, ipv6 := range []bool{false, true} {
		for _, protocol := range []string{"tcp", "udp"} {
			services = append(services, lab.Service{VIP: vip(ipv6), Port: outPort, Protocol: protocol,
				Backends: []netip.AddrPort{w.on(w.t, map[bool]string{false: "ipv4", true: "ipv6"}[ipv6]).beyond()}})
		}
	}
	w.must(w.lab.Node().AddServices(context.Background(), services))
}

// beyond is the server outside.
func (w *world) beyond() netip.AddrPort {
	o := w.lab.Outside()
	if w.ipv6 {
		return netip.AddrPortFrom(o.IPv6, serverPort)
	}
	return netip.AddrPortFrom(o.IPv4, serverPort)
}

func (w *world) beyondService() netip.AddrPort { return netip.AddrPortFrom(vip(w.ipv6), outPort) }

// legacyAddress is of a pod without a datapath among the node's pods.
func legacyAddress(ipv6 bool) netip.Addr {
	if ipv6 {
		return netip.MustParseAddr("fd00:10:1::c8")
	}
	return netip.MustParseAddr("10.1.0.200")
}

func (w *world) legacyName() string { return legacy + strings.TrimPrefix(w.lab.Name(), "t") }

func (w *world) addLegacyPod(mode lab.Mode) {
	w.t.Helper()
	ctx := context.Background()
	name := w.legacyName()
	ip := fmt.Sprintf("--ip=%s/16,%s/64", legacyAddress(false), legacyAddress(true))
	_, err := w.lab.Mustang(ctx, "pod", "add", name, "--plain", "--mode="+string(mode), ip)
	w.must(err)
	w.t.Cleanup(func() {
		if _, err := w.lab.Mustang(ctx, "pod", "rm", name); err != nil {
			w.t.Error(err)
		}
	})
	w.startServer(&lab.Pod{Space: lab.Space{NetNS: "/var/run/netns/" + name}, Name: legacy})
}

func (w *world) localMTU() {
	for _, c := range []struct {
		name string
		run  func(*world)
	}{
		{"tcp segments follow the way", (*world).segmentsFollowTheWay},
		{"siblings take long datagrams whole", (*world).longToSibling},
		{"a pod without it answers what is too long", (*world).longToLegacy},
		{"outside and node: no longer than the wire", (*world).longToOthers},
		{"from outside and node, in fragments", (*world).longFromOthers},
		{"bundles of long segments, and of the wire's beyond the node", (*world).bundlesFollowTheWay},
		{"a narrower wire, by address and by Service", (*world).narrowWire},
	} {
		w.t.Run(c.name, func(t *testing.T) {
			sub := *w
			sub.t = t
			c.run(&sub)
		})
	}
}

func option(t interface{ Fatal(...any) }, c syscall.Conn, level, name int) (value int) {
	raw, err := c.SyscallConn()
	if err == nil {
		raw.Control(func(fd uintptr) { value, err = unix.GetsockoptInt(int(fd), level, name) })
	}
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// mss is the largest segment of a new connection, once both ends have said theirs.
func (w *world) mss(dst netip.AddrPort) int {
	w.t.Helper()
	c, err := dial(w.client, "tcp", dst, 0)
	w.must(err)
	defer c.Close()
	_, _, err = who(c)
	w.must(err)
	return option(w.t, c.(*net.TCPConn), unix.IPPROTO_TCP, unix.TCP_MAXSEG)
}

func (w *world) segmentsFollowTheWay() {
	legacyPod := netip.AddrPortFrom(legacyAddress(w.ipv6), serverPort)
	for _, c := range []struct {
		to   string
		dst  netip.AddrPort
		huge bool
	}{
		{"a sibling", w.direct(0), true},
		// The packet path gives a Service's address the way out: its backend may be anywhere.
		{"a sibling by its Service", w.twin(), w.path != lab.MustangTC},
		{"a pod without it", legacyPod, false},
		{"outside", w.beyond(), false},
		{"outside by a Service", w.beyondService(), false},
	} {
		if mss := w.mss(c.dst); (mss > hugeMSS) != c.huge || !c.huge && mss > wireMTU-40 {
			w.t.Errorf("segments to %s have %d bytes", c.to, mss)
		}
	}
}

// whole is a connected UDP socket whose datagrams must not be cut: what is too
// long is an error.
func (w *world) whole(dst netip.AddrPort) *net.UDPConn {
	w.t.Helper()
	c, err := dial(w.client, "udp", dst, 0)
	w.must(err)
	w.t.Cleanup(func() { c.Close() })
	raw, err := c.(*net.UDPConn).SyscallConn()
	w.must(err)
	raw.Control(func(fd uintptr) {
		if w.ipv6 {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
		} else {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
		}
	})
	w.must(err)
	return c.(*net.UDPConn)
}

// pathMTU is what the kernel knows of a connected socket's way.
func (w *world) pathMTU(c *net.UDPConn) int {
	w.t.Helper()
	if w.ipv6 {
		return option(w.t, c, unix.IPPROTO_IPV6, unix.IPV6_MTU)
	}
	return option(w.t, c, unix.IPPROTO_IP, unix.IP_MTU)
}

// payload is how much a datagram holds in a packet of mtu bytes.
func (w *world) payload(mtu int) int {
	if w.ipv6 {
		return mtu - 48
	}
	return mtu - 28
}

// echoes sends a datagram and wants it back.
func (w *world) echoes(c net.Conn, size int) {
	w.t.Helper()
	data := make([]byte, size)
	rand.NewChaCha8([32]byte{3}).Read(data)
	_, err := c.Write(data)
	w.must(err)
	buf := make([]byte, 65536)
	n, err := c.Read(buf)
	if err != nil || !bytes.Equal(buf[:n], data) {
		w.t.Errorf("%d bytes to %s: %d came back, %v", size, c.RemoteAddr(), n, err)
	}
}

func (w *world) refuses(c net.Conn, size int) {
	w.t.Helper()
	if _, err := c.Write(make([]byte, size)); !errors.Is(err, unix.EMSGSIZE) {
		w.t.Errorf("%d bytes to %s: %v, want %v", size, c.RemoteAddr(), err, unix.EMSGSIZE)
	}
}

func (w *world) longToSibling() {
	c := w.whole(w.direct(0))
	w.echoes(c, 60_000)
	w.refuses(c, 65_507)
	by := w.whole(w.twin())
	if w.path == lab.MustangTC {
		w.echoes(by, w.payload(wireMTU))
		w.refuses(by, w.payload(wireMTU)+1)
	} else {
		w.echoes(by, 60_000)
	}
}

// learns sends what is too long until the path's MTU is known: the datagram is
// lost, and an ICMP error says why.
func (w *world) learns(c *net.UDPConn, size, mtu int) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("%s is known to take %d bytes", c.RemoteAddr(), mtu), func() bool {
		c.Write(make([]byte, size)) // also collects the error of the one before
		return w.pathMTU(c) == mtu
	})
	eventually(w.t, "the socket has told its errors", func() bool {
		_, err := c.Write(make([]byte, w.payload(mtu)+1))
		return errors.Is(err, unix.EMSGSIZE)
	})
	// What the errors left in the queue must not be taken for an answer.
	w.echoesFresh(plain(c.RemoteAddr()), w.payload(mtu))
}

func (w *world) echoesFresh(dst netip.AddrPort, size int) {
	w.t.Helper()
	c := w.whole(dst)
	defer c.Close()
	w.echoes(c, size)
}

func (w *world) longToLegacy() {
	dst := netip.AddrPortFrom(legacyAddress(w.ipv6), serverPort)
	w.learns(w.whole(dst), 5000, wireMTU)
	c, err := dial(w.client, "udp", dst, 0)
	w.must(err)
	defer c.Close()
	w.echoes(c, 5000) // in fragments, now that the MTU is known
	w.bulkBy(dst, 4<<20)
}

func (w *world) nodeAddress() netip.Addr {
	if w.ipv6 {
		return w.lab.Node().IPv6
	}
	return w.lab.Node().IPv4
}

func (w *world) longToOthers() {
	for _, dst := range []netip.AddrPort{w.beyond(), w.beyondService()} {
		c := w.whole(dst)
		w.echoes(c, w.payload(wireMTU))
		w.refuses(c, w.payload(wireMTU)+1)
		cut, err := dial(w.client, "udp", dst, 0)
		w.must(err)
		w.echoes(cut, 60_000)
		cut.Close()
	}
	w.refuses(w.whole(netip.AddrPortFrom(w.nodeAddress(), 9)), w.payload(wireMTU)+1)
}

func (w *world) longFromOthers() {
	for what, from := range map[string]lab.Space{"node": w.lab.Node().Space, "outside": w.lab.Outside().Space} {
		c, err := dial(&lab.Pod{Space: from}, "udp", w.direct(0), 0)
		if err != nil {
			w.t.Fatalf("from %s: %v", what, err)
		}
		w.echoes(c, 60_000)
		c.Close()
	}
}

// narrowWire makes the uplink narrower than the pods know.
func (w *world) narrowWire() {
	set := func(mtu int) {
		w.t.Helper()
		for _, s := range []lab.Space{w.lab.Node().Space, w.lab.Outside().Space} {
			w.must(s.Do(func() error {
				l, err := netlink.LinkByName(lab.Uplink)
				if err != nil {
					return err
				}
				return netlink.LinkSetMTU(l, mtu)
			}))
		}
	}
	set(smallMTU)
	defer set(wireMTU)
	w.learns(w.whole(w.beyond()), w.payload(wireMTU), smallMTU)
	w.learns(w.whole(w.beyondService()), w.payload(wireMTU), smallMTU)
	w.bulkBy(w.beyond(), 4<<20)
	w.bulkBy(w.beyondService(), 4<<20)
}

// bulkBy sends bytes there and back, and wants them whole.
func (w *world) bulkBy(dst netip.AddrPort, size int64) {
	w.t.Helper()
	c, err := dial(w.client, "tcp", dst, 0)
	w.must(err)
	defer c.Close()
	sent, got := sha256.New(), sha256.New()
	done := make(chan error, 1)
	go func() {
		_, err := c.Write([]byte("echo\n"))
		if err == nil {
			_, err = io.CopyN(io.MultiWriter(c, sent), rand.NewChaCha8([32]byte{4}), size)
		}
		done <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	n, err := io.Copy(got, c)
	if err = errors.Join(err, <-done); err != nil {
		w.t.Fatalf("bulk to %s: %v", dst, err)
	}
	if n != size || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		w.t.Errorf("bulk to %s: %d bytes came back, not the %d that were sent", dst, n, size)
	}
}

// TestWithoutLocalMTU: nothing is longer than the wire when it is off, or when
// the mode has none.
func TestWithoutLocalMTU(t *testing.T) {
	for _, c := range []lab.Config{
		{Mode: lab.Veth, LocalMTU: "off"}, {Mode: lab.Bridge, LocalMTU: "off"}, {Mode: lab.Netkit, LocalMTU: "off"},
		{Mode: lab.NetkitL3, LocalMTU: "off"}, {Mode: lab.Macvlan}, {Mode: lab.IPVlan}, {Mode: lab.IPVlanL3},
	} {
		if !slices.Contains(chosen(modesVariable, c.Mode), c.Mode) {
			continue
		}
		t.Run(string(c.Mode), func(t *testing.T) {
			c.Services = lab.Mustang
			w := newWorldOf(t, c)
			for _, family := range []string{"ipv4", "ipv6"} {
				if mss := w.on(t, family).mss(w.on(t, family).direct(0)); mss > wireMTU-40 {
					t.Errorf("%s: segments have %d bytes", family, mss)
				}
			}
		})
	}
}

// TestServiceNetworkMayBeLocal: where all backends are known to be near, the
// Services' network may be given too.
func TestServiceNetworkMayBeLocal(t *testing.T) {
	onlyWith(t, lab.Veth)
	w := newWorldOf(t, lab.Config{Mode: lab.Veth, Services: lab.MustangTC,
		LocalCIDRs: []netip.Prefix{lab.PodCIDR4, lab.PodCIDR6, lab.ServiceCIDR4, lab.ServiceCIDR6}})
	w.serveOutside()
	for _, family := range []string{"ipv4", "ipv6"} {
		w := w.on(t, family)
		if mss := w.mss(w.service()); mss < hugeMSS {
			t.Errorf("%s: segments to the Service have %d bytes", family, mss)
		}
		w.echoesFresh(w.service(), 60_000)
		w.bulkBy(w.beyondService(), 4<<20) // and where it is not true, TCP and path MTU discovery see to it
		w.learns(w.whole(w.beyondService()), 5000, wireMTU)
	}
}

// TestLocalMTUWithoutMustang: when its programs are taken away, what they handed
// over whole must still arrive. Also on a bridge, where nobody answers that a
// packet is too long.
func TestLocalMTUWithoutMustang(t *testing.T) {
	for _, mode := range []lab.Mode{lab.Veth, lab.Bridge} { // a netkit pair without programs is closed
		if !slices.Contains(chosen(modesVariable, mode), mode) {
			continue
		}
		t.Run(string(mode), func(t *testing.T) {
			w := newWorldOf(t, lab.Config{Mode: mode, Services: lab.Mustang})
			// The lab's own bpffs cannot be removed; all that is in it can.
			if _, err := w.lab.Mustang(context.Background(), "reset"); err != nil && !strings.Contains(err.Error(), "busy") {
				t.Fatal(err)
			}
			for _, family := range []string{"ipv4", "ipv6"} {
				w.on(t, family).bulkBy(w.on(t, family).direct(0), 256<<10)
			}
		})
	}
}
