// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"encoding/binary"
	"net/netip"
	"testing"

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
				r := o.arrive(end(netip.AddrFrom4(a), uint16(1024+i)), o.f, syn)
				if r.Dropped != "" {
					dropped++
				} else if answered {
					o.answer(pod, b, r.Tuple().Src, syn|ack)
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
