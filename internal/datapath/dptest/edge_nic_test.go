// SPDX-License-Identifier: Apache-2.0

// Clients outside whose backend is a pod with a child of the NIC (macvlan, ipvlan).

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
)

// onNIC is a pod with a child of the NIC, whose packets to its gateway, the node, pass the NIC.
type onNIC struct {
	outside
	pod     Pod
	gateway [6]byte
	parent  *Parent
}

// passes lets the pod send a packet to its gateway, and follows it to the NIC's ingress.
func (n onNIC) passes(from, to netip.AddrPort, flags uint8) Arrival {
	n.t.Helper()
	a, err := n.edge.Arrive(Eth(n.pod.MAC, n.gateway).IP(from.Addr(), to.Addr()).L4(n.proto, from.Port(), to.Port(), flags).Payload(24).Frame())
	return n.checked(a, err)
}

// leaves lets a frame that still has the socket of the test's namespace pass the parent's program.
func (n onNIC) leaves(what string, frame []byte, want uint32) {
	n.t.Helper()
	copy(frame[6:12], n.edge.MAC[:])
	r, err := n.edge.Run(n.parent.Program, frame, Context{Ifindex: n.edge.Ifindex})
	check(n.t, err)
	if r.Reason != want || (r.Verdict == Next) != (want == bpfgen.ReasonNone) {
		n.t.Errorf("%v v6=%v: %s: %v, want %s", n.proto, n.v6, what, r, ReasonName(want))
	}
}

func eachOnNIC(t *testing.T, fn func(n onNIC)) {
	for mode, gateway := range map[string][6]byte{"macvlan": shimMAC, "ipvlan": {2, 0xed, 0, 0, 0, 1}} { // ipvlan's have the NIC's
		t.Run(mode, func(t *testing.T) {
			eachEdgeWith(t, Options{InPod: true}, func(o outside) {
				n := onNIC{o, o.edge.Pods[1], gateway, o.edge.LoadParent(t, elsewhere)}
				n.pod.Parent = o.edge.Ifindex
				o.edge.SetParent(t, int(o.edge.Ifindex), o.edge.MAC, mode == "ipvlan")
				o.edge.SetPod(t, n.pod)
				cookie, err := netns.Cookie()
				check(t, err)
				o.edge.SetNetns(t, n.pod, cookie)
				fn(n)
			})
		})
	}
}

// A pod on the NIC sees the client. Its answer is turned back at the NIC: at its egress when
// the pod sends it to the wire; at its ingress, where it passes, when the node is the pod's
// gateway. The node's stack must not see it there: it would masquerade it.
func TestEdgeToAPodOnTheNICAndBack(t *testing.T) {
	eachOnNIC(t, func(n onNIC) {
		b := end(n.pod.IP(n.v6), 8080)
		n.nodePort(0, b)
		for i, flags := range []uint8{syn, ack, ack} {
			a := n.arrive(n.c, n.f, flags)
			if a.Dropped != "" || a.Direct || a.Tuple().Src != n.c || a.Tuple().Dst != b || [6]byte(a.Frame) != n.pod.MAC {
				n.t.Fatalf("packet %d: %v to %x", i, a, a.Frame[:6])
			}
			if r, err := n.edge.ToPod(n.pod, a.Frame); err != nil || r.Verdict != Next {
				n.t.Fatalf("packet %d into the pod: %v, %v", i, r, err)
			}
			back := []uint8{syn | ack, ack, ack}[i]
			answer := n.packet(n.pod, b, n.c, back).Frame()
			if r, err := n.edge.FromPod(n.pod, answer); err != nil || r.Verdict != Next || string(r.Packet) != string(answer) {
				n.t.Fatalf("answer %d out of the pod: %v, %v", i, r, err)
			}
			turned := n.passes(b, n.c, back)
			n.want("by the node", turned, 0, n.f, n.c)
			n.leaves("by the node", turned.Frame, bpfgen.ReasonNone)
			a, err := n.edge.Leave(answer)
			if a = n.checked(a, err); a.Dropped != "" || a.Tuple().Src != n.f {
				n.t.Errorf("to the wire: %v", a)
			}
		}
		for what, ends := range map[string][2]netip.AddrPort{
			"a flow of its own":        {b, end(External(5, n.v6), 4000)},
			"another pod's":            {end(n.edge.Pods[2].IP(n.v6), 8080), n.c},
			"the question, once more":  {n.c, b},
			"what the client was told": {n.f, n.c},
		} {
			if a := n.passes(ends[0], ends[1], ack); a.Direct || a.Dropped != "" || a.Tuple().Src != ends[0] || a.Tuple().Dst != ends[1] {
				n.t.Errorf("%s: %v", what, a)
			}
		}
	})
}

// By ipvlan in l3 mode the pod's packets meet the node's stack before the NIC's egress, and no ingress: the
// program inside the pod turns the answer back, the first and those of a known flow.
func TestEdgeToAPodWhosePacketsTheNodeRoutesAndBack(t *testing.T) {
	eachEdgeWith(t, Options{InPod: true}, func(o outside) {
		n := onNIC{outside: o, pod: o.edge.Pods[1], parent: o.edge.LoadParent(t, elsewhere)}
		n.pod.Parent = o.edge.Ifindex
		n.pod.Flags = bpfgen.EPInPod | bpfgen.EPServiceTc | bpfgen.EPNodeRoutes
		o.edge.SetParent(t, int(o.edge.Ifindex), o.edge.MAC, true)
		o.edge.SetPod(t, n.pod)
		cookie, err := netns.Cookie()
		check(t, err)
		o.edge.SetNetns(t, n.pod, cookie)
		b := end(n.pod.IP(n.v6), 8080)
		n.nodePort(0, b)
		for i, flags := range []uint8{syn, ack, ack, ack} {
			a := n.arrive(n.c, n.f, flags)
			if r, err := n.edge.ToPod(n.pod, a.Frame); err != nil || r.Verdict != Next {
				n.t.Fatalf("packet %d into the pod: %v, %v", i, r, err)
			}
			back := []uint8{syn | ack, ack, ack, ack}[i]
			r, err := n.edge.FromPod(n.pod, n.packet(n.pod, b, n.c, back).Frame())
			check(n.t, err)
			if r.Verdict != Next || string(r.Packet) != string(n.packet(n.pod, n.f, n.c, back).Frame()) {
				n.t.Fatalf("answer %d out of the pod: %v", i, r)
			}
			n.leaves("the answer", r.Packet, bpfgen.ReasonNone)
			a, err = n.edge.Leave(r.Packet)
			if a = n.checked(a, err); a.Dropped != "" || a.Tuple().Src != n.f || a.Tuple().Dst != n.c {
				n.t.Errorf("at the NIC's egress: %v", a)
			}
		}
	})
}

// Who may send from the node's address past its ingress: the pod that a flow from outside is with.
func TestTheParentKnowsWhoseAnswerItIs(t *testing.T) {
	eachOnNIC(t, func(n onNIC) {
		b := end(n.pod.IP(n.v6), 8080)
		n.nodePort(0, b)
		n.arrive(n.c, n.f, syn)
		frame := func(from, to netip.AddrPort) []byte { return n.frame(from, to, syn|ack).Frame() }
		n.leaves("the answer", frame(n.f, n.c), bpfgen.ReasonNone)
		n.leaves("to another client", frame(n.f, end(n.c.Addr(), 4001)), bpfgen.ReasonSpoofedAddress)
		n.leaves("from another port", frame(end(n.f.Addr(), 22), n.c), bpfgen.ReasonSpoofedAddress)
		n.leaves("the question", frame(n.c, n.f), bpfgen.ReasonSpoofedAddress)
		n.edge.SetNetns(n.t, n.pod, elsewhere+1)
		n.leaves("by another pod", frame(n.f, n.c), bpfgen.ReasonSpoofedAddress)
	})
}
