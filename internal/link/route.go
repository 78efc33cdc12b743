// SPDX-License-Identifier: Apache-2.0

package link

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// AddRoute gives a pod a route, unless another interface of the pod's leads there already,
// in the same table by the same priority: the kernel has one place for both, and
// who was there first is the way back for what it let in. One of the same interface gives
// way, but r has its MTU then if it has none itself.
//
// Return: whether r is there.
func AddRoute(h *netlink.Handle, r *netlink.Route) (bool, error) {
	err := h.RouteAdd(r)
	if !errors.Is(err, unix.EEXIST) {
		return err == nil, err
	}
	there, err := sameAs(h, r)
	if err != nil {
		return false, err
	}
	for _, o := range there {
		if o.LinkIndex != r.LinkIndex {
			return false, nil
		}
		if r.MTU == 0 {
			r.MTU = o.MTU
		}
	}
	return true, h.RouteReplace(r)
}

// sameAs are the routes that the kernel takes for the same as r, but for what they
// lead by.
func sameAs(h *netlink.Handle, r *netlink.Route) (out []netlink.Route, err error) {
	v4 := r.Dst.IP.To4() != nil
	like := &netlink.Route{Table: r.Table, Dst: &net.IPNet{IP: r.Dst.IP.Mask(r.Dst.Mask), Mask: r.Dst.Mask}}
	if like.Table == unix.RT_TABLE_UNSPEC {
		like.Table = unix.RT_TABLE_MAIN
	}
	family, priority := unix.AF_INET6, r.Priority
	switch {
	case v4:
		family = unix.AF_INET
	case priority == 0:
		priority = defaultMetric6
	}
	all, err := netns.RoutesIn(h, family, like, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
	if err != nil {
		return nil, fmt.Errorf("list routes to %s: %w", like.Dst, err)
	}
	for _, o := range all {
		if o.Priority == priority {
			out = append(out, o)
		}
	}
	return out, nil
}

// defaultMetric6 is an IPv6 route's that is added without one (IP6_RT_PRIO_USER).
const defaultMetric6 = 1024
