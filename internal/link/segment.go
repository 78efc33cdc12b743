// SPDX-License-Identifier: Apache-2.0

package link

// What is asked and told on a segment that the pods share with others: whether a
// router out there has the gateway's address, and that a pod has its addresses now.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// probes are sent probeEvery apart, and the last is waited for as long. RFC 5227 takes
// seconds, which no pod's start has.
const (
	probes     = 3
	probeEvery = 100 * time.Millisecond
)

// Of neighbour discovery (RFC 4861 4.3, 4.4).
const (
	ndSolicitation  = 135
	ndAdvertisement = 136
	ndOverride      = 0x20 // of an advertisement's flags
	ndTargetLink    = 2    // the option with the target's link address
	ndHopLimit      = 255
)

// withoutRouters leaves out the gateways' addresses that somebody on the segment of l has,
// where whoever named them may have meant that one. The node's own are not asked for.
func (b *builder) withoutRouters(l netlink.Link, gateways []netip.Prefix) ([]netip.Prefix, error) {
	if !b.Foreign || !OnSegment(b.Mode) || len(gateways) == 0 {
		return gateways, nil
	}
	has, err := netns.AddrsIn(b.node, l)
	if err != nil {
		return nil, fmt.Errorf("list addresses of %s: %w", l.Attrs().Name, err)
	}
	var ask []netip.Addr
	for _, p := range gateways {
		if !slices.ContainsFunc(has, func(x netlink.Addr) bool { return x.IP.Equal(p.Addr().AsSlice()) }) {
			ask = append(ask, p.Addr())
		}
	}
	on, err := b.asksBy(l)
	if err != nil {
		return nil, err
	}
	if on == nil || len(ask) == 0 {
		return gateways, nil
	}
	theirs, err := whoHas(on, ask)
	if err != nil {
		return nil, fmt.Errorf("ask by %s whether somebody has %v: %w", on.Attrs().Name, ask, err)
	}
	return slices.DeleteFunc(gateways, func(p netip.Prefix) bool { return slices.Contains(theirs, p.Addr()) }), nil
}

// asksBy is the interface that leads to the segment of l, the bridge or the shim; nil: there
// is nobody. A shim's parent: an answer to an ipvlan that names no address goes to it.
func (b *builder) asksBy(l netlink.Link) (netlink.Link, error) {
	if HasShim(b.Mode) {
		return must(b.node, b.Uplink)
	}
	all, err := list(b.node)
	if err != nil || !slices.ContainsFunc(all, func(x netlink.Link) bool { return x.Attrs().MasterIndex == l.Attrs().Index }) {
		return nil, err
	}
	return l, nil
}

// question asks for one address, by a packet socket.
type question struct {
	addr netip.Addr
	fd   int
	to   *unix.SockaddrLinklayer
	text []byte
}

// whoHas asks the segment that l leads to for addresses, in the name of nobody (RFC 5227
// 2.1.1, RFC 4862 5.4), and answers those that somebody has. It takes probes times
// probeEvery, unless all are answered before.
func whoHas(l netlink.Link, addrs []netip.Addr) (theirs []netip.Addr, err error) {
	var open []*question
	for _, a := range addrs {
		q, qerr := newQuestion(l, a)
		if qerr != nil {
			err = qerr
			break
		}
		defer unix.Close(q.fd)
		open = append(open, q)
	}
	for i := 0; i < probes && len(open) > 0 && err == nil; i++ {
		for _, q := range open {
			if e := unix.Sendto(q.fd, q.text, 0, q.to); e != nil && !errors.Is(e, unix.ENOBUFS) { // which is a lost packet
				return nil, e
			}
		}
		for end := time.Now().Add(probeEvery); len(open) > 0 && time.Now().Before(end) && err == nil; {
			err = awaitAny(open, time.Until(end))
			open = slices.DeleteFunc(open, func(q *question) bool {
				answered := q.answered()
				if answered {
					theirs = append(theirs, q.addr)
				}
				return answered
			})
		}
	}
	return theirs, err
}

// awaitAny returns when something has come, or the time is over.
func awaitAny(open []*question, d time.Duration) error {
	var fds []unix.PollFd
	for _, q := range open {
		fds = append(fds, unix.PollFd{Fd: int32(q.fd), Events: unix.POLLIN})
	}
	_, err := unix.Poll(fds, int(d/time.Millisecond)+1)
	if errors.Is(err, unix.EINTR) {
		err = nil
	}
	return err
}

// advertisements lets neighbour advertisements pass, and no other IPv6: an uplink has much.
var advertisements = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 14 + 6}, // next header
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_ICMPV6, Jf: 3},
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 14 + 40}, // type
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: ndAdvertisement, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 256},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

func newQuestion(l netlink.Link, a netip.Addr) (*question, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0) // hears nothing yet
	if err != nil {
		return nil, err
	}
	index := l.Attrs().Index
	q := &question{addr: a, fd: fd, to: &unix.SockaddrLinklayer{Ifindex: index, Halen: 6}}
	kind := uint16(unix.ETH_P_ARP)
	if a.Is4() {
		q.text = arpProbe(l.Attrs().HardwareAddr, a)
	} else {
		kind, q.text = unix.ETH_P_IPV6, solicitation(l.Attrs().HardwareAddr, a)
		group := unix.PacketMreq{Ifindex: int32(index), Type: unix.PACKET_MR_MULTICAST, Alen: 6, Address: [8]byte{0x33, 0x33, 5: 1}} // ff02::1, which is told
		err = errors.Join(
			unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(advertisements)), Filter: &advertisements[0]}),
			unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &group))
	}
	copy(q.to.Addr[:], q.text[:6])
	q.to.Protocol = binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, kind))
	if err == nil {
		err = unix.Bind(fd, q.to)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return q, nil
}

// answered reads what has come, until somebody says that the address is his: by any ARP
// packet that he sends under it, or by an advertisement. What is of a VLAN on the interface,
// or meant for a third, says nothing of this segment.
func (q *question) answered() bool {
	for frame := make([]byte, 256); ; {
		n, from, err := unix.Recvfrom(q.fd, frame, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return false
		}
		at, ok := from.(*unix.SockaddrLinklayer)
		if !ok || at.Ifindex != q.to.Ifindex || at.Pkttype == unix.PACKET_OTHERHOST {
			continue
		}
		said := frame[:n]
		switch {
		case q.addr.Is4() && n >= 42 && slices.Equal(said[28:32], q.addr.AsSlice()), // the sender's
			q.addr.Is6() && n >= 78 && said[21] == ndHopLimit && slices.Equal(said[62:78], q.addr.AsSlice()): // the target's
			return true
		}
	}
}

// arpProbe is a frame that asks for a in the name of 0.0.0.0.
func arpProbe(mac net.HardwareAddr, a netip.Addr) []byte {
	f := slices.Concat([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, mac, []byte{
		0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1, // ARP: of Ethernet and IPv4, a request
	}, mac)
	return append(append(f, make([]byte, 4+6)...), a.AsSlice()...)
}

// solicitation is a frame that asks for a in the name of ::.
func solicitation(mac net.HardwareAddr, a netip.Addr) []byte {
	target := a.As16()
	group := [16]byte{0: 0xff, 1: 2, 11: 1, 12: 0xff, 13: target[13], 14: target[14], 15: target[15]}
	msg := append([]byte{ndSolicitation, 7: 0}, target[:]...)
	binary.BigEndian.PutUint16(msg[2:], checksum6(netip.IPv6Unspecified().As16(), group, msg))
	f := slices.Concat([]byte{0x33, 0x33}, group[12:], mac, []byte{0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(msg)), unix.IPPROTO_ICMPV6, ndHopLimit})
	return slices.Concat(f, make([]byte, 16), group[:], msg)
}

// checksum6 is that of an ICMPv6 message, whose length is even (RFC 8200 8.1).
func checksum6(src, dst [16]byte, msg []byte) uint16 {
	sum := uint32(len(msg)) + unix.IPPROTO_ICMPV6
	for _, part := range [][]byte{src[:], dst[:], msg} {
		for ; len(part) > 1; part = part[2:] {
			sum += uint32(binary.BigEndian.Uint16(part))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// announce tells the segment who has the pod's addresses now: another may have had them,
// whom the neighbours remember. The endpoint is known by then, so its programs let it say
// so. Who does not hear it (a device without a carrier yet tells nobody) asks when he
// forgets: so no failure is one. Not by a packet socket: closing one takes a grace period,
// as long as all of an ADD in mode bridge.
func (b *builder) announce(index int, mac net.HardwareAddr) {
	if !OnSegment(b.Mode) {
		return
	}
	if b.IPv4.IsValid() {
		// The kernel asks for a neighbour at once, under the pod's own address: who asks for
		// himself announces himself (RFC 5227 3). Left there, it would ask twice more.
		self := &netlink.Neigh{LinkIndex: index, Family: unix.AF_INET, IP: b.IPv4.Addr().AsSlice(), Flags: unix.NTF_USE}
		if b.pod.NeighSet(self) == nil {
			_ = b.pod.NeighDel(self)
		}
	}
	if b.IPv6.IsValid() && !b.IPv6.Addr().IsLinkLocalUnicast() {
		_ = b.inPod(func() error { return advertise(index, mac, b.IPv6.Addr()) })
	}
}

// advertise sends an unsolicited advertisement of a (RFC 4861 7.2.6) from the calling
// thread's namespace. The kernel fills in the checksum.
func advertise(index int, mac net.HardwareAddr, a netip.Addr) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, ndHopLimit); err != nil {
		return err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet6{Addr: a.As16()}); err != nil {
		return err
	}
	msg := slices.Concat([]byte{ndAdvertisement, 4: ndOverride, 7: 0}, a.AsSlice(), []byte{ndTargetLink, 1}, mac)
	return unix.Sendto(fd, msg, 0, &unix.SockaddrInet6{Addr: [16]byte{0: 0xff, 1: 2, 15: 1}, ZoneId: uint32(index)})
}
