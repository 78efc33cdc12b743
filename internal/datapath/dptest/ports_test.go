// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// A backend has some thousand ports of the node's for clients outside. Who asks one question holds one for as long as
// another might follow, and a flood of SYNs as many as it likes; but not against whom there is no other for.
func TestHalfOpenFlowsFromOutsideYieldTheirPorts(t *testing.T) {
	for _, proto := range []uint8{oracle.UDP, oracle.TCP} {
		for _, answered := range []bool{false, true} {
			e := NewEdge(t, Options{NIC: true}, 2)
			o := outside{speaker{t, e.Network, proto}, e, false, end(External(1, false), 4000), end(e.Node(false), 30080)}
			pod := e.Pods[1]
			b := end(pod.IP4, 8080)
			o.nodePort(0, b)
			worn := o.worn(o.arrive(o.c, o.f, syn))
			o.want("answer", o.answer(pod, b, worn, syn|ack), 0, o.f, o.c)
			o.want("more", o.arrive(o.c, o.f, ack), pod.ID, worn, b)
			dropped := 0
			for i := range 6000 {
				var a [4]byte
				binary.BigEndian.PutUint32(a[:], 0xc6336500+uint32(i)*7)
				client := end(netip.AddrFrom4(a), uint16(1024+i))
				r := o.arrive(client, o.f, syn)
				if r.Dropped != "" {
					dropped++
				} else if answered {
					o.answer(pod, b, r.Tuple().Src, syn|ack)
					if proto == oracle.TCP {
						o.arrive(client, o.f, 0) // which proves nothing: the pod drops it without a word
					}
				}
			}
			if dropped > 0 {
				t.Errorf("protocol %d, answered %v: of 6000 clients %d found no port", proto, answered, dropped)
			}
			// Who has been proved keeps his.
			o.want("its next", o.arrive(o.c, o.f, ack), pod.ID, worn, b)
			o.want("its answer", o.answer(pod, b, worn, ack), 0, o.f, o.c)
		}
	}
}

// A flow that has closed leaves its port to others only when there are none that are free: the other end may remember it
// (TIME-WAIT), and take no SYN from somebody else there. From its own client it does.
func TestAClosedFlowsPortIsNotAnothersAtOnce(t *testing.T) {
	const ports = 64
	eachEdge(t, func(o outside) {
		if o.proto != oracle.TCP {
			return
		}
		o.edge.Wear(t, EdgePorts.First, ports)
		pod := o.edge.Pods[1]
		b := end(pod.IP(o.v6), 8080)
		o.nodePort(0, b)
		for last, ends := range map[string]func(worn netip.AddrPort){
			"closed": func(worn netip.AddrPort) {
				o.answer(pod, b, worn, fin|ack)
				o.arrive(o.c, o.f, fin|ack)
				o.answer(pod, b, worn, ack)
			},
			"reset":             func(worn netip.AddrPort) { o.answer(pod, b, worn, rst) }, // of anybody's, maybe
			"reset, and silent": func(worn netip.AddrPort) { o.answer(pod, b, worn, rst) },
		} {
			for _, who := range []netip.Addr{External(5, o.v6), o.c.Addr()} {
				same := 0
				for i := range uint16(ports) {
					o.edge.ClearFlows(t)
					worn := o.worn(o.arrive(o.c, o.f, syn))
					o.want("answer", o.answer(pod, b, worn, syn|ack), 0, o.f, o.c)
					o.want("more", o.arrive(o.c, o.f, ack), pod.ID, worn, b)
					ends(worn)
					if last == "reset, and silent" {
						o.edge.Age(t, bpfgen.CTNearClosed)
					}
					if o.worn(o.arrive(end(who, 5000+i), o.f, syn)) == worn {
						same++
					}
				}
				if free := last == "reset, and silent" || who == o.c.Addr(); free != (same > 0) {
					t.Errorf("v6=%v, %s: %d of %d flows of %v have the port of %v's", o.v6, last, same, ports, who, o.c)
				}
			}
		}
		// Where there is no other, it is.
		o.edge.ClearFlows(t)
		o.edge.Wear(t, EdgePorts.First, 1)
		worn := o.worn(o.arrive(o.c, o.f, syn))
		o.answer(pod, b, worn, fin|ack)
		o.arrive(o.c, o.f, fin|ack)
		if next := o.worn(o.arrive(end(External(5, o.v6), 5000), o.f, syn)); next != worn {
			t.Errorf("%v, want %v again", next, worn)
		}
		o.edge.Wear(t, EdgePorts.First, EdgePorts.Count)
	})
}
