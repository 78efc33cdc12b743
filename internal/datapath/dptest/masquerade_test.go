// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

const masqueradeGroup = 7

// masqueraded is a pod that opens a flow to the outside, whose node masquerades.
type masqueraded struct {
	outside
	pod  Pod
	from netip.AddrPort // as the pod sends
	to   netip.AddrPort
}

// eachMasqueraded runs fn for both families and all protocols, on one thread.
// Pods 1 and 2 are masqueraded, but not towards External(50), nor, as no pod is, towards External(51).
func eachMasqueraded(t *testing.T, fn func(m masqueraded)) {
	e := NewEdge(t, Options{}, 3)
	check(t, e.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf | bpfgen.NodeMasquerade}))
	check(t, e.MstWearV1.Put(e.Ifindex, bpfgen.PodWear{Ip4: toAddr(e.Node(false)), Ip6: toAddr(e.Node(true))}))
	for id := range uint32(2) {
		check(t, e.MstMasqueradeV1.Put(id+1, uint32(masqueradeGroup)))
	}
	for _, v6 := range []bool{false, true} {
		check(t, e.MstInsideV1.Put(bpfgen.PodInsideKey{Prefixlen: 32 + 128, Group: masqueradeGroup, Addr: toAddr(External(50, v6))}, uint8(1)))
		check(t, e.MstInsideV1.Put(bpfgen.PodInsideKey{Prefixlen: 32 + 128, Group: bpfgen.InsideAll, Addr: toAddr(External(51, v6))}, uint8(1)))
	}
	eachToOutside(t, e, fn)
}

// IPv4 lies in ::/0 as the table has it, and is masqueraded where that is inside.
func TestMasqueradeOfOneFamily(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		all := bpfgen.PodInsideKey{Prefixlen: 32, Group: masqueradeGroup}
		check(t, m.edge.MstInsideV1.Put(all, uint8(bpfgen.NetIpv6Only)))
		a := m.send(m.pod, m.from, m.to, syn)
		if keeps := a.Dropped == "" && a.Tuple().Src == m.from; keeps != m.v6 {
			t.Errorf("%v: it keeps its address: %v", a, keeps)
		}
		check(t, m.edge.MstInsideV1.Delete(all))
	})
}

// eachToOutside runs fn for both families and all protocols, with pod 1.
func eachToOutside(t *testing.T, e *Edge, fn func(m masqueraded)) {
	for _, v6 := range []bool{false, true} {
		for _, proto := range []uint8{oracle.TCP, oracle.UDP, oracle.SCTP, oracle.ICMP} {
			e.ClearFlows(t)
			to := uint16(80)
			if proto == oracle.ICMP {
				to = 4000
			}
			if proto == oracle.ICMP && v6 {
				proto = oracle.ICMPv6
			}
			pod := e.Pods[1]
			o := outside{speaker{t, e.Network, proto}, e, v6, netip.AddrPort{}, netip.AddrPort{}}
			fn(masqueraded{o, pod, end(pod.IP(v6), 4000), end(External(1, v6), to)})
		}
	}
}

// echo says whether ports are an identifier.
func (m masqueraded) echo() bool { return m.proto == oracle.ICMP || m.proto == oracle.ICMPv6 }

// open sends the flow's first packet, and returns both ends as the outside sees them.
func (m masqueraded) open(pod Pod, from, to netip.AddrPort) (worn, far netip.AddrPort) {
	m.t.Helper()
	a := m.answer(pod, from, to, syn)
	worn, far = m.worn(a), to
	if m.echo() {
		far = end(to.Addr(), worn.Port())
	}
	m.want("first", a, 0, worn, far)
	return worn, far
}

func TestAPodsFlowToTheOutsideWearsTheNodesAddress(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		worn, far := m.open(m.pod, m.from, m.to)
		m.want("answer", m.arrive(far, worn, syn|ack), m.pod.ID, m.to, m.from)
		for range 3 {
			a := m.answer(m.pod, m.from, m.to, ack)
			if m.echo() { // an echo's flags would make it a reply
				a = m.answer(m.pod, m.from, m.to, 0)
			}
			m.want("more", a, 0, worn, far)
			if got := hopLimit(a.Frame); got != 63 {
				m.t.Errorf("hop limit %d, want one less than 64", got)
			}
			m.want("more back", m.arrive(far, worn, ack), m.pod.ID, m.to, m.from)
		}
		for _, f := range m.edge.Flows(m.t) {
			if !f.Established {
				m.t.Errorf("%v is not promoted", f.Tuple())
			}
		}
		// Another pod's flow from the same port to the same end wears another.
		other := m.edge.Pods[2]
		next, nextFar := m.open(other, end(other.IP(m.v6), 4000), m.to)
		if next == worn {
			m.t.Errorf("two flows wear %v", worn)
		}
		m.want("its answer", m.arrive(nextFar, next, syn|ack), other.ID, m.to, end(other.IP(m.v6), 4000))
		// Who is not the other end of a flow reaches no pod by its port.
		if a := m.arrive(end(External(9, m.v6), far.Port()), worn, ack); a.Direct || a.Dropped != "" {
			m.t.Errorf("a stranger: %v", a)
		}
	})
}

func TestWhatIsNotOutsideKeepsThePodsAddress(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		third := m.edge.Pods[3]
		node := bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf}
		for what, try := range map[string]func(){
			"inside":        func() { m.to = end(External(50, m.v6), m.to.Port()) },
			"inside of all": func() { m.to = end(External(51, m.v6), m.to.Port()) },
			"the node":      func() { m.to = end(m.edge.Node(m.v6), m.to.Port()) },
			"no route": func() {
				m.to = end(netip.MustParseAddr(map[bool]string{false: "198.18.0.1", true: "2001:db8:ffff::1"}[m.v6]), m.to.Port())
			},
			"not masqueraded":   func() { m.pod, m.from = third, end(third.IP(m.v6), m.from.Port()) },
			"another device":    func() { check(m.t, m.edge.MstWearV1.Delete(m.edge.Ifindex)) },
			"the stack does it": func() { check(m.t, m.edge.MstNodeV1.Put(uint32(0), node)) },
		} {
			was := m
			m.edge.ClearFlows(m.t)
			try()
			for range 2 {
				a := m.answer(m.pod, m.from, m.to, syn)
				if a.Direct || a.Dropped != "" || a.Tuple().Src != m.from || a.Tuple().Dst != m.to {
					m.t.Errorf("%s: %v", what, a)
				}
			}
			m = was
			m.edge.ClearFlows(m.t)
			other := Eth(m.pod.MAC, Router).IP(m.from.Addr(), m.to.Addr()).L4(m.proto, m.from.Port(), m.to.Port(), syn).Payload(24)
			if a, err := m.edge.Answer(m.pod, other.Frame()); err != nil || a.Direct || a.Dropped != "" || a.Tuple().Src != m.from {
				m.t.Errorf("by another router: %v, %v", a, err)
			}
			check(m.t, m.edge.MstWearV1.Put(m.edge.Ifindex, bpfgen.PodWear{Ip4: toAddr(m.edge.Node(false)), Ip6: toAddr(m.edge.Node(true))}))
			check(m.t, m.edge.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf | bpfgen.NodeMasquerade}))
		}
	})
}

// A hop limit that runs out, a route that goes, a packet over the path's MTU:
// the stack answers, and so gets what the pod sent.
func TestWhatCannotLeaveIsTheStacksAsThePodSentIt(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		hop := 8
		if m.v6 {
			hop = 7
		}
		stuck := func(what string, p *Packet) {
			m.t.Helper()
			a, err := m.edge.Answer(m.pod, p.Frame())
			a = m.checked(a, err)
			if a.Direct || a.Dropped != "" || a.Tuple().Src != m.from || a.Tuple().Dst != m.to {
				m.t.Errorf("%s: %v", what, a)
			}
		}
		dies := func() *Packet { return m.packet(m.pod, m.from, m.to, syn) }
		if !m.v6 { // its checksum is of no interest
			dies = func() *Packet {
				p := m.packet(m.pod, m.from, m.to, syn)
				return p.edit(func(f []byte, _ int) {
					sum := binary.BigEndian.Uint16(f[14+10:])
					diff := uint32(sum) + 63<<8
					binary.BigEndian.PutUint16(f[14+10:], uint16(diff+diff>>16))
				})
			}
		}
		stuck("the first dies", dies().Byte(hop, 1))
		worn, far := m.open(m.pod, m.from, m.to)
		m.want("answer", m.arrive(far, worn, syn|ack), m.pod.ID, m.to, m.from)
		more := uint8(ack)
		if m.echo() {
			more = 0
		}
		m.want("more", m.answer(m.pod, m.from, m.to, more), 0, worn, far)
		p := m.packet(m.pod, m.from, m.to, more).Byte(hop, 1)
		if !m.v6 {
			p = m.packet(m.pod, m.from, m.to, more).edit(func(f []byte, _ int) {
				diff := uint32(binary.BigEndian.Uint16(f[14+10:])) + 63<<8
				f[14+8] = 1
				binary.BigEndian.PutUint16(f[14+10:], uint16(diff+diff>>16))
			})
		}
		stuck("a later one dies", p)
		told := func(what string, p *Packet) {
			m.t.Helper()
			a, err := m.edge.Answer(m.pod, p.Frame())
			a = m.checked(a, err)
			if !a.Refused || a.Dropped != ReasonName(bpfgen.ReasonTooLong) || !a.Headers.Error || a.Headers.Dst != m.from.Addr() {
				m.t.Errorf("%s: %v", what, a)
			}
		}
		if m.proto == oracle.TCP { // the pod has all resets of this second
			stray := end(m.from.Addr(), m.from.Port()+1)
			for tries := 0; tries < 20_000 && m.answer(m.pod, stray, m.to, ack).Refused; tries++ {
			}
		}
		// The stack might send it on, under the pod's own address: it knows the device alone, the lookup the path.
		told("too long", m.packet(m.pod, m.from, m.to, more).Payload(1800))
		if !m.v6 {
			told("too long, and may be cut", m.packet(m.pod, m.from, m.to, more).Payload(1800).edit(func(f []byte, _ int) {
				diff := uint32(binary.BigEndian.Uint16(f[14+10:])) + 0x4000
				f[14+6] &^= 0x40
				binary.BigEndian.PutUint16(f[14+10:], uint16(diff+diff>>16))
			}))
		}
		m.want("still", m.answer(m.pod, m.from, m.to, more), 0, worn, far)
	})
}

func TestAMasqueradedFlowBeginsWithItsFirstPacket(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		a := m.answer(m.pod, m.from, m.to, ack)
		if m.proto != oracle.TCP && m.proto != oracle.SCTP {
			return
		}
		m.dropped(a, bpfgen.ReasonMidstreamNAT)
		if !a.Refused {
			m.t.Errorf("%v: nobody tells the pod", a)
		}
	})
}

// What has no port, and is no echo, cannot leave under the node's address: nothing would tell its answer from others.
func TestWhatHasNoPortIsNotMasqueraded(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		if m.proto != oracle.UDP {
			return
		}
		to := func(a netip.Addr) *Packet { return Eth(m.pod.MAC, m.pod.NodeMAC).IP(m.from.Addr(), a) }
		question := uint8(13)
		if m.v6 {
			question = 139
		}
		for what, with := range map[string]func(p *Packet) *Packet{
			"GRE":                        func(p *Packet) *Packet { return p.Proto(47) },
			"ESP":                        func(p *Packet) *Packet { return p.Proto(50) },
			"UDP-Lite":                   func(p *Packet) *Packet { return p.Proto(136) },
			"a question that is no echo": func(p *Packet) *Packet { return p.ICMP(question, 0, 0x12340001) },
		} {
			a, err := m.edge.Answer(m.pod, with(to(m.to.Addr())).Payload(40).Frame())
			if flows := len(m.edge.Flows(t)); err != nil || a.Dropped != ReasonName(bpfgen.ReasonNATFailed) || flows > 0 {
				t.Errorf("v6=%v, %s: %v, %v, %d flows", m.v6, what, a, err, flows)
			}
			a, err = m.edge.Answer(m.pod, with(to(External(50, m.v6))).Payload(40).Frame())
			if err != nil || a.Dropped != "" || a.Direct {
				t.Errorf("v6=%v, %s, inside: %v, %v", m.v6, what, a, err)
			}
			m.edge.ClearFlows(t)
		}
	})
}

// Where the edge's ports are taken, flows wear others, which the NIC then knows.
func TestMasqueradeWearsMorePortsThanTheEdge(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		m.edge.Wear(m.t, EdgePorts.First, 1)
		defer m.edge.Wear(m.t, EdgePorts.First, EdgePorts.Count)
		open := func(pod Pod, port uint16) (from, to, worn, far netip.AddrPort) {
			m.t.Helper()
			from, to = end(pod.IP(m.v6), port), m.to
			a := m.answer(pod, from, to, syn)
			worn, far = a.Tuple().Src, a.Tuple().Dst
			if a.Dropped != "" || !a.Direct || worn.Addr() != m.edge.Node(m.v6) {
				m.t.Fatalf("%v", a)
			}
			return from, to, worn, far
		}
		_, _, worn, _ := open(m.pod, 4000)
		if worn.Port() != EdgePorts.First {
			m.t.Errorf("the first wears %v", worn)
		}
		other := m.edge.Pods[2]
		from, to, worn, far := open(other, 4000)
		if worn.Port() < 10000 || worn.Port() >= 30000 {
			m.t.Errorf("the second wears %v", worn)
		}
		for range 3 {
			// A stranger there finds the node, and is not remembered as finding nothing.
			if a := m.arrive(end(External(9, m.v6), 99), worn, syn); a.Direct || a.Dropped != "" {
				m.t.Errorf("a stranger: %v", a)
			}
			m.want("answer", m.arrive(far, worn, syn|ack), other.ID, to, from)
		}
		// The engine has read and written what else is marked there, while the flow began.
		check(m.t, m.edge.MstFrontendPortsV1.Put(uint32(worn.Port()/64), uint64(0)))
		m.edge.VoidFlows(m.t)
		m.answer(other, from, to, m.more())
		m.want("answer, marked again", m.arrive(far, worn, ack), other.ID, to, from)
		// A pod that goes gives back what it wore, whoever has its number then.
		heir := m.edge.Pods[3]
		heir.ID = m.pod.ID
		m.edge.RemovePod(m.t, m.pod)
		if m.proto%2 == 0 {
			m.edge.SetPod(m.t, heir)
		}
		if _, _, worn, _ = open(other, 4001); worn.Port() != EdgePorts.First {
			m.t.Errorf("after it is gone another wears %v", worn)
		}
		m.edge.RemovePod(m.t, heir)
		m.edge.SetPod(m.t, m.edge.Pods[3])
		m.edge.SetPod(m.t, m.pod)
	})
}

func TestAnswersToAPodThatIsGone(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		worn, far := m.open(m.pod, m.from, m.to)
		m.edge.RemovePod(m.t, m.pod)
		m.dropped(m.arrive(far, worn, syn|ack), bpfgen.ReasonNoEndpoint)
		m.edge.SetPod(m.t, m.pod)
	})
}

// A flow that wears an address which the node has lost is a new one under the next,
// or is refused.
func TestAWornAddressThatIsGone(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		worn, far := m.open(m.pod, m.from, m.to)
		more := uint8(ack)
		if m.echo() {
			more = 0
		}
		for range 2 {
			m.want("answer", m.arrive(far, worn, syn|ack), m.pod.ID, m.to, m.from)
			m.want("more", m.answer(m.pod, m.from, m.to, more), 0, worn, far)
		}
		own, next := m.edge.Node(m.v6), External(203, m.v6)
		wear := bpfgen.PodWear{Ip4: toAddr(External(203, false)), Ip6: toAddr(External(203, true))}
		m.edge.mark(m.t, own, 0)
		m.edge.mark(m.t, next, bpfgen.SvcAddress|bpfgen.SvcNode)
		check(m.t, m.edge.MstWearV1.Put(m.edge.Ifindex, wear))
		check(m.t, m.edge.MstEdgeV2.Put(uint32(bpfgen.EdgeWire), bpfgen.PodEdgeConfig{Ip4: wear.Ip4, Ip6: wear.Ip6, PortFirst: EdgePorts.First, PortCount: EdgePorts.Count}))
		defer m.edge.Wear(m.t, EdgePorts.First, EdgePorts.Count)
		m.edge.VoidFlows(m.t)
		a := m.answer(m.pod, m.from, m.to, more)
		if m.proto == oracle.TCP || m.proto == oracle.SCTP {
			m.dropped(a, bpfgen.ReasonMidstreamNAT)
		} else if a.Dropped != "" || !a.Direct || a.Tuple().Src.Addr() != next {
			m.t.Errorf("%v, want it from %v", a, next)
		}
		m.edge.mark(m.t, own, bpfgen.SvcAddress|bpfgen.SvcNode)
		m.edge.mark(m.t, next, 0)
		check(m.t, m.edge.MstWearV1.Put(m.edge.Ifindex, bpfgen.PodWear{Ip4: toAddr(m.edge.Node(false)), Ip6: toAddr(m.edge.Node(true))}))
	})
}

// A flow from before the tunnel does not lead into it.
func TestAFlowIsOlderThanTheTunnel(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		if m.proto != oracle.UDP {
			return
		}
		config := bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf | bpfgen.NodeMasquerade, Vni: tunnelID, Port: port(udpPort)}
		defer func() {
			config.Overlay = 0
			check(m.t, m.edge.MstNodeV1.Put(uint32(0), config))
		}()
		tunnel := end(m.to.Addr(), udpPort)
		for range 2 {
			if a := m.answer(m.pod, m.from, tunnel, 0); a.Dropped != "" {
				m.t.Fatalf("there is no tunnel: %v", a)
			}
		}
		config.Overlay = 77
		check(m.t, m.edge.MstNodeV1.Put(uint32(0), config))
		m.edge.VoidFlows(m.t)
		m.dropped(m.answer(m.pod, m.from, tunnel, 0), bpfgen.ReasonTunnelPort)
	})
}

func TestAServiceOutsideIsMasqueraded(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		if m.echo() {
			return
		}
		vip := end(VIP(1, m.v6), 443)
		m.edge.SetService(m.t, m.proto, vip, m.to)
		defer m.edge.RemoveService(m.t, m.proto, vip)
		a := m.answer(m.pod, m.from, vip, syn)
		worn := m.worn(a)
		m.want("first", a, 0, worn, m.to)
		for range 2 {
			m.want("answer", m.arrive(m.to, worn, syn|ack), m.pod.ID, vip, m.from)
			m.want("more", m.answer(m.pod, m.from, vip, ack), 0, worn, m.to)
		}
		for _, flags := range []uint8{ack, rst, syn} { // somebody on the wire speaks for the pod
			m.dropped(m.arrive(m.from, vip, flags), bpfgen.ReasonWireSpoofed)
		}
		m.want("more", m.answer(m.pod, m.from, vip, ack), 0, worn, m.to)
	})
}

func TestErrorsAboutMasqueradedFlows(t *testing.T) {
	eachMasqueraded(t, func(m masqueraded) {
		s := scene{speaker: m.speaker}
		kind, code, quoted := uint8(11), uint8(0), 60
		if m.v6 {
			kind, quoted = 3, 80
		}
		worn, far := m.open(m.pod, m.from, m.to)
		// From a router on the way.
		there := Eth(m.edge.MAC, Router).IP(worn.Addr(), far.Addr()).L4(m.proto, worn.Port(), far.Port(), 0).Payload(200)
		e := Eth(Router, m.edge.MAC).IP(External(9, m.v6), worn.Addr()).ICMP(kind, code, 0).Data(quote(there, quoted))
		a, err := m.edge.Arrive(e.Frame())
		s.quotes(m.checked(a, err), m.pod, Tuple{m.proto, m.from, m.to}, External(9, m.v6).String())
		// From the pod, about an answer.
		m.want("answer", m.arrive(far, worn, syn|ack), m.pod.ID, m.to, m.from)
		kind, code = 3, 3
		if m.v6 {
			kind, code = 1, 4
		}
		back := Eth(Router, m.pod.MAC).IP(m.to.Addr(), m.from.Addr()).L4(m.proto, m.to.Port(), m.from.Port(), ack).Payload(200)
		e = Eth(m.pod.MAC, m.pod.NodeMAC).IP(m.from.Addr(), m.to.Addr()).ICMP(kind, code, 0).Data(quote(back, quoted))
		a, err = m.edge.Answer(m.pod, e.Frame())
		a = m.checked(a, err)
		s.quotes(a, Pod{}, Tuple{m.proto, far, worn}, worn.Addr().String())
		if !a.Direct || a.Headers.Dst != far.Addr() {
			m.t.Errorf("the pod's error: %v", a)
		}
	})
}
