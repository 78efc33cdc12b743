// SPDX-License-Identifier: Apache-2.0

package cni

// What the plugin needs to know of its node, and to set on it.

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
)

// uplinks are the configured interface, or those of the node's default route, of
// all its next hops; none when the node has none. A host's device is nobody's
// uplink but its pod's.
func (c *Config) uplinks() ([]netlink.Link, error) {
	if c.Uplink != "" {
		l, err := netlink.LinkByName(c.Uplink)
		if err != nil {
			return nil, codedf(types.ErrInvalidNetworkConfig, "uplink %s: %v: name an interface of this node", c.Uplink, err)
		}
		return []netlink.Link{l}, nil
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := netns.Routes(family, &netlink.Route{}, netlink.RT_FILTER_DST)
		if err != nil {
			return nil, fmt.Errorf("look for the node's default route: %w", err)
		}
		for _, r := range routes {
			if out := linksOf(r); len(out) > 0 {
				return out, nil
			}
		}
	}
	return nil, nil
}

// linksOf are those that a route leads by, each once.
func linksOf(r netlink.Route) (out []netlink.Link) {
	indexes := []int{r.LinkIndex} // 0: it has several next hops
	for _, hop := range r.MultiPath {
		indexes = append(indexes, hop.LinkIndex)
	}
	slices.Sort(indexes)
	for _, i := range slices.Compact(indexes) {
		if l, err := netlink.LinkByIndex(i); i != 0 && err == nil {
			out = append(out, l)
		}
	}
	return out
}

// uplinkAndMTU are a pod's uplink, "" where its mode needs none, and its MTU:
// the configured ones, or the node's. MTU 0 leaves it to the kernel.
func (c *Config) uplinkAndMTU() (uplink string, mtu int, err error) {
	uplink, mtu = c.Uplink, int(c.MTU)
	if c.Mode == link.HostDevice || mtu != 0 && (uplink != "" || !link.NeedsUplink(c.Mode)) {
		return uplink, mtu, nil
	}
	all, err := c.uplinks()
	if err != nil || len(all) == 0 {
		return "", mtu, err
	}
	if link.NeedsUplink(c.Mode) { // which can only be one
		all, uplink = all[:1], all[0].Attrs().Name
	}
	if mtu == 0 { // any of them may carry any packet
		mtu = slices.MinFunc(all, func(a, b netlink.Link) int { return cmp.Compare(a.Attrs().MTU, b.Attrs().MTU) }).Attrs().MTU
	}
	return uplink, mtu, nil
}

// forward lets the node route between its interfaces: pods behind it reach the
// outside by that. Nothing is written where it is on already.
func (p *plugin) forward(v4, v6 bool) error {
	var errs []error
	if v4 {
		errs = append(errs, p.forwardIPv4())
	}
	if v6 {
		errs = append(errs, netns.ForwardIPv6(p.here.Sysctl("ipv6/conf"), "all"))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("let the node forward packets: %w", err)
	}
	return nil
}

func (p *plugin) forwardIPv4() error {
	file := p.here.Sysctl("ipv4/ip_forward")
	if now, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(now)) != "0" {
		return nil
	}
	return os.WriteFile(file, []byte("1"), 0)
}
