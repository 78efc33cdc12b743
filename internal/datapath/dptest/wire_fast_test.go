// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// The short way from the NIC into a pod (bpf/lib/wire_fast.h). That a packet took
// it shows when the pod's address is gone, and nobody said so: who looks for the
// receiver finds none, and leaves the packet to the stack.

// nearWire is a flow of a far pod with one of the node's, direct or through the tunnel.
type nearWire struct {
	*wireNode
	t        *testing.T
	v6       bool
	service  bool
	tunnel   *tunnelled // nil: direct
	pod      Pod
	far, own netip.AddrPort // as the wire shows them
	seen     netip.AddrPort // the far end as the pod knows it
}

// eachNearWire runs fn for such flows of both families, by a Service and without, each of its own.
func eachNearWire(t *testing.T, fn func(w nearWire)) { eachWireFlow(t, []bool{false, true}, fn) }

// eachWireFlow is eachNearWire for flows that the pod opens by a Service (true), or the far one (false).
func eachWireFlow(t *testing.T, services []bool, fn func(w nearWire)) {
	for _, tunnel := range []string{"direct", "over IPv4", "over IPv6"} {
		over6 := tunnel == "over IPv6"
		n := newWireNode(t, tunnel != "direct", over6)
		for i := range 2 * len(services) {
			v6, service := i&1 != 0, services[i/2]
			t.Run(fmt.Sprintf("%s/IPv6 %t/Service %t", tunnel, v6, service), func(t *testing.T) {
				onOneCPU(t)
				w := nearWire{wireNode: n, t: t, v6: v6, pod: n.Pods[1], service: service}
				if tunnel != "direct" {
					from := fromThere(over6)
					w.tunnel = &from
				}
				w.anew()
				fn(w)
				n.join(t, tunnel != "direct", over6)
			})
		}
	}
}

// anew goes on with another flow.
func (w *nearWire) anew() {
	w.t.Helper()
	flowsOpened++
	w.far, w.own = netip.AddrPortFrom(farPod(9, w.v6), 5000+flowsOpened), netip.AddrPortFrom(w.pod.IP(w.v6), 7000+flowsOpened)
	w.seen = w.far
	w.open(w.service)
	w.holdPairs(w.t)
}

var flowsOpened uint16 // no test runs beside another

// answer lets the pod send to the far end.
func (w *nearWire) answer(flags uint8) {
	w.t.Helper()
	p := Eth(w.pod.MAC, w.pod.NodeMAC).IP(w.own.Addr(), w.seen.Addr()).TCP(w.own.Port(), w.seen.Port(), flags)
	if r := w.send(w.t, p, Context{}); r.Verdict == Drop {
		w.t.Fatal(r)
	}
}

// open establishes it: by the far pod, or by the node's through a Service.
func (w *nearWire) open(service bool) {
	w.t.Helper()
	if service {
		w.seen = netip.AddrPortFrom(VIP(1, w.v6), 443)
		w.SetService(w.t, oracle.TCP, w.seen, w.far)
		w.answer(syn)
		w.enters(w.arrive(syn | ack))
		w.answer(ack)
	} else {
		w.enters(w.arrive(syn))
		w.answer(syn | ack)
		w.enters(w.arrive(ack))
	}
	w.enters(w.arrive(ack))
}

func (w *nearWire) frame(flags uint8) []byte {
	return Eth([6]byte{2, 1}, [6]byte{}).IP(w.far.Addr(), w.own.Addr()).TCP(w.far.Port(), w.own.Port(), flags).Payload(40).Frame()
}

func (w *nearWire) arrive(flags uint8) Result {
	w.t.Helper()
	frame := w.frame(flags)
	if w.tunnel != nil {
		frame = w.tunnel.wrap(frame)
	}
	return w.fromNetdev(w.t, frame)
}

func (w *nearWire) enters(r Result) {
	w.t.Helper()
	w.wireNode.enters(w.t, r, w.pod, w.seen, w.own)
}

// entry is the flow's, of the tuple that the wire shows.
func (w *nearWire) entry() *Flow {
	w.t.Helper()
	if f := w.Flow(w.t, Tuple{oracle.TCP, w.far, w.own}, bpfgen.CTScopeFlow); f != nil {
		return f
	}
	return w.Flow(w.t, Tuple{oracle.TCP, w.own, w.far}, bpfgen.CTScopeFlow)
}

// forgetPod takes the pod's addresses from the table of endpoints until the test ends.
func (w *nearWire) forgetPod() {
	w.t.Helper()
	for _, a := range []netip.Addr{w.pod.IP4, w.pod.IP6} {
		check(w.t, w.MstEndpointAddrsV1.Delete(toAddr(a)))
		w.t.Cleanup(func() { check(w.t, w.MstEndpointAddrsV1.Put(toAddr(a), w.pod.ID)) })
	}
}

// away fails unless the packet is left to the stack.
func (w *nearWire) away(r Result, after string) {
	w.t.Helper()
	if r.Verdict == Redirect && r.RedirectKind == bpfgen.RedirectPeer {
		w.t.Errorf("after %s changed it goes the short way: %v", after, r)
	}
}

func TestPacketsFromTheWireTakeTheShortWay(t *testing.T) {
	eachNearWire(t, func(w nearWire) {
		w.forgetPod()
		before := counted(w.t, w.Network, w.pod)
		w.enters(w.arrive(ack))
		if after := counted(w.t, w.Network, w.pod); after.ToPod.Packets != before.ToPod.Packets+1 {
			w.t.Errorf("counted %+v, then %+v", before.ToPod, after.ToPod)
		}
	})
}

// Connections that follow one another, from the SYN to the last ACK, once their pair was judged.
func TestConnectionsFromTheWireTakeTheShortWay(t *testing.T) {
	eachWireFlow(t, []bool{false}, func(w nearWire) {
		w.forgetPod()
		for i := range uint16(3) {
			w.far = netip.AddrPortFrom(w.far.Addr(), 100+i)
			w.seen = w.far
			w.open(false)
			if f := w.entry(); f == nil || !f.near || !f.Established {
				w.t.Fatalf("its entry is %+v", f)
			}
			w.enters(w.arrive(fin | ack))
			w.answer(fin | ack)
			w.enters(w.arrive(ack))
			if f := w.entry(); f == nil || f.Left() > 121 {
				w.t.Errorf("closed, its entry is %+v", f)
			}
		}
	})
}

// eachWireChange runs fn with whatever the short way rests on changed, in a flow of its own each.
func (w *nearWire) eachWireChange(fn func(name string)) {
	w.t.Helper()
	for name, change := range map[string]func(){
		"the pod's endpoint": func() { w.SetPod(w.t, w.pod) },
		"the tables":         func() { w.VoidFlows(w.t) },
		"time": func() {
			ageKept(w.t, w.Network)
			w.agePairs(w.t)
		},
		"its node": func() {
			const anew = thereRef + 1<<16
			w.putRemote(w.t, thereRef&0xffff, bpfgen.PodRemote{Ref: anew})
		},
	} {
		w.t.Run(name, func(t *testing.T) {
			outer := w.t
			w.t = t
			defer func() { w.t = outer }()
			w.anew()
			change()
			w.forgetPod()
			fn(name)
			w.join(t, w.tunnel != nil, w.tunnel != nil && w.tunnel.src.Is6())
		})
	}
}

func TestTheShortWayFromTheWireEndsWithWhatItRestsOn(t *testing.T) {
	eachNearWire(t, func(w nearWire) {
		w.eachWireChange(func(name string) { w.away(w.arrive(ack), name) })
		w.anew()
		w.putRemote(w.t, thereRef&0xffff, bpfgen.PodRemote{})
		if r := w.arrive(ack); r.Verdict == Redirect {
			w.t.Errorf("its node is gone: %v", r)
		}
	})
}

func TestAPairFromTheWireEndsWithWhatItRestsOn(t *testing.T) {
	eachWireFlow(t, []bool{false}, func(w nearWire) {
		next := func() Result {
			w.far = netip.AddrPortFrom(w.far.Addr(), 99)
			return w.arrive(syn)
		}
		w.eachWireChange(func(name string) { w.away(next(), name) })
		w.t.Run("a Service", func(t *testing.T) {
			outer := w.t
			w.t = t
			defer func() { w.t = outer }()
			w.anew()
			var meta bpfgen.PodMeta
			check(t, w.MstMetaV1.Lookup(uint32(0), &meta))
			meta.NextService++
			check(t, w.MstMetaV1.Put(uint32(0), meta))
			w.forgetPod()
			w.away(next(), "a Service")
		})
		w.anew()
		w.forgetPod()
		w.own = netip.AddrPortFrom(w.own.Addr(), w.own.Port()+1000)
		w.away(w.arrive(syn), "the port")
	})
}

// Nobody else opens a connection by a pair that was judged.
func TestAPairFromTheWireIsTheSendersAlone(t *testing.T) {
	eachWireFlow(t, []bool{false}, func(w nearWire) {
		w.forgetPod()
		w.far = netip.AddrPortFrom(w.far.Addr(), 98)
		frame := w.frame(syn)
		if w.tunnel == nil {
			wrapped := fromThere(w.v6).wrap(frame)
			passes(w.t, w.fromNetdev(w.t, wrapped), wrapped)
		} else {
			passes(w.t, w.fromNetdev(w.t, frame), frame)
			other := *w.tunnel
			other.src = wireAddr(3, other.src.Is6())
			w.away(w.fromNetdev(w.t, other.wrap(frame)), "the tunnel's other end")
		}
		if f := w.entry(); f != nil {
			w.t.Errorf("it was entered: %+v", f)
		}
	})
}

// Who knows a flow's ports does not get in by what is kept of it: not from elsewhere, nor another way.
func TestTheShortWayFromTheWireIsTheSendersAlone(t *testing.T) {
	eachNearWire(t, func(w nearWire) {
		frame := w.frame(ack)
		if w.tunnel == nil {
			wrapped := fromThere(w.v6).wrap(frame)
			passes(w.t, w.fromNetdev(w.t, wrapped), wrapped)
			return
		}
		passes(w.t, w.fromNetdev(w.t, frame), frame)
		other := *w.tunnel
		other.src = wireAddr(3, other.src.Is6())
		if r := w.fromNetdev(w.t, other.wrap(frame)); r.Verdict != Drop || r.Reason != bpfgen.ReasonTunnelSource {
			w.t.Errorf("by another node's tunnel: %v", r)
		}
		odd := *w.tunnel
		odd.vni++
		wrapped := odd.wrap(frame)
		passes(w.t, w.fromNetdev(w.t, wrapped), wrapped)
	})
}

func TestFlowsFromTheWireAreSeenToClose(t *testing.T) {
	eachNearWire(t, func(w nearWire) {
		w.enters(w.arrive(fin | ack))
		if f := w.entry(); f == nil || f.Entry.ClosingOrig|f.Entry.ClosingReply == 0 || f.Left() > 121 {
			w.t.Errorf("after the far end's FIN: %+v", f)
		}
		w.enters(w.arrive(ack))
	})
}

// Another node's own packets, or those of clients who wear its address, enter past the stack when that
// node is reached without the tunnel, and so do the answers leave.
func TestANodeItselfReachesAPodPastTheStack(t *testing.T) {
	wire := onWire(t)
	for _, tunnel := range []bool{false, true} {
		n := newWireNode(t, tunnel, false)
		pod := n.Pods[1]
		for _, v6 := range []bool{false, true} {
			src, dst := netip.AddrPortFrom(wireAddr(2, v6), 5000), netip.AddrPortFrom(pod.IP(v6), 80)
			frame := func(flags uint8) []byte {
				return Eth([6]byte{2, 1}, [6]byte{}).IP(src.Addr(), dst.Addr()).TCP(src.Port(), dst.Port(), flags).Payload(20).Frame()
			}
			if tunnel {
				passes(t, n.fromNetdev(t, frame(syn)), frame(syn))
				continue
			}
			n.enters(t, n.fromNetdev(t, frame(syn)), pod, src, dst)
			answer := Eth(pod.MAC, pod.NodeMAC).IP(dst.Addr(), src.Addr()).TCP(dst.Port(), src.Port(), syn|ack)
			if r := n.send(t, answer, Context{}); r.Verdict != Redirect || r.RedirectKind != bpfgen.RedirectNeigh || r.RedirectIfindex != wire {
				t.Errorf("IPv6 %t: the answer: %v, want it at the wire", v6, r)
			}
			n.SetPod(t, pod) // judged again: it is still that node's
			n.enters(t, n.fromNetdev(t, frame(ack)), pod, src, dst)
			// What the pod opens to the node goes by the stack, which may masquerade it.
			question := Eth(pod.MAC, pod.NodeMAC).IP(dst.Addr(), src.Addr()).TCP(6000, 22, syn)
			passes(t, n.send(t, question, Context{}), question.Frame())
			back := Eth([6]byte{2, 1}, [6]byte{}).IP(src.Addr(), dst.Addr()).TCP(22, 6000, syn|ack).Frame()
			passes(t, n.fromNetdev(t, back), back)
			stranger := Eth([6]byte{2, 1}, [6]byte{}).IP(wireAddr(77, v6), dst.Addr()).TCP(5000, 80, syn).Frame()
			passes(t, n.fromNetdev(t, stranger), stranger)
		}
	}
}

// A flow with somebody outside is the stack's: packets that follow one are left to it before anything is asked.
// That one took the short way shows when nobody else would let it pass.
func TestPacketsForTheStackTakeTheShortWay(t *testing.T) {
	n := newWireNode(t, false, false)
	wall := newWall(t)
	port := uint16(5000)
	for name, proto := range map[string]uint8{"TCP": oracle.TCP, "UDP": oracle.UDP} {
		eachFamily(t, func(t *testing.T, v6 bool) {
			pod := n.Pods[1]
			port++
			packet := func(to [6]byte, src, dst netip.Addr, sport, dport uint16, flags uint8) *Packet {
				p := Eth(pod.MAC, to).IP(src, dst)
				if proto == oracle.UDP {
					return p.UDP(sport, dport).Payload(40)
				}
				return p.TCP(sport, dport, flags).Payload(40)
			}
			for opener, open := range map[string]func(flags uint8){
				"the pod": func(flags uint8) {
					n.send(t, packet(pod.NodeMAC, pod.IP(v6), External(1, v6), port, 443, flags), Context{})
				},
				"outside": func(flags uint8) {
					_, err := n.ToPod(pod, packet(pod.MAC, External(1, v6), pod.IP(v6), 443, port, flags).Frame())
					check(t, err)
				},
			} {
				t.Run(name+" by "+opener, func(t *testing.T) {
					onOneCPU(t)
					n.ClearFlows(t)
					open(syn)
					arrives := func(flags uint8) Result {
						return n.fromNetdev(t, packet([6]byte{}, External(1, v6), pod.IP(v6), 443, port, flags).Frame())
					}
					first := syn | ack
					if opener == "outside" {
						first = ack
					}
					if r := arrives(uint8(first)); r.Verdict != Next {
						t.Fatalf("the first: %v", r)
					}
					var toPod *ebpf.Program
					check(t, n.MstProgramsV1.Lookup(uint32(bpfgen.ProgToPodWire), &toPod))
					t.Cleanup(func() {
						check(t, n.MstProgramsV1.Put(uint32(bpfgen.ProgToPodWire), toPod))
						check(t, toPod.Close())
					})
					check(t, n.MstProgramsV1.Put(uint32(bpfgen.ProgToPodWire), wall))
					for range 2 {
						if r := arrives(ack); r.Verdict != Next {
							t.Errorf("the next: %v", r)
						}
					}
					n.SetPod(t, pod)
					if r := arrives(ack); r.Verdict != Drop {
						t.Errorf("after the pod was changed: %v", r)
					}
				})
			}
		})
	}
}

// newWall is a program that drops whatever comes.
func newWall(t *testing.T) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, int32(Drop)), asm.Return()}})
	check(t, err)
	t.Cleanup(func() { check(t, p.Close()) })
	return p
}

// The way into the pod is kept with the flow, and follows the pod.
func TestTheShortWayFromTheWireLeadsToThePodAsItIsNow(t *testing.T) {
	eachNearWire(t, func(w nearWire) {
		before := w.pod
		defer func() { w.SetPod(w.t, before) }()
		w.pod.Ifindex, w.pod.MAC[5] = before.Ifindex+100, before.MAC[5]^1
		w.SetPod(w.t, w.pod)
		for range 3 {
			w.enters(w.arrive(ack))
		}
		w.pod.MTU = 39
		w.SetPod(w.t, w.pod)
		for range 3 {
			w.away(w.arrive(ack), "what it takes")
		}
	})
}
