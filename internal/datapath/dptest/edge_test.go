// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// outside is a client outside that uses one frontend of a Service.
type outside struct {
	speaker
	edge *Edge
	v6   bool
	c, f netip.AddrPort // client and frontend
}

// eachEdge runs fn for both families and all protocols, on one thread, at a NIC
// that leads to other nodes, too.
func eachEdge(t *testing.T, fn func(o outside)) { eachEdgeWith(t, Options{NIC: true}, fn) }

// eitherEdge is eachEdge at such a NIC, and at one that does not.
func eitherEdge(t *testing.T, fn func(o outside)) {
	eachEdge(t, fn)
	eachEdgeWith(t, Options{}, fn)
}

func eachEdgeWith(t *testing.T, options Options, fn func(o outside)) {
	e := NewEdge(t, options, 3)
	for _, v6 := range []bool{false, true} {
		for _, proto := range []uint8{oracle.TCP, oracle.UDP, oracle.SCTP} {
			e.ClearFlows(t)
			fn(outside{speaker{t, e.Network, proto}, e, v6, end(External(1, v6), 4000), end(e.Node(v6), 30080)})
		}
	}
}

// nodePort is a Service whose node port is the frontend's.
func (o outside) nodePort(flags uint16, backends ...netip.AddrPort) {
	o.t.Helper()
	any := netip.IPv4Unspecified()
	if o.v6 {
		any = netip.IPv6Unspecified()
	}
	o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindNodePort, Flags: flags}, o.proto, end(any, o.f.Port()), backends...)
}

func (o outside) frame(from, to netip.AddrPort, flags uint8) *Packet {
	return Eth(Router, o.edge.MAC).IP(from.Addr(), to.Addr()).L4(o.proto, from.Port(), to.Port(), flags).Payload(24)
}

// arrive lets a packet come in, with the right checksums and out with such.
func (o outside) arrive(from, to netip.AddrPort, flags uint8) Arrival {
	o.t.Helper()
	a, err := o.edge.Arrive(o.frame(from, to, flags).Frame())
	return o.checked(a, err)
}

func (o outside) answer(p Pod, from, to netip.AddrPort, flags uint8) Arrival {
	o.t.Helper()
	a, err := o.edge.Answer(p, o.packet(p, from, to, flags).Frame())
	return o.checked(a, err)
}

// want fails unless a packet went on by redirect to pod (0: out of the NIC) as from→to.
func (o outside) want(what string, a Arrival, pod uint32, from, to netip.AddrPort) {
	o.t.Helper()
	if got := a.Tuple(); a.Dropped != "" || a.Pod != pod || !a.Direct || got.Src != from || got.Dst != to {
		o.t.Fatalf("%v v6=%v: %s: %v, want it at pod %d as %v>%v", o.proto, o.v6, what, a, pod, from, to)
	}
}

// worn is the source that a packet wears: the node's address and a port of the edge's.
func (o outside) worn(a Arrival) netip.AddrPort {
	o.t.Helper()
	src := a.Tuple().Src
	if src.Addr() != o.edge.Node(o.v6) || src.Port() < EdgePorts.First || int(src.Port()) >= int(EdgePorts.First)+int(EdgePorts.Count) {
		o.t.Fatalf("%v: the source is not the node's with a port of the edge's", a)
	}
	return src
}

func TestEdgeToAnotherNodeAndBack(t *testing.T) {
	eitherEdge(t, func(o outside) {
		b := end(External(2, o.v6), 8080)
		o.nodePort(0, b)
		a := o.arrive(o.c, o.f, syn)
		worn := o.worn(a)
		o.want("first", a, 0, worn, b)
		o.want("answer", o.arrive(b, worn, syn|ack), 0, o.f, o.c)
		for range 3 {
			o.want("more", o.arrive(o.c, o.f, ack), 0, worn, b)
			o.want("more back", o.arrive(b, worn, ack), 0, o.f, o.c)
		}
		for _, f := range o.edge.Flows(o.t) {
			if !f.Established {
				o.t.Errorf("%v is not promoted", f.Tuple())
			}
		}
		// Another client's flow to the same backend wears another port.
		a = o.arrive(end(External(3, o.v6), 4000), o.f, syn)
		if next := o.worn(a); next == worn {
			o.t.Errorf("two flows wear %v", worn)
		}
	})
}

// A flow to a node behind the tunnel wears the address that this node has there,
// and its answers come by the tunnel's device. There pods of other nodes use node
// ports; nothing else is taken.
func TestEdgeThroughTheTunnelAndBack(t *testing.T) {
	eachEdge(t, func(o outside) {
		b, own := end(External(2, o.v6), 8080), o.edge.Tunnel(o.t, o.v6)
		o.nodePort(0, b)
		a := o.arrive(o.c, o.f, syn)
		worn := a.Tuple().Src
		if worn.Addr() != own || worn.Port() < EdgePorts.First {
			o.t.Fatalf("%v: the source is not %v with a port of the edge's", a, own)
		}
		o.want("first", a, 0, worn, b)
		byTunnel := func(from, to netip.AddrPort, flags uint8) Arrival {
			a, err := o.edge.ArriveByTunnel(o.frame(from, to, flags).Frame())
			return o.checked(a, err)
		}
		o.want("answer", byTunnel(b, worn, syn|ack), 0, o.f, o.c)
		o.want("more", o.arrive(o.c, o.f, ack), 0, worn, b)
		o.want("more back", byTunnel(b, worn, ack), 0, o.f, o.c)
		pod := o.edge.Pods[1]
		near := end(pod.IP(o.v6), 8080)
		o.nodePort(0, near)
		client := end(External(2, o.v6), 4001)
		a = byTunnel(client, o.f, syn)
		worn = o.worn(a)
		o.want("of another node's pod", a, pod.ID, worn, near)
		o.want("the answer to it", o.answer(pod, near, worn, syn|ack), 0, o.f, client)
		for what, to := range map[string]netip.AddrPort{
			"a port that nothing wears": end(own, 61005), "a port of the node's own": end(own, 22), "a node port": end(own, o.f.Port()),
			"another's": end(External(7, o.v6), 61005),
		} {
			if a := byTunnel(b, to, syn); a.Direct || a.Dropped != "" || a.Tuple().Dst != to {
				o.t.Errorf("%s: %v", what, a)
			}
		}
	})
}

// To a node that is reached without the tunnel a flow wears the address that this one has between nodes,
// if node ports are taken there: else nobody would turn the answers.
func TestEdgeToAnotherNodeWearsTheAddressBetweenNodes(t *testing.T) {
	eachEdge(t, func(o outside) {
		own, ref := External(202, o.v6), uint32(2<<16|4)
		b := end(External(2, o.v6), 8080)
		check(o.t, o.edge.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Ip4: toAddr(External(202, false)), Ip6: toAddr(External(202, true))}))
		o.edge.putRemote(o.t, 4, bpfgen.PodRemote{Ref: ref})
		check(o.t, o.edge.MstRemoteNetsV1.Put(bpfgen.PodPrefix{Length: 128, Addr: b.Addr().As16()}, ref))
		o.nodePort(0, b)
		o.worn(o.arrive(o.c, o.f, syn))
		o.edge.mark(o.t, own, bpfgen.SvcAddress|bpfgen.SvcNode)
		o.c = end(o.c.Addr(), o.c.Port()+1)
		a := o.arrive(o.c, o.f, syn)
		worn := a.Tuple().Src
		if worn.Addr() != own || worn.Port() < EdgePorts.First {
			o.t.Fatalf("%v: the source is not %v with a port of the edge's", a, own)
		}
		for range 3 {
			o.want("answer", o.arrive(b, worn, syn|ack), 0, o.f, o.c)
			o.want("more", o.arrive(o.c, o.f, ack), 0, worn, b)
		}
		o.nodePort(0, end(o.edge.Pods[1].IP(o.v6), 8080))
		o.c = end(o.c.Addr(), o.c.Port()+1)
		o.worn(o.arrive(o.c, o.f, syn)) // to a pod of its own
		o.edge.mark(o.t, own, 0)
	})
}

func TestEdgeToAPodAndBack(t *testing.T) {
	for name, flags := range map[string]uint16{"wears": 0, "keeps": bpfgen.SvcKeepSource} {
		eitherEdge(t, func(o outside) {
			pod := o.edge.Pods[1]
			b := end(pod.IP(o.v6), 8080)
			o.nodePort(flags, b)
			a := o.arrive(o.c, o.f, syn)
			src := o.c
			if flags == 0 {
				src = o.worn(a)
			}
			o.want(name+": first", a, pod.ID, src, b)
			o.want(name+": answer", o.answer(pod, b, src, syn|ack), 0, o.f, o.c)
			o.want(name+": more", o.arrive(o.c, o.f, ack), pod.ID, src, b)
			o.want(name+": more back", o.answer(pod, b, src, ack), 0, o.f, o.c)
			// The pod has another number: the client's half knew the old one.
			moved := pod
			moved.ID, moved.Ifindex = 40, 140
			o.edge.RemovePod(o.t, pod)
			o.edge.SetPod(o.t, moved)
			delete(o.edge.Pods, pod.ID)
			o.edge.Pods[moved.ID] = moved
			o.want(name+": to its new number", o.arrive(o.c, o.f, ack), moved.ID, src, b)
			o.edge.RemovePod(o.t, moved)
			delete(o.edge.Pods, moved.ID)
			o.edge.Pods[pod.ID] = pod
			o.edge.SetPod(o.t, pod)
		})
	}
}

// A backend that is the node itself gets the packet by the node's stack, from the
// client's own address; the NIC's egress turns the answer back.
func TestEdgeToTheNodeAndBack(t *testing.T) {
	eachEdge(t, func(o outside) {
		b := end(o.edge.Node(o.v6), 8081)
		o.nodePort(0, b)
		a := o.arrive(o.c, o.f, syn)
		if a.Direct || a.Dropped != "" || a.Tuple().Src != o.c || a.Tuple().Dst != b {
			o.t.Fatalf("%v", a)
		}
		back := Eth(o.edge.MAC, Router).IP(b.Addr(), o.c.Addr()).L4(o.proto, b.Port(), o.c.Port(), syn|ack).Payload(24)
		a, err := o.edge.Leave(back.Frame())
		a = o.checked(a, err)
		if a.Dropped != "" || a.Tuple().Src != o.f || a.Tuple().Dst != o.c {
			o.t.Fatalf("%v", a)
		}
	})
}

// Where no address of the node takes node ports, load balancers' still lead to backends on the node itself, and to those on
// others and back.
func TestANodeWhoseAddressesTakeNoNodePorts(t *testing.T) {
	eitherEdge(t, func(o outside) {
		own, b := end(External(202, o.v6), 8081), end(External(2, o.v6), 8080)
		check(o.t, o.edge.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{Ip4: toAddr(External(202, false)), Ip6: toAddr(External(202, true))}))
		for _, v6 := range []bool{false, true} {
			o.edge.mark(o.t, o.edge.Node(v6), 0)
			defer o.edge.mark(o.t, o.edge.Node(v6), bpfgen.SvcAddress|bpfgen.SvcNode)
		}
		o.f = end(VIP(1, o.v6), 80)
		for _, to := range []netip.AddrPort{own, end(o.edge.Node(o.v6), 8081)} {
			o.edge.ClearFlows(o.t)
			o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindLoadBalancer}, o.proto, o.f, to)
			if a := o.arrive(o.c, o.f, syn); a.Direct || a.Dropped != "" || a.Tuple().Src != o.c || a.Tuple().Dst != to {
				o.t.Errorf("to the node: %v", a)
			}
			back := Eth(o.edge.MAC, Router).IP(to.Addr(), o.c.Addr()).L4(o.proto, to.Port(), o.c.Port(), syn|ack).Payload(24)
			a, err := o.edge.Leave(back.Frame())
			if a = o.checked(a, err); a.Dropped != "" || a.Tuple().Src != o.f || a.Tuple().Dst != o.c {
				o.t.Errorf("the node's answer: %v", a)
			}
		}
		o.edge.ClearFlows(o.t)
		o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindLoadBalancer}, o.proto, o.f, b)
		o.goesOn("to another node", o.outlive(b), b)
		o.edge.RemoveService(o.t, o.proto, o.f)
		o.nodePort(0, b)
		o.c = end(o.c.Addr(), o.c.Port()+1)
		o.f = end(o.edge.Node(o.v6), 30080)
		o.isTheStacks("a node port", o.arrive(o.c, o.f, syn), o.f)
	})
}

// What is no Service's goes on untouched and unremembered.
func TestEdgeLeavesTheNodesOwnTrafficAlone(t *testing.T) {
	eitherEdge(t, func(o outside) {
		o.nodePort(0, end(External(2, o.v6), 8080))
		o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindExternalIp}, o.proto, end(VIP(9, o.v6), 80), end(External(2, o.v6), 8080))
		node := o.edge.Node(o.v6)
		for what, to := range map[string]netip.AddrPort{
			"ssh": end(node, 22), "a port of the edge's that nothing wears": end(node, 61005), "a pod": end(o.edge.Pods[1].IP(o.v6), 80),
			"another host": end(External(7, o.v6), 80), "another port of an external address": end(VIP(9, o.v6), 81),
		} {
			in := o.frame(o.c, to, syn).Frame()
			r, err := o.edge.Run(o.edge.FromOutside, in, Context{Ifindex: o.edge.Ifindex})
			if err != nil || r.Verdict != Next || string(r.Packet) != string(in) {
				o.t.Errorf("%s: %v, %v", what, r, err)
			}
		}
		if o.proto == oracle.TCP {
			// The answer to a connection that the node opened from the node port's number.
			if a := o.arrive(o.c, o.f, syn|ack); a.Direct || a.Dropped != "" {
				o.t.Errorf("in the middle of a connection: %v", a)
			}
		}
		if n := len(o.edge.Flows(o.t)); n > 0 {
			o.t.Errorf("%d flow entries", n)
		}
		o.edge.RemoveService(o.t, o.proto, end(VIP(9, o.v6), 80))
	})
}

// What is dropped at the NIC is told as no pod's hook, whatever a packet brings in its control block.
func TestADropAtTheNICIsOfNoPodsHook(t *testing.T) {
	eachEdge(t, func(o outside) {
		o.f = end(VIP(1, o.v6), 80)
		o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindLoadBalancer, Flags: bpfgen.SvcDrop}, o.proto, o.f)
		for _, brought := range []uint32{0, bpfgen.WireTunnel, bpfgen.WireOrEdge, 7} {
			cpus := ebpf.MustPossibleCPU()
			for slot := range o.edge.MstStoppedV1.MaxEntries() {
				check(o.t, o.edge.MstStoppedV1.Put(slot, make([]bpfgen.PodEvent, cpus)))
			}
			check(o.t, o.edge.MstEventRoomV1.Put(uint32(0), make([]bpfgen.PodEventRoom, cpus)))
			r, err := o.edge.Run(o.edge.FromOutside, o.frame(o.c, o.f, syn).Frame(), Context{Ifindex: o.edge.Ifindex, Endpoint: brought})
			if err != nil || r.Verdict != Drop {
				o.t.Fatalf("%v, %v", r, err)
			}
			found := 0
			var each []bpfgen.PodEvent
			for slot := range o.edge.MstStoppedV1.MaxEntries() {
				check(o.t, o.edge.MstStoppedV1.Lookup(slot, &each))
				for _, e := range each {
					if e.Reason == 0 {
						continue
					}
					if found++; e.Endpoint != 0 {
						o.t.Errorf("brought %d: the hook is endpoint %d's", brought, e.Endpoint)
					}
				}
			}
			if found != 1 {
				o.t.Errorf("%d drops are told, want 1", found)
			}
		}
	})
}

// Where clients outside have backends of their own, nobody else gets those.
func TestEdgeSplit(t *testing.T) {
	eachEdge(t, func(o outside) {
		o.f = end(VIP(1, o.v6), 80)
		here, there := end(o.edge.Pods[1].IP(o.v6), 8080), end(o.edge.Pods[2].IP(o.v6), 8080)
		o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindExternalIp, Flags: bpfgen.SvcSplit}, o.proto, o.f, there)
		o.edge.SetServiceWith(o.t, ServiceOptions{Kind: bpfgen.KindExternalIp, Scope: bpfgen.ScopeOutside, Flags: bpfgen.SvcKeepSource}, o.proto, o.f, here)
		for port := uint16(1); port < 9; port++ {
			o.want("outside", o.arrive(end(o.c.Addr(), port), o.f, syn), 1, end(o.c.Addr(), port), here)
			pod := o.edge.Pods[3]
			if a := o.send(pod, end(pod.IP(o.v6), port), o.f, syn); a.Pod != 2 {
				o.t.Errorf("a pod is led to %v", a)
			}
		}
		o.edge.RemoveService(o.t, o.proto, o.f)
	})
}

// A pod uses node ports as frontends of any other kind; other ports of the node are the node's.
func TestNodePortsFromPods(t *testing.T) {
	eachEdge(t, func(o outside) {
		pod, b := o.edge.Pods[1], end(o.edge.Pods[2].IP(o.v6), 8080)
		o.nodePort(0, b)
		if a := o.send(pod, end(pod.IP(o.v6), 4000), o.f, syn); a.Pod != 2 || a.Tuple().Dst != b {
			o.t.Errorf("%v", a)
		}
		if a := o.send(pod, end(pod.IP(o.v6), 4000), end(o.edge.Node(o.v6), 22), syn); a.Dropped != "" || a.Direct || a.Tuple().Dst.Port() != 22 {
			o.t.Errorf("the node's own port: %v", a)
		}
	})
}

func TestEdgePortsAreNeverShared(t *testing.T) {
	eachEdge(t, func(o outside) {
		b := end(External(2, o.v6), 8080)
		o.nodePort(0, b)
		o.edge.Wear(o.t, 61000, 1)
		worn := o.worn(o.arrive(o.c, o.f, syn))
		o.arrive(b, worn, syn|ack)
		o.arrive(o.c, o.f, ack) // half-open, it would yield its port (ports_test.go)
		if a := o.arrive(end(External(3, o.v6), 4000), o.f, syn); a.Dropped != ReasonName(bpfgen.ReasonNATPorts) {
			o.t.Errorf("%v", a)
		}
		// To another backend the same port tells the answers apart.
		o.nodePort(0, end(External(4, o.v6), 8080))
		o.worn(o.arrive(end(External(3, o.v6), 4000), o.f, syn))
		o.edge.Wear(o.t, EdgePorts.First, EdgePorts.Count)
	})
}

// A client's next connection from the port of one that has closed wears what that one wore.
func TestATupleThatComesAgainWearsTheSamePort(t *testing.T) {
	eachEdge(t, func(o outside) {
		if o.proto != oracle.TCP {
			return
		}
		b := end(External(2, o.v6), 8080)
		o.nodePort(0, b)
		o.edge.setCredit(o.t, 2) // both its halves begin where they stay
		before := len(o.edge.Flows(o.t))
		worn := o.worn(o.arrive(o.c, o.f, syn))
		entries := len(o.edge.Flows(o.t)) - before
		for range 3 {
			for _, flags := range []uint8{ack, fin | ack, ack} {
				o.arrive(o.c, o.f, flags)
				o.arrive(b, worn, fin|ack)
			}
			if got := o.worn(o.arrive(o.c, o.f, syn)); got != worn {
				o.t.Errorf("it wears %v, then %v", worn, got)
			}
		}
		if more := len(o.edge.Flows(o.t)) - before; more != entries {
			o.t.Errorf("%d entries for one tuple, want %d", more, entries)
		}
	})
}

func TestEdgeErrorsSpeakOfWhatTheirReceiverKnows(t *testing.T) {
	eachEdge(t, func(o outside) {
		s := scene{speaker: o.speaker}
		kind, code, quoted := uint8(3), uint8(3), 60
		if o.v6 {
			kind, code, quoted = 1, 4, 80
		}
		pod := o.edge.Pods[1]
		b := end(pod.IP(o.v6), 8080)
		o.nodePort(0, b)
		worn := o.worn(o.arrive(o.c, o.f, syn))
		// From the pod, about what it got.
		there := Eth(Router, pod.MAC).IP(worn.Addr(), b.Addr()).L4(o.proto, worn.Port(), b.Port(), ack).Payload(200)
		e := Eth(pod.MAC, pod.NodeMAC).IP(b.Addr(), worn.Addr()).ICMP(kind, code, 0).Data(quote(there, quoted))
		a, err := o.edge.Answer(pod, e.Frame())
		a = o.checked(a, err)
		s.quotes(a, Pod{}, Tuple{o.proto, o.c, o.f}, o.f.Addr().String())
		if a.Headers.Dst != o.c.Addr() || !a.Direct {
			o.t.Errorf("%v", a)
		}
		// From the node itself, which is a backend, about what it got from another client.
		c4 := end(External(4, o.v6), 4000)
		own := end(o.edge.Node(o.v6), 8081)
		o.nodePort(0, own)
		o.arrive(c4, o.f, syn)
		there = Eth(Router, o.edge.MAC).IP(c4.Addr(), own.Addr()).L4(o.proto, c4.Port(), own.Port(), ack).Payload(200)
		e = Eth(o.edge.MAC, Router).IP(own.Addr(), c4.Addr()).ICMP(kind, code, 0).Data(quote(there, quoted))
		a, err = o.edge.Leave(e.Frame())
		s.quotes(o.checked(a, err), Pod{}, Tuple{o.proto, c4, o.f}, o.f.Addr().String())
		o.nodePort(0, b)
		// From the client, about an answer that it got.
		back := Eth(o.edge.MAC, Router).IP(o.f.Addr(), o.c.Addr()).L4(o.proto, o.f.Port(), o.c.Port(), ack).Payload(200)
		e = Eth(Router, o.edge.MAC).IP(o.c.Addr(), o.f.Addr()).ICMP(kind, code, 0).Data(quote(back, quoted))
		a, err = o.edge.Arrive(e.Frame())
		s.quotes(o.checked(a, err), pod, Tuple{o.proto, b, worn}, worn.Addr().String())
		if !o.v6 { // by which the pod would send all its answers elsewhere
			e = Eth(Router, o.edge.MAC).IP(External(9, false), o.f.Addr()).ICMP(5, 1, 0).Data(quote(back, quoted))
			if a, err = o.edge.Arrive(e.Frame()); err != nil || a.Dropped == "" {
				o.t.Errorf("a redirect: %v, %v, want it dropped", a, err)
			}
		}
		// From a router on the way to a backend on another node.
		far := end(External(2, o.v6), 8080)
		o.nodePort(0, far)
		c2 := end(External(3, o.v6), 4000)
		worn = o.worn(o.arrive(c2, o.f, syn))
		there = Eth(o.edge.MAC, Router).IP(worn.Addr(), far.Addr()).L4(o.proto, worn.Port(), far.Port(), ack).Payload(200)
		e = Eth(Router, o.edge.MAC).IP(External(9, o.v6), worn.Addr()).ICMP(kind, code, 0).Data(quote(there, quoted))
		a, err = o.edge.Arrive(e.Frame())
		s.quotes(o.checked(a, err), Pod{}, Tuple{o.proto, c2, o.f}, External(9, o.v6).String())
		// About nothing that is known: the node's own.
		e = Eth(Router, o.edge.MAC).IP(External(9, o.v6), o.edge.Node(o.v6)).ICMP(kind, code, 0).
			Data(quote(Eth(o.edge.MAC, Router).IP(o.edge.Node(o.v6), far.Addr()).L4(o.proto, 1, 2, ack), quoted))
		if a, err = o.edge.Arrive(e.Frame()); err != nil || a.Dropped != "" || a.Direct {
			o.t.Errorf("the node's own error: %v, %v", a, err)
		}
	})
}
