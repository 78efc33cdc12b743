// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// step is one event. Its numbers pick from what exists when it is played, so a
// list of steps stays playable when others are taken out of it.
type step struct {
	kind kind
	r    [6]uint32
}

type kind int

const (
	carryOn  kind = iota // another packet of a connection
	toVIP                // a first packet to a Service
	toPod                // a first packet straight to a pod or an outside host
	stray                // a packet out of nowhere
	fromHost             // a first packet from outside
	backends             // a Service's backends change
	passTime
	judge // an endpoint changes
)

var weights = []struct {
	kind
	weight int
}{{carryOn, 50}, {toVIP, 20}, {toPod, 12}, {stray, 4}, {fromHost, 4}, {backends, 4}, {passTime, 4}, {judge, 2}}

func randomSteps(rng *rand.Rand, n int) []step {
	steps := make([]step, n)
	for i := range steps {
		roll := rng.IntN(100)
		for _, w := range weights {
			if roll -= w.weight; roll < 0 {
				steps[i].kind = w.kind
				break
			}
		}
		for j := range steps[i].r {
			steps[i].r[j] = rng.Uint32()
		}
	}
	return steps
}

// play is one world: the programs' tables, and the oracle's.
type play struct {
	t     *testing.T
	net   *Network
	model *oracle.World
	lives int
	moved uint32
	cases int
	trace []string
}

const worldPods = 4

func newPlay(t *testing.T, net *Network) *play {
	net.Reset(t, worldPods)
	p := &play{t: t, net: net, model: &oracle.World{
		InPod: net.InPod,
		Timeouts: oracle.Timeouts{TCPHalfOpen: 60, TCPEstablished: 86400, TCPClosing: 120, TCPReset: 10,
			UDPHalfOpen: 30, UDPEstablished: 180, Other: 30},
		Pods:     map[netip.Addr]uint32{},
		Services: map[oracle.Service][]netip.AddrPort{},
		Backends: map[oracle.Service]int{},
		Affinity: map[oracle.Service]int64{},
		Silent:   map[oracle.Service]bool{},
	}}
	for i, s := range frontends() {
		if i%2 == 1 {
			p.model.Affinity[s], p.model.Silent[s] = affinityUnits, true
		}
	}
	for id, pod := range net.Pods {
		p.model.Pods[pod.IP4], p.model.Pods[pod.IP6] = id, id
	}
	for i, s := range frontends() {
		p.setBackends(s, uint32(i*7+3))
	}
	return p
}

// Of every two Services one has an affinity of so many seconds, which end after so
// many of the programs' own, and drops instead of refusing.
const (
	affinitySeconds = 100
	affinityUnits   = affinitySeconds*1_000_000_000>>bpfgen.SecondShift + 1
)

func frontends() []oracle.Service {
	var all []oracle.Service
	for _, v6 := range []bool{false, true} {
		all = append(all,
			oracle.Service{Proto: oracle.TCP, Addr: end(VIP(1, v6), 80)},
			oracle.Service{Proto: oracle.TCP, Addr: end(VIP(2, v6), 80)},
			oracle.Service{Proto: oracle.UDP, Addr: end(VIP(1, v6), 53)},
			oracle.Service{Proto: oracle.UDP, Addr: end(VIP(3, v6), 53)},
			oracle.Service{Proto: oracle.SCTP, Addr: end(VIP(1, v6), 8080)}, // the backends' own port
			oracle.Service{Proto: oracle.SCTP, Addr: end(VIP(2, v6), 8081)})
	}
	return all
}

// candidates of a Service's backends: pods 1 to 3, and a host outside.
func candidates(v6 bool) []netip.AddrPort {
	all := []netip.AddrPort{end(External(1, v6), 8080)}
	for n := 1; n <= 3; n++ {
		all = append(all, end(NewPod(n).IP(v6), 8080))
	}
	return all
}

// setBackends gives a Service those candidates whose bit is set.
func (p *play) setBackends(s oracle.Service, bits uint32) {
	var set []netip.AddrPort
	for i, b := range candidates(s.Addr.Addr().Is6()) {
		if bits>>i&1 == 1 {
			set = append(set, b)
		}
	}
	p.model.Services[s] = set
	var o ServiceOptions
	if p.model.Affinity[s] > 0 {
		o.Affinity = affinitySeconds
		if len(set) == 0 {
			o.Flags = bpfgen.SvcDrop
		}
	}
	p.net.SetServiceWith(p.t, o, s.Proto, s.Addr, set...)
	for _, b := range set {
		if key := (oracle.Service{Proto: s.Proto, Addr: b}); p.model.Backends[key] == 0 {
			p.lives++
			p.model.Backends[key] = p.lives
		}
	}
	if bits>>8&1 == 1 {
		p.forgetUnused()
	}
}

func (p *play) forgetUnused() {
	for b := range p.model.Backends {
		used := false
		for s, set := range p.model.Services {
			used = used || s.Proto == b.Proto && slices.Contains(set, b.Addr)
		}
		if !used {
			delete(p.model.Backends, b)
			p.net.ForgetBackend(p.t, b.Proto, b.Addr)
		}
	}
}

// do plays one step.
func (p *play) do(s step) error {
	r := s.r
	v6 := r[0]&1 == 1
	sport := uint16(1000 + r[1]%3)
	pod := p.net.byNumber(r[2])
	proto := []uint8{oracle.UDP, oracle.TCP, oracle.TCP, oracle.TCP, oracle.SCTP}[r[0]>>1%5]
	switch s.kind {
	case carryOn:
		return p.carryOn(r)
	case toVIP:
		dst := p.someFrontend(proto, v6, r[3])
		return p.send(oracle.Packet{Tuple: oracle.Tuple{Proto: proto, Src: end(pod.IP(v6), sport), Dst: dst}, Flags: syn, From: pod.ID}, r[4])
	case toPod, stray:
		dst := candidates(v6)[r[3]%4]
		t := oracle.Tuple{Proto: proto, Src: end(pod.IP(v6), sport), Dst: dst}
		if r[3]>>8&7 == 0 {
			t = echo(t)
		}
		flags := uint8(syn)
		if s.kind == stray {
			// No reset straight to a pod: how long such an entry lives depends on
			// how many hooks the packet passes, and does not matter.
			flags = []uint8{ack, syn | ack}[r[5]%2]
			if r[5]>>4&1 == 1 && (t.Proto == oracle.TCP || t.Proto == oracle.SCTP) {
				flags = []uint8{ack, fin | ack, rst, syn | ack}[r[5]%4]
				t.Dst = p.someFrontend(proto, v6, r[3])
			}
		}
		return p.send(oracle.Packet{Tuple: t, Flags: flags, From: pod.ID}, r[4])
	case fromHost:
		t := oracle.Tuple{Proto: proto, Src: end(External(1+int(r[3]%2), v6), sport), Dst: end(pod.IP(v6), 8080)}
		return p.send(oracle.Packet{Tuple: t, Flags: syn, To: pod.ID}, r[4])
	case backends:
		all := frontends()
		p.setBackends(all[r[3]%uint32(len(all))], r[4])
		p.note("backends of %v: %v", all[r[3]%uint32(len(all))], p.model.Services)
	case passTime:
		p.pass([]int64{1, 3, 8, 15, 35, 70, 130, 200, 90000}[r[3]%9])
	case judge:
		p.judge(pod, r[3])
	}
	return nil
}

func (p *play) someFrontend(proto uint8, v6 bool, r uint32) netip.AddrPort {
	if r>>8&31 == 0 {
		return end(VIP(1, v6), 81) // a port that no Service has
	}
	if proto == oracle.UDP {
		return end(VIP(1+2*int(r%2), v6), 53)
	}
	if proto == oracle.SCTP {
		return end(VIP(1+int(r%2), v6), 8080+uint16(r%2))
	}
	return end(VIP(1+int(r%2), v6), 80)
}

func echo(t oracle.Tuple) oracle.Tuple {
	t.Proto = oracle.ICMP
	if t.Src.Addr().Is6() {
		t.Proto = oracle.ICMPv6
	}
	t.Dst = end(t.Dst.Addr(), t.Src.Port())
	return t
}

// carryOn sends a packet of one end of a connection.
func (p *play) carryOn(r [6]uint32) error {
	if len(p.model.Conns) == 0 {
		return nil
	}
	c := p.model.Conns[r[0]%uint32(len(p.model.Conns))]
	pkt := oracle.Packet{Tuple: c.Pre, Flags: []uint8{ack, ack, ack, ack, fin | ack, fin | ack, rst, syn}[r[1]%8]}
	if r[2]&1 == 1 {
		pkt.Tuple = c.Post.Reverse()
		pkt.Flags = []uint8{ack, ack, ack, syn | ack, syn | ack, fin | ack, fin | ack, rst | ack}[r[1]%8]
	}
	pkt.From = p.model.Pods[pkt.Src.Addr()]
	if pkt.From == 0 {
		pkt.To = p.model.Pods[pkt.Dst.Addr()]
		if pkt.To == 0 {
			return nil
		}
	}
	return p.send(pkt, r[4])
}

// send sends a packet, and asks the oracle about what became of it.
func (p *play) send(pkt oracle.Packet, knobs uint32) error {
	if p.model.Ambiguous(pkt) {
		return nil
	}
	if pkt.Proto == oracle.SCTP {
		pkt.Flags = oracle.ChunkFlags(chunkOf(pkt.Flags))
	}
	p.cases++
	frame := p.frame(pkt, knobs)
	before, _ := oracle.Parse(frame)
	ip, l4 := oracle.Sums(frame, before)
	var a Arrival
	var err error
	if pkt.From != 0 {
		a, err = p.net.Send(p.net.Pods[pkt.From], frame)
	} else {
		a, err = p.net.Receive(p.net.Pods[pkt.To], frame)
	}
	got := oracle.Outcome{Drop: a.Dropped, Pod: a.Pod, Direct: a.Direct}
	if a.Dropped == "" {
		got.Tuple = oracle.Tuple(a.Tuple())
	}
	p.note("endpoint %d sends %v flags %#x: %v", pkt.From, pkt.Tuple, pkt.Flags, got)
	if err != nil {
		return err
	}
	if err := p.model.Packet(pkt, got); err != nil {
		return err
	}
	p.forgetDoubtful()
	return p.sums(a, ip, l4)
}

// sums: what was good is good, what was bad is bad, and none is none; an
// answer of our own is good.
func (p *play) sums(a Arrival, ip, l4 oracle.SumState) error {
	if a.Dropped != "" && !a.Refused {
		return nil
	}
	gotIP, gotL4 := oracle.Sums(a.Frame, a.Headers)
	if a.Refused {
		if gotIP == oracle.SumBad || gotL4 != oracle.SumGood {
			return fmt.Errorf("the refusal's checksums: network %v, transport %v", gotIP, gotL4)
		}
		return nil
	}
	if gotIP != ip || gotL4 != l4 {
		return fmt.Errorf("checksums: network %v, was %v; transport %v, was %v", gotIP, ip, gotL4, l4)
	}
	to := p.net.Pods[a.Pod]
	if a.Direct && [6]byte(a.Frame) != to.MAC {
		return fmt.Errorf("link address %x, want %x", a.Frame[:6], to.MAC)
	}
	return nil
}

// frame is a packet's bytes, with now and then something odd that must not matter.
func (p *play) frame(pkt oracle.Packet, knobs uint32) []byte {
	b := Eth(Router, p.net.Pods[pkt.To].MAC)
	if pkt.From != 0 {
		from := p.net.Pods[pkt.From]
		b = Eth(from.MAC, from.NodeMAC)
	}
	b.IP(pkt.Src.Addr(), pkt.Dst.Addr())
	if knobs&7 == 0 {
		if b.v6 {
			b.Ext(oracle.HopByHop, 8).Ext(oracle.DestOpts, 24)
		} else {
			b.Options([]byte{1, 1, 1, 0})
		}
	}
	b.L4(pkt.Proto, pkt.Src.Port(), pkt.Dst.Port(), pkt.Flags).Payload(int(knobs >> 3 & 31))
	switch knobs >> 8 & 15 {
	case 0:
		b.BadSum()
	case 1:
		if pkt.Proto == oracle.UDP || pkt.Proto == oracle.SCTP {
			b.NoSum()
		}
	case 2:
		if !b.v6 {
			b.BadIPSum()
		}
	case 3:
		b.Pad(7)
	}
	return b.Frame()
}

func (p *play) pass(seconds int64) {
	p.note("%d seconds pass", seconds)
	p.net.Age(p.t, uint32(seconds))
	p.model.Pass(seconds)
	p.forgetDoubtful()
}

func (p *play) forgetDoubtful() {
	for _, c := range p.model.Doubtful {
		p.note("forgotten: %v", c)
		scope := uint8(bpfgen.CTScopeFlow)
		if c.Backend == 0 && c.Pre != c.Post {
			scope = bpfgen.CTScopeShadow
		}
		p.net.DeleteFlow(p.t, Tuple(c.Pre), scope)
		p.net.DeleteFlow(p.t, Tuple(c.Post), bpfgen.CTScopeFlow)
	}
	p.model.Doubtful = nil
}

// judge gives a pod a new generation, or a new endpoint altogether.
func (p *play) judge(pod Pod, r uint32) {
	if r&1 == 0 {
		p.net.SetPod(p.t, pod)
		p.note("endpoint %d has changed", pod.ID)
		return
	}
	moved := pod
	p.moved++
	moved.ID, moved.Ifindex = 10+p.moved%200, 1000+p.moved
	p.net.RemovePod(p.t, pod)
	p.net.SetPod(p.t, moved)
	delete(p.net.Pods, pod.ID)
	p.net.Pods[moved.ID] = moved
	p.model.Pods[pod.IP4], p.model.Pods[pod.IP6] = moved.ID, moved.ID
	p.note("endpoint %d is %d now", pod.ID, moved.ID)
}

func (p *play) note(format string, args ...any) {
	p.trace = append(p.trace, fmt.Sprintf(format, args...))
}

// byNumber picks a pod by its address, so that the choice survives a new id.
func (n *Network) byNumber(r uint32) Pod {
	pod, _ := n.owner(NewPod(1 + int(r%worldPods)).IP4)
	return pod
}
