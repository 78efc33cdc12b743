// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"encoding/binary"
	"hash/crc32"
)

// Sum is the Internet checksum over all of the data at once (RFC 1071): every
// byte is added, nothing is carried over from an earlier sum.
func Sum(parts ...[]byte) uint16 {
	var sum uint64
	odd := false
	for _, part := range parts {
		for _, b := range part {
			if odd {
				sum += uint64(b)
			} else {
				sum += uint64(b) << 8
			}
			odd = !odd
		}
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// SumState is what a checksum field says about its packet.
type SumState int

const (
	SumNone SumState = iota // no checksum: UDP's or SCTP's zero, or a protocol without one
	SumGood
	SumBad
)

func (s SumState) String() string { return [...]string{"none", "good", "bad"}[s] }

// Sums checks a packet's checksums: IPv4's header, and the transport's over
// the whole datagram. A fragment's transport checksum cannot be checked.
func Sums(frame []byte, h Headers) (ip, l4 SumState) {
	if h.V6 {
		ip = SumNone
	} else if ip = SumBad; Sum(frame[14:h.NetEnd]) == 0 {
		ip = SumGood
	}
	if h.Frag != Whole {
		return ip, SumNone
	}
	segment := frame[h.L4:h.End]
	pseudo := pseudoHeader(h, len(segment))
	switch h.Proto {
	case TCP, ICMPv6:
	case UDP:
		if binary.BigEndian.Uint16(segment[6:]) == 0 {
			return ip, SumNone
		}
		segment = segment[:binary.BigEndian.Uint16(segment[4:])]
		pseudo = pseudoHeader(h, len(segment))
	case ICMP:
		pseudo = nil
	case SCTP:
		return ip, sumSCTP(segment)
	default:
		return ip, SumNone
	}
	if Sum(pseudo, segment) == 0 {
		return ip, SumGood
	}
	return ip, SumBad
}

// SumSCTP is the checksum of an SCTP packet (RFC 9260 appendix A), whatever its
// own field holds.
func SumSCTP(segment []byte) uint32 {
	p := append([]byte{}, segment...)
	clear(p[8:12])
	return crc32.Checksum(p, crc32.MakeTable(crc32.Castagnoli))
}

// sumSCTP takes a zero for a checksum that the device is to fill in.
func sumSCTP(segment []byte) SumState {
	switch binary.LittleEndian.Uint32(segment[8:]) {
	case 0:
		return SumNone
	case SumSCTP(segment):
		return SumGood
	}
	return SumBad
}

// pseudoHeader is RFC 9293 3.1's for IPv4 and RFC 8200 8.1's for IPv6.
func pseudoHeader(h Headers, length int) []byte {
	if h.V6 {
		src, dst := h.Src.As16(), h.Dst.As16()
		p := append(src[:], dst[:]...)
		p = binary.BigEndian.AppendUint32(p, uint32(length))
		return append(p, 0, 0, 0, h.Proto)
	}
	src, dst := h.Src.As4(), h.Dst.As4()
	p := append(src[:], dst[:]...)
	return append(p, 0, h.Proto, byte(length>>8), byte(length))
}
