// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// One program at the NIC has the parts of two: other nodes' pods' packets go into
// pods, the edge gets what is its own, whatever it looks like, and the node the rest.
func TestOneProgramAtTheNIC(t *testing.T) {
	e := NewEdge(t, Options{NIC: true}, 2)
	const ref = 3<<16 | 5
	between := External(202, false)
	check(t, e.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Flags: bpfgen.NodeEbpf, Overlay: 77, Port: port(udpPort),
		Ip4: toAddr(between), Ip6: toAddr(External(202, true))}))
	e.putRemote(t, 5, bpfgen.PodRemote{Ref: ref})
	for _, v6 := range []bool{false, true} {
		length := uint32(128)
		check(t, e.MstRemoteNetsV1.Put(bpfgen.PodPrefix{Length: length, Addr: External(7, v6).As16()}, uint32(ref)))
		e.mark(t, External(202, v6), bpfgen.SvcAddress|bpfgen.SvcNode)
		for _, proto := range []uint8{oracle.TCP, oracle.UDP} {
			o := outside{speaker{t, e.Network, proto}, e, v6, end(External(1, v6), 4000), end(e.Node(v6), 30080)}
			pod, far := e.Pods[1], end(External(7, v6), 4000)
			b := end(pod.IP(v6), 8080)
			o.nodePort(0, b)
			e.ClearFlows(t)
			o.want("another node's pod's", o.arrive(far, b, syn), pod.ID, far, b)
			if a := o.arrive(o.c, end(pod.IP(v6), 8081), syn); a.Direct || a.Dropped != "" {
				t.Errorf("a stranger's to a pod: %v, want it at the stack", a)
			}
			// Some endpoint has the bit of the node's address, and none the address.
			setBit(t, e.MstEndpointBitsV1, datapath.EndpointBit(toAddr(e.Node(v6))))
			a := o.arrive(o.c, o.f, syn)
			o.want("a node port", a, pod.ID, o.worn(a), b)
			a = o.arrive(end(o.c.Addr(), 4001), end(External(202, v6), 30080), syn)
			o.want("and at the address between nodes", a, pod.ID, o.worn(a), b)
			for what, to := range map[string]uint16{"the node's own port": 22, "the tunnel's": udpPort, "one that is worn, and nobody's": 61001} {
				if a := o.arrive(o.c, end(External(202, v6), to), syn); a.Direct || a.Dropped != "" {
					t.Errorf("%s: %v, want it at the node", what, a)
				}
			}
		}
	}
}
