// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"net/netip"
	"slices"
)

// Tuple is both ends of a flow, in one direction. An echo has its identifier
// as both ports.
type Tuple struct {
	Proto    uint8
	Src, Dst netip.AddrPort
}

// Reverse is the tuple of the answers.
func (t Tuple) Reverse() Tuple { return Tuple{t.Proto, t.Dst, t.Src} }

func (t Tuple) String() string {
	name := map[uint8]string{TCP: "tcp", UDP: "udp", SCTP: "sctp", ICMP: "icmp", ICMPv6: "icmp6"}[t.Proto]
	return fmt.Sprintf("%s %v>%v", name, t.Src, t.Dst)
}

// Service is a frontend: an address, a port, a protocol.
type Service struct {
	Proto uint8
	Addr  netip.AddrPort
}

// Conn is what the oracle remembers of one connection: the tuple that its
// opener uses, the one that its responder sees, and what happened so far.
type Conn struct {
	Pre, Post   Tuple
	Backend     int // which life of the backend; 0: it is no Service's
	ViaStack    bool
	Replied     bool
	Established bool // the opener spoke after the responder
	Closed      [2]bool
	Reset       bool
	Last        int64 // when a packet was seen
	ClosedAt    int64
}

func (c *Conn) closing() bool { return c.Closed[0] || c.Closed[1] || c.Reset }

// over: nothing more is owed to the connection.
func (c *Conn) over() bool { return c.Reset || c.Closed[0] && c.Closed[1] }

func (c *Conn) String() string {
	return fmt.Sprintf("%v seen as %v (replied %v, established %v, closed %v, reset %v, last %d)",
		c.Pre, c.Post, c.Replied, c.Established, c.Closed, c.Reset, c.Last)
}

// Timeouts are seconds without a packet after which a connection is forgotten.
type Timeouts struct {
	TCPHalfOpen, TCPEstablished, TCPClosing, TCPReset int64
	UDPHalfOpen, UDPEstablished, Other                int64
}

// World is all that decides about a packet.
type World struct {
	InPod    bool
	Timeouts Timeouts
	Pods     map[netip.Addr]uint32 // address → endpoint
	Services map[Service][]netip.AddrPort
	// Affinity is how long a client keeps its backend of a Service; Silent Services
	// drop what they have no backend for.
	Affinity map[Service]int64
	Silent   map[Service]bool
	kept     map[keeper]choice
	// Backends are the existing ones; each new life of one has a new number.
	Backends map[Service]int
	Conns    []*Conn
	Now      int64
	// Doubtful connections may or may not be known to the programs any longer:
	// the caller makes them forget, and empties the list.
	Doubtful []*Conn
}

// keeper is a client of a Service with affinity, and choice the backend it was
// led to.
type keeper struct {
	client netip.Addr
	s      Service
}
type choice struct {
	backend netip.AddrPort
	life    int
	until   int64
}

// Packet is one packet as its sender made it.
type Packet struct {
	Tuple
	Flags uint8
	From  uint32 // the endpoint that sends it, or 0: it comes from outside to pod To
	To    uint32
}

// Outcome is what the programs did with it.
type Outcome struct {
	Drop   string // the reason's name
	Pod    uint32 // 0: it left the node
	Direct bool   // handed over by redirect
	Tuple  Tuple  // as it arrived
}

// connects: the protocol has packets that open and close. SCTP's have the flags
// that their first chunk comes to.
func (p Packet) connects() bool { return p.Proto == TCP || p.Proto == SCTP }

func (p Packet) opens() bool {
	return !p.connects() || p.Flags&(SYN|ACK|RST) == SYN
}

func (p Packet) syn() bool { return p.connects() && p.Flags&(SYN|ACK) == SYN }

// Ambiguous: no real host would send the packet, because it speaks against a
// translated connection's tuple that the sender does not know.
func (w *World) Ambiguous(p Packet) bool {
	for _, c := range w.Conns {
		if c.Pre != c.Post && (c.Pre.Reverse() == p.Tuple || p.From == 0 && c.Post == p.Tuple) {
			return true
		}
	}
	return false
}

func (w *World) remove(c *Conn) {
	w.Conns = slices.DeleteFunc(w.Conns, func(o *Conn) bool { return o == c })
}

// find is the connection a packet belongs to, and whether it answers.
func (w *World) find(t Tuple) (c *Conn, reply bool) {
	for _, c := range w.Conns {
		if c.Pre == t {
			return c, false
		}
	}
	for _, c := range w.Conns {
		if c.Post.Reverse() == t {
			return c, true
		}
	}
	return nil, false
}

// owner is the connection that the responder would take t for.
func (w *World) owner(t Tuple) *Conn {
	for _, c := range w.Conns {
		if c.Post == t || c.Post == t.Reverse() {
			return c
		}
	}
	return nil
}

// Packet compares what was done with a packet to what must be done, and
// remembers it.
func (w *World) Packet(p Packet, got Outcome) error {
	c, reply := w.find(p.Tuple)
	if c != nil && (p.syn() && (c.closing() || !reply && w.backendGone(c)) || !reply && w.servedSince(c, p)) {
		w.remove(c)
		c = nil
	}
	if c == nil {
		return w.first(p, got)
	}
	if p.syn() && !reply && c.Pre != c.Post {
		w.doubtClosed(p.Tuple, c)
	}
	want := c.Post
	if reply {
		want = c.Pre.Reverse()
	}
	if got.Drop != "" || got.Tuple != want {
		return fmt.Errorf("%v: want %v, of the connection %v", got, want, c)
	}
	if err := w.route(p, c, reply, got); err != nil {
		return err
	}
	w.note(c, p, reply)
	return nil
}

// doubtClosed: a SYN ends what is over and has the same tuple by translation,
// even if the SYN turns out to be of a connection that need not have it.
func (w *World) doubtClosed(t Tuple, but *Conn) {
	for _, c := range slices.Clone(w.Conns) {
		if c != but && c.Post == t && c.over() {
			w.remove(c)
			w.Doubtful = append(w.Doubtful, c)
		}
	}
}

// servedSince: a Service came when a pod had begun a flow to its address, which
// nobody has answered.
func (w *World) servedSince(c *Conn, p Packet) bool {
	_, served := w.Services[Service{p.Proto, p.Dst}]
	return served && p.From != 0 && c.Pre == c.Post && !c.Replied && (p.Proto == UDP || p.syn())
}

func (w *World) backendGone(c *Conn) bool {
	if c.Backend == 0 {
		return false
	}
	for _, life := range w.Backends {
		if life == c.Backend {
			return false
		}
	}
	return true
}

func (w *World) note(c *Conn, p Packet, reply bool) {
	c.Last = w.Now
	side := 0
	if reply {
		side = 1
		c.Replied = true
	} else if c.Replied && (!p.connects() || p.Flags&SYN == 0) {
		c.Established = true
	}
	if !p.connects() {
		return
	}
	if p.Flags&RST != 0 {
		c.Reset, c.ClosedAt = true, w.Now
	} else if p.Flags&FIN != 0 {
		c.Closed[side], c.ClosedAt = true, w.Now
	}
}

// route: pods of the node get packets by redirect where the programs can, and
// answers to what came through the host's stack go back through it.
func (w *World) route(p Packet, c *Conn, reply bool, got Outcome) error {
	pod := w.Pods[got.Tuple.Dst.Addr()]
	direct := pod != 0 && p.From != 0
	if w.InPod {
		direct = direct && pod == p.From
	} else if reply && c.ViaStack {
		direct = false
	}
	if got.Pod != pod || got.Direct != direct {
		return fmt.Errorf("%v: want it at endpoint %d, redirected %v", got, pod, direct)
	}
	return nil
}

// first judges a connection's first packet.
func (w *World) first(p Packet, got Outcome) error {
	c := &Conn{Pre: p.Tuple, Post: got.Tuple, Last: w.Now, ViaStack: p.From == 0 && !w.InPod}
	want := p.Tuple
	if p.From != 0 {
		reason, err := w.balance(p, c, &want, got)
		if err != nil || reason != "" {
			return err
		}
	}
	if got.Drop != "" {
		return fmt.Errorf("%v: want it to pass", got)
	}
	if err := w.sourcePort(p, want, got); err != nil {
		return err
	}
	if err := w.route(p, c, false, got); err != nil {
		return err
	}
	w.note(c, p, false)
	w.Conns = append(w.Conns, c)
	return nil
}

// balance sends a packet for a Service to any of its backends: want becomes
// the one that was taken.
func (w *World) balance(p Packet, c *Conn, want *Tuple, got Outcome) (reason string, err error) {
	s := Service{p.Proto, p.Dst}
	backends, ok := w.Services[s]
	switch {
	case !ok && !w.serviceAddress(p.Dst.Addr()):
		return "", nil
	case !ok:
		reason = "service_port"
	case len(backends) == 0 && w.Silent[s]:
		reason = "no_local_backend"
	case !p.opens():
		reason = "midstream_nat"
	case len(backends) == 0:
		reason = "no_backend"
	}
	if reason != "" {
		if got.Drop != reason {
			return reason, fmt.Errorf("%v: want it dropped: %s", got, reason)
		}
		return reason, nil
	}
	if !slices.Contains(backends, got.Tuple.Dst) {
		return "", fmt.Errorf("%v: want one of the backends %v", got, backends)
	}
	if err := w.affinity(p, s, got); err != nil {
		return "", err
	}
	c.Backend = w.Backends[Service{p.Proto, got.Tuple.Dst}]
	want.Dst = got.Tuple.Dst
	if want.Dst.Addr() == want.Src.Addr() {
		want.Src = netip.AddrPortFrom(p.Dst.Addr(), p.Src.Port()) // a pod drops packets from itself
	}
	return "", nil
}

// affinity: a client's flow goes where its last one went, while that is a
// backend of the Service and the time is not up. Each flow moves the time.
func (w *World) affinity(p Packet, s Service, got Outcome) error {
	if w.Affinity[s] == 0 {
		return nil
	}
	k := keeper{p.Src.Addr(), s}
	last, was := w.kept[k]
	life := func(b netip.AddrPort) int { return w.Backends[Service{p.Proto, b}] }
	if was && w.Now <= last.until-affinityBlur && slices.Contains(w.Services[s], last.backend) && life(last.backend) == last.life &&
		got.Tuple.Dst != last.backend {
		return fmt.Errorf("%v: want the backend %v, to which the client was led until %d", got, last.backend, last.until)
	}
	if w.kept == nil {
		w.kept = map[keeper]choice{}
	}
	w.kept[k] = choice{got.Tuple.Dst, life(got.Tuple.Dst), w.Now + w.Affinity[s]}
	return nil
}

// affinityBlur is how near its end an affinity may be over or not.
const affinityBlur = 3

func (w *World) serviceAddress(a netip.Addr) bool {
	for s := range w.Services {
		if s.Addr.Addr() == a {
			return true
		}
	}
	return false
}

// sourcePort: it stays, unless the tuple is another connection's. One that is
// over may be replaced, and is forgotten then.
func (w *World) sourcePort(p Packet, want Tuple, got Outcome) error {
	taken := w.owner(want)
	kept := got.Tuple == want
	changed := got.Tuple
	changed.Src = netip.AddrPortFrom(changed.Src.Addr(), want.Src.Port())
	switch {
	case !kept && changed != want:
		return fmt.Errorf("%v: want %v, but for the source port", got, want)
	case kept && taken != nil && !taken.over():
		return fmt.Errorf("%v: that tuple is taken by %v", got, taken)
	case !kept && taken == nil:
		return fmt.Errorf("%v: want %v, whose source port is free", got, want)
	case !kept && w.owner(got.Tuple) != nil:
		return fmt.Errorf("%v: that tuple is taken by %v", got, w.owner(got.Tuple))
	case kept && taken != nil:
		w.remove(taken)
	}
	return nil
}

func (o Outcome) String() string {
	if o.Drop != "" {
		return "dropped: " + o.Drop
	}
	return fmt.Sprintf("arrived at endpoint %d (redirected %v) as %v", o.Pod, o.Direct, o.Tuple)
}

// life is how long the connection is remembered after its last packet.
func (w *World) life(c *Conn) int64 {
	t := w.Timeouts
	switch {
	case (c.Pre.Proto == TCP || c.Pre.Proto == SCTP) && c.Reset:
		return t.TCPReset
	case c.Pre.Proto == TCP && c.closing():
		return t.TCPClosing
	case c.Pre.Proto == TCP && c.Established:
		return t.TCPEstablished
	case c.Pre.Proto == TCP:
		return t.TCPHalfOpen
	case (c.Pre.Proto == UDP || c.Pre.Proto == SCTP) && c.Established:
		return t.UDPEstablished
	case c.Pre.Proto == UDP || c.Pre.Proto == SCTP:
		return t.UDPHalfOpen
	}
	return t.Other
}

// Entries are refreshed no more often than every few seconds, and the clock is
// read to the second: near its end a connection may be known or not.
const blur = 6

// longest is how long it may be remembered: of TCP without translation the answer may be enough.
func (w *World) longest(c *Conn) int64 {
	if c.Pre.Proto == TCP && c.Pre == c.Post && c.Replied && !c.closing() {
		return w.Timeouts.TCPEstablished
	}
	return w.life(c)
}

// leaves says whether a connection may have left its room to another: between two
// pods of the node, TCP that is over keeps it for a moment only.
func (w *World) leaves(c *Conn) bool {
	_, from := w.Pods[c.Post.Src.Addr()]
	_, to := w.Pods[c.Post.Dst.Addr()]
	return c.Pre.Proto == TCP && c.over() && from && to && w.Now > c.ClosedAt
}

// Pass lets time pass. What has expired is forgotten; what may have is doubtful.
func (w *World) Pass(seconds int64) {
	w.Now += seconds
	var alive []*Conn
	for _, c := range w.Conns {
		since := c.Last
		if c.closing() {
			since = c.ClosedAt // later packets refresh one half only
		}
		switch {
		case w.Now-since <= w.life(c)-blur && !w.leaves(c):
			alive = append(alive, c)
		case w.Now-c.Last <= w.longest(c)+blur:
			w.Doubtful = append(w.Doubtful, c)
		}
	}
	w.Conns = alive
}
