// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"

	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// Packet builds a frame, from the outside in:
//
//	Eth(src, dst).IP(a, b).TCP(1000, 80, oracle.SYN).Payload(10).Frame()
//
// Lengths and checksums come out right unless a knob says otherwise.
type Packet struct {
	eth  []byte
	v6   bool
	src  netip.Addr
	dst  netip.Addr
	opts []byte // IPv4
	ext  []extension
	frag *fragment

	proto uint8
	l4    []byte
	load  []byte
	pad   int

	edits []func(frame []byte, l4 int)
	noSum bool
	badL4 bool
	badIP bool
}

type extension struct {
	kind uint8
	body []byte // from the third byte on
}

type fragment struct {
	off  int // bytes
	more bool
	id   uint32
}

// Eth starts a frame.
func Eth(src, dst [6]byte) *Packet {
	return &Packet{eth: append(append([]byte{}, dst[:]...), src[:]...)}
}

// VLAN puts an 802.1Q tag into the frame.
func (p *Packet) VLAN(id uint16) *Packet {
	p.eth = append(p.eth[:12], 0x81, 0, byte(id>>8), byte(id))
	return p
}

// Raw ends the frame with an EtherType and bytes of any kind.
func (p *Packet) Raw(ethertype uint16, body []byte) []byte {
	return append(binary.BigEndian.AppendUint16(p.eth, ethertype), body...)
}

// IP gives both addresses; their family is the packet's.
func (p *Packet) IP(src, dst netip.Addr) *Packet {
	p.src, p.dst, p.v6 = src, dst, src.Is6()
	return p
}

// Options adds IPv4 options: a multiple of 4 bytes.
func (p *Packet) Options(b []byte) *Packet {
	p.opts = b
	return p
}

// Ext adds an IPv6 extension header of so many bytes, in the order of calls.
func (p *Packet) Ext(kind uint8, length int) *Packet {
	p.ext = append(p.ext, extension{kind, make([]byte, length-2)})
	return p
}

// Fragment makes the packet a part of a datagram: an offset in bytes, whether
// more follow, and the identification. On IPv6 it comes after the headers
// added so far.
func (p *Packet) Fragment(off int, more bool, id uint32) *Packet {
	p.frag = &fragment{off, more, id}
	if p.v6 {
		body := binary.BigEndian.AppendUint16(nil, uint16(off))
		if more {
			body[1] |= 1
		}
		p.ext = append(p.ext, extension{oracle.Fragment, binary.BigEndian.AppendUint32(body, id)})
	}
	return p
}

// TCP adds a header with options, a multiple of 4 bytes.
func (p *Packet) TCP(sport, dport uint16, flags uint8, options ...byte) *Packet {
	p.proto = oracle.TCP
	h := binary.BigEndian.AppendUint16(nil, sport)
	h = binary.BigEndian.AppendUint16(h, dport)
	h = append(h, 0, 0, 0, 1, 0, 0, 0, 2, byte(20+len(options))/4<<4, flags, 0xff, 0xff, 0, 0, 0, 0)
	p.l4 = append(h, options...)
	return p
}

// UDP adds a header.
func (p *Packet) UDP(sport, dport uint16) *Packet {
	p.proto = oracle.UDP
	h := binary.BigEndian.AppendUint16(nil, sport)
	h = binary.BigEndian.AppendUint16(h, dport)
	p.l4 = append(h, 0, 0, 0, 0)
	return p
}

// SCTP adds a header and the head of a chunk (RFC 9260 3.1, 3.2); of INIT, all of it.
func (p *Packet) SCTP(sport, dport uint16, chunk uint8) *Packet {
	p.proto = oracle.SCTP
	h := binary.BigEndian.AppendUint16(nil, sport)
	h = binary.BigEndian.AppendUint16(h, dport)
	p.l4 = append(h, 0, 0, 0, 9, 0, 0, 0, 0, chunk, 0, 0, 4)
	if chunk == oracle.Init { // has no tag yet, but says which one it wants
		p.l4[7], p.l4[15] = 0, 20
		p.l4 = append(p.l4, 0, 0, 0, 8, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1)
	}
	return p
}

// chunkOf is a chunk that does to an association what TCP's flags do to a connection.
func chunkOf(flags uint8) uint8 {
	switch {
	case flags&oracle.RST != 0:
		return oracle.Abort
	case flags&oracle.FIN != 0:
		return oracle.ShutdownComplete
	case flags&(oracle.SYN|oracle.ACK) == oracle.SYN:
		return oracle.Init
	case flags&oracle.SYN != 0:
		return oracle.InitAck
	}
	return oracle.Data
}

// Echo adds an echo request, or its reply.
func (p *Packet) Echo(id uint16, reply bool) *Packet {
	kind := uint8(8)
	switch {
	case p.v6 && reply:
		kind = 129
	case p.v6:
		kind = 128
	case reply:
		kind = 0
	}
	return p.ICMP(kind, 0, uint32(id)<<16|1)
}

// ICMP adds any message of the packet's family.
func (p *Packet) ICMP(kind, code uint8, rest uint32) *Packet {
	p.proto = oracle.ICMP
	if p.v6 {
		p.proto = oracle.ICMPv6
	}
	p.l4 = binary.BigEndian.AppendUint32([]byte{kind, code, 0, 0}, rest)
	return p
}

// Proto adds another protocol, without a header of its own.
func (p *Packet) Proto(proto uint8) *Packet {
	p.proto, p.l4 = proto, nil
	return p
}

// L4 adds a header by protocol and port, for tests that run over both.
func (p *Packet) L4(proto uint8, sport, dport uint16, flags uint8) *Packet {
	switch proto {
	case oracle.TCP:
		return p.TCP(sport, dport, flags)
	case oracle.UDP:
		return p.UDP(sport, dport)
	case oracle.SCTP:
		return p.SCTP(sport, dport, chunkOf(flags))
	}
	return p.Echo(sport, flags&oracle.ACK != 0)
}

// Payload adds so many bytes.
func (p *Packet) Payload(n int) *Packet {
	p.load = make([]byte, n)
	for i := range p.load {
		p.load[i] = byte(i*7 + 3)
	}
	return p
}

// Data adds these bytes.
func (p *Packet) Data(b []byte) *Packet {
	p.load = b
	return p
}

// Pad adds bytes after the IP packet, as Ethernet does to short frames.
func (p *Packet) Pad(n int) *Packet {
	p.pad = n
	return p
}

// NoSum leaves the transport checksum zero.
func (p *Packet) NoSum() *Packet { p.noSum = true; return p }

// BadSum makes the transport checksum wrong.
func (p *Packet) BadSum() *Packet { p.badL4 = true; return p }

// BadIPSum makes IPv4's header checksum wrong.
func (p *Packet) BadIPSum() *Packet { p.badIP = true; return p }

// Byte overwrites a byte, counted from the end of the link header.
func (p *Packet) Byte(off int, v byte) *Packet {
	return p.edit(func(frame []byte, _ int) { frame[len(p.eth)+2+off] = v })
}

// L4Byte overwrites a byte, counted from the start of the transport header.
func (p *Packet) L4Byte(off int, v byte) *Packet {
	return p.edit(func(frame []byte, l4 int) { frame[l4+off] = v })
}

// TotalLen sets IPv4's total length or IPv6's payload length.
func (p *Packet) TotalLen(n int) *Packet {
	off := 2
	if p.v6 {
		off = 4
	}
	return p.Byte(off, byte(n>>8)).Byte(off+1, byte(n))
}

// UDPLen sets UDP's length.
func (p *Packet) UDPLen(n int) *Packet { return p.L4Byte(4, byte(n>>8)).L4Byte(5, byte(n)) }

func (p *Packet) edit(f func(frame []byte, l4 int)) *Packet {
	p.edits = append(p.edits, f)
	return p
}

// Frame is the packet's bytes.
func (p *Packet) Frame() []byte {
	segment := append(append([]byte{}, p.l4...), p.load...)
	if p.proto == oracle.UDP && len(p.l4) > 0 {
		binary.BigEndian.PutUint16(segment[4:], uint16(len(segment)))
	}
	p.sum(segment)
	var frame []byte
	if p.v6 {
		frame = p.header6(segment)
	} else {
		frame = p.header4(segment)
	}
	l4 := len(frame)
	frame = append(frame, segment...)
	frame = append(frame, make([]byte, p.pad)...)
	for _, e := range p.edits {
		e(frame, l4)
	}
	return frame
}

func (p *Packet) sum(segment []byte) {
	if p.proto == oracle.SCTP && len(p.l4) > 0 && !p.noSum {
		sum := crc32.Checksum(segment, crc32.MakeTable(crc32.Castagnoli))
		if p.badL4 {
			sum ^= 0x5a5aa5a5
		}
		binary.LittleEndian.PutUint32(segment[8:], sum)
	}
	off := map[uint8]int{oracle.TCP: 16, oracle.UDP: 6, oracle.ICMP: 2, oracle.ICMPv6: 2}[p.proto]
	if off == 0 || len(p.l4) == 0 || p.noSum {
		return
	}
	var pseudo []byte
	if p.proto != oracle.ICMP {
		pseudo = append(p.src.AsSlice(), p.dst.AsSlice()...)
		pseudo = append(pseudo, 0, p.proto, byte(len(segment)>>8), byte(len(segment)))
	}
	sum := oracle.Sum(pseudo, segment)
	if p.badL4 {
		sum ^= 0x5a5a
	}
	if sum == 0 && p.proto == oracle.UDP {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(segment[off:], sum)
}

func (p *Packet) header4(segment []byte) []byte {
	h := []byte{byte(4<<4 | (20+len(p.opts))/4), 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, p.proto, 0, 0}
	binary.BigEndian.PutUint16(h[2:], uint16(20+len(p.opts)+len(segment)))
	if p.frag != nil {
		word := uint16(p.frag.off / 8)
		if p.frag.more {
			word |= 0x2000
		}
		binary.BigEndian.PutUint16(h[4:], uint16(p.frag.id))
		binary.BigEndian.PutUint16(h[6:], word)
	}
	h = append(append(h, p.src.AsSlice()...), p.dst.AsSlice()...)
	h = append(h, p.opts...)
	sum := oracle.Sum(h)
	if p.badIP {
		sum ^= 0x3c3c
	}
	binary.BigEndian.PutUint16(h[10:], sum)
	return append(append(append([]byte{}, p.eth...), 0x08, 0x00), h...)
}

func (p *Packet) header6(segment []byte) []byte {
	kinds := make([]uint8, 0, len(p.ext)+1)
	for _, e := range p.ext {
		kinds = append(kinds, e.kind)
	}
	kinds = append(kinds, p.proto)
	var chain []byte
	for i, e := range p.ext {
		length := byte((len(e.body)+2)/8 - 1)
		switch e.kind {
		case oracle.Fragment:
			length = 0
		case oracle.AH:
			length = byte((len(e.body)+2)/4 - 2)
		}
		chain = append(append(chain, kinds[i+1], length), e.body...)
	}
	h := []byte{6 << 4, 0, 0, 0, 0, 0, kinds[0], 64}
	binary.BigEndian.PutUint16(h[4:], uint16(len(chain)+len(segment)))
	h = append(append(h, p.src.AsSlice()...), p.dst.AsSlice()...)
	return append(append(append(append([]byte{}, p.eth...), 0x86, 0xdd), h...), chain...)
}
