// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"net"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// Flows of clients outside lie near, as pods' do, but on credit.

func TestAFloodFromOutsideTakesNoMoreRoomNearThanTheCredit(t *testing.T) {
	eachEdge(t, func(o outside) {
		if o.proto != oracle.TCP {
			return
		}
		o.nodePort(0, end(o.edge.Pods[1].IP(o.v6), 8080))
		o.edge.setCredit(o.t, 20)
		for i := range uint16(100) {
			o.worn(o.arrive(end(o.c.Addr(), 3000+i), o.f, syn))
		}
		if near, credit := len(o.edge.nearFlows(o.t)), o.edge.credit(o.t); near != 20 || credit != 0 {
			o.t.Errorf("%d entries of a flood lie near, credit %d: want 20 and none", near, credit)
		}
	})
}

func TestNothingEntersAPodFromOutsideWithoutItsProgram(t *testing.T) {
	eachEdge(t, func(o outside) {
		b := end(o.edge.Pods[1].IP(o.v6), 8080)
		o.nodePort(0, b)
		var toPod *ebpf.Program
		check(o.t, o.edge.MstProgramsV1.Lookup(uint32(bpfgen.ProgToPodEdge), &toPod))
		check(o.t, o.edge.MstProgramsV1.Delete(uint32(bpfgen.ProgToPodEdge)))
		if a := o.arrive(o.c, o.f, syn); a.Dropped != ReasonName(bpfgen.ReasonNoProgram) {
			o.t.Errorf("%v", a)
		}
		check(o.t, o.edge.MstProgramsV1.Put(uint32(bpfgen.ProgToPodEdge), toPod))
		check(o.t, toPod.Close())
		worn := o.worn(o.arrive(o.c, o.f, syn))
		o.want("with it", o.arrive(o.c, o.f, syn), 1, worn, b)
	})
}

// The half that a backend sees leaves its room soon after both ends have closed, and its port is worn
// again. What comes late from the first client is not the next one's, not even by the short way.
func TestALateClientIsNotTakenForTheNext(t *testing.T) {
	eachEdge(t, func(o outside) {
		if o.proto != oracle.TCP {
			return
		}
		onOneCPU(o.t)
		o.edge.setCredit(o.t, 100)
		pod := o.edge.Pods[1]
		b, other := end(pod.IP(o.v6), 8080), end(pod.IP(o.v6), 8082)
		o.nodePort(0, b)
		second := o
		second.f = end(o.f.Addr(), o.f.Port()+1)
		second.nodePort(0, other)
		o.edge.Wear(o.t, 61000, 1)
		worn := o.worn(o.arrive(o.c, o.f, syn))
		o.want("the answer", o.answer(pod, b, worn, syn|ack), 0, o.f, o.c)
		for _, flags := range []uint8{ack, ack, fin | ack} {
			o.want("the client's", o.arrive(o.c, o.f, flags), pod.ID, worn, b)
		}
		o.want("the answer to FIN", o.answer(pod, b, worn, fin|ack), 0, o.f, o.c)
		o.want("the last, by what is kept", o.arrive(o.c, o.f, ack), pod.ID, worn, b)
		o.edge.eachNear(o.t, func(n *bpfgen.PodNearFlow) { n.E.Expires -= bpfgen.CTNearClosed + 1 }) // and what is kept stays

		// Its place is that of a flow whose ports differ in the same bits, which takes its room.
		o.edge.Wear(o.t, 61002, 1)
		o.worn(o.arrive(end(o.c.Addr(), 5000), second.f, syn))
		if f := o.edge.Flow(o.t, Tuple{o.proto, worn, b}, bpfgen.CTScopeFlow); f != nil {
			o.t.Fatalf("the closed flow still has its room: %+v", f)
		}
		o.edge.Wear(o.t, 61000, 1)
		if next := o.worn(o.arrive(end(o.c.Addr(), 5001), o.f, syn)); next != worn {
			o.t.Fatalf("the next client wears %v, want %v", next, worn)
		}
		if a := o.arrive(o.c, o.f, ack); a.Direct || a.Tuple().Dst != o.f {
			o.t.Errorf("the first client's, late: %v, want it left to the node", a)
		}
		o.edge.Wear(o.t, EdgePorts.First, EdgePorts.Count)
	})
}

// A client's next connection goes the way that was found for its last one, by its address alone: from the answer to its
// SYN on.
func TestAClientsConnectionsGoTheWayOfItsLast(t *testing.T) {
	eachEdge(t, func(o outside) {
		onOneCPU(o.t)
		router := net.HardwareAddr{2, 0xab, 0, 0, 0, 1}
		check(o.t, netlink.NeighSet(&netlink.Neigh{
			LinkIndex: int(o.edge.Ifindex), IP: o.c.Addr().AsSlice(), HardwareAddr: router, State: netlink.NUD_PERMANENT}))
		pod := o.edge.Pods[1]
		b := end(pod.IP(o.v6), 8080)
		o.nodePort(0, b)
		want := append(append([]byte{}, router...), o.edge.MAC[:]...)
		var answers [2]Arrival
		for port := range uint16(20) { // on a machine that has other work, the moment may be over before
			for i := range answers {
				c := end(o.c.Addr(), 5000+2*port+uint16(i))
				worn := o.worn(o.arrive(c, o.f, syn))
				answers[i] = o.answer(pod, b, worn, syn|ack)
				o.want("the answer", answers[i], 0, o.f, c)
			}
			if bytes.Equal(answers[1].Frame[:12], want) {
				break
			}
		}
		if got := answers[1].Frame[:12]; !bytes.Equal(got, want) {
			o.t.Errorf("the second connection's answer goes as %x, want %x", got, want)
		}
		check(o.t, netlink.NeighDel(&netlink.Neigh{LinkIndex: int(o.edge.Ifindex), IP: o.c.Addr().AsSlice()}))
	})
}
