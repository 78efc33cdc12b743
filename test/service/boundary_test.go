// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// The boundary of modes whose programs sit inside the pod: what a pod with
// CAP_NET_RAW or CAP_NET_ADMIN does to pass its own hook by is caught at the
// parent's egress and at the destination's ingress. See docs/boundary.md.

func TestBoundaryInsideThePod(t *testing.T) {
	if !slices.Contains(modes(), lab.Macvlan) {
		t.Skip("macvlan is not among the chosen modes")
	}
	w := newWorld(t, lab.Macvlan, lab.MustangTC)
	outside := w.lab.Outside()
	eth0 := w.child("eth0")
	parent := w.parentMAC()

	t.Run("past its own hook, out of the node", func(t *testing.T) {
		w := w.on(t, "ipv4")
		w.counts("hook_bypassed", "parent link", func() {
			w.bypass(eth0, frame{eth0.mac, parent, w.client.IPv4, outside.IPv4})
		})
		w.counts("spoofed_address", "parent link", func() {
			w.bypass(eth0, frame{eth0.mac, parent, w.servers[0].IPv4, outside.IPv4})
		})
	})
	t.Run("past its own hook, to a sibling with another's address", func(t *testing.T) {
		w := w.on(t, "ipv4")
		w.counts("spoofed_mac", "to pod", func() {
			w.bypass(eth0, frame{eth0.mac, w.macOf(w.servers[1]), w.servers[0].IPv4, w.servers[1].IPv4})
		})
	})
	t.Run("a sibling that the pod made itself", func(t *testing.T) {
		w := w.on(t, "ipv4")
		own := w.makeSibling("own0")
		w.counts("unknown_child", "parent link", func() {
			w.bypass(own, frame{own.mac, parent, w.client.IPv4, outside.IPv4})
		})
		w.counts("spoofed_mac", "to pod", func() {
			w.bypass(own, frame{own.mac, w.macOf(w.servers[1]), w.client.IPv4, w.servers[1].IPv4})
		})
	})
	t.Run("through its own hook with another's address", func(t *testing.T) {
		w := w.on(t, "ipv4")
		w.counts("spoofed_address", "from pod", func() {
			w.send(eth0, frame{eth0.mac, parent, w.servers[0].IPv4, outside.IPv4}, false)
		})
		w.counts("spoofed_mac", "from pod", func() {
			w.send(eth0, frame{net.HardwareAddr{2, 0, 0, 0, 0, 9}, parent, w.client.IPv4, outside.IPv4}, false)
		})
	})
	t.Run("what is honest still passes", func(t *testing.T) {
		for _, family := range []string{"ipv4", "ipv6"} {
			w.on(t, family).outside()
		}
	})
}

// child is an interface inside the client pod.
type child struct {
	index int
	mac   net.HardwareAddr
}

func (w *world) child(name string) (c child) {
	w.t.Helper()
	w.must(w.client.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err == nil {
			c = child{l.Attrs().Index, l.Attrs().HardwareAddr}
		}
		return err
	}))
	return c
}

// makeSibling is what a pod with CAP_NET_ADMIN can do: the kernel puts a macvlan
// on a macvlan next to it.
func (w *world) makeSibling(name string) child {
	w.t.Helper()
	w.must(w.client.Do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		l := &netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: name, ParentIndex: eth0.Attrs().Index}, Mode: netlink.MACVLAN_MODE_BRIDGE}
		if err := netlink.LinkAdd(l); err != nil {
			return err
		}
		// Else it greets its neighbours, which counts too.
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0); err != nil {
			return err
		}
		return netlink.LinkSetUp(l)
	}))
	return w.child(name)
}

func (w *world) parentMAC() (mac net.HardwareAddr) {
	w.t.Helper()
	w.must(w.lab.Outside().Do(func() error {
		l, err := netlink.LinkByName(lab.Uplink)
		if err == nil {
			mac = l.Attrs().HardwareAddr
		}
		return err
	}))
	return mac
}

func (w *world) macOf(p *lab.Pod) (mac net.HardwareAddr) {
	w.t.Helper()
	w.must(p.Do(func() error {
		l, err := netlink.LinkByName("eth0")
		if err == nil {
			mac = l.Attrs().HardwareAddr
		}
		return err
	}))
	return mac
}

// frame is an Ethernet frame with a UDP datagram over IPv4.
type frame struct {
	srcMAC, dstMAC net.HardwareAddr
	src, dst       netip.Addr
}

func (f frame) bytes() []byte {
	b := make([]byte, 14+20+8)
	copy(b, f.dstMAC)
	copy(b[6:], f.srcMAC)
	binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IP)
	ip := b[14:]
	ip[0], ip[8], ip[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(ip[2:], 28)
	src, dst := f.src.As4(), f.dst.As4()
	copy(ip[12:], src[:])
	copy(ip[16:], dst[:])
	var sum uint32
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum>>16+sum))
	binary.BigEndian.PutUint16(ip[20:], 40000)
	binary.BigEndian.PutUint16(ip[22:], 9)
	binary.BigEndian.PutUint16(ip[24:], 8)
	return b
}

func (w *world) bypass(c child, f frame) { w.send(c, f, true) }

// send puts a frame on an interface of the client pod by a packet socket.
func (w *world) send(c child, f frame, bypass bool) {
	w.t.Helper()
	w.must(w.client.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if bypass {
			if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
				return fmt.Errorf("PACKET_QDISC_BYPASS: %w", err)
			}
		}
		err = unix.Sendto(fd, f.bytes(), 0, &unix.SockaddrLinklayer{Ifindex: c.index, Protocol: 8, Halen: 6})
		if errors.Is(err, unix.ENOBUFS) {
			err = nil // how the kernel says that a program on the way dropped it
		}
		return err
	}))
}

// drops is how many packets the node dropped for a reason in a direction.
func (w *world) drops(reason, direction string) (n uint64) {
	w.t.Helper()
	out, err := w.lab.Mustang(context.Background(), "status", "-o", "json")
	w.must(err)
	var status struct {
		Drops []struct {
			Reason, Direction string
			Packets           uint64
		}
	}
	w.must(json.Unmarshal(out, &status))
	for _, d := range status.Drops {
		if d.Reason == reason && d.Direction == direction {
			n += d.Packets
		}
	}
	return n
}

// counts runs fn, and wants packets to be dropped for the reason: one, or more where the
// interface has begun to look for neighbours.
func (w *world) counts(reason, direction string, fn func()) {
	w.t.Helper()
	before := w.drops(reason, direction)
	fn()
	deadline := time.Now().Add(patience)
	for w.drops(reason, direction) == before && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	if w.drops(reason, direction) == before {
		w.t.Errorf("no packet was dropped as %s (%s)", reason, direction)
	}
}

// outside is a connection from the pod out of the node, and one from there into it.
func (w *world) outside() {
	w.t.Helper()
	out := w.lab.Outside()
	addr := out.IPv4
	if w.ipv6 {
		addr = out.IPv6
	}
	var l net.Listener
	w.must(out.Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	}))
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			fmt.Fprintln(c, plain(c.RemoteAddr()).Addr())
			c.Close()
		}
	}()
	c, err := dial(w.client, "tcp", plain(l.Addr()), 0)
	w.must(err)
	defer c.Close()
	var seen string
	if _, err := fmt.Fscanln(c, &seen); err != nil || seen != address(w.client, w.ipv6).String() {
		w.t.Errorf("outside saw %q, %v; want the pod's address", seen, err)
	}
	var in net.Conn
	w.must(out.Do(func() (err error) {
		d := net.Dialer{Timeout: patience, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0))}
		in, err = d.Dial("tcp", w.direct(0).String())
		return err
	}))
	defer in.Close()
	in.SetDeadline(time.Now().Add(patience))
	name, client, err := who(in)
	w.must(err)
	if name != w.servers[0].Name || client.Addr() != addr {
		w.t.Errorf("from outside: %s answered and saw %s", name, client)
	}
}
