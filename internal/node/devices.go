// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// Device is a link of this node that leads to other nodes.
type Device struct {
	Name  string `json:"name"`
	Index int    `json:"ifindex"`
	MTU   int    `json:"mtu"`
}

// Devices are the links that named says, or else those by which other nodes are
// reached, that have an address of this node, or a default route.
func Devices(named []string, self state.Node, remotes []state.Node) ([]Device, error) {
	if len(named) > 0 {
		return NamedDevices(named)
	}
	var found []int
	local, err := localAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range self.Addrs {
		if link, ok := local[a]; ok {
			found = append(found, link)
		}
	}
	for _, n := range remotes {
		for _, a := range n.Addrs {
			_, links := way(a) // an unreachable family has none
			found = append(found, links...)
		}
	}
	defaults, err := defaultLinks()
	if err != nil {
		return nil, err
	}
	found = append(found, defaults...)
	return describe(found)
}

// HasLinkHeader says, by a link's address, whether what it carries has an Ethernet header, as programs
// read it: a tunnel for IP alone has no such address.
func HasLinkHeader(mac net.HardwareAddr) bool { return len(mac) == 6 }

// DefaultDevices are the links that default routes lead by.
func DefaultDevices() ([]Device, error) {
	found, err := defaultLinks()
	if err != nil {
		return nil, err
	}
	return describe(found)
}

// NamedDevices leaves out those that are away: the others, and the nodes behind
// them, do not wait for one that comes back. And those that CheckDevices refuses.
func NamedDevices(names []string) ([]Device, error) {
	var out []Device
	for _, name := range names {
		l, err := linkNamed(name)
		if err != nil {
			return nil, err
		}
		if l != nil && HasLinkHeader(l.Attrs().HardwareAddr) {
			out = append(out, deviceOf(l))
		}
	}
	return out, nil
}

// CheckDevices refuses names that no device has, and devices whose packets programs cannot read.
func CheckDevices(names []string) error {
	var errs []error
	for _, name := range names {
		l, err := linkNamed(name)
		if err == nil && l == nil {
			err = fmt.Errorf("device %s does not exist: name interfaces of this node, or auto", name)
		} else if err == nil && !HasLinkHeader(l.Attrs().HardwareAddr) {
			err = fmt.Errorf("device %s carries IP without a link header, as tunnels do: programs find nothing in its packets, and the host's stack forwards there; leave it out", name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// linkNamed is nil when there is none.
func linkNamed(name string) (netlink.Link, error) {
	l, err := netlink.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", name, err)
	}
	return l, nil
}

func deviceOf(l netlink.Link) Device {
	return Device{l.Attrs().Name, l.Attrs().Index, l.Attrs().MTU}
}

// defaultLinks are the links of default routes, of all their next hops.
func defaultLinks() ([]int, error) {
	var out []int
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		list, err := netns.Routes(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for _, r := range list {
			if r.Dst != nil && prefixOf(r.Dst).Bits() != 0 {
				continue
			}
			out = append(out, hops(r)...)
		}
	}
	return out, nil
}

// BareWay is a device without a link header by which a node is reached that no tunnel of mustang's leads to; "": there is none.
func BareWay(remotes []state.Node) (string, error) {
	links, err := netns.Links()
	if err != nil {
		return "", fmt.Errorf("list links: %w", err)
	}
	bare := map[int]string{}
	for _, l := range links {
		if a := l.Attrs(); a.Flags&net.FlagLoopback == 0 && !HasLinkHeader(a.HardwareAddr) {
			bare[a.Index] = a.Name
		}
	}
	if len(bare) == 0 {
		return "", nil
	}
	for _, n := range remotes {
		if n.Mode == state.NodeVXLAN {
			continue
		}
		for _, a := range n.Addrs {
			_, links := way(a)
			for _, i := range links {
				if bare[i] != "" {
					return bare[i], nil
				}
			}
		}
	}
	return "", nil
}

// describe names each once, and leaves out what is no way to other machines, what has no link header, and what is gone.
func describe(indexes []int) ([]Device, error) {
	slices.Sort(indexes)
	var out []Device
	for _, i := range slices.Compact(indexes) {
		l, err := netlink.LinkByIndex(i)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look up link %d: %w", i, err)
		}
		if l.Attrs().Name != OverlayName && l.Attrs().Name != "lo" && HasLinkHeader(l.Attrs().HardwareAddr) {
			out = append(out, deviceOf(l))
		}
	}
	return out, nil
}

// UnderlayMTU is the smallest MTU of the routes and devices by which remotes are reached.
func UnderlayMTU(remotes []state.Node) (int, error) {
	smallest := 0
	for _, n := range remotes {
		for _, a := range n.Addrs {
			mtu, err := pathMTU(a)
			if err != nil {
				return 0, fmt.Errorf("node %s: %w", n.Name, err)
			}
			if mtu > 0 && (smallest == 0 || mtu < smallest) {
				smallest = mtu
			}
		}
	}
	if smallest == 0 {
		return 1500, nil // nobody can be reached yet
	}
	return smallest, nil
}

// pathMTU is the metric of the route that leads there, or the smallest of its devices';
// 0: there is no way. What the kernel has learned of the path does not count: anybody can
// tell it that, by an ICMP error, and it says less than the devices do for ten minutes.
func pathMTU(a netip.Addr) (int, error) {
	metric, links := way(a)
	if metric > 0 {
		return metric, nil
	}
	smallest := 0
	for _, index := range links {
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			return 0, fmt.Errorf("look up the device of the route to %s: %w", a, err)
		}
		mtu := l.Attrs().MTU
		if a.Is6() {
			mtu = ipv6MTU(l.Attrs().Name, mtu)
		}
		if smallest == 0 || mtu < smallest {
			smallest = mtu
		}
	}
	return smallest, nil
}

// ipv6MTU is what a device takes of IPv6, which a router's advertisement may have made
// less than its own MTU.
func ipv6MTU(name string, own int) int {
	text, err := os.ReadFile(netns.Sysctl("ipv6/conf/" + name + "/mtu"))
	if err != nil {
		return own // it has no IPv6
	}
	mtu, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || mtu <= 0 {
		return own
	}
	return min(mtu, own)
}

// way is the MTU of the route to an address (0: it says none), and the devices of all
// its next hops: none where no route leads there.
func way(a netip.Addr) (mtu int, links []int) {
	routes, err := netlink.RouteGetWithOptions(a.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil || len(routes) == 0 {
		return 0, nil
	}
	mtu, links = routes[0].MTU, hops(routes[0])
	if len(links) == 0 { // a nexthop object's, where net.ipv4.nexthop_compat_mode is 0
		if routes, err = netlink.RouteGet(a.AsSlice()); err != nil || len(routes) == 0 {
			return 0, nil
		}
		links = hops(routes[0])
	}
	return mtu, links
}

// hops are the links of a route's next hops.
func hops(r netlink.Route) (out []int) {
	if r.LinkIndex != 0 {
		out = append(out, r.LinkIndex)
	}
	for _, hop := range r.MultiPath {
		out = append(out, hop.LinkIndex)
	}
	return out
}
