// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// Fragments whose first one comes last, as a wire may deliver them, reach a pod all
// the same: also where the first is to be judged (the pod is isolated), and where it
// is to be translated (the answer comes back through a Service by packet).
func TestFragmentsWhoseFirstComesLast(t *testing.T) {
	for _, join := range []lab.Join{{Mode: "direct", HostRouting: "ebpf"}, {Mode: "vxlan", HostRouting: "ebpf"},
		{Mode: "direct", HostRouting: "legacy"}, {Mode: "vxlan", HostRouting: "legacy"}} {
		t.Run(join.Mode+"/"+join.HostRouting, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, join)
			for _, n := range w.lab.Nodes() {
				// As many distributions have it: each device is at least this strict.
				w.run(&n.Space, "sysctl -qw net.ipv4.conf.all.rp_filter=1")
			}
			for _, name := range []string{"open", "isolated"} {
				if name == "isolated" {
					w.policy(fmt.Sprintf("[{from: [{ipBlock: {cidr: %s/32}}, {ipBlock: {cidr: %s/128}}]}]", w.client.IPv4, w.client.IPv6))
				}
				for family, ipv6 := range families {
					t.Run(name+"/"+family, func(t *testing.T) {
						sub := w.on(t, ipv6)
						for range 3 {
							sub.lastFirst()
						}
						sub.lastFirstBack()
					})
				}
			}
			foe := w.by(podPlace(w.near)).on(t, false)
			if got := foe.sentLastFirst(); got != nil {
				t.Errorf("%d bytes of whom policy keeps out reached the pod", len(got))
			}
		})
	}
}

// lastFirst sends from the client's node to the far pod.
func (w *world) lastFirst() {
	w.t.Helper()
	data := noise(4000)
	if got := w.sentLastFirst(); !bytes.Equal(got, data) {
		w.t.Errorf("%d bytes came, not the %d that were sent", len(got), len(data))
	}
}

// sentLastFirst is what comes of a datagram to the far pod: nil, nothing did.
func (w *world) sentLastFirst() []byte {
	w.t.Helper()
	u := w.by(podPlace(w.far)).listenUDP()
	defer u.Close()
	w.inject(w.lab.Nodes()[0], netip.AddrPortFrom(w.me(), 5000), plain(u.LocalAddr()), noise(4000))
	u.SetReadDeadline(time.Now().Add(slow(time.Second)))
	buf := make([]byte, 65536)
	n, _, err := u.ReadFrom(buf)
	if err != nil {
		return nil
	}
	return buf[:n]
}

// lastFirstBack asks the far pod through its Service; the second answer is ours.
func (w *world) lastFirstBack() {
	w.t.Helper()
	u := w.listenUDP()
	defer u.Close()
	w.exchange(u, w.vip(w.far), []byte("who"))
	data := noise(4000)
	w.inject(w.lab.Nodes()[1], w.direct(w.far), plain(u.LocalAddr()), data)
	u.SetReadDeadline(time.Now().Add(slow(time.Second)))
	buf := make([]byte, 65536)
	n, from, err := u.ReadFrom(buf)
	if err != nil || plain(from) != w.vip(w.far) || !bytes.Equal(buf[:n], data) {
		w.t.Errorf("through the Service: %d bytes from %v, %v", n, from, err)
	}
}

var datagramID uint16

// inject sends a datagram from a node, as if a pod of its had, in fragments, the last one first.
func (w *world) inject(n *lab.Node, from, to netip.AddrPort, data []byte) {
	w.t.Helper()
	pieces := cut(from, to, data)
	slices.Reverse(pieces)
	w.raw(&n.Space, to.Addr(), pieces)
}

// piece is how many bytes of a datagram a fragment has.
const piece = 1000

// cut makes a datagram, and fragments of it.
func cut(from, to netip.AddrPort, data []byte) (pieces [][]byte) {
	udp := make([]byte, 8, 8+len(data))
	binary.BigEndian.PutUint16(udp, from.Port())
	binary.BigEndian.PutUint16(udp[2:], to.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(8+len(data)))
	udp = append(udp, data...)
	binary.BigEndian.PutUint16(udp[6:], udpSum(from.Addr(), to.Addr(), udp))
	datagramID++
	for off := 0; off < len(udp); off += piece {
		more := off+piece < len(udp)
		pieces = append(pieces, fragment(from.Addr(), to.Addr(), off, more, udp[off:min(off+piece, len(udp))]))
	}
	return pieces
}

// raw sends whole packets from a namespace.
func (w *world) raw(s *lab.Space, to netip.Addr, packets [][]byte) {
	w.t.Helper()
	w.must(s.Do(func() error {
		var at unix.Sockaddr
		family := unix.AF_INET
		if to.Is4() {
			at = &unix.SockaddrInet4{Addr: to.As4()}
		} else {
			family, at = unix.AF_INET6, &unix.SockaddrInet6{Addr: to.As16()}
		}
		fd, err := unix.Socket(family, unix.SOCK_RAW, unix.IPPROTO_RAW) // takes whole packets
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for _, p := range packets {
			if err := unix.Sendto(fd, p, 0, at); err != nil {
				return err
			}
		}
		return nil
	}))
}

// fragment is a packet with a part of a datagram.
func fragment(from, to netip.Addr, off int, more bool, part []byte) []byte {
	flag := uint16(0)
	if more {
		flag = 1
	}
	if from.Is4() {
		p := make([]byte, 20, 20+len(part))
		p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP
		binary.BigEndian.PutUint16(p[2:], uint16(20+len(part)))
		binary.BigEndian.PutUint16(p[4:], datagramID)
		binary.BigEndian.PutUint16(p[6:], flag<<13|uint16(off/8))
		copy(p[12:], from.AsSlice())
		copy(p[16:], to.AsSlice())
		return append(p, part...) // the kernel fills in the checksum
	}
	p := make([]byte, 48, 48+len(part))
	p[0], p[6], p[7] = 0x60, unix.IPPROTO_FRAGMENT, 64
	binary.BigEndian.PutUint16(p[4:], uint16(8+len(part)))
	copy(p[8:], from.AsSlice())
	copy(p[24:], to.AsSlice())
	p[40] = unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(p[42:], uint16(off)|flag)
	binary.BigEndian.PutUint32(p[44:], uint32(datagramID))
	return append(p, part...)
}

// udpSum is the checksum of a datagram whose own is 0 (RFC 768, RFC 8200 8.1).
func udpSum(from, to netip.Addr, udp []byte) uint16 {
	text := append(append([]byte{}, from.AsSlice()...), to.AsSlice()...)
	text = append(text, 0, unix.IPPROTO_UDP, byte(len(udp)>>8), byte(len(udp)))
	text = append(text, udp...)
	if len(text)%2 != 0 {
		text = append(text, 0)
	}
	sum := uint32(0)
	for i := 0; i < len(text); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(text[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
