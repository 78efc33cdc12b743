// SPDX-License-Identifier: Apache-2.0

// Package oracle is a plain, slow, obvious model of what the datapath must do
// to a packet: its own parser, its own checksums, its own list of connections.
// It shares nothing with what it checks, and imports nothing of ours.
package oracle

import (
	"encoding/binary"
	"net/netip"
)

// Protocol numbers (IANA).
const (
	HopByHop = 0
	ICMP     = 1
	TCP      = 6
	UDP      = 17
	Routing  = 43
	Fragment = 44
	AH       = 51
	ICMPv6   = 58
	DestOpts = 60
	SCTP     = 132
)

// Which part of a datagram a packet is.
const (
	Whole = iota
	First
	Later
)

// TCP flags.
const (
	FIN = 1
	SYN = 2
	RST = 4
	PSH = 8
	ACK = 16
)

// SCTP chunks (RFC 9260 3.2).
const (
	Data             = 0
	Init             = 1
	InitAck          = 2
	Abort            = 6
	ShutdownComplete = 14
)

// ChunkFlags are TCP's flags that do to a connection what a chunk does to an
// association.
func ChunkFlags(chunk uint8) uint8 {
	switch chunk {
	case Init:
		return SYN
	case InitAck:
		return SYN | ACK
	case Abort, ShutdownComplete:
		return RST
	}
	return ACK
}

// Headers is what a well-formed packet says.
type Headers struct {
	V6       bool
	Src, Dst netip.Addr
	Proto    uint8 // of the transport header, or for a later fragment what its header names
	Sport    uint16
	Dport    uint16
	Flags    uint8 // TCP's, or those that SCTP's first chunk comes to
	Frag     int
	FragID   uint32
	FragOff  int // bytes
	NetEnd   int // end of IPv4's header, with its options
	L4       int // offset of the transport header
	End      int // of the IP packet, in the frame
	Control  bool
	Hops     uint8 // IPv6's hop limit
	Error    bool  // an ICMP error
	ARP      bool
}

// Fault is why a packet is not well-formed; "" when it is. The names are the
// datapath's reasons.
type Fault string

const (
	FaultEthertype Fault = "ethertype"
	FaultTruncated Fault = "truncated"
	FaultLength    Fault = "bad_length"
	FaultHeader    Fault = "bad_header"
	FaultChain     Fault = "ext_headers"
	FaultTiny      Fault = "frag_tiny"
	FaultOverlap   Fault = "frag_overlap"
)

const maxExtHeaders = 6

// Parse reads a frame without segmentation offload.
func Parse(frame []byte) (Headers, Fault) {
	if len(frame) < 14 {
		return Headers{}, FaultTruncated
	}
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0806:
		return Headers{ARP: true, Control: true}, ""
	case 0x0800:
		return parse4(frame)
	case 0x86dd:
		return parse6(frame)
	}
	return Headers{}, FaultEthertype
}

func parse4(frame []byte) (h Headers, fault Fault) {
	ip := frame[14:]
	if len(ip) < 20 {
		return h, FaultTruncated
	}
	header := int(ip[0]&15) * 4
	if ip[0]>>4 != 4 || header < 20 {
		return h, FaultHeader
	}
	total := int(binary.BigEndian.Uint16(ip[2:]))
	if total < header || total > len(ip) {
		return h, FaultLength
	}
	h.Src, h.Dst = netip.AddrFrom4([4]byte(ip[12:16])), netip.AddrFrom4([4]byte(ip[16:20]))
	h.Proto = ip[9]
	h.NetEnd, h.L4, h.End = 14+header, 14+header, 14+total
	h.Control = h.Dst.IsMulticast() || h.Dst == netip.AddrFrom4([4]byte{255, 255, 255, 255})
	if h.Proto == ICMPv6 {
		return h, FaultHeader
	}
	word := binary.BigEndian.Uint16(ip[6:])
	h.FragOff = int(word&0x1fff) * 8
	h.FragID = uint32(binary.BigEndian.Uint16(ip[4:]))
	if h.FragOff > 0 {
		return later(h)
	}
	if word&0x2000 != 0 {
		h.Frag = First
	}
	return transport(frame, h)
}

func later(h Headers) (Headers, Fault) {
	h.Frag = Later
	if h.Proto == TCP && h.FragOff < 20 {
		return h, FaultOverlap
	}
	return h, ""
}

func parse6(frame []byte) (h Headers, fault Fault) {
	ip := frame[14:]
	if len(ip) < 40 {
		return h, FaultTruncated
	}
	if ip[0]>>4 != 6 {
		return h, FaultHeader
	}
	payload := int(binary.BigEndian.Uint16(ip[4:]))
	if payload > len(ip)-40 {
		return h, FaultLength
	}
	h.V6 = true
	h.Src, h.Dst = netip.AddrFrom16([16]byte(ip[8:24])), netip.AddrFrom16([16]byte(ip[24:40]))
	if h.Src.Is4In6() || h.Dst.Is4In6() {
		return h, FaultHeader
	}
	h.Control = h.Dst.IsMulticast()
	h.Proto, h.Hops = ip[6], ip[7]
	h.NetEnd, h.L4, h.End = 54, 54, 54+payload
	if h, fault = chain(frame, h); fault != "" || h.Frag == Later {
		return h, fault
	}
	if h.Proto == ICMP {
		return h, FaultHeader
	}
	return transport(frame, h)
}

// chain follows the extension headers (RFC 8200 4, RFC 4302 2.2).
func chain(frame []byte, h Headers) (Headers, Fault) {
	for n := 0; ; n++ {
		switch h.Proto {
		case HopByHop, Routing, DestOpts, Fragment, AH:
		default:
			return h, ""
		}
		if n == maxExtHeaders {
			return h, FaultChain
		}
		if h.Proto == HopByHop && n > 0 {
			return h, FaultHeader
		}
		if h.L4+8 > h.End {
			return h, FaultTruncated
		}
		e := frame[h.L4:]
		length := (int(e[1]) + 1) * 8
		switch h.Proto {
		case Fragment:
			length = 8
		case AH:
			length = (int(e[1]) + 2) * 4
		}
		kind := h.Proto
		h.Proto = e[0]
		h.L4 += length
		if kind == Fragment {
			word := binary.BigEndian.Uint16(e[2:])
			h.FragOff = int(word &^ 7)
			if h.FragOff > 0 {
				h.FragID = binary.BigEndian.Uint32(e[4:])
				return later(h)
			}
			if word&1 != 0 {
				h.Frag = First
				h.FragID = binary.BigEndian.Uint32(e[4:])
			}
		}
		if h.L4 > h.End {
			return h, FaultTruncated
		}
		if h.L4 > 1023-20 {
			return h, FaultChain
		}
	}
}

func transport(frame []byte, h Headers) (Headers, Fault) {
	need := map[uint8]int{TCP: 20, UDP: 8, SCTP: 16, ICMP: 8, ICMPv6: 8}[h.Proto]
	if need == 0 {
		return h, ""
	}
	if h.L4+need > h.End {
		if h.Frag == First {
			return h, FaultTiny
		}
		return h, FaultTruncated
	}
	l4 := frame[h.L4:h.End]
	switch h.Proto {
	case TCP:
		return transportTCP(l4, h)
	case SCTP:
		h.Sport, h.Dport, h.Flags = binary.BigEndian.Uint16(l4), binary.BigEndian.Uint16(l4[2:]), ChunkFlags(l4[12])
		return h, ""
	case UDP:
		h.Sport, h.Dport = binary.BigEndian.Uint16(l4), binary.BigEndian.Uint16(l4[2:])
		length := int(binary.BigEndian.Uint16(l4[4:]))
		if length < 8 || h.Frag == Whole && length > len(l4) {
			return h, FaultLength
		}
		return h, ""
	}
	return transportICMP(l4, h)
}

func transportTCP(l4 []byte, h Headers) (Headers, Fault) {
	h.Sport, h.Dport = binary.BigEndian.Uint16(l4), binary.BigEndian.Uint16(l4[2:])
	h.Flags = l4[13]
	header := int(l4[12]>>4) * 4
	if header < 20 {
		return h, FaultHeader
	}
	if header > len(l4) {
		return h, FaultLength
	}
	return h, ""
}

// ofNeighbours: discovery that no router has passed on. RFC 4861 wants the most hops left, of multicast listeners
// RFC 3810 a source that no router forwards; RFC 6980 wants neither in fragments.
func ofNeighbours(kind byte, h Headers) bool {
	switch kind {
	case 133, 134, 135, 136, 137:
		return h.Hops == 255 && h.Frag == Whole
	case 130, 131, 132, 143:
		return h.Src.IsLinkLocalUnicast() && h.Frag == Whole
	}
	return false
}

// transportICMP: an echo's identifier serves as both ports, another message's
// type as its destination's.
func transportICMP(l4 []byte, h Headers) (Headers, Fault) {
	kind := l4[0]
	echo := kind == 0 || kind == 8
	if h.Proto == ICMPv6 {
		echo = kind == 128 || kind == 129
		h.Error = kind < 128
		h.Control = h.Control || ofNeighbours(kind, h)
	} else {
		h.Error = kind == 3 || kind == 4 || kind == 5 || kind == 11 || kind == 12
	}
	if echo {
		id := binary.BigEndian.Uint16(l4[4:])
		h.Sport, h.Dport = id, id
	} else {
		h.Dport = uint16(kind)
	}
	return h, ""
}
