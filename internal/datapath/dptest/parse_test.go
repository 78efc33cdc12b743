// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// hook is one of the four places where packets are read.
type hook struct {
	name string
	net  *Network
	prog *ebpf.Program
	dir  uint32
}

// eachHook runs a test at the host's end and inside the pod, in both directions.
// Packets are pod 1's own, or for it from pod 2: see frames.
func eachHook(t *testing.T, f func(t *testing.T, h hook)) {
	for _, inPod := range []bool{false, true} {
		net := usualNetwork(t, way{inPod: inPod})
		for dir, prog := range []*ebpf.Program{net.PodPrograms.FromPod, net.PodPrograms.ToPod} {
			h := hook{net: net, prog: prog, dir: uint32(dir)}
			h.name = map[bool]string{false: "host", true: "inner"}[inPod] +
				map[int]string{0: "_from_pod", 1: "_to_pod"}[dir]
			net.ClearFlows(t)
			t.Run(h.name, func(t *testing.T) { f(t, h) })
		}
	}
}

// run sends a frame from pod 2 through the hook: out of pod 2, or into pod 1.
func (h hook) run(t testing.TB, frame []byte, c Context) Result {
	t.Helper()
	c.Endpoint = 2
	if h.dir == bpfgen.DirToPod {
		c.Endpoint = 1
	}
	r, err := h.net.Run(h.prog, frame, c)
	if errors.Is(err, unix.EINVAL) && len(frame) < 54 {
		whole := append(append([]byte{}, frame...), make([]byte, 54)...)
		r, err = h.net.RunCut(h.prog, whole, len(frame), c)
	}
	if err != nil {
		t.Fatalf("%d bytes: %v", len(frame), err)
	}
	return r
}

// start is a frame of pod 2 to pod 1.
func start(v6 bool) *Packet {
	from, to := NewPod(2), NewPod(1)
	return Eth(from.MAC, from.NodeMAC).IP(from.IP(v6), to.IP(v6))
}

type shape struct {
	name string
	p    func() *Packet
}

// shapes are well-formed packets with every header that the parser knows.
func shapes() []shape {
	v4, v6 := func() *Packet { return start(false) }, func() *Packet { return start(true) }
	all := []shape{
		{"ipv4_options_4", func() *Packet { return v4().Options(make([]byte, 4)).TCP(1, 2, oracle.SYN) }},
		{"ipv4_options_40", func() *Packet { return v4().Options(make([]byte, 40)).TCP(1, 2, oracle.SYN).Payload(5) }},
		{"ipv4_options_udp", func() *Packet { return v4().Options(make([]byte, 12)).UDP(1, 2).Payload(3) }},
		{"ipv4_options_echo", func() *Packet { return v4().Options(make([]byte, 8)).Echo(9, false) }},
		{"ipv4_padded", func() *Packet { return v4().TCP(1, 2, oracle.SYN).Pad(6) }},
		{"ipv6_padded", func() *Packet { return v6().TCP(1, 2, oracle.SYN).Pad(6) }},
	}
	for name, base := range map[string]func() *Packet{"ipv4": v4, "ipv6": v6} {
		all = append(all,
			shape{name + "_tcp", func() *Packet { return base().TCP(1, 2, oracle.SYN) }},
			shape{name + "_tcp_data", func() *Packet { return base().TCP(1, 2, oracle.ACK).Payload(40) }},
			shape{name + "_tcp_options", func() *Packet { return base().TCP(1, 2, oracle.SYN, make([]byte, 12)...) }},
			shape{name + "_tcp_options_40", func() *Packet { return base().TCP(1, 2, oracle.SYN, make([]byte, 40)...).Payload(2) }},
			shape{name + "_udp", func() *Packet { return base().UDP(1, 2) }},
			shape{name + "_udp_data", func() *Packet { return base().UDP(1, 2).Payload(11) }},
			shape{name + "_echo", func() *Packet { return base().Echo(7, false).Payload(8) }},
			shape{name + "_echo_reply", func() *Packet { return base().Echo(7, true) }},
			shape{name + "_sctp", func() *Packet { return base().Proto(132).Payload(16) }},
			shape{name + "_esp", func() *Packet { return base().Proto(50).Payload(16) }},
			shape{name + "_first_fragment", func() *Packet { return base().Fragment(0, true, 5).UDP(1, 2).Payload(16) }},
		)
	}
	for name, kinds := range map[string][]uint8{
		"hbh": {oracle.HopByHop}, "dst": {oracle.DestOpts}, "rt": {oracle.Routing}, "ah": {oracle.AH},
		"hbh_dst_rt_dst": {oracle.HopByHop, oracle.DestOpts, oracle.Routing, oracle.DestOpts},
		"six":            {oracle.HopByHop, oracle.DestOpts, oracle.Routing, oracle.AH, oracle.DestOpts, oracle.DestOpts},
	} {
		for i, length := range []int{8, 24, 64} {
			base := func() *Packet {
				p := v6()
				for _, k := range kinds {
					p.Ext(k, length)
				}
				return p
			}
			all = append(all,
				shape{fmt.Sprintf("ipv6_%s_%d_tcp", name, i), func() *Packet { return base().TCP(1, 2, oracle.SYN) }},
				shape{fmt.Sprintf("ipv6_%s_%d_udp", name, i), func() *Packet { return base().UDP(1, 2).Payload(1) }},
				shape{fmt.Sprintf("ipv6_%s_%d_echo", name, i), func() *Packet { return base().Echo(3, false) }})
		}
	}
	return append(all,
		shape{"ipv6_atomic_fragment", func() *Packet { return v6().Fragment(0, false, 5).TCP(1, 2, oracle.SYN) }},
		shape{"ipv6_no_next_header", func() *Packet { return v6().Proto(59) }},
		shape{"ipv6_hbh_fragment_dst", func() *Packet {
			return v6().Ext(oracle.HopByHop, 8).Fragment(0, true, 8).Ext(oracle.DestOpts, 16).UDP(1, 2).Payload(32)
		}})
}

func TestEveryHeaderShapeIsUnderstood(t *testing.T) {
	eachHook(t, func(t *testing.T, h hook) {
		for _, s := range shapes() {
			h.net.ClearFlows(t)
			r := h.run(t, s.p().Frame(), Context{})
			if r.Verdict == Drop {
				t.Errorf("%s: %v", s.name, r)
			}
		}
	})
}

func TestEveryTruncationIsDroppedAndCounted(t *testing.T) {
	eachHook(t, func(t *testing.T, h hook) {
		cases := 0
		for _, s := range shapes() {
			frame := s.p().Frame()
			for n := 14; n <= len(frame); n++ {
				_, fault := oracle.Parse(frame[:n])
				h.expectFault(t, fmt.Sprintf("%s cut to %d of %d bytes", s.name, n, len(frame)), frame[:n], fault)
				cases++
			}
			h.leftNothing(t, s.name)
		}
		t.Logf("%d truncations", cases)
	})
}

// expectFault: dropped, counted and under the right name; or, without a fault, not for a parse reason.
func (h hook) expectFault(t *testing.T, what string, frame []byte, fault oracle.Fault) {
	t.Helper()
	if fault == "" {
		h.leftNothing(t, what+", the ones before")
		defer h.net.ClearFlows(t)
	}
	var before uint64
	number := reasonNumber(string(fault))
	if fault != "" {
		before = h.net.Drops(t, number, h.dir)
	}
	r := h.run(t, frame, Context{})
	switch {
	case fault == "" && r.Verdict == Drop && isParseReason(r.Reason):
		t.Errorf("%s: %v, but it is well-formed", what, r)
	case fault != "" && (r.Verdict != Drop || r.Reason != number):
		t.Errorf("%s: %v, want drop %s", what, r, fault)
	case fault != "" && h.net.Drops(t, number, h.dir) != before+1:
		t.Errorf("%s: dropped, but not counted", what)
	}
}

// leftNothing: whatever was dropped left no flow behind.
func (h hook) leftNothing(t *testing.T, what string) {
	t.Helper()
	if flows := h.net.Flows(t); len(flows) != 0 {
		t.Errorf("%s: dropped, but there are flows: %+v", what, flows)
		h.net.ClearFlows(t)
	}
}

func reasonNumber(name string) uint32 {
	for _, r := range bpfgen.Reasons {
		if r.Name == name {
			return r.Number
		}
	}
	return bpfgen.ReasonNone
}

func isParseReason(reason uint32) bool {
	return reason >= bpfgen.ReasonEthertype && reason <= bpfgen.ReasonExtHeaders ||
		reason == bpfgen.ReasonFragTiny || reason == bpfgen.ReasonFragOverlap
}

func TestWrongLengthsAndFieldsAreDropped(t *testing.T) {
	v4, v6 := func() *Packet { return start(false) }, func() *Packet { return start(true) }
	syn := uint8(oracle.SYN)
	cases := []struct {
		name string
		p    *Packet
		want oracle.Fault
	}{
		{"ipv4 version 5", v4().TCP(1, 2, syn).Byte(0, 0x55), oracle.FaultHeader},
		{"ipv4 header of 16 bytes", v4().TCP(1, 2, syn).Byte(0, 0x44), oracle.FaultHeader},
		{"ipv4 header past the end", v4().UDP(1, 2).Byte(0, 0x4f), oracle.FaultLength},
		{"ipv4 total shorter than its header", v4().TCP(1, 2, syn).TotalLen(19), oracle.FaultLength},
		{"ipv4 total 0", v4().TCP(1, 2, syn).TotalLen(0), oracle.FaultLength},
		{"ipv4 total over the frame", v4().TCP(1, 2, syn).TotalLen(41), oracle.FaultLength},
		{"ipv4 total inside tcp", v4().TCP(1, 2, syn).TotalLen(39), oracle.FaultTruncated},
		{"ipv4 with icmpv6", v4().Proto(oracle.ICMPv6).Payload(8), oracle.FaultHeader},
		{"ipv6 version 4", v6().TCP(1, 2, syn).Byte(0, 0x40), oracle.FaultHeader},
		{"ipv6 payload over the frame", v6().TCP(1, 2, syn).TotalLen(21), oracle.FaultLength},
		{"ipv6 payload 0", v6().TCP(1, 2, syn).TotalLen(0), oracle.FaultTruncated},
		{"ipv6 payload inside tcp", v6().TCP(1, 2, syn).TotalLen(19), oracle.FaultTruncated},
		{"ipv6 with icmp of ipv4", v6().Proto(oracle.ICMP).Payload(8), oracle.FaultHeader},
		{"ipv6 hop-by-hop not first", v6().Ext(oracle.DestOpts, 8).Ext(oracle.HopByHop, 8).TCP(1, 2, syn), oracle.FaultHeader},
		{"ipv6 extension past the end", v6().Ext(oracle.DestOpts, 8).TCP(1, 2, syn).Byte(41, 9), oracle.FaultTruncated},
		{"ipv6 authentication header past the end", v6().Ext(oracle.AH, 12).TCP(1, 2, syn).Byte(41, 200), oracle.FaultTruncated},
		{"tcp header of 16 bytes", v4().TCP(1, 2, syn).L4Byte(12, 4<<4), oracle.FaultHeader},
		{"tcp options past the end", v4().TCP(1, 2, syn).L4Byte(12, 6<<4), oracle.FaultLength},
		{"tcp options past the end, ipv6", v6().TCP(1, 2, syn).L4Byte(12, 15<<4), oracle.FaultLength},
		{"udp length 7", v4().UDP(1, 2).Payload(4).UDPLen(7), oracle.FaultLength},
		{"udp length over the packet", v4().UDP(1, 2).Payload(4).UDPLen(13), oracle.FaultLength},
		{"udp length into the padding", v4().UDP(1, 2).Payload(4).UDPLen(13).Pad(10), oracle.FaultLength},
		{"udp length over the packet, ipv6", v6().UDP(1, 2).Payload(4).UDPLen(13), oracle.FaultLength},
		{"udp length 0", v4().UDP(1, 2).Payload(4).UDPLen(0), oracle.FaultLength},
		{"udp length 0, ipv6", v6().UDP(1, 2).Payload(4).UDPLen(0), oracle.FaultLength},
		{"first fragment of udp, length 7", v4().Fragment(0, true, 1).UDP(1, 2).Payload(8).UDPLen(7), oracle.FaultLength},
		{"first fragment with half of tcp", v4().Fragment(0, true, 1).TCP(1, 2, syn).TotalLen(36), oracle.FaultTiny},
		{"first fragment with half of tcp, ipv6", v6().Fragment(0, true, 1).TCP(1, 2, syn).TotalLen(24), oracle.FaultTiny},
		{"fragment over tcp's flags", v4().Fragment(8, true, 1).Proto(oracle.TCP).Payload(16), oracle.FaultOverlap},
		{"fragment over tcp's flags, ipv6", v6().Fragment(16, false, 1).Proto(oracle.TCP).Payload(16), oracle.FaultOverlap},
	}
	seven := v6()
	for range 7 {
		seven.Ext(oracle.DestOpts, 8)
	}
	long := v6().Ext(oracle.DestOpts, 1000)
	cases = append(cases, []struct {
		name string
		p    *Packet
		want oracle.Fault
	}{
		{"seven extension headers", seven.TCP(1, 2, syn), oracle.FaultChain},
		{"a thousand bytes of extension headers", long.TCP(1, 2, syn), oracle.FaultChain},
	}...)
	eachHook(t, func(t *testing.T, h hook) {
		for _, c := range cases {
			frame := c.p.Frame()
			if _, fault := oracle.Parse(frame); fault != c.want {
				t.Errorf("%s: the oracle says %q, want %q", c.name, fault, c.want)
			}
			h.expectFault(t, c.name, frame, c.want)
			h.leftNothing(t, c.name)
		}
	})
}

func TestOnlyKnownEtherTypesPass(t *testing.T) {
	from := NewPod(2)
	eth := func() *Packet { return Eth(from.MAC, from.NodeMAC) }
	eachHook(t, func(t *testing.T, h hook) {
		for name, frame := range map[string][]byte{
			"vlan":    start(false).VLAN(5).TCP(1, 2, oracle.SYN).Frame(),
			"mpls":    eth().Raw(0x8847, make([]byte, 40)),
			"ipx":     eth().Raw(0x8137, make([]byte, 40)),
			"802.3":   eth().Raw(40, make([]byte, 40)),
			"nothing": eth().Raw(0x88b5, nil),
		} {
			h.expectFault(t, name, frame, oracle.FaultEthertype)
			h.leftNothing(t, name)
		}
		if r := h.run(t, eth().Raw(0x0806, make([]byte, 28)), Context{}); r.Verdict != Next {
			t.Errorf("ARP: %v", r)
		}
	})
}

func TestIPv4MappedAddressesOnTheWireAreDropped(t *testing.T) {
	mapped := NewPod(2).IP4.As16()
	eachHook(t, func(t *testing.T, h hook) {
		for name, off := range map[string]int{"source": 8, "destination": 24} {
			p := start(true).TCP(1, 2, oracle.SYN)
			for i, b := range mapped {
				p.Byte(off+i, b)
			}
			h.expectFault(t, "mapped "+name, p.Frame(), oracle.FaultHeader)
			h.leftNothing(t, "mapped "+name)
		}
	})
}

func TestOffloadedBundlesMayHaveNoLength(t *testing.T) {
	eachHook(t, func(t *testing.T, h hook) {
		for _, v6 := range []bool{false, true} {
			h.net.ClearFlows(t)
			frame := start(v6).TCP(1, 2, oracle.ACK).Payload(3000).TotalLen(0).Frame()
			r := h.run(t, frame, Context{GSOSize: 1400, GSOSegs: 3})
			if r.Verdict == Drop {
				t.Errorf("ipv6 %v: a bundle without a length: %v", v6, r)
			}
		}
	})
}

func TestHeadersOutsideTheLinearPartAreRead(t *testing.T) {
	eachHook(t, func(t *testing.T, h hook) {
		for _, s := range shapes() {
			frame := s.p().Payload(3000).Frame()
			want, fault := oracle.Parse(frame)
			for _, linear := range []uint32{14, 20, 34, 54, 60} {
				h.net.ClearFlows(t)
				c := Context{Linear: linear, Endpoint: 2 - h.dir}
				r, err := h.net.Run(h.prog, frame, c)
				if err != nil {
					t.Skipf("this kernel's test run takes no packet in parts: %v", err)
				}
				if fault == "" && r.Verdict == Drop {
					t.Errorf("%s, %d bytes linear: %v", s.name, linear, r)
				}
				if fault == "" && want.Frag == oracle.Whole && len(h.net.Flows(t)) != 1 {
					t.Errorf("%s, %d bytes linear: no flow entry", s.name, linear)
				}
			}
		}
	})
}
