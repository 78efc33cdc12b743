// SPDX-License-Identifier: Apache-2.0

package observe

// A packet to ask the programs about: the first of a flow, as a pod's kernel
// would send it.

import (
	"encoding/binary"
	"hash/crc32"
	"net"
	"net/netip"
)

// probe is what a packet is to be.
type probe struct {
	srcMAC, dstMAC net.HardwareAddr
	src, dst       netip.AddrPort // without ports for an echo request
	proto          uint8
}

const (
	ethLen   = 14
	ipv4Len  = 20
	ipv6Len  = 40
	tcpSYN   = 2
	ttl      = 64
	echoType = 8
	echoV6   = 128
)

// frame is the packet with its link header; checksums are right.
func (p probe) frame() []byte {
	f := append(mac(p.dstMAC), mac(p.srcMAC)...)
	body := p.transport()
	if p.src.Addr().Is4() {
		f = append(f, 0x08, 0x00)
		f = append(f, 0x45, 0)
		f = binary.BigEndian.AppendUint16(f, uint16(ipv4Len+len(body)))
		f = append(f, 0, 1, 0x40, 0, ttl, p.proto, 0, 0)
		f = append(append(f, p.src.Addr().AsSlice()...), p.dst.Addr().AsSlice()...)
		binary.BigEndian.PutUint16(f[ethLen+10:], checksum(f[ethLen:], 0))
		return append(f, body...)
	}
	f = append(f, 0x86, 0xdd)
	f = append(f, 0x60, 0, 0, 0)
	f = binary.BigEndian.AppendUint16(f, uint16(len(body)))
	f = append(f, p.proto, ttl)
	f = append(append(f, p.src.Addr().AsSlice()...), p.dst.Addr().AsSlice()...)
	return append(f, body...)
}

func mac(a net.HardwareAddr) []byte { return append(make([]byte, 0, 128), a[:6]...) }

func (p probe) transport() []byte {
	var b []byte
	at := 0 // of the checksum
	switch p.proto {
	case protoTCP:
		b = binary.BigEndian.AppendUint16(b, p.src.Port())
		b = binary.BigEndian.AppendUint16(b, p.dst.Port())
		b = append(b, 0, 0, 0, 1, 0, 0, 0, 0, 5<<4, tcpSYN, 0xff, 0xff, 0, 0, 0, 0)
		at = 16
	case protoUDP:
		b = binary.BigEndian.AppendUint16(b, p.src.Port())
		b = binary.BigEndian.AppendUint16(b, p.dst.Port())
		b = append(b, 0, 8, 0, 0)
		at = 6
	case protoSCTP:
		return p.sctp()
	case protoICMP, protoICMPv6:
		kind := byte(echoType)
		if p.proto == protoICMPv6 {
			kind = echoV6
		}
		b = append(b, kind, 0, 0, 0)
		b = binary.BigEndian.AppendUint16(b, p.src.Port()) // the identifier
		b = append(b, 0, 1)
		at = 2
	}
	sum := uint32(0)
	if p.proto != protoICMP {
		sum = p.pseudo(len(b))
	}
	binary.BigEndian.PutUint16(b[at:], checksum(b, sum))
	return b
}

// sctp is a header with an INIT chunk (RFC 9260 3.1, 3.3.2).
func (p probe) sctp() []byte {
	b := binary.BigEndian.AppendUint16(nil, p.src.Port())
	b = binary.BigEndian.AppendUint16(b, p.dst.Port())
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)
	b = append(b, 1, 0, 0, 20, 0, 0, 0, 1, 0, 0, 0xff, 0xff, 0, 1, 0, 1, 0, 0, 0, 1)
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// pseudo sums what the transport's checksum covers of the IP header (RFC 9293
// 3.1, RFC 8200 8.1).
func (p probe) pseudo(length int) uint32 {
	b := append(p.src.Addr().AsSlice(), p.dst.Addr().AsSlice()...)
	return add(b, uint32(length)+uint32(p.proto))
}

func add(b []byte, sum uint32) uint32 {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	return sum
}

// checksum is the Internet checksum (RFC 1071) of an even number of bytes.
func checksum(b []byte, sum uint32) uint16 {
	sum = add(b, sum)
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// destination is where a frame goes.
func destination(frame []byte) netip.Addr { return addressIn(frame, ethLen+16, ethLen+24) }

// source is where a frame comes from.
func source(frame []byte) netip.Addr { return addressIn(frame, ethLen+12, ethLen+8) }

// innerSource is where a frame comes from that lies in a tunnel's (RFC 7348 5).
func innerSource(frame []byte) netip.Addr {
	outer := ipv4Len
	if len(frame) > ethLen && frame[ethLen]>>4 == 6 {
		outer = ipv6Len
	}
	const udpAndVXLAN = 8 + 8
	return source(frame[min(ethLen+outer+udpAndVXLAN, len(frame)):])
}

// addressIn is the address at the one place or, of IPv6, the other.
func addressIn(frame []byte, at4, at6 int) netip.Addr {
	from, to := at4, at4+4
	if len(frame) > ethLen && frame[ethLen]>>4 == 6 {
		from, to = at6, at6+16
	}
	if len(frame) < to {
		return netip.Addr{}
	}
	a, _ := netip.AddrFromSlice(frame[from:to])
	return a
}

// relink gives a frame other link addresses: a router's doing.
func relink(frame []byte, src, dst net.HardwareAddr) []byte {
	out := append([]byte{}, frame...)
	copy(out, dst)
	copy(out[6:], src)
	return out
}
