// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// What is not of the edge's flows is not the edge's to end: a stranger who sends as if from a pod would end the pod's own.
func TestTheEdgeForgetsNoOthersFlows(t *testing.T) {
	eitherEdge(t, func(o outside) {
		pod := o.edge.Pods[1]
		client, server := end(pod.IP(o.v6), 4001), end(pod.IP(o.v6), 8080)
		o.f = end(VIP(1, o.v6), 80)
		o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindExternalIp}, o.proto, o.f, server)
		stands := end(o.f.Addr(), client.Port())
		o.want("open", o.answer(pod, client, o.f, syn), pod.ID, stands, server)
		o.want("answer", o.answer(pod, server, stands, syn|ack), pod.ID, o.f, client)
		o.want("more", o.answer(pod, client, o.f, ack), pod.ID, stands, server)
		for _, flags := range []uint8{ack, syn} {
			if a := o.arrive(client, o.f, flags); a.Direct {
				o.t.Errorf("a stranger's: %v", a)
			}
			o.edge.VoidFlows(o.t)
			o.want("still", o.answer(pod, client, o.f, ack), pod.ID, stands, server)
			o.want("still, back", o.answer(pod, server, stands, ack), pod.ID, o.f, client)
		}
		o.edge.RemoveService(o.t, o.proto, o.f)
	})
}

// The kernel may have given a socket of the node's the number of a node port, of which no socket tells it.
func TestAnswersToTheNodesSocketAreNoServices(t *testing.T) {
	eitherEdge(t, func(o outside) {
		if o.proto != oracle.UDP {
			return
		}
		b := end(External(2, o.v6), 8080)
		o.nodePort(0, b)
		bound, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(o.f))
		check(o.t, err)
		o.worn(o.arrive(o.c, o.f, syn)) // a server's there has a Service before it
		check(o.t, bound.Close())
		o.edge.ClearFlows(o.t)
		connected, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(o.f), net.UDPAddrFromAddrPort(o.c))
		check(o.t, err)
		defer connected.Close()
		o.isTheStacks("an answer", o.arrive(o.c, o.f, syn), o.f)
		if n := len(o.edge.Flows(o.t)); n > 0 {
			o.t.Errorf("%d flow entries", n)
		}
		o.worn(o.arrive(end(External(9, o.v6), 99), o.f, syn))
	})
}

// A tag of VLAN 0 says how urgent a frame is, and nothing else. One of another VLAN is for the device of that.
func TestAPriorityIsNoVLAN(t *testing.T) {
	eitherEdge(t, func(o outside) {
		b := end(External(2, o.v6), 8080)
		o.nodePort(0, b)
		tagged := func(tci uint16) Arrival {
			o.t.Helper()
			r, err := o.edge.RunTagged(o.edge.FromOutside, o.frame(o.c, o.f, syn).Frame(), tci, Context{Ifindex: o.edge.Ifindex})
			check(o.t, err)
			return arrived(r, 0)
		}
		o.isTheStacks("of VLAN 5", tagged(5<<13|5), o.f)
		if a := tagged(5 << 13); a.Dropped != "" || a.Tuple().Dst != b {
			o.t.Errorf("of priority 5: %v", a)
		}
		o.edge.ClearFlows(o.t)
	})
}

// A client may use the same port for a node port and for the very port of the node that this leads to.
func TestAFlowToTheNodeTakesNoConnectionsPlace(t *testing.T) {
	eitherEdge(t, func(o outside) {
		if o.proto != oracle.TCP {
			return
		}
		b := end(o.edge.Node(o.v6), 80)
		o.nodePort(0, b)
		o.connected(b)
		a := o.arrive(o.c, o.f, syn)
		if a.Dropped != "" || a.Tuple().Dst != b || a.Tuple().Src.Addr() != o.c.Addr() || a.Tuple().Src == o.c {
			o.t.Errorf("as the connection that is there: %v", a)
		}
		other := end(o.c.Addr(), o.c.Port()+2)
		if a := o.arrive(other, o.f, syn); a.Dropped != "" || a.Tuple().Src != other || a.Tuple().Dst != b {
			o.t.Errorf("of another port: %v", a)
		}
	})
}

// connected gives the node a connection from o.c to b until the test ends: the client's address is the node's meanwhile.
func (o outside) connected(b netip.AddrPort) {
	o.t.Helper()
	lo, err := netlink.LinkByName("lo")
	check(o.t, err)
	check(o.t, netlink.LinkSetUp(lo))
	ownAddress(o.t, lo, netip.PrefixFrom(o.c.Addr(), o.c.Addr().BitLen()))
	listener, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(b))
	check(o.t, err)
	o.t.Cleanup(func() { listener.Close() })
	c, err := net.DialTCP("tcp", net.TCPAddrFromAddrPort(o.c), net.TCPAddrFromAddrPort(b))
	check(o.t, err)
	o.t.Cleanup(func() { c.Close() })
	accepted, err := listener.Accept()
	check(o.t, err)
	o.t.Cleanup(func() { accepted.Close() })
}
