// SPDX-License-Identifier: Apache-2.0

package datapath

// The flows of backends that left a Service: which they are, and taking them
// out of the tables.

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

type (
	ctKey       = bpfgen.PodCtKey
	ctEntry     = bpfgen.PodCtEntry
	sockFlowKey = bpfgen.SockSockFlowKey
	sockFlow    = bpfgen.SockSockFlow
	sockSeen    = bpfgen.IterSockSeen
)

// end is one end of a flow as the tables hold it.
type end struct {
	addr Addr
	port uint16
}

func endOf(a netip.AddrPort) end { return end{FromAddr(a.Addr()), Port(a.Port())} }

func (e end) addrPort() netip.AddrPort { return netip.AddrPortFrom(ToAddr(e.addr), Port(e.port)) }

type pairKey struct {
	front, back end
	proto       uint8
}

type endKey struct {
	end   end
	proto uint8
}

// Departures are backends that left a Service, or that are gone altogether.
// A flow is told by its addresses, not by its backend's id: that is used again,
// and other Services share it.
type Departures struct {
	pairs  map[pairKey]bool // true: established TCP is reset too
	fronts map[endKey]bool  // of pairs
	gone   map[endKey]bool
	pods   []Addr // of this node, that are gone
}

// Left adds a backend that left one Service. Its established TCP goes on,
// unless reset.
func (d *Departures) Left(f state.Frontend, backend netip.AddrPort, reset bool) {
	if d.pairs == nil {
		d.pairs, d.fronts = make(map[pairKey]bool), make(map[endKey]bool)
	}
	k := pairKey{endOf(f.AddrPort), endOf(backend), uint8(f.Protocol)}
	d.pairs[k] = d.pairs[k] || reset
	d.fronts[endKey{k.front, k.proto}] = true
}

// Gone adds a backend that is gone: its flows through any Service end.
func (d *Departures) Gone(b state.Backend) {
	if d.gone == nil {
		d.gone = make(map[endKey]bool)
	}
	k := endKey{endOf(b.AddrPort), uint8(b.Protocol)}
	d.gone[k] = true
}

// PodGone adds an address of a pod of this node that is gone: all its flows end. They would
// be the next pod's that has the address, with what was judged of this one.
func (d *Departures) PodGone(a netip.Addr) {
	d.Gone(state.Backend{AddrPort: netip.AddrPortFrom(a, 0)})
	d.pods = append(d.pods, FromAddr(a))
}

// Empty says that there is nothing to look for.
func (d *Departures) Empty() bool { return len(d.pairs) == 0 && len(d.gone) == 0 }

// Has says whether flows of p end: of TCP and SCTP, those to reset.
func (d *Departures) Has(p state.Protocol) bool {
	return d.some(p, func(reset bool) bool { return p == state.UDP || reset })
}

// Touches says whether flows of p are concerned, be it that half-open ones move.
func (d *Departures) Touches(p state.Protocol) bool {
	return d.some(p, func(bool) bool { return true })
}

// some says whether one of p's backends is gone, or left in a way that counts.
func (d *Departures) some(p state.Protocol, counts func(reset bool) bool) bool {
	for k, reset := range d.pairs {
		if k.proto == uint8(p) && counts(reset) {
			return true
		}
	}
	for k := range d.gone {
		if k.proto == uint8(p) || k.proto == 0 {
			return true
		}
	}
	return false
}

// fate is what becomes of a flow.
type fate int

const (
	stays  fate = iota
	leaves      // established TCP goes on; a half-open one picks another backend
	ends
	orphaned // of a pod that is gone: nobody need be told
)

// anyAddress is the unspecified address of a's family.
func anyAddress(a Addr) Addr {
	if ToAddr(a).Is4() {
		return FromAddr(netip.IPv4Unspecified())
	}
	return FromAddr(netip.IPv6Unspecified())
}

func (d *Departures) fate(front, back end, proto uint8) fate {
	if len(d.gone) > 0 {
		host := end{addr: back.addr}
		if d.gone[endKey{back, proto}] || d.gone[endKey{host, 0}] || d.gone[endKey{host, proto}] {
			return ends
		}
	}
	reset, left := d.pairs[pairKey{front, back, proto}]
	if !left {
		reset, left = d.pairs[pairKey{end{anyAddress(front.addr), front.port}, back, proto}] // a node port
	}
	switch {
	case !left:
		return stays
	case reset || proto == uint8(state.UDP):
		return ends
	}
	return leaves
}

// ctEnds are a translated flow's ends by either of its halves.
func ctEnds(k *ctKey, e *ctEntry) (client, front, back end) {
	src, dst := end{k.Lo, k.LoPort}, end{k.Hi, k.HiPort}
	if e.Flags&bpfgen.CTOriginIsHi != 0 {
		src, dst = dst, src
	}
	if e.Role == bpfgen.CTPreNAT {
		return src, dst, end{e.Other.Dst, e.Other.Dport}
	}
	return end{e.Other.Src, e.Other.Sport}, end{e.Other.Dst, e.Other.Dport}, dst
}

func (d *Departures) fateOf(k *ctKey, e *ctEntry) fate {
	if e.Role == bpfgen.CTDirect {
		if d.podGone(k.Lo) || d.podGone(k.Hi) {
			return orphaned
		}
		return d.fateOfAnswer(k, e)
	}
	client, front, back := ctEnds(k, e)
	f := stays
	if e.Backend != bpfgen.BackendNone {
		f = d.fate(front, back, k.Proto)
	}
	if f != ends && (d.podGone(client.addr) || d.podGone(back.addr)) {
		return orphaned
	}
	return f
}

func (d *Departures) podGone(a Addr) bool { return slices.Contains(d.pods, a) }

// fateOfAnswer is of what looks like a flow that a frontend has opened: an answer that was
// under way when its client's half and the Service went. While the client goes on, what it
// sends is taken for that flow's answer, also when the Service is there again.
func (d *Departures) fateOfAnswer(k *ctKey, e *ctEntry) fate {
	from := end{k.Lo, k.LoPort}
	if e.Flags&bpfgen.CTOriginIsHi != 0 {
		from = end{k.Hi, k.HiPort}
	}
	anywhere := end{anyAddress(from.addr), from.port} // a node port's
	if k.Proto != uint8(state.TCP) && (d.fronts[endKey{from, k.Proto}] || d.fronts[endKey{anywhere, k.Proto}]) {
		return ends
	}
	return stays
}

// ctTables are in the order in which flows move through them, so that one that
// moves meanwhile is met again.
var ctTables = []string{bpfgen.PodMapMstCtNewV1, bpfgen.PodMapMstCtV1}

// Clients collects the TCP connections that end, as their clients see them.
// A client's socket must be destroyed before its flow is forgotten: its reset
// is translated on its way to the backend.
func (d *Datapath) Clients(dep *Departures) (map[Connection]bool, error) {
	if !dep.Has(state.TCP) {
		return nil, nil
	}
	out := make(map[Connection]bool)
	look := func(k *ctKey, e *ctEntry) {
		if k.Proto == uint8(state.TCP) && dep.fateOf(k, e) == ends {
			client, front, _ := ctEnds(k, e)
			out[Connection{client.addrPort(), front.addrPort()}] = true
		}
	}
	for _, name := range ctTables {
		t := bindTable[ctKey, ctEntry](d, name)
		err := t.eachChunk(func(keys []ctKey, values []ctEntry) error {
			for i := range keys {
				look(&keys[i], &values[i])
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return out, d.eachNear(func(_ *nearFlow, was nearFlow) { look(&was.Key, &was.E) })
}

// ForgetFlows removes the flows that end, so that the next datagram picks a
// backend anew, and makes half-open TCP do so. At first only the client's half
// of UDP and SCTP goes, which is enough to move it, or to have its next packet
// refused: the other one still translates the reply that is under way, as both
// do for a TCP client's reset. Late, both go. All other flows of a pod that is gone
// go at once, and do not count.
func (d *Datapath) ForgetFlows(dep *Departures, late bool) (forgotten int, err error) {
	for _, name := range ctTables {
		n, err := forget(bindTable[ctKey, ctEntry](d, name), dep, late)
		forgotten += n
		if err != nil {
			return forgotten, err
		}
	}
	n, err := d.forgetNear(dep, late)
	forgotten += n
	if err == nil && forgotten > 0 {
		err = d.VoidFlows()
	}
	return forgotten, err
}

func forget(t *Table[ctKey, ctEntry], dep *Departures, late bool) (forgotten int, err error) {
	var dead []ctKey
	err = t.eachChunk(func(keys []ctKey, values []ctEntry) error {
		dead = dead[:0]
		for i := range keys {
			k, e := &keys[i], values[i]
			client := e.Role == bpfgen.CTPreNAT
			switch dep.fateOf(k, &e) {
			case orphaned:
				dead = append(dead, *k)
			case ends:
				if late || client && k.Proto != uint8(state.TCP) {
					dead = append(dead, *k)
					forgotten++
				}
			case leaves:
				if !client || !led(&e) {
					continue
				}
				if err := t.change(*k, func(now *ctEntry) bool {
					other := now.Role != e.Role || now.Other != e.Other || !led(now)
					now.Backend = bpfgen.BackendLeft
					return !other
				}); err != nil {
					return err
				}
			}
		}
		return t.Delete(dead)
	})
	return forgotten, err
}

// led says of a client's half that another SYN of its flow goes where the first did.
func led(e *ctEntry) bool {
	return e.Opening != bpfgen.CTAnswered && e.Backend != bpfgen.BackendLeft
}

// change changes an entry as it is now, if it is still there and fn says so: what was read with many others is old by
// then, and packets write to it.
func (t Table[K, V]) change(k K, fn func(*V) bool) error {
	m, err := t.open()
	if err != nil {
		return err
	}
	var v V
	if err = m.Lookup(k, &v); err == nil && fn(&v) {
		err = m.Update(k, v, ebpf.UpdateExist)
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("write table %s: %w", t.name, err)
	}
	return nil
}

// ForgetSockFlows removes what unconnected UDP sockets were told. The ways
// back go only when late: a reply may be under way. What is stored with sockets
// nobody but their programs reaches: it holds until the tables' number moves.
func (d *Datapath) ForgetSockFlows(dep *Departures, late bool) error {
	if !dep.Has(state.UDP) {
		return nil
	}
	err := d.eachSlot(dep, state.UDP, func(s *sockSlot, was sockSlot) {
		// A socket that has been led elsewhere meanwhile is led once more, with its next datagram.
		atomic.StoreUint32(&s.Peer.Backend, bpfgen.BackendNone)
		if late {
			atomic.CompareAndSwapUint64(&s.Cookie, was.Cookie, 0)
		}
	})
	if err != nil {
		return err
	}
	if err := d.VoidFlows(); err != nil {
		return err
	}
	t := bindTable[sockFlowKey, sockFlow](d, bpfgen.SockMapMstSockFlowsV1)
	var dead []sockFlowKey
	return t.eachChunk(func(keys []sockFlowKey, values []sockFlow) error {
		dead = dead[:0]
		for i, k := range keys {
			front, back := end{Addr(k.Addr), k.Port}, end{Addr(values[i].Addr), values[i].Port}
			if k.Kind != bpfgen.SockFlowThere {
				front, back = back, front
			}
			if (late || k.Kind == bpfgen.SockFlowThere) && dep.fate(front, back, uint8(state.UDP)) == ends {
				dead = append(dead, k)
			}
		}
		return t.Delete(dead)
	})
}
