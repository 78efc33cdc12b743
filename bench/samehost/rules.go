// SPDX-License-Identifier: Apache-2.0

package samehost

// Routing by rules: what clouds' plugins do that give pods addresses of several NICs. A
// rule of its own leads to each pod, and one leads away from it; rules are compared one by
// one.

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// maxPods is how many a node may have here.
const maxPods = 500

// Priorities of the rules: to a pod before from a pod, both before the main table.
const (
	toPod   = 512
	fromPod = 2048
)

// policyRouting gives each pod of the node its two rules. All lead to the main table,
// which has the routes: the cost is that of finding the rule.
func policyRouting(n *lab.Node) error {
	return n.Do(func() error {
		for _, p := range n.Pods() {
			for _, addr := range []netip.Addr{p.IPv4, p.IPv6} {
				for _, priority := range []int{toPod, fromPod} {
					r := netlink.NewRule()
					r.Priority, r.Table, r.Family = priority, unix.RT_TABLE_MAIN, unix.AF_INET
					if addr.Is6() {
						r.Family = unix.AF_INET6
					}
					single := &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}
					if priority == toPod {
						r.Dst = single
					} else {
						r.Src = single
					}
					if err := netlink.RuleAdd(r); err != nil {
						return fmt.Errorf("add the rule of pod %s: %w", p.Name, err)
					}
				}
			}
		}
		return nil
	})
}
