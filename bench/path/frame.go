// SPDX-License-Identifier: Apache-2.0

package path

import (
	"encoding/binary"
	"net"
	"net/netip"
)

// TCP flags (RFC 9293 3.1).
const (
	tcpSYN = 0x02
	tcpACK = 0x10
	tcpPSH = 0x08
)

const ethLen, ipv4Len, ipv6Len, tcpLen = 14, 20, 40, 20

// flow names both ends of a packet.
type flow struct{ from, to netip.AddrPort }

func (f flow) reversed() flow { return flow{f.to, f.from} }

// frame is an Ethernet frame with TCP, as a pod's request of one byte.
type frame struct {
	src, dst net.HardwareAddr
	flow
	flags   uint8
	control // what comes along with it
}

// portOffset is where a frame of this flow has its source port.
func (f flow) portOffset() int {
	if f.from.Addr().Is4() {
		return ethLen + ipv4Len
	}
	return ethLen + ipv6Len
}

// bytes builds the frame. TCP's checksum is left 0: programs change a checksum
// by differences and never look at it.
func (f frame) bytes() []byte {
	payload := 1
	if f.flags&tcpSYN != 0 {
		payload = 0
	}
	l4 := f.portOffset()
	b := make([]byte, l4+tcpLen+payload)
	copy(b, f.dst)
	copy(b[6:], f.src)
	ip, src, dst := b[ethLen:l4], f.from.Addr().AsSlice(), f.to.Addr().AsSlice()
	if f.from.Addr().Is4() {
		binary.BigEndian.PutUint16(b[12:], 0x0800)
		ip[0], ip[6], ip[8], ip[9] = 0x45, 0x40, 64, 6 // don't fragment, TTL, TCP
		binary.BigEndian.PutUint16(ip[2:], uint16(len(b)-ethLen))
		copy(ip[12:], src)
		copy(ip[16:], dst)
		binary.BigEndian.PutUint16(ip[10:], ^onesSum(ip))
	} else {
		binary.BigEndian.PutUint16(b[12:], 0x86dd)
		ip[0], ip[6], ip[7] = 0x60, 6, 64
		binary.BigEndian.PutUint16(ip[4:], uint16(len(b)-l4))
		copy(ip[8:], src)
		copy(ip[24:], dst)
	}
	tcp := b[l4:]
	binary.BigEndian.PutUint16(tcp, f.from.Port())
	binary.BigEndian.PutUint16(tcp[2:], f.to.Port())
	tcp[12], tcp[13] = tcpLen/4<<4, f.flags
	binary.BigEndian.PutUint16(tcp[14:], 512) // window
	return b
}

// onesSum is the one's complement sum of RFC 1071 over an even number of bytes.
func onesSum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// flowOf reads the ends of a frame that bytes built, or a program rewrote.
func flowOf(b []byte) flow {
	l4, addr := ethLen+ipv6Len, func(at int) netip.Addr { return netip.AddrFrom16([16]byte(b[ethLen+at : ethLen+at+16])) }
	first, second := 8, 24
	if b[ethLen]>>4 == 4 {
		l4, first, second = ethLen+ipv4Len, 12, 16
		addr = func(at int) netip.Addr { return netip.AddrFrom4([4]byte(b[ethLen+at : ethLen+at+4])) }
	}
	return flow{
		netip.AddrPortFrom(addr(first), binary.BigEndian.Uint16(b[l4:])),
		netip.AddrPortFrom(addr(second), binary.BigEndian.Uint16(b[l4+2:])),
	}
}
