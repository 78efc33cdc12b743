// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
	"golang.org/x/sys/unix"
)

// The short way of established packets (bpf/lib/fast.h). Its decisions lie on
// one CPU, so these tests stay on one. Whether a packet took it shows when the
// flow's entries are gone, and nobody said so: the long way then drops.

func onOneCPU(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	var before, one unix.CPUSet
	check(t, unix.SchedGetaffinity(0, &before))
	for cpu := range 1024 {
		if before.IsSet(cpu) {
			one.Set(cpu)
			break
		}
	}
	check(t, unix.SchedSetaffinity(0, &one))
	t.Cleanup(func() { check(t, unix.SchedSetaffinity(0, &before)) })
}

// talking is a flow by the Service whose packets take the short way in both directions.
func talking(t *testing.T, net *Network, v6 bool, proto uint8) scene {
	t.Helper()
	net.fillNear(t)
	s := newScene(t, net, v6, proto)
	s.open(s.vip, s.b)
	s.exchange()
	return s
}

// exchange sends a packet of the flow in each direction.
func (s scene) exchange() {
	s.t.Helper()
	flags := uint8(0)
	if s.proto == oracle.TCP {
		flags = ack
	}
	s.sees(s.send(s.client, s.c, s.vip, flags), s.server, s.c, s.b)
	s.sees(s.send(s.server, s.b, s.c, flags), s.client, s.vip, s.c)
}

func TestEstablishedPacketsNeedNoEntryForASecond(t *testing.T) {
	for name, proto := range map[string]uint8{"tcp": oracle.TCP, "udp": oracle.UDP} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				onOneCPU(t)
				s := talking(t, net, v6, proto)
				net.loseFlows(t)
				s.exchange()
				before := counted(t, net, s.client)
				s.exchange()
				after := counted(t, net, s.client)
				if after.FromPod.Packets != before.FromPod.Packets+1 || after.ToPod.Packets != before.ToPod.Packets+1 {
					t.Errorf("counted %+v, then %+v: want one packet more each way", before, after)
				}
			})
		})
	}
}

func counted(t *testing.T, net *Network, p Pod) (sum bpfgen.PodEndpointCounters) {
	t.Helper()
	var each []bpfgen.PodEndpointCounters
	check(t, net.MstEndpointCountersV1.Lookup(p.ID, &each))
	for _, c := range each {
		sum.FromPod.Packets += c.FromPod.Packets
		sum.ToPod.Packets += c.ToPod.Packets
	}
	return sum
}

func TestWhatIsKeptOfAFlowGoesWithWhatItRestsOn(t *testing.T) {
	other := func(s scene) netip.AddrPort { return end(s.c.Addr(), s.c.Port()+1) }
	for name, change := range map[string]func(t *testing.T, s scene){
		"the sender's endpoint":   func(t *testing.T, s scene) { s.net.SetPod(t, s.client) },
		"the receiver's endpoint": func(t *testing.T, s scene) { s.net.SetPod(t, s.server) },
		"the tables":              func(t *testing.T, s scene) { s.net.VoidFlows(t) },
		"time":                    func(t *testing.T, s scene) { ageKept(t, s.net) },
		"a flow that was entered": func(t *testing.T, s scene) {
			s.sees(s.send(s.client, s.c, s.vip, syn), s.server, s.c, s.b)
			s.net.loseFlows(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				onOneCPU(t)
				s := talking(t, net, v6, oracle.TCP)
				net.loseFlows(t)
				s.exchange()
				change(t, s)
				s.dropped(s.send(s.client, s.c, s.vip, ack), bpfgen.ReasonMidstreamNAT)
				s.dropped(s.send(s.client, other(s), s.vip, ack), bpfgen.ReasonMidstreamNAT)
			})
		})
	}
}

// ageKept lets what is kept of flows end.
func ageKept(t *testing.T, net *Network) {
	t.Helper()
	net.eachNear(t, func(n *bpfgen.PodNearFlow) { n.Until -= bpfgen.FastLifetime + 1 })
	for slot := range net.MstFastV1.MaxEntries() {
		var each []bpfgen.PodFastFlow
		check(t, net.MstFastV1.Lookup(slot, &each))
		for i := range each {
			each[i].Until -= bpfgen.FastLifetime + 1
		}
		check(t, net.MstFastV1.Update(slot, each, ebpf.UpdateAny))
	}
	var front []bpfgen.PodFastFront
	check(t, net.MstFastFrontV1.Lookup(uint32(0), &front))
	for cpu := range front {
		for i := range front[cpu].Slots {
			front[cpu].Slots[i].Until -= bpfgen.FastLifetime + 1
		}
	}
	check(t, net.MstFastFrontV1.Update(uint32(0), front, ebpf.UpdateAny))
}

func TestUnusualPacketsOfAKeptFlowTakeTheLongWay(t *testing.T) {
	for name, reshape := range map[string]func(s scene) *Packet{
		"fin":              func(s scene) *Packet { return s.packet(s.client, s.c, s.vip, fin|ack) },
		"rst":              func(s scene) *Packet { return s.packet(s.client, s.c, s.vip, rst) },
		"another protocol": func(s scene) *Packet { s.proto = oracle.UDP; return s.packet(s.client, s.c, s.vip, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, net *Network, v6 bool) {
				onOneCPU(t)
				s := talking(t, net, v6, oracle.TCP)
				net.loseFlows(t)
				s.exchange()
				a, err := net.Send(s.client, reshape(s).Frame())
				check(t, err)
				if a.Dropped == "" {
					t.Errorf("%v, want it judged, and dropped", a)
				}
			})
		})
	}
}

func TestAnotherPodCannotTakeTheShortWayOfAFlow(t *testing.T) {
	eachWay(t, func(t *testing.T, net *Network, v6 bool) {
		onOneCPU(t)
		s := talking(t, net, v6, oracle.TCP)
		thief := s.second
		a, err := net.Send(thief, s.packet(thief, s.c, s.vip, ack).Frame())
		s.dropped(s.checked(a, err), bpfgen.ReasonSpoofedAddress)
		own := thief.MAC
		thief.MAC = s.client.MAC
		a, err = net.Send(thief, s.packet(thief, s.c, s.vip, ack).Frame())
		s.dropped(s.checked(a, err), bpfgen.ReasonSpoofedMAC)
		liar := s.client
		liar.MAC = own
		a, err = net.Send(liar, s.packet(liar, s.c, s.vip, ack).Frame())
		s.dropped(s.checked(a, err), bpfgen.ReasonSpoofedMAC)
	})
}
