// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// child is an interface inside the client pod.
type child struct {
	index int
	mac   net.HardwareAddr
}

func (w *world) child(name string) child { return w.linkIn(w.client.Space, name) }

// nodeLink is an interface of the node.
func (w *world) nodeLink(name string) child { return w.linkIn(w.lab.Node().Space, name) }

func (w *world) linkIn(s lab.Space, name string) (c child) {
	w.t.Helper()
	w.must(s.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err == nil {
			c = child{l.Attrs().Index, l.Attrs().HardwareAddr}
		}
		return err
	}))
	return c
}

// makeSibling is what a pod with CAP_NET_ADMIN can do: the kernel puts a child
// of a child next to it.
func (w *world) makeSibling(mode lab.Mode, name string) child {
	w.t.Helper()
	w.must(w.client.Do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		attrs := netlink.LinkAttrs{Name: name, ParentIndex: eth0.Attrs().Index}
		var l netlink.Link = &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}
		switch mode {
		case lab.IPVlan:
			l = &netlink.IPVlan{LinkAttrs: attrs, Mode: netlink.IPVLAN_MODE_L2}
		case lab.IPVlanL3:
			l = &netlink.IPVlan{LinkAttrs: attrs, Mode: netlink.IPVLAN_MODE_L3}
		}
		if err := netlink.LinkAdd(l); err != nil {
			return err
		}
		if mode == lab.Macvlan {
			// Else it greets its neighbours, which counts too.
			if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(l)
	}))
	return w.child(name)
}

// makePair gives the pod two ends of a wire, the first of which it forwards from.
func (w *world) makePair(first, second string) (a, b child) {
	w.t.Helper()
	w.must(w.client.Do(func() error {
		l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: first}, PeerName: second}
		err := netlink.LinkAdd(l)
		for _, name := range []string{first, second} {
			if l, missing := netlink.LinkByName(name); missing == nil {
				err = errors.Join(err, netlink.LinkSetUp(l))
			}
		}
		for path, value := range map[string]string{
			"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1",
			"ipv4/conf/all/rp_filter": "0", "ipv4/conf/" + first + "/rp_filter": "0",
		} {
			err = errors.Join(err, os.WriteFile("/proc/sys/net/"+path, []byte(value), 0))
		}
		return err
	}))
	return w.child(first), w.child(second)
}

// routeBy leads the pod to dst by an interface of its choice.
func (w *world) routeBy(name string, dst netip.Addr, mac net.HardwareAddr) {
	w.t.Helper()
	index := w.child(name).index
	w.must(w.client.Do(func() error {
		whole := &net.IPNet{IP: dst.AsSlice(), Mask: net.CIDRMask(dst.BitLen(), dst.BitLen())}
		return errors.Join(
			netlink.RouteReplace(&netlink.Route{LinkIndex: index, Dst: whole, Scope: netlink.SCOPE_LINK, Priority: 1}),
			netlink.NeighSet(&netlink.Neigh{LinkIndex: index, IP: dst.AsSlice(), HardwareAddr: mac, State: netlink.NUD_PERMANENT}))
	}))
}

func (w *world) remove(name string) {
	w.t.Helper()
	w.must(w.client.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}))
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

// frame is an Ethernet frame with a UDP datagram of either family.
type frame struct {
	srcMAC, dstMAC net.HardwareAddr
	src, dst       netip.Addr
}

func (f frame) bytes() []byte {
	udp := []byte{40000 >> 8, 40000 & 0xff, 0, 9, 0, 8, 0, 0}
	b := slices.Concat(f.dstMAC, f.srcMAC)
	if f.src.Is6() {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IPV6)
		b = append(b, 0x60, 0, 0, 0, 0, byte(len(udp)), unix.IPPROTO_UDP, 64)
		b = slices.Concat(b, f.src.AsSlice(), f.dst.AsSlice())
		return append(b, udp...)
	}
	b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IP)
	ip := []byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	ip = slices.Concat(ip, f.src.AsSlice(), f.dst.AsSlice())
	var sum uint32
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum>>16+sum))
	return slices.Concat(b, ip, udp)
}

// protocol is the frame's type in network order, as packet sockets want it.
func (f frame) protocol() uint16 {
	if f.src.Is6() {
		return bits.ReverseBytes16(unix.ETH_P_IPV6)
	}
	return bits.ReverseBytes16(unix.ETH_P_IP)
}

func (w *world) bypass(c child, f frame) { w.send(c, f, true) }

// send puts a frame on an interface of the client pod by a packet socket.
func (w *world) send(c child, f frame, bypass bool) {
	w.t.Helper()
	w.put(c, f.bytes(), f.protocol(), bypass)
}

// put is send of any bytes; protocol is what the socket says of them.
func (w *world) put(c child, b []byte, protocol uint16, bypass bool) {
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
		err = unix.Sendto(fd, b, 0, &unix.SockaddrLinklayer{Ifindex: c.index, Protocol: protocol, Halen: 6})
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
