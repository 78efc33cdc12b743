// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// connects is a pod of the node that opens connections to a far one, by its address or by a Service.
type connects struct {
	*wireNode
	t       *testing.T
	tunnel  *tunnelled // nil: direct
	pod     Pod
	to, far netip.AddrPort
	ports   uint16 // the first of its own
}

func eachConnects(t *testing.T, fn func(c connects)) { eachConnectsBy(t, []bool{false, true}, fn) }

// eachConnectsBy: by a Service (true), by the far pod's address (false).
func eachConnectsBy(t *testing.T, services []bool, fn func(c connects)) {
	for _, tunnel := range []bool{false, true} {
		n := newWireNode(t, tunnel, false)
		for i := range uint16(2 * len(services)) {
			v6, service := i&1 != 0, services[i/2]
			t.Run(fmt.Sprintf("tunnel %t/IPv6 %t/Service %t", tunnel, v6, service), func(t *testing.T) {
				onOneCPU(t)
				c := connects{wireNode: n, t: t, pod: n.Pods[1], far: netip.AddrPortFrom(farPod(9, v6), 80), ports: 5000 + 1000*i}
				if c.to = c.far; service {
					c.to = netip.AddrPortFrom(VIP(1, v6), 443)
					n.SetService(t, oracle.TCP, c.to, c.far)
				}
				if tunnel {
					from := fromThere(false)
					c.tunnel = &from
				}
				fn(c)
				n.SetPod(t, c.pod)
				n.join(t, tunnel, false)
			})
		}
	}
}

func (c *connects) own(port uint16) netip.AddrPort {
	return netip.AddrPortFrom(c.pod.IP(c.far.Addr().Is6()), c.ports+port)
}

// forgetRemotes: who looks for the node that has the far pod finds none any more.
func (c *connects) forgetRemotes() {
	c.t.Helper()
	for _, key := range []bpfgen.PodPrefix{{Length: 96 + 16, Addr: farPod(9, false).As16()}, {Length: 16, Addr: farPod(9, true).As16()}} {
		check(c.t, c.MstRemoteNetsV1.Delete(key))
	}
}

func (c *connects) packet(port uint16, flags uint8) *Packet {
	return Eth(c.pod.MAC, c.pod.NodeMAC).IP(c.own(port).Addr(), c.to.Addr()).TCP(c.own(port).Port(), c.to.Port(), flags)
}

// out lets the pod send, and fails unless that is on its way to the far pod.
func (c *connects) out(port uint16, flags uint8) Result {
	c.t.Helper()
	r := c.send(c.t, c.packet(port, flags), Context{})
	if r.Verdict == Drop {
		c.t.Fatal(r)
	}
	sent := r.Packet
	if c.tunnel != nil && r.Verdict == Redirect {
		_, _, sent = unwrap(c.t, sent)
	}
	h, fault := oracle.Parse(sent)
	if got := TupleOf(h); fault != "" || got.Dst != c.far || got.Src != c.own(port) {
		c.t.Errorf("%v %s, want %v>%v", got, fault, c.own(port), c.far)
	}
	if ip, l4 := oracle.Sums(sent, h); ip == oracle.SumBad || l4 != oracle.SumGood {
		c.t.Errorf("checksums %v, %v", ip, l4)
	}
	return r
}

// in is an answer of the far pod's, which must reach the pod as one of whom it asked.
func (c *connects) in(port uint16, flags uint8) {
	c.t.Helper()
	frame := Eth([6]byte{2, 1}, [6]byte{}).IP(c.far.Addr(), c.own(port).Addr()).TCP(c.far.Port(), c.own(port).Port(), flags).Frame()
	if c.tunnel != nil {
		frame = c.tunnel.wrap(frame)
	}
	c.enters(c.t, c.fromNetdev(c.t, frame), c.pod, c.to, c.own(port))
}

func (c *connects) open(port uint16) {
	c.t.Helper()
	c.out(port, syn)
	c.in(port, syn|ack)
	c.out(port, ack)
	c.in(port, ack)
}

// A connection by pod address, on the port of one by Service to the same pod of another node, though its
// pair was judged: beside an open one it takes another port, after a closed one the answers are its own.
func TestAConnectionOfItsOwnToAnotherNodesPod(t *testing.T) {
	eachConnectsBy(t, []bool{true}, func(c connects) {
		direct := c
		direct.to = c.far
		for port, near := range []bool{false, true} { // where the Service's flow lies; then there is a shadow, and no SYN is entered at once
			if !near {
				c.fillNear(c.t)
			}
			c.open(uint16(port))
			if !near {
				c.freeNear(c.t)
			}
			direct.open(10 + uint16(port))
			r := c.send(c.t, direct.packet(uint16(port), syn), Context{})
			h, fault := oracle.Parse(r.Packet)
			if got := TupleOf(h); r.Verdict == Drop || fault != "" || got.Dst != c.far || got.Src == c.own(uint16(port)) {
				c.t.Errorf("near %t: %v %v %s, want another port than the Service's flow has, whose answers would be its own", near, r, got, fault)
			}
			c.in(uint16(port), ack)
		}
		c.open(2)
		c.out(2, fin|ack)
		c.in(2, fin|ack)
		c.out(2, ack)
		direct.open(2)
	})
}

// Who looks for the far pod, or for the near one, finds nobody any more.
func TestConnectionsToAnotherNodeTakeTheShortWay(t *testing.T) {
	eachConnects(t, func(c connects) {
		c.open(0)
		c.forgetRemotes()
		for _, a := range []netip.Addr{c.pod.IP4, c.pod.IP6} {
			check(c.t, c.MstEndpointAddrsV1.Delete(toAddr(a)))
		}
		before := counted(c.t, c.Network, c.pod)
		for port := uint16(1); port <= 3; port++ {
			c.open(port)
			c.out(port, fin|ack)
			c.in(port, fin|ack)
			c.out(port, ack)
			for _, dst := range []netip.AddrPort{c.to, c.far} {
				f := c.Flow(c.t, Tuple{oracle.TCP, c.own(port), dst}, bpfgen.CTScopeFlow)
				if f == nil || !f.near || f.Entry.Responder.Generation != thereRef || f.Left() > 121 {
					c.t.Errorf("%v: %+v", dst, f)
				}
			}
		}
		after := counted(c.t, c.Network, c.pod)
		if sent, got := after.FromPod.Packets-before.FromPod.Packets, after.ToPod.Packets-before.ToPod.Packets; sent != 12 || got != 9 {
			c.t.Errorf("counted %d packets from the pod and %d to it, want 12 and 9", sent, got)
		}
	})
}

func TestAPairOfAnotherNodeEndsWithWhatItRestsOn(t *testing.T) {
	eachConnects(t, func(c connects) {
		var port uint16
		for name, change := range map[string]func(){
			"the pod's endpoint": func() { c.SetPod(c.t, c.pod) },
			"its node":           func() { c.putRemote(c.t, thereRef&0xffff, bpfgen.PodRemote{}) },
			"time":               func() { c.agePairs(c.t) },
			"the tables":         func() { c.VoidFlows(c.t) },
		} {
			c.open(port)
			change()
			c.forgetRemotes()
			c.out(port+1, syn)
			f := c.Flow(c.t, Tuple{oracle.TCP, c.own(port + 1), c.to}, bpfgen.CTScopeFlow)
			if f == nil || f.Entry.Responder.Generation != 0 {
				c.t.Errorf("%s changed, and the flow is entered as judged before: %+v", name, f)
			}
			c.join(c.t, c.tunnel != nil, false)
			port += 2
		}
	})
}

// A TCP flow goes the way that was found for its SYN; the SYN that follows it goes it, too, by the pod's address.
func TestAConnectionGoesTheWayOfItsSyn(t *testing.T) {
	eachConnects(t, func(c connects) {
		link, err := netlink.LinkByIndex(int(onWire(c.t)))
		check(c.t, err)
		neighbour := net.HardwareAddr{2, 0xab, 0, 0, 0, 1}
		for _, v6 := range []bool{false, true} {
			check(c.t, netlink.NeighSet(&netlink.Neigh{
				LinkIndex: link.Attrs().Index, IP: wireAddr(2, v6).AsSlice(), HardwareAddr: neighbour, State: netlink.NUD_PERMANENT}))
		}
		want := append(append([]byte{}, neighbour...), link.Attrs().HardwareAddr...)
		known := func(r Result) bool {
			return r.RedirectKind == bpfgen.RedirectNeigh && bytes.Equal(r.Packet[:12], want)
		}
		service := c.to != c.far
		var first, second, next Result
		for port := range uint16(20) { // on a machine that has other work, the moment may be over before
			first, second, next = c.out(2*port, syn), c.out(2*port, ack), c.out(2*port+1, syn)
			if known(second) && (known(next) || service) {
				break
			}
		}
		if first.RedirectKind != bpfgen.RedirectNeigh || !known(second) {
			c.t.Errorf("SYN %v, ACK %v as %x, want %x", first, second, second.Packet[:12], want)
		}
		if !service && !known(next) {
			c.t.Errorf("the next SYN goes %v as %x, want %x", next, next.Packet[:12], want)
		}
		if r := c.send(c.t, c.packet(0, ack).Payload(wireMTU), Context{}); r.Verdict != Next {
			c.t.Errorf("a packet over the MTU: %v", r)
		}
		last := c.packet(0, ack)
		if c.far.Addr().Is6() {
			last.Byte(7, 1)
		} else {
			last.Byte(8, 1).BadIPSum() // nobody here looks
		}
		if r := c.send(c.t, last, Context{}); r.Verdict != Next {
			c.t.Errorf("a packet whose hop limit runs out: %v", r)
		}
	})
}

// A Service's connection that begins anew with a backend on another node does not go to the node that the last one was on.
func TestAServicesConnectionToAnotherBackendGoesItsOwnWay(t *testing.T) {
	eachConnectsBy(t, []bool{true}, func(c connects) {
		if c.tunnel == nil {
			return // the route to the other node's pods is another there, and its packets the same
		}
		wire := int(onWire(c.t))
		neighbours := []net.HardwareAddr{{2, 0xab, 0, 0, 0, 1}, {2, 0xab, 0, 0, 0, 2}}
		for i, mac := range neighbours {
			check(c.t, netlink.NeighSet(&netlink.Neigh{LinkIndex: wire, IP: wireAddr(byte(2+i), false).AsSlice(), HardwareAddr: mac, State: netlink.NUD_PERMANENT}))
		}
		backends := []netip.AddrPort{c.far, netip.AddrPortFrom(farPod(8, c.far.Addr().Is6()), c.far.Port())}
		to := func(backend int) {
			c.far = backends[backend]
			c.SetService(c.t, oracle.TCP, c.to, c.far)
		}
		for port := range uint16(20) { // on a machine that has other work, the moment may be over before
			to(0)
			c.out(port, syn)
			c.out(port, ack)
			if r := c.out(port, ack); !bytes.Equal(r.Packet[:6], neighbours[0]) {
				continue
			}
			c.out(port, rst|ack)
			to(1)
			c.out(port, syn)
			for range 2 {
				if r := c.out(port, ack); bytes.Equal(r.Packet[:6], neighbours[0]) {
					c.t.Errorf("%v: sent to the last backend's node", r)
				}
			}
			return
		}
		c.t.Error("no way was kept")
	})
}
