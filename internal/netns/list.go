// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// Dump lists by netlink, again when what is listed changed meanwhile: the
// kernel says then that the list may lack something. All lists are taken so;
// internal/archtest holds it.
func Dump[T any](list func() ([]T, error)) (all []T, err error) {
	for range 20 {
		all, err = list()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}

// Links are all links of the calling thread's namespace.
func Links() ([]netlink.Link, error) { return Dump(netlink.LinkList) }

// Addrs are the addresses of l, of both families; nil: of all links.
func Addrs(l netlink.Link) ([]netlink.Addr, error) {
	return Dump(func() ([]netlink.Addr, error) { return netlink.AddrList(l, netlink.FAMILY_ALL) })
}

// Routes are those of a family that are like filter in the fields that mask
// names (netlink.RT_FILTER_*).
func Routes(family int, filter *netlink.Route, mask uint64) ([]netlink.Route, error) {
	return Dump(func() ([]netlink.Route, error) { return netlink.RouteListFiltered(family, filter, mask) })
}

// RoutesIn are the same in the namespace of h.
func RoutesIn(h *netlink.Handle, family int, filter *netlink.Route, mask uint64) ([]netlink.Route, error) {
	return Dump(func() ([]netlink.Route, error) { return h.RouteListFiltered(family, filter, mask) })
}

// AddrsIn are the addresses of l, of both families, in the namespace of h.
func AddrsIn(h *netlink.Handle, l netlink.Link) ([]netlink.Addr, error) {
	return Dump(func() ([]netlink.Addr, error) { return h.AddrList(l, netlink.FAMILY_ALL) })
}

// Rules are the routing rules of all families.
func Rules() ([]netlink.Rule, error) {
	return Dump(func() ([]netlink.Rule, error) { return netlink.RuleList(netlink.FAMILY_ALL) })
}

// RoutesBy are the routes of both families by l.
func RoutesBy(l netlink.Link) ([]netlink.Route, error) {
	return Dump(func() ([]netlink.Route, error) { return netlink.RouteList(l, netlink.FAMILY_ALL) })
}

// Neighbours are the neighbours of both families on the link of that index.
func Neighbours(index int) ([]netlink.Neigh, error) {
	return Dump(func() ([]netlink.Neigh, error) { return netlink.NeighList(index, netlink.FAMILY_ALL) })
}

// Qdiscs are the queueing disciplines of l.
func Qdiscs(l netlink.Link) ([]netlink.Qdisc, error) {
	return Dump(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(l) })
}

// Filters are the filters of l below parent.
func Filters(l netlink.Link, parent uint32) ([]netlink.Filter, error) {
	return Dump(func() ([]netlink.Filter, error) { return netlink.FilterList(l, parent) })
}

// Policies are the IPsec policies of both families.
func Policies() ([]netlink.XfrmPolicy, error) {
	return Dump(func() ([]netlink.XfrmPolicy, error) { return netlink.XfrmPolicyList(netlink.FAMILY_ALL) })
}
