// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"net/netip"
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
