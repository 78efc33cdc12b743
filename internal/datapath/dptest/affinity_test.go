// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// A time-out that has become shorter holds for clients that were led somewhere before: who has been there for longer
// ago than it says is led anew.
func TestAShorterAffinityHoldsAtOnce(t *testing.T) {
	net := NewNetwork(t, Options{}, 3)
	eachFamily(t, func(t *testing.T, v6 bool) {
		vip := netip.AddrPortFrom(VIP(1, v6), 80)
		backends := []netip.AddrPort{netip.AddrPortFrom(net.Pods[2].IP(v6), 8080), netip.AddrPortFrom(net.Pods[3].IP(v6), 8080)}
		port := uint16(5000)
		moves := func(before, after uint32) (moved bool) {
			net.SetServiceWith(t, ServiceOptions{Affinity: before}, oracle.TCP, vip, backends...)
			var last netip.AddrPort
			for i := range 64 {
				if i%2 == 1 { // each second flow is after the change
					net.SetServiceWith(t, ServiceOptions{Affinity: after}, oracle.TCP, vip, backends...)
				} else {
					net.SetServiceWith(t, ServiceOptions{Affinity: before}, oracle.TCP, vip, backends...)
					clearTable(t, net.MstAffinityV1)
				}
				port++
				a, err := net.Send(net.Pods[1], Eth(net.Pods[1].MAC, net.Pods[1].NodeMAC).IP(net.Pods[1].IP(v6), vip.Addr()).TCP(port, 80, syn).Frame())
				check(t, err)
				if a.Pod == 0 {
					t.Fatal(a)
				}
				moved = moved || i%2 == 1 && a.Tuple().Dst != last
				last = a.Tuple().Dst
			}
			return moved
		}
		if moves(1000, 1000) || moves(10, 1000) {
			t.Error("a client was led elsewhere while its affinity lasts")
		}
		if !moves(1000, 10) {
			t.Error("an affinity of 1000 s lasts when it may last 10")
		}
	})
}

// Two flows that a client begins at the same moment, on two processors, have one backend: whoever is later takes what
// the first was led to.
func TestFlowsThatBeginAtOnceHaveOneBackend(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("one processor does nothing at once")
	}
	net := NewNetwork(t, Options{}, 9)
	vip := netip.AddrPortFrom(VIP(1, false), 80)
	var backends []netip.AddrPort
	for i := range uint32(8) {
		backends = append(backends, netip.AddrPortFrom(net.Pods[2+i].IP(false), 8080))
	}
	net.SetServiceWith(t, ServiceOptions{Affinity: 1000}, oracle.TCP, vip, backends...)
	const rounds = 2000
	var led [2][rounds]netip.AddrPort
	var here [2]atomic.Int64
	var done sync.WaitGroup
	for i := range led {
		done.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			own := *net
			own.Datapath = &Datapath{}
			*own.Datapath = *net.Datapath
			own.Datapath.out = make([]byte, len(net.Datapath.out))
			meet := func() { // until the other is here, too
				for at := here[i].Add(1); here[1-i].Load() < at; {
				}
			}
			for round := range rounds {
				if meet(); i == 0 {
					clearTable(t, net.MstAffinityV1)
				}
				meet()
				frame := Eth(net.Pods[1].MAC, net.Pods[1].NodeMAC).IP(net.Pods[1].IP(false), vip.Addr()).TCP(uint16(1024+2*round+i), 80, syn).Frame()
				if r, err := own.FromPod(net.Pods[1], frame); err == nil && r.Verdict == Redirect {
					h, _ := oracle.Parse(r.Packet)
					led[i][round] = TupleOf(h).Dst
				}
			}
		})
	}
	done.Wait()
	apart := 0
	for round := range rounds {
		if !led[0][round].IsValid() || !led[1][round].IsValid() {
			t.Fatalf("round %d: led to %v and %v", round, led[0][round], led[1][round])
		}
		if led[0][round] != led[1][round] {
			apart++
		}
	}
	if apart > 0 {
		t.Errorf("in %d of %d rounds two flows of one client were led apart", apart, rounds)
	}
}
