// SPDX-License-Identifier: Apache-2.0

package node

// The door: a pair of devices by which the node's own packets to Services meet
// the edge's program (bpf/lib/edge.h). Rules take them there (doorrules.go), so
// that nothing else of what goes to the same addresses does.

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// DoorName is the end of the door that the node sends into and receives by; the
// edge's program is at the ingress of the other.
const (
	DoorName  = "mst-host"
	doorOuter = "mst-net"
)

const (
	doorTable  = 0x6d7374 // "mst"
	doorMTU    = 1280     // bytes; fits wherever the backend is (RFC 8200 5)
	doorDevice = 65535    // bytes: what comes back is as long as its sender could make it
)

// Door is the pair as it is.
type Door struct{ inner, outer netlink.Link }

// Outer is the ifindex where the program belongs.
func (d *Door) Outer() int { return d.outer.Attrs().Index }

// EnsureDoor makes the devices, or finds them. v6: they are to carry IPv6, too.
func EnsureDoor(v6 bool) (*Door, error) {
	d, err := findDoor()
	if err == nil && d == nil {
		d, err = makeDoor()
	}
	if err != nil {
		return nil, err
	}
	for _, l := range []netlink.Link{d.inner, d.outer} {
		if err := setUpDoor(l, v6); err != nil {
			return nil, fmt.Errorf("set up %s: %w", l.Attrs().Name, err)
		}
	}
	return d, nil
}

// findDoor is nil when there is none. Half of one is none.
func findDoor() (*Door, error) {
	inner, err := linkNamed(DoorName)
	if err != nil || inner == nil {
		return nil, err
	}
	outer, err := linkNamed(doorOuter)
	if err != nil {
		return nil, err
	}
	if outer != nil && inner.Attrs().ParentIndex == outer.Attrs().Index && bytes.Equal(inner.Attrs().HardwareAddr, outer.Attrs().HardwareAddr) {
		return &Door{inner, outer}, nil
	}
	if err := netlink.LinkDel(inner); err != nil {
		return nil, fmt.Errorf("remove %s, which does not lead to %s: %w", DoorName, doorOuter, err)
	}
	return nil, nil
}

// makeDoor gives both ends the same link address: without ARP, the kernel takes
// a device's own for that of each of its neighbours.
func makeDoor() (*Door, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = DoorName, doorDevice, []byte{0x02, 0x6d, 0x73, 0x74, 0, 1}
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: doorOuter, PeerHardwareAddr: attrs.HardwareAddr}
	if err := netlink.LinkAdd(pair); err != nil {
		return nil, fmt.Errorf("create %s and %s: %w", DoorName, doorOuter, err)
	}
	d, err := findDoor()
	if err == nil && d == nil {
		err = fmt.Errorf("%s is gone right after it was made", DoorName)
	}
	return d, err
}

func setUpDoor(l netlink.Link, v6 bool) error {
	name := l.Attrs().Name
	settings := map[string]string{
		"ipv4/conf/" + name + "/forwarding":    "1", // the program asks for the way on from here
		"ipv6/conf/" + name + "/addr_gen_mode": "1", // none: nobody is to be met there
	}
	if v6 {
		settings["ipv6/conf/"+name+"/disable_ipv6"] = "0"
	}
	if err := errors.Join(setSysctls(settings), forwardIPv6(name)); err != nil {
		return err
	}
	for _, err := range []error{netlink.LinkSetARPOff(l), netlink.LinkSetMTU(l, doorDevice), netlink.LinkSetUp(l)} {
		if err != nil {
			return err
		}
	}
	return nil
}

// Lead makes the door the way of the node's SCTP to exactly these addresses, from
// these of its own, as far as there are any; to its own addresses by these ports
// alone, and each from itself, as without a door.
func (d *Door) Lead(addrs []netip.Addr, own []DoorPorts, from []netip.Addr) error {
	ways := make(map[netip.Addr]netip.Addr, len(addrs)+len(own)) // by whose address
	for _, a := range addrs {
		if i := slices.IndexFunc(from, func(f netip.Addr) bool { return f.Is4() == a.Is4() }); i >= 0 {
			ways[a] = from[i]
		} else {
			ways[a] = netip.Addr{}
		}
	}
	for _, p := range own {
		ways[p.Addr] = p.Addr
	}
	have, err := doorRoutes()
	if err != nil {
		return err
	}
	var errs []error
	for a, src := range ways {
		r := netlink.Route{Dst: ipNet(netip.PrefixFrom(a, a.BitLen())), LinkIndex: d.inner.Attrs().Index, Scope: netlink.SCOPE_LINK,
			Table: doorTable, Protocol: routeProtocol, MTU: doorMTU}
		if src.IsValid() {
			r.Src = src.AsSlice()
		}
		w := wish{route: r}
		if slices.ContainsFunc(have, func(h netlink.Route) bool { return prefixOf(h.Dst).Addr() == a && w.isThere(h) }) {
			continue
		}
		if err := netlink.RouteReplace(&r); err != nil {
			errs = append(errs, fmt.Errorf("lead %s into %s: %w", a, DoorName, err))
		}
	}
	for _, h := range have {
		if _, wanted := ways[prefixOf(h.Dst).Addr()]; !wanted {
			errs = append(errs, deleteRoute(h))
		}
	}
	var families []int
	for a := range ways {
		families = append(families, familyOf(a))
	}
	return errors.Join(append(errs, leadBeforeMain(families), leadBeforeLocal(own))...)
}

func doorRoutes() (out []netlink.Route, err error) {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		list, err := netns.Routes(family, &netlink.Route{Table: doorTable}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		out = append(out, slices.DeleteFunc(list, func(r netlink.Route) bool { return r.Dst == nil || r.Protocol != routeProtocol })...)
	}
	return out, nil
}

// RemoveDoor removes what EnsureDoor and Lead made. Absent is success.
func RemoveDoor() error {
	if err := errors.Join(leadBeforeLocal(nil), leadBeforeMain(nil)); err != nil {
		return err
	}
	l, err := linkNamed(DoorName)
	if err != nil || l == nil {
		return err
	}
	if err := netlink.LinkDel(l); err != nil { // and with it, its routes
		return fmt.Errorf("remove %s: %w", DoorName, err)
	}
	return nil
}
