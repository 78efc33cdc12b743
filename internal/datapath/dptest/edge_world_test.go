// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// edgeWorld is a node with an edge, pods that are masqueraded and one that is not,
// clients outside, and what is known of their connections. Nothing of ours is asked for
// that: a connection is the two tuples that its ends have seen.
type edgeWorld struct {
	e        *Edge
	t        *testing.T
	rng      *rand.Rand
	services []*edgeService
	conns    []*edgeConn
	trace    []string
	fragID   uint32
	packets  int
}

type edgeService struct {
	proto    uint8
	addr     netip.AddrPort
	key      netip.AddrPort // as the table has it
	o        ServiceOptions
	backends []netip.AddrPort
	stuck    map[netip.Addr]netip.AddrPort // by affinity
}

// edgeConn is a connection from both ends: what the opener uses, and what the responder sees.
type edgeConn struct {
	pre, post Tuple
	opener    uint32 // the pod that opened it; 0: outside
	answered  bool
	proved    bool    // the opener has sent after the answer
	fin       [2]bool // of opener and responder
	closed    bool
	stale     bool // an end has changed since its last packet
	idle      int
	last      [2][]byte // what arrived last, of the opener's and of the responder's
}

const (
	edgeAffinity  = 1000
	edgeWorldPods = 3
	edgeGroup     = 7 // whose source range has one client outside
)

func newEdgeWorld(t *testing.T, e *Edge, rng *rand.Rand) *edgeWorld {
	e.ClearFlows(t)
	clearTable(t, e.MstAffinityV1)
	clearTable(t, e.MstFragsV1)
	w := &edgeWorld{e: e, t: t, rng: rng}
	for _, v6 := range []bool{false, true} {
		any := netip.IPv4Unspecified()
		if v6 {
			any = netip.IPv6Unspecified()
		}
		key := bpfgen.PodSourceKey{Prefixlen: 32 + 64 + 128, Group: edgeGroup, Addr: toAddr(External(1, v6))}
		check(t, e.MstSourcesV1.Put(key, uint8(0)))
		for _, proto := range []uint8{oracle.TCP, oracle.UDP, oracle.SCTP} {
			for i, o := range []ServiceOptions{{Kind: bpfgen.KindNodePort}, {Kind: bpfgen.KindNodePort, Flags: bpfgen.SvcKeepSource},
				{Kind: bpfgen.KindExternalIp, Affinity: edgeAffinity}, {Kind: bpfgen.KindClusterIp},
				{Kind: bpfgen.KindLoadBalancer, Flags: bpfgen.SvcRanges, Group: edgeGroup}} {
				s := &edgeService{proto: proto, o: o, stuck: map[netip.Addr]netip.AddrPort{}}
				if i < 2 {
					s.addr, s.key = end(e.Node(v6), 30080+uint16(i)), end(any, 30080+uint16(i))
				} else {
					s.addr = end(VIP(5+i, v6), 80)
					s.key = s.addr
				}
				w.services = append(w.services, s)
				w.setBackends(s)
			}
		}
	}
	return w
}

// setBackends gives a Service some of: pods, another host, the node itself.
func (w *edgeWorld) setBackends(s *edgeService) {
	v6 := s.addr.Addr().Is6()
	all := []netip.AddrPort{end(w.e.Node(v6), 8081)}
	if s.o.Flags&bpfgen.SvcKeepSource == 0 { // its backends elsewhere would answer the client past this node
		all = append(all, end(External(2, v6), 8080))
	}
	for n := range edgeWorldPods {
		all = append(all, end(NewPod(n+1).IP(v6), 8080))
	}
	s.backends = nil
	for _, b := range all {
		if w.rng.IntN(2) == 0 {
			s.backends = append(s.backends, b)
		}
	}
	w.e.SetServiceWith(w.t, s.o, s.proto, s.key, s.backends...)
	w.note("%d %v has %v", s.proto, s.addr, s.backends)
}

func (w *edgeWorld) note(format string, args ...any) {
	w.trace = append(w.trace, fmt.Sprintf(format, args...))
}

// step plays one event.
func (w *edgeWorld) step() error {
	switch roll := w.rng.IntN(100); {
	case roll < 24:
		return w.open()
	case roll < 78:
		return w.carryOn()
	case roll < 86:
		return w.complain()
	case roll < 93:
		return w.fragments()
	case roll < 94:
		p := w.e.Pods[1+uint32(w.rng.IntN(edgeWorldPods))]
		w.note("pod %d has changed", p.ID)
		w.e.SetPod(w.t, p)
		for _, c := range w.conns {
			c.stale = true
		}
	case roll < 96:
		w.setBackends(w.services[w.rng.IntN(len(w.services))])
	default:
		seconds := []int{1, 2, 4, 90_000}[w.rng.IntN(4)]
		w.note("%d seconds pass", seconds)
		w.e.Age(w.t, uint32(seconds))
		for _, c := range w.conns {
			c.idle += seconds
		}
		w.forgetIdle()
		if seconds > edgeAffinity {
			for _, s := range w.services {
				clear(s.stuck)
			}
		}
	}
	return nil
}

// forgetIdle makes both sides forget the connections of which nobody knows whether they are remembered.
func (w *edgeWorld) forgetIdle() {
	idle := func(c *edgeConn) bool { return c.idle >= 8 }
	all := w.conns
	w.conns = slices.DeleteFunc(slices.Clone(all), idle)
	for _, c := range all {
		for _, t := range []Tuple{c.pre, c.post} {
			// What was a closed one's may be another's by now.
			if idle(c) && !slices.ContainsFunc(w.conns, func(o *edgeConn) bool { return o.pre == t || o.post == t }) {
				w.e.DeleteFlow(w.t, t, bpfgen.CTScopeFlow)
				w.e.DeleteFlow(w.t, t, bpfgen.CTScopeShadow)
			}
		}
	}
}

// open sends a first packet, of a client outside or of a pod.
func (w *edgeWorld) open() error {
	v6 := w.rng.IntN(2) == 0
	proto := []uint8{oracle.TCP, oracle.TCP, oracle.UDP, oracle.SCTP}[w.rng.IntN(4)]
	port := 1000 + uint16(w.rng.IntN(3))
	var s *edgeService
	var pre Tuple
	var opener uint32
	if w.rng.IntN(2) == 0 {
		opener = 1 + uint32(w.rng.IntN(edgeWorldPods))
		pre = Tuple{proto, end(w.e.Pods[opener].IP(v6), port), end(External(1+w.rng.IntN(3), v6), 8080)}
		if w.rng.IntN(3) == 0 {
			pre.Dst = end(NewPod(1+w.rng.IntN(edgeWorldPods)).IP(v6), 8080)
			if pre.Dst.Addr() == pre.Src.Addr() {
				return nil
			}
		}
		if w.rng.IntN(6) == 0 {
			pre = Tuple(echo(oracle.Tuple(pre)))
		}
	} else {
		pre = Tuple{proto, end(External(1+w.rng.IntN(3), v6), []uint16{port, 8080}[w.rng.IntN(2)]), netip.AddrPort{}}
	}
	if opener == 0 || pre.Proto == proto && w.rng.IntN(2) == 0 {
		for s == nil || s.proto != proto || s.addr.Addr().Is6() != v6 {
			s = w.services[w.rng.IntN(len(w.services))]
		}
		if opener == 0 && s.o.Kind == bpfgen.KindClusterIp {
			return nil
		}
		pre.Dst = s.addr
	}
	for i, c := range w.conns {
		if c.pre != pre && c.pre != pre.Reverse() && c.post != pre && c.post != pre.Reverse() {
			continue
		}
		if c.pre != pre || c.opener != opener {
			return nil // its other end's, or one that the programs lead there
		}
		if !c.closed {
			if c.fin[0] || c.fin[1] {
				return nil
			}
			return w.send(c, 0, syn)
		}
		w.conns = slices.Delete(w.conns, i, i+1)
		break
	}
	c := &edgeConn{pre: pre, opener: opener}
	check(w.t, w.e.MstAnswersV1.Put(uint32(0), make([]bpfgen.PodAnswers, ebpf.MustPossibleCPU())))
	in := w.frame(pre, opener, syn)
	a, err := w.put(opener, pre.Src.Addr(), in)
	w.note("opens %v from %d: %v", pre, opener, a)
	if err != nil {
		return err
	}
	if s != nil && s.o.Flags&bpfgen.SvcRanges != 0 && pre.Src.Addr() != External(1, v6) {
		if a.Dropped != ReasonName(bpfgen.ReasonSourceRange) || a.Refused {
			return fmt.Errorf("from beside the source range: %v", a)
		}
		return nil
	}
	if s != nil && len(s.backends) == 0 {
		if h, _ := oracle.Parse(in); a.Dropped != ReasonName(bpfgen.ReasonNoBackend) || !a.Refused && !(proto == oracle.UDP && h.L4 != 34 && h.L4 != 54) {
			return fmt.Errorf("without a backend: %v", a)
		}
		return nil
	}
	if a.Dropped != "" {
		return fmt.Errorf("dropped: %v", a.Dropped)
	}
	c.post = a.Tuple()
	if err := w.judge(c, s); err != nil {
		return err
	}
	w.conns = append(w.conns, c)
	return w.arrived(c, 0, in, a)
}

// judge says whether a new connection became what it may.
func (w *edgeWorld) judge(c *edgeConn, s *edgeService) error {
	v6 := c.pre.Src.Addr().Is6()
	from, to := c.pre.Src.Addr(), c.post.Dst
	switch {
	case s != nil && !slices.Contains(s.backends, to):
		return fmt.Errorf("%v is no backend", to)
	case s != nil && s.o.Affinity > 0:
		if old, ok := s.stuck[from]; ok && slices.Contains(s.backends, old) && old != to {
			return fmt.Errorf("affinity says %v", old)
		}
		s.stuck[from] = to
	case s == nil && !isEcho(c.pre.Proto) && to != c.pre.Dst || to.Addr() != c.pre.Dst.Addr() && s == nil:
		return fmt.Errorf("it goes to %v", to)
	}
	_, toPod := w.e.owner(to.Addr())
	toNode := to.Addr() == w.e.Node(v6)
	want, worn := from, false
	switch {
	case c.opener == 0:
		worn = s.o.Flags&bpfgen.SvcKeepSource == 0 && !toNode
	case to.Addr() == from: // hairpin
		want = c.pre.Dst.Addr()
	case !toPod && !toNode:
		worn = c.opener <= 2
	}
	if worn {
		want = w.e.Node(v6)
		if p := c.post.Src.Port(); p < EdgePorts.First {
			return fmt.Errorf("it wears port %d", p)
		}
	}
	if c.post.Src.Addr() != want {
		return fmt.Errorf("its source is %v, want %v", c.post.Src, want)
	}
	for _, o := range w.conns {
		if !o.closed && (o.post == c.post || o.post == c.post.Reverse()) {
			return fmt.Errorf("%v is the tuple of %v, too", c.post, o.pre)
		}
	}
	return nil
}

func isEcho(proto uint8) bool { return proto == oracle.ICMP || proto == oracle.ICMPv6 }

// carryOn sends another packet of either end.
func (w *edgeWorld) carryOn() error {
	c, side := w.some()
	if c == nil || c.closed {
		return nil
	}
	flags := []uint8{ack, ack, ack, ack, ack, fin | ack, rst | ack}[w.rng.IntN(7)]
	if !c.answered && side == 1 {
		flags = syn | ack
	}
	if !c.answered && side == 0 {
		flags = syn
	}
	return w.send(c, side, flags)
}

func (w *edgeWorld) some() (*edgeConn, int) {
	if len(w.conns) == 0 {
		return nil, 0
	}
	return w.conns[w.rng.IntN(len(w.conns))], w.rng.IntN(2)
}

// ends are what one side sends, and what arrives of it.
func (c *edgeConn) ends(side int) (from, to Tuple) {
	if side == 0 {
		return c.pre, c.post
	}
	return c.post.Reverse(), c.pre.Reverse()
}

func (c *edgeConn) pod(w *edgeWorld, side int) uint32 {
	if side == 0 {
		return c.opener
	}
	p, _ := w.e.owner(c.post.Dst.Addr())
	return p.ID
}

// send sends a packet of a known connection, and now and then once more by the long way.
func (w *edgeWorld) send(c *edgeConn, side int, flags uint8) error {
	from, to := c.ends(side)
	pod := c.pod(w, side)
	if isEcho(c.pre.Proto) {
		flags = []uint8{0, syn | ack}[side] // a question, and its answer
	}
	in := w.frame(from, pod, flags)
	for range 1 + w.rng.IntN(3) {
		a, err := w.put(pod, from.Src.Addr(), in)
		w.note("side %d of %v sends %v flags %#x: %v", side, c.pre, from, flags, a)
		if err != nil {
			return err
		}
		if a.Dropped != "" || a.Tuple() != to {
			return fmt.Errorf("%v, want it as %v", a, to)
		}
		if err := w.arrived(c, side, in, a); err != nil {
			return err
		}
		if w.rng.IntN(4) == 0 {
			w.e.VoidFlows(w.t)
		}
	}
	if c.pre.Proto == oracle.TCP && flags&rst != 0 || c.pre.Proto == oracle.SCTP && chunkOf(flags) == oracle.Abort {
		c.closed = true
	}
	if c.pre.Proto == oracle.TCP && flags&fin != 0 {
		c.fin[side] = true
		c.closed = c.closed || c.fin[1-side]
	}
	if c.pre.Proto == oracle.SCTP && flags&fin != 0 {
		c.closed = c.closed || oracle.ChunkFlags(chunkOf(flags))&oracle.RST != 0
	}
	return nil
}

// arrived holds one packet to what must be true of any, and notes it.
func (w *edgeWorld) arrived(c *edgeConn, side int, in []byte, a Arrival) error {
	w.packets++
	c.idle, c.stale = 0, false
	if side == 1 {
		c.answered = true
	}
	c.last[side] = bytes.Clone(a.Frame)
	if err := w.place(a); err != nil {
		return err
	}
	before, _ := oracle.Parse(in)
	ip, l4 := oracle.Sums(in, before)
	if gotIP, gotL4 := oracle.Sums(a.Frame, a.Headers); gotIP != ip || gotL4 != l4 {
		return fmt.Errorf("checksums: network %v, was %v; transport %v, was %v", gotIP, ip, gotL4, l4)
	}
	if was, is := hopLimit(in), hopLimit(a.Frame); is != was && is != was-1 {
		return fmt.Errorf("hop limit %d, was %d", is, was)
	}
	if was, is := plain(in, before), plain(a.Frame, a.Headers); !bytes.Equal(was, is) {
		return fmt.Errorf("bytes that are nobody's business were changed:\n%x\n%x", was, is)
	}
	return nil
}

// place says whether a packet is where its destination is.
func (w *edgeWorld) place(a Arrival) error {
	p, isPod := w.e.owner(a.Headers.Dst)
	switch {
	case isPod && a.Pod != p.ID:
		return fmt.Errorf("not at pod %d", p.ID)
	case !isPod && a.Pod != 0:
		return fmt.Errorf("in a pod")
	case a.Headers.Dst == w.e.Node(a.Headers.V6) && a.Direct:
		return fmt.Errorf("sent to the wire")
	}
	return nil
}

// plain is a packet without what translation may change.
func plain(frame []byte, h oracle.Headers) []byte {
	b := bytes.Clone(frame[:h.End])
	if h.V6 {
		clear(b[21:54])
	} else {
		b[22] = 0
		clear(b[24:34])
	}
	if h.Frag == oracle.Later {
		return b[14:]
	}
	sum := map[uint8][2]int{oracle.TCP: {16, 18}, oracle.UDP: {6, 8}, oracle.SCTP: {8, 12}, oracle.ICMP: {2, 6}, oracle.ICMPv6: {2, 6}}[h.Proto]
	clear(b[h.L4+sum[0] : h.L4+sum[1]])
	if !isEcho(h.Proto) {
		clear(b[h.L4 : h.L4+4])
	}
	return b[14:]
}

// put lets a frame go on its way, by the host's stack, too.
func (w *edgeWorld) put(pod uint32, from netip.Addr, frame []byte) (a Arrival, err error) {
	switch {
	case pod != 0:
		a, err = w.e.Answer(w.e.Pods[pod], frame)
	case from == w.e.Node(from.Is6()):
		h, _ := oracle.Parse(frame)
		if to, ok := w.e.owner(h.Dst); ok {
			return w.e.Receive(to, frame)
		}
		return w.e.Leave(frame)
	default:
		a, err = w.e.Arrive(frame)
	}
	if err != nil || a.Dropped != "" || a.Direct || a.Pod != 0 {
		return a, err
	}
	if to, ok := w.e.owner(a.Headers.Dst); ok {
		return w.e.Receive(to, a.Frame)
	}
	if pod != 0 && a.Headers.Dst != w.e.Node(a.Headers.V6) {
		return w.e.Leave(a.Frame)
	}
	return a, err
}

// frame is a packet's bytes, with now and then something odd.
func (w *edgeWorld) frame(t Tuple, pod uint32, flags uint8) []byte {
	b := w.link(t.Src.Addr(), pod).IP(t.Src.Addr(), t.Dst.Addr())
	switch w.rng.IntN(12) {
	case 0:
		if b.v6 {
			b.Ext(oracle.HopByHop, 8).Ext(oracle.DestOpts, 24)
		} else {
			b.Options([]byte{1, 1, 1, 0})
		}
	case 1:
		if b.v6 {
			b.Ext(oracle.DestOpts, 8)
		}
	}
	b.L4(t.Proto, t.Src.Port(), t.Dst.Port(), flags).Payload(w.rng.IntN(60))
	switch w.rng.IntN(16) {
	case 0:
		b.BadSum()
	case 1:
		if t.Proto == oracle.UDP {
			b.NoSum()
		}
	case 2:
		b.Pad(7)
	}
	return b.Frame()
}

func (w *edgeWorld) link(src netip.Addr, pod uint32) *Packet {
	switch p := w.e.Pods[pod]; {
	case pod != 0:
		return Eth(p.MAC, p.NodeMAC)
	case src == w.e.Node(src.Is6()):
		return Eth(w.e.MAC, Router)
	}
	return Eth(Router, w.e.MAC)
}

// complain sends an ICMP error about what arrived last, from whom it reached or a router before that.
func (w *edgeWorld) complain() error {
	c, side := w.some()
	if c == nil || c.closed || c.last[side] == nil {
		return nil
	}
	about := c.last[side]
	h, _ := oracle.Parse(about)
	if h.Frag != oracle.Whole {
		return nil
	}
	sentAs, arrivedAs := c.ends(side)
	pod := c.pod(w, 1-side)
	from := arrivedAs.Dst.Addr()
	router := pod == 0 && from != w.e.Node(h.V6) && w.rng.IntN(2) == 0
	if router {
		from = External(9, h.V6)
	}
	kind := [][3]uint32{{3, 4, 1400}, {3, 3, 0}, {11, 0, 0}}[w.rng.IntN(3)]
	if h.V6 {
		kind = [][3]uint32{{2, 0, 1400}, {1, 4, 0}, {3, 0, 0}}[w.rng.IntN(3)]
	}
	_, good := oracle.Sums(about, h)
	b := w.link(from, pod).IP(from, arrivedAs.Src.Addr()).ICMP(uint8(kind[0]), uint8(kind[1]), kind[2]).Data(about[14:h.End])
	a, err := w.put(pod, from, b.Frame())
	w.note("side %d of %v complains from %v (%v) about %v: %v", 1-side, c.pre, from, kind, arrivedAs, a)
	if err != nil {
		return err
	}
	if c.stale && a.Dropped == ReasonName(bpfgen.ReasonICMPErrorFlow) {
		return nil
	}
	if a.Dropped != "" {
		return fmt.Errorf("an error is dropped: %v", a)
	}
	w.packets++
	if err := w.place(a); err != nil {
		return err
	}
	if ip, l4 := oracle.Sums(a.Frame, a.Headers); ip == oracle.SumBad || l4 != oracle.SumGood {
		return fmt.Errorf("the error's checksums: network %v, transport %v", ip, l4)
	}
	if a.Headers.Dst != sentAs.Src.Addr() {
		return fmt.Errorf("the error goes to %v, want %v", a.Headers.Dst, sentAs.Src.Addr())
	}
	if want := sentAs.Dst.Addr(); !router && a.Headers.Src != want {
		return fmt.Errorf("the error comes from %v, want %v", a.Headers.Src, want)
	}
	if router && a.Headers.Src != from {
		return fmt.Errorf("the router's error comes from %v", a.Headers.Src)
	}
	quoted := append(bytes.Clone(a.Frame[:14]), a.Frame[a.Headers.L4+8:a.Headers.End]...)
	q, fault := oracle.Parse(quoted)
	if fault != "" || TupleOf(q) != sentAs {
		return fmt.Errorf("it quotes %v (%v), want %v", TupleOf(q), fault, sentAs)
	}
	wasIP, _ := oracle.Sums(about, h)
	if ip, l4 := oracle.Sums(quoted, q); ip != wasIP || q.Proto != oracle.SCTP && l4 != good {
		return fmt.Errorf("the quoted checksums: network %v, was %v; transport %v, was %v", ip, wasIP, l4, good)
	}
	if !bytes.Equal(plain(about, h), plain(quoted, q)) {
		return fmt.Errorf("the quote was changed:\n%x\n%x", about[14:], quoted[14:])
	}
	return nil
}

// fragments sends a datagram of a connection in three, in order.
func (w *edgeWorld) fragments() error {
	c, side := w.some()
	if c == nil || c.closed || c.pre.Proto != oracle.UDP {
		return nil
	}
	from, to := c.ends(side)
	pod := c.pod(w, side)
	w.fragID++
	for i := range 3 {
		b := w.link(from.Src.Addr(), pod).IP(from.Src.Addr(), from.Dst.Addr()).Fragment(i*64, i < 2, w.fragID)
		if i == 0 {
			b.UDP(from.Src.Port(), from.Dst.Port()).Payload(56)
		} else {
			b.Proto(oracle.UDP).Payload(64)
		}
		in := b.Frame()
		a, err := w.put(pod, from.Src.Addr(), in)
		w.note("side %d of %v sends fragment %d of %d: %v", side, c.pre, i, w.fragID, a)
		if err != nil {
			return err
		}
		if a.Dropped != "" || a.Headers.Src != to.Src.Addr() || a.Headers.Dst != to.Dst.Addr() || i == 0 && a.Tuple() != to {
			return fmt.Errorf("%v, want it as %v", a, to)
		}
		if err := w.arrived(c, side, in, a); err != nil {
			return err
		}
	}
	return nil
}

// whole says whether the tables' halves refer to each other.
func (w *edgeWorld) whole() error {
	flows := map[Tuple]Flow{}
	for _, f := range w.e.Flows(w.t) {
		if f.Left() >= 0 && f.Key.Scope == bpfgen.CTScopeFlow {
			flows[f.Tuple()] = f
		}
	}
	for _, c := range w.conns {
		if c.closed {
			continue
		}
		pre, post := flows[c.pre], flows[c.post]
		if c.pre == c.post {
			continue
		}
		if pre.Entry.Role == bpfgen.CTPreNAT && post.Entry.Role == bpfgen.CTPostNAT {
			if pre.Entry.Flags&bpfgen.CTEdge != post.Entry.Flags&bpfgen.CTEdge || pre.Entry.Backend != post.Entry.Backend {
				return fmt.Errorf("halves of %v differ: %+v, %+v", c.pre, pre.Entry, post.Entry)
			}
			continue
		}
		return fmt.Errorf("%v has the halves %+v and %+v", c.pre, pre, post)
	}
	return nil
}

// TestTheEdgesWorlds plays random connections from outside, to the outside, and between pods, at one node: what one end
// sends, an ICMP error and fragments included, the other gets, as the tuple that it has seen from the first packet on,
// whatever happens to backends and pods meanwhile, and nothing else of it is changed. MUSTANG_TEST_WORLDS plays more.
func TestTheEdgesWorlds(t *testing.T) {
	worlds, seed := 10, *seedFlag
	if n, err := strconv.Atoi(os.Getenv("MUSTANG_TEST_WORLDS")); err == nil {
		worlds = n
	}
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	for _, nic := range []bool{true, false} {
		e := NewEdge(t, Options{NIC: nic}, edgeWorldPods)
		check(t, e.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf | bpfgen.NodeMasquerade}))
		e.outside(t, nic)
		for id := range uint32(2) {
			check(t, e.MstMasqueradeV1.Put(id+1, uint32(masqueradeGroup)))
		}
		packets := 0
		for world := range worlds {
			if *worldFlag >= 0 && world != *worldFlag {
				continue
			}
			w := newEdgeWorld(t, e, rand.New(rand.NewPCG(seed, uint64(world))))
			for i := range 150 {
				err := w.step()
				if err == nil && i%10 == 9 {
					err = w.whole()
				}
				if err != nil {
					t.Errorf("nic=%v: replay with -seed=%d -world=%d: %v\n%s", nic, seed, world, err, strings.Join(w.trace, "\n"))
					break
				}
			}
			packets += w.packets
		}
		t.Logf("%d packets, seed %d", packets, seed)
	}
}
