// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// flow is one as the tests enter it into the tables.
type flow struct {
	proto               state.Protocol
	client, front, back string // front "": not translated
	opening             uint8  // enum ct_opening
}

func (f flow) String() string { return fmt.Sprintf("%s %s>%s>%s", f.proto, f.client, f.front, f.back) }

func tables(e *Engine, f flow) *ebpf.Map {
	if f.opening == bpfgen.CTOpening {
		return e.dp.Map(bpfgen.PodMapMstCtNewV1)
	}
	return e.dp.Map(bpfgen.PodMapMstCtV1)
}

// ctKey is ct_key_of() of bpf/lib/conntrack.h.
func ctKey(src, dst netip.AddrPort, p state.Protocol) (k bpfgen.PodCtKey, srcIsHi bool) {
	a, b := src.Addr().As16(), dst.Addr().As16()
	lo, hi := src, dst
	if srcIsHi = slices.Compare(a[:], b[:]) > 0; srcIsHi {
		lo, hi = dst, src
	}
	return bpfgen.PodCtKey{
		Lo: datapath.FromAddr(lo.Addr()), Hi: datapath.FromAddr(hi.Addr()),
		LoPort: datapath.Port(lo.Port()), HiPort: datapath.Port(hi.Port()), Proto: uint8(p),
	}, srcIsHi
}

// halves are the entries of f by their keys, the client's first.
func (f flow) halves() (keys []bpfgen.PodCtKey, values []bpfgen.PodCtEntry) {
	client, back := netip.MustParseAddrPort(f.client), netip.MustParseAddrPort(f.back)
	add := func(dst, other netip.AddrPort, role uint8, backend uint32) {
		k, hi := ctKey(client, dst, f.proto)
		v := bpfgen.PodCtEntry{Expires: 1 << 30, Role: role, Backend: backend, Opening: f.opening}
		if hi {
			v.Flags = bpfgen.CTOriginIsHi
		}
		if other.IsValid() {
			v.Other.Src, v.Other.Sport = datapath.FromAddr(client.Addr()), datapath.Port(client.Port())
			v.Other.Dst, v.Other.Dport = datapath.FromAddr(other.Addr()), datapath.Port(other.Port())
		}
		keys, values = append(keys, k), append(values, v)
	}
	if f.front == "" {
		add(back, netip.AddrPort{}, bpfgen.CTDirect, 0)
		return
	}
	front := netip.MustParseAddrPort(f.front)
	add(front, back, bpfgen.CTPreNAT, 1)
	add(back, front, bpfgen.CTPostNAT, 1)
	return
}

func (n *node) enter(flows ...flow) {
	n.t.Helper()
	n.must(func(e *Engine) error {
		for _, f := range flows {
			keys, values := f.halves()
			for i := range keys {
				if err := tables(e, f).Put(keys[i], values[i]); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// left counts the entries of f, and says whether its next SYN picks anew.
func (n *node) left(f flow) (entries int, marked bool) {
	n.t.Helper()
	n.must(func(e *Engine) error {
		keys, _ := f.halves()
		for _, k := range keys {
			var v bpfgen.PodCtEntry
			if err := tables(e, f).Lookup(k, &v); err == nil {
				entries++
				marked = marked || v.Backend == bpfgen.BackendLeft
			} else if !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
		}
		return nil
	})
	return entries, marked
}

func countFlows(e *Engine) (int, error) {
	infos, err := e.dp.Tables()
	for _, i := range infos {
		if i.Name == bpfgen.PodMapMstCtV1 {
			return i.Entries, err
		}
	}
	return 0, err
}

func udp(front string, backends ...string) state.Service {
	return plain(state.UDP, front, backends...)
}

func sctp(front string, backends ...string) state.Service {
	return plain(state.SCTP, front, backends...)
}

const answered, opening, inPlace = bpfgen.CTAnswered, bpfgen.CTOpening, bpfgen.CTOpeningInPlace

func TestRemovedBackendTouchesItsOwnFlowsOnly(t *testing.T) {
	for name, c := range map[string]struct {
		front, other, back, replaced string
		clients                      []string // above and below in the order of addresses
	}{
		"ipv4": {"10.96.0.1:80", "10.96.0.2:80", "10.9.0.2:80", "10.9.0.3:80", []string{"10.1.0.9", "172.16.0.9"}},
		"ipv6": {"[fd50::1]:80", "[fd50::2]:80", "[fd09::2]:80", "[fd09::3]:80", []string{"[fd01::9]", "[fe01::9]"}},
	} {
		for _, reset := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/reset=%v", name, reset), func(t *testing.T) {
				n := newNode(t)
				n.must(func(e *Engine) error {
					return e.AddServices(svc(c.front, c.back), udp(c.front, c.back), sctp(c.front, c.back),
						svc(c.other, c.back), udp(c.other, c.back), sctp(c.other, c.back))
				})
				var ends, stays, half []flow
				port := 4000
				for _, client := range c.clients {
					next := func(p state.Protocol, front, back string, opening uint8) flow {
						port++ // so that no two flows share a tuple
						return flow{p, fmt.Sprintf("%s:%d", client, port), front, back, opening}
					}
					ends = append(ends, next(state.UDP, c.front, c.back, answered), next(state.UDP, c.front, c.back, opening),
						next(state.UDP, c.front, c.back, inPlace))
					for _, p := range []state.Protocol{state.UDP, state.SCTP} { // answers that met no half of a flow
						port++
						ends = append(ends, flow{p, c.front, "", fmt.Sprintf("%s:%d", client, port), answered})
						stays = append(stays, flow{p, c.other, "", fmt.Sprintf("%s:%d", client, port), answered}, next(p, "", c.front, answered))
					}
					for _, p := range []state.Protocol{state.UDP, state.TCP, state.SCTP} {
						stays = append(stays, next(p, "", c.back, answered), next(p, "", c.back, opening), next(p, c.other, c.back, answered),
							next(p, c.other, c.back, opening), next(p, c.front, c.replaced, answered))
					}
					for _, p := range []state.Protocol{state.TCP, state.SCTP} {
						if known := next(p, c.front, c.back, answered); reset {
							ends = append(ends, known)
						} else {
							stays, half = append(stays, known), append(half, next(p, c.front, c.back, opening), next(p, c.front, c.back, inPlace))
						}
					}
				}
				n.enter(slices.Concat(ends, stays, half)...)
				n.must(func(e *Engine) error {
					e.ResetRemoved = reset
					return e.UpsertServices([]state.Service{svc(c.front, c.replaced), udp(c.front, c.replaced), sctp(c.front, c.replaced)})
				})
				for _, f := range ends {
					if got, _ := n.left(f); got != 0 {
						t.Errorf("%v: %d entries are left", f, got)
					}
				}
				for _, f := range slices.Concat(stays, half) {
					keys, _ := f.halves()
					if got, marked := n.left(f); got != len(keys) || marked != slices.Contains(half, f) {
						t.Errorf("%v: %d entries are left; picks anew: %v", f, got, marked)
					}
				}
			})
		}
	}
}

func TestBackendsGoneEndsFlowsThroughAnyService(t *testing.T) {
	n := newNode(t)
	pod := []flow{{state.TCP, "10.1.0.9:4000", "10.96.0.1:80", "10.9.0.2:80", answered}, {state.UDP, "10.1.0.9:4000", "10.96.0.2:81", "10.9.0.2:81", answered},
		{state.SCTP, "10.1.0.9:4000", "10.96.0.2:81", "10.9.0.2:81", answered}}
	port := flow{state.TCP, "10.1.0.9:4001", "10.96.0.1:80", "192.0.2.1:80", answered}
	stays := []flow{
		{state.TCP, "10.1.0.9:4002", "10.96.0.1:80", "192.0.2.1:81", answered}, {state.UDP, "10.1.0.9:4002", "10.96.0.1:80", "192.0.2.1:80", answered},
		{state.TCP, "10.1.0.9:4003", "", "10.9.0.2:80", answered},
	}
	n.enter(slices.Concat(pod, stays, []flow{port})...)
	n.must(func(e *Engine) error {
		return e.BackendsGone(state.Backend{AddrPort: netip.MustParseAddrPort("10.9.0.2:0")},
			state.Backend{AddrPort: netip.MustParseAddrPort("192.0.2.1:80"), Protocol: state.TCP})
	})
	for _, f := range append(pod, port) {
		if got, _ := n.left(f); got != 0 {
			t.Errorf("%v: %d entries are left", f, got)
		}
	}
	for _, f := range stays {
		if got, _ := n.left(f); got == 0 {
			t.Errorf("%v: ended", f)
		}
	}
}

func TestAKilledToolsRemovalIsFinished(t *testing.T) {
	n := newNode(t)
	s := udp("10.96.0.1:80", "10.9.0.2:80", "10.9.0.3:80")
	f := flow{state.UDP, "10.1.0.9:4000", "10.96.0.1:80", "10.9.0.2:80", answered}
	n.must(func(e *Engine) error { return e.AddServices(s) })
	n.enter(f)
	n.must(func(e *Engine) error {
		op := operation{Kind: opServices, Upserts: []state.Binding{bound(t, udp("10.96.0.1:80", "10.9.0.3:80"))}}
		if err := e.loadServices(); err != nil {
			return err
		}
		op.Departures = e.departing(op)
		if err := e.store.WriteJournal(op); err != nil {
			return err
		}
		return e.applyServices(op) // and dies here
	})
	n.must(func(e *Engine) error {
		var op operation
		if left, err := e.store.ReadJournal(&op); err != nil || left {
			t.Errorf("the journal holds %+v, %v", op, err)
		}
		return nil
	})
	if got, _ := n.left(f); got != 0 {
		t.Errorf("%d entries are left", got)
	}
}

func TestAChangeThatFailsEndsNothing(t *testing.T) {
	n := newNode(t)
	n.must(func(e *Engine) error { return e.AddServices(udp("10.96.0.1:80", "10.9.0.2:80")) })
	f := flow{state.UDP, "10.1.0.9:4000", "10.96.0.1:80", "10.9.0.2:80", answered}
	n.enter(f)
	n.opts.Faults = (&breaking{left: 2, err: errors.New("injected fault")}).wrap
	err := n.do(func(e *Engine) error { return e.UpsertServices([]state.Service{udp("10.96.0.1:80", "10.9.0.3:80")}) })
	n.opts.Faults = nil
	if got, _ := n.left(f); err == nil || got != 2 {
		t.Errorf("%v; %d entries are left", err, got)
	}
}

func TestWhatUnconnectedSocketsWereToldIsForgotten(t *testing.T) {
	n := newNode(t)
	n.must(func(e *Engine) error {
		return e.AddServices(udp("10.96.0.1:80", "10.9.0.2:80"), udp("10.96.0.2:80", "10.9.0.2:80"))
	})
	told := func(cookie uint64, front, back string) (keys []bpfgen.SockSockFlowKey, values []bpfgen.SockSockFlow) {
		ends := []netip.AddrPort{netip.MustParseAddrPort(front), netip.MustParseAddrPort(back)}
		for i, a := range ends {
			k := bpfgen.SockSockFlowKey{Cookie: cookie, Port: datapath.Port(a.Port()), Kind: uint8(i)}
			k.Addr.Bytes = a.Addr().As16()
			v := bpfgen.SockSockFlow{Port: datapath.Port(ends[1-i].Port()), Backend: 1}
			v.Addr.Bytes = ends[1-i].Addr().As16()
			keys, values = append(keys, k), append(values, v)
		}
		return keys, values
	}
	n.must(func(e *Engine) error {
		for cookie, front := range map[uint64]string{7: "10.96.0.1:80", 8: "10.96.0.2:80"} {
			keys, values := told(cookie, front, "10.9.0.2:80")
			for i := range keys {
				if err := e.dp.Map(bpfgen.SockMapMstSockFlowsV1).Put(keys[i], values[i]); err != nil {
					return err
				}
			}
		}
		for cookie, front := range map[uint64]string{17: "10.96.0.1:80", 18: "10.96.0.2:80"} {
			f, b := netip.MustParseAddrPort(front), netip.MustParseAddrPort("10.9.0.2:80")
			slot := bpfgen.SockSockSlot{Cookie: cookie}
			slot.Peer.Frontend.Bytes, slot.Peer.FrontendPort = f.Addr().As16(), datapath.Port(f.Port())
			slot.Peer.BackendAddr.Bytes, slot.Peer.BackendPort, slot.Peer.Backend = b.Addr().As16(), datapath.Port(b.Port()), 1
			if err := e.dp.Map(bpfgen.SockMapMstUdpSlotsV1).Put(uint32(cookie), slot); err != nil {
				return err
			}
		}
		return e.RemoveServices(front(udp("10.96.0.1:80")))
	})
	n.must(func(e *Engine) error {
		for cookie, want := range map[uint32]bpfgen.SockSockSlot{17: {}, 18: {Cookie: 18}} {
			var got bpfgen.SockSockSlot
			if err := e.dp.Map(bpfgen.SockMapMstUdpSlotsV1).Lookup(cookie, &got); err != nil {
				return err
			}
			if got.Cookie != want.Cookie || (got.Peer.Backend == 0) != (want.Cookie == 0) {
				t.Errorf("slot %d: %+v", cookie, got)
			}
		}
		var k bpfgen.SockSockFlowKey
		var v bpfgen.SockSockFlow
		got := map[uint64]int{}
		it := e.dp.Map(bpfgen.SockMapMstSockFlowsV1).Iterate()
		for it.Next(&k, &v) {
			got[k.Cookie]++
		}
		if d := cmp.Diff(map[uint64]int{8: 2}, got); d != "" {
			t.Error(d)
		}
		return it.Err()
	})
}

func TestDeletingManyOfWhichSomeAreAbsent(t *testing.T) {
	n := newNode(t)
	n.must(func(e *Engine) error {
		var all, some []uint32
		for i := range uint32(1000) {
			all = append(all, i+1)
			if i%3 != 0 {
				some = append(some, i+1)
			}
		}
		if err := e.dp.Backends.Put(some, make([]datapath.Backend, len(some))); err != nil {
			return err
		}
		if err := e.dp.Backends.Delete(all); err != nil {
			return err
		}
		left, err := e.dp.Backends.All()
		if len(left) > 0 {
			t.Errorf("%d are left", len(left))
		}
		return err
	})
}

// This is one removal on a node that carries 100,000 flows, and a hundred at once.
func TestRemovalAmongManyFlows(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	const flows, services = 100_000, 100
	n := newNode(t)
	n.opts.Sizes.CT = 4 * flows
	var list []state.Service
	for i := range services {
		list = append(list, udp(fmt.Sprintf("10.96.0.%d:80", i+1), "10.9.0.2:80"))
	}
	n.must(func(e *Engine) error { return e.AddServices(list...) })
	var keys []bpfgen.PodCtKey
	var values []bpfgen.PodCtEntry
	for i := range flows {
		f := flow{state.UDP, fmt.Sprintf("10.1.%d.%d:%d", i>>8&255, i&255, 1024+i>>16), fmt.Sprintf("10.96.0.%d:80", i%services+1), "10.9.0.2:80", answered}
		k, v := f.halves()
		keys, values = append(keys, k...), append(values, v...)
	}
	count := 0
	n.must(func(e *Engine) error {
		if _, err := tables(e, flow{}).BatchUpdate(keys, values, nil); err != nil {
			return err
		}
		all, err := countFlows(e)
		count = all
		return err
	})
	remove := func(list []state.Service) (took time.Duration, gone int) {
		var fronts []state.Frontend
		for _, s := range list {
			fronts = append(fronts, front(s))
		}
		n.must(func(e *Engine) error {
			if err := e.loadCatalog(); err != nil {
				return err
			}
			start := time.Now()
			err := e.RemoveServices(fronts...)
			took = time.Since(start)
			all, countErr := countFlows(e)
			gone, count = count-all, all
			return errors.Join(err, countErr)
		})
		return took, gone
	}
	if count < flows {
		t.Fatalf("only %d entries", count)
	}
	t.Logf("%d entries", count)
	took, gone := remove(list[:1])
	t.Logf("one Service of %d: %v, %d entries removed", services, took, gone)
	took, gone = remove(list[1:])
	t.Logf("%d Services at once: %v, %d entries removed", services-1, took, gone)
	if count != 0 || took > 10*time.Second {
		t.Errorf("%d are left after %v", count, took)
	}
}

// The next pod that has the address of one that is gone gets none of its flows, with what was judged of it: neither those it
// opened, by a Service or under the node's address too, nor those to it.
func TestAPodThatIsGoneLeavesNoFlow(t *testing.T) {
	for what, remove := range map[string]func(e *Engine, ep state.Endpoint) error{
		"at once": func(e *Engine, ep state.Endpoint) error { return e.RemovePod(ep.ID) },
		"by the next tool": func(e *Engine, ep state.Endpoint) error {
			return errors.Join(e.begin(e.removal(ep, true)), e.uninstall(ep)) // and dies here
		},
	} {
		t.Run(what, func(t *testing.T) { leavesNoFlow(t, remove) })
	}
}

func leavesNoFlow(t *testing.T, remove func(*Engine, state.Endpoint) error) {
	t.Helper()
	n := newNode(t)
	ep, err := n.add(n.pod(2))
	if err != nil {
		t.Fatal(err)
	}
	near := []flow{{state.TCP, "10.9.0.2:4000", "", "10.9.0.3:80", answered}, {state.TCP, "10.9.0.2:4001", "10.96.0.1:80", "10.9.0.3:80", inPlace}}
	its := []flow{
		{state.UDP, "10.9.0.2:4000", "", "10.9.0.3:80", answered}, {state.UDP, "10.1.0.9:4000", "", "10.9.0.2:80", opening},
		{state.SCTP, "10.9.0.2:4000", "10.96.0.1:80", "10.9.0.3:80", answered}, {state.TCP, "10.9.0.2:4002", "192.0.2.1:443", "192.0.2.1:443", answered},
	}
	other := flow{state.UDP, "10.9.0.3:4000", "10.96.0.1:80", "10.9.0.4:80", answered}
	n.enterNear(near...)
	n.enter(append(its, other)...)
	n.must(func(e *Engine) error { return remove(e, ep) })
	for _, f := range its {
		if got, _ := n.left(f); got != 0 {
			t.Errorf("%v: %d entries are left", f, got)
		}
	}
	if got, _ := n.left(other); got != 2 {
		t.Errorf("%v: %d halves are left", other, got)
	}
	n.must(func(e *Engine) error {
		for place := range uint32(3) {
			var p bpfgen.PodNearPlace
			if err := e.dp.Map(bpfgen.PodMapMstCtNearV1).Lookup(place+1, &p); err != nil {
				return err
			}
			if p.Flows[1].E.Expires == 1<<30 {
				t.Errorf("near, the entry at place %d is left", place+1)
			}
		}
		return nil
	})
}

// To an idle pod nothing goes, so its removal waits for no grace period, and keeps the lock for none.
func TestAnIdlePodHasNothingToSettle(t *testing.T) {
	n := newNode(t)
	n.must(func(e *Engine) error { return e.AddServices(svc("10.96.0.1:80", "10.9.0.2:80")) })
	ep, err := n.add(n.pod(2))
	if err != nil {
		t.Fatal(err)
	}
	n.must(func(e *Engine) error {
		if err := e.loadEndpoints(); err != nil {
			return err
		}
		gone := departures{Pods: ep.Addrs()}
		found, err := e.settleOnce(gone.set(), false)
		if found {
			t.Error("something was found that must move or end")
		}
		return errors.Join(err, e.RemovePod(ep.ID))
	})
}
