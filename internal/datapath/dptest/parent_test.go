// SPDX-License-Identifier: Apache-2.0

// The parent link's program: what leaves the node by the link that pods share.

package dptest

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
	"github.com/mustang-net/mustang/internal/netns"
)

const (
	parentIndex = 1 // a test run's packets are on the loopback interface
	elsewhere   = 1 // the cookie of a namespace that no test is in
)

var (
	parentMAC = [6]byte{2, 0xdd, 0, 0, 0, 1}
	shimMAC   = [6]byte{2, 0xdd, 0, 0, 0, 2}
	toWire    = [6]byte{2, 0xdd, 0, 0, 0, 9}
)

// wire is a parent with four pods behind it, and what it sees of a packet that
// came from a pod's socket.
type wire struct {
	*Network
	parent *Parent
	v6     bool
	shared bool // as with ipvlan: all have the parent's link address
	netns  uint64
}

func eachParent(t *testing.T, f func(t *testing.T, w *wire)) {
	for kind, shared := range map[string]bool{"macvlan": false, "ipvlan": true} {
		for family, v6 := range map[string]bool{"v4": false, "v6": true} {
			t.Run(kind+"_"+family, func(t *testing.T) {
				f(t, newWire(t, shared, v6))
			})
		}
	}
}

func newWire(t *testing.T, shared, v6 bool) *wire {
	t.Helper()
	w := &wire{Network: usualNetwork(t, way{inPod: true}), v6: v6, shared: shared}
	var err error
	w.netns, err = netns.Cookie()
	check(t, err)
	w.SetParent(t, parentIndex, parentMAC, shared)
	for id, p := range w.Pods {
		if shared {
			p.MAC = parentMAC
			w.SetPod(t, p)
			w.Pods[id] = p
		} else {
			w.SetChild(t, parentIndex, p.MAC, id)
		}
	}
	w.SetChild(t, parentIndex, shimMAC, 0)
	w.SetNetns(t, w.Pods[1], w.netns)
	w.SetNetns(t, w.Pods[2], elsewhere+1)
	w.parent = w.LoadParent(t, elsewhere)
	return w
}

// datagram is a packet of a pod to somebody outside.
func (w *wire) datagram(mac [6]byte, src netip.Addr) *Packet {
	return Eth(mac, toWire).IP(src, External(1, w.v6)).UDP(1000, 53).Payload(8)
}

func (w *wire) leaves(t *testing.T, what string, frame []byte, want uint32) {
	t.Helper()
	before := w.Drops(t, want, bpfgen.DirParent)
	r, err := w.Run(w.parent.Program, frame, Context{})
	check(t, err)
	verdict := Drop
	if want == bpfgen.ReasonNone {
		verdict = Next
	}
	if r.Verdict != verdict || r.Reason != want || string(r.Packet) != string(frame) {
		t.Errorf("%s: %v, want %s", what, r, ReasonName(want))
	}
	if n := w.Drops(t, want, bpfgen.DirParent) - before; verdict == Drop && n != 1 {
		t.Errorf("%s: counted %d times as %s", what, n, ReasonName(want))
	}
}

// seen lets a pod's own hook see a packet.
func (w *wire) seen(t *testing.T, p Pod, frame []byte) []byte {
	t.Helper()
	r, err := w.FromPod(p, frame)
	check(t, err)
	if r.Verdict != Next {
		t.Fatalf("at the pod's own hook: %v", r)
	}
	return r.Packet
}

func TestTheParentPassesWhatAPodsHookHasSeen(t *testing.T) {
	eachParent(t, func(t *testing.T, w *wire) {
		p := w.Pods[1]
		frame := w.datagram(p.MAC, p.IP(w.v6)).Frame()
		w.leaves(t, "unseen", frame, bpfgen.ReasonHookBypassed)
		w.leaves(t, "seen", w.seen(t, p, frame), bpfgen.ReasonNone)
		other := Eth(p.MAC, toWire).IP(p.IP(w.v6), External(1, w.v6)).UDP(1001, 53).Frame()
		w.leaves(t, "of another flow", other, bpfgen.ReasonHookBypassed)
	})
}

func TestTheParentPassesATranslatedFlow(t *testing.T) {
	eachParent(t, func(t *testing.T, w *wire) {
		p, vip := w.Pods[1], netip.AddrPortFrom(VIP(1, w.v6), 80)
		w.SetService(t, oracle.TCP, vip, netip.AddrPortFrom(External(1, w.v6), 8080))
		frame := Eth(p.MAC, toWire).IP(p.IP(w.v6), vip.Addr()).TCP(1000, 80, syn).Frame()
		out := w.seen(t, p, frame)
		w.leaves(t, "as its hook made it", out, bpfgen.ReasonNone)
		direct := Eth(p.MAC, toWire).IP(p.IP(w.v6), External(2, w.v6)).TCP(1000, 8080, syn).Frame()
		w.leaves(t, "to another backend", direct, bpfgen.ReasonHookBypassed)
	})
}

func TestTheParentFollowsFragments(t *testing.T) {
	eachParent(t, func(t *testing.T, w *wire) {
		p := w.Pods[1]
		part := func(off int, more bool, id uint32) []byte {
			b := Eth(p.MAC, toWire).IP(p.IP(w.v6), External(1, w.v6)).Fragment(off, more, id)
			if off == 0 {
				return b.UDP(1000, 53).Payload(64).Frame()
			}
			return b.Proto(oracle.UDP).Payload(64).Frame()
		}
		w.leaves(t, "a later fragment whose first one nobody saw", part(72, false, 5), bpfgen.ReasonFragNoFirst)
		first, last := w.seen(t, p, part(0, true, 6)), w.seen(t, p, part(72, false, 6))
		w.leaves(t, "the first", first, bpfgen.ReasonNone)
		w.leaves(t, "the last", last, bpfgen.ReasonNone)
	})
}

func TestTheParentFollowsErrors(t *testing.T) {
	eachParent(t, func(t *testing.T, w *wire) {
		p := w.Pods[1]
		about := func(whose Pod) []byte {
			quoted := Eth(toWire, p.MAC).IP(External(1, w.v6), whose.IP(w.v6)).UDP(53, 1000).Payload(8).Frame()[14:]
			kind := uint8(3)
			if w.v6 {
				kind = 1
			}
			return Eth(p.MAC, toWire).IP(p.IP(w.v6), External(1, w.v6)).ICMP(kind, 3, 0).Data(quoted).Frame()
		}
		w.leaves(t, "about no flow", about(p), bpfgen.ReasonICMPErrorFlow)
		w.seen(t, p, w.datagram(p.MAC, p.IP(w.v6)).Frame())
		w.leaves(t, "about a flow", about(p), bpfgen.ReasonNone)
		other := w.Pods[2]
		w.seen(t, other, w.datagram(other.MAC, other.IP(w.v6)).Frame())
		w.leaves(t, "about another pod's flow", about(other), bpfgen.ReasonHookBypassed)
	})
}

// TestTheParentKnowsItsSenders: link address, network address and namespace must
// be one pod's.
func TestTheParentKnowsItsSenders(t *testing.T) {
	eachParent(t, func(t *testing.T, w *wire) {
		p, other := w.Pods[1], w.Pods[2]
		for _, pod := range []Pod{p, other} { // flows that exist, so that only the sender is at fault
			w.seen(t, pod, w.datagram(pod.MAC, pod.IP(w.v6)).Frame())
		}
		src := func(a netip.Addr) []byte { return w.datagram(p.MAC, a).Frame() }
		w.leaves(t, "its own address", src(p.IP(w.v6)), bpfgen.ReasonNone)
		w.leaves(t, "another pod's address", src(other.IP(w.v6)), bpfgen.ReasonSpoofedAddress)
		w.leaves(t, "nobody's address", src(External(9, w.v6)), bpfgen.ReasonSpoofedAddress)
		w.leaves(t, "another pod's addresses, both", w.datagram(other.MAC, other.IP(w.v6)).Frame(), bpfgen.ReasonSpoofedAddress)
		w.leaves(t, "the node's link address, nobody's address", w.datagram(parentMAC, External(9, w.v6)).Frame(), bpfgen.ReasonSpoofedAddress)
		if !w.shared {
			w.leaves(t, "the shim's link address", w.datagram(shimMAC, External(9, w.v6)).Frame(), bpfgen.ReasonSpoofedAddress)
			w.leaves(t, "nobody's link address", w.datagram([6]byte{2, 9, 9, 9, 9, 9}, p.IP(w.v6)).Frame(), bpfgen.ReasonUnknownChild)
		}
		w.RemovePod(t, other)
		w.leaves(t, "of a pod that is gone", w.datagram(other.MAC, other.IP(w.v6)).Frame(),
			map[bool]uint32{false: bpfgen.ReasonNoEndpoint, true: bpfgen.ReasonSpoofedAddress}[w.shared])
	})
}

func TestTheParentPassesWhatTheNodesSocketsSend(t *testing.T) {
	eachParent(t, func(t *testing.T, w *wire) {
		w.parent = w.LoadParent(t, w.netns)
		for _, mac := range [][6]byte{parentMAC, shimMAC, w.Pods[1].MAC} {
			for _, src := range []netip.Addr{External(9, w.v6), w.Pods[1].IP(w.v6)} {
				w.leaves(t, src.String(), w.datagram(mac, src).Frame(), bpfgen.ReasonNone)
			}
		}
		w.leaves(t, "no network protocol", Eth(parentMAC, toWire).Raw(0x88cc, make([]byte, 46)), bpfgen.ReasonNone)
	})
}

// TestTheParentPassesHostEndPods: those whose packets a program on the node has
// seen keep their socket where eBPF forwards them, in a tunnel too.
func TestTheParentPassesHostEndPods(t *testing.T) {
	eachParent(t, func(t *testing.T, w *wire) {
		p := NewPod(1)
		p.Flags = bpfgen.EPHostEnd | bpfgen.EPServiceTc
		w.SetPod(t, p)
		w.SetNetns(t, p, w.netns)
		w.leaves(t, "under the node's address", w.datagram(parentMAC, External(9, w.v6)).Frame(), bpfgen.ReasonNone)
		w.leaves(t, "under another pod's address", w.datagram(parentMAC, w.Pods[2].IP(w.v6)).Frame(), bpfgen.ReasonSpoofedAddress)
	})
}

func TestTheParentAndControlPackets(t *testing.T) {
	eachParent(t, func(t *testing.T, w *wire) {
		p, other := w.Pods[1], w.Pods[2]
		if !w.v6 {
			nobody := External(9, false)
			w.leaves(t, "ARP from its own address", ARP(p.MAC, p.IP4, nobody), bpfgen.ReasonNone)
			w.leaves(t, "ARP that asks whether an address is free", ARP(p.MAC, netip.IPv4Unspecified(), nobody), bpfgen.ReasonNone)
			w.leaves(t, "ARP from nobody's address", ARP(p.MAC, nobody, other.IP4), bpfgen.ReasonSpoofedAddress)
			dhcp := Eth(p.MAC, toWire).IP(netip.IPv4Unspecified(), netip.MustParseAddr("255.255.255.255")).UDP(68, 67).Frame()
			group := Eth(p.MAC, toWire).IP(nobody, netip.MustParseAddr("224.0.0.251")).UDP(5353, 5353).Frame()
			w.leaves(t, "a request for an address", dhcp, bpfgen.ReasonNone)
			if w.shared { // else its link address says whose it is
				w.leaves(t, "multicast from nobody's address", group, bpfgen.ReasonSpoofedAddress)
			}
			return
		}
		group, nobody := netip.MustParseAddr("ff02::1:ff00:2"), External(9, true)
		solicitation := func(src netip.Addr) []byte {
			return Eth(p.MAC, toWire).IP(src, group).ICMP(135, 0, 0).Payload(20).Frame()
		}
		w.leaves(t, "solicitation from its own address", solicitation(p.IP6), bpfgen.ReasonNone)
		w.leaves(t, "solicitation from a link-local address", solicitation(netip.MustParseAddr("fe80::1")), bpfgen.ReasonNone)
		w.leaves(t, "duplicate address detection", solicitation(netip.IPv6Unspecified()), bpfgen.ReasonNone)
		if w.shared {
			w.leaves(t, "solicitation from nobody's address", solicitation(nobody), bpfgen.ReasonSpoofedAddress)
		}
	})
}

func TestTheParentDropsWhatIsMalformed(t *testing.T) {
	eachParent(t, func(t *testing.T, w *wire) {
		p := w.Pods[1]
		w.leaves(t, "too short", w.datagram(p.MAC, p.IP(w.v6)).UDPLen(900).Frame(), bpfgen.ReasonBadLength)
		w.leaves(t, "no network protocol", Eth(p.MAC, toWire).Raw(0x88cc, make([]byte, 46)), bpfgen.ReasonEthertype)
	})
}

func TestALinkThatIsNoParentPassesAll(t *testing.T) {
	w := newWire(t, true, false)
	check(t, w.MstParentsV1.Delete(uint32(parentIndex)))
	w.leaves(t, "nobody's address", w.datagram(parentMAC, External(9, false)).Frame(), bpfgen.ReasonNone)
}
