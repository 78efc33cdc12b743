// SPDX-License-Identifier: Apache-2.0

package cni

// What the plugin needs to know of its node, and to set on it.

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
)

// uplink is the configured interface, or that of the node's default route; nil
// when the node has none. A host's device is nobody's uplink but its pod's.
func (c *Config) uplink() (netlink.Link, error) {
	if c.Uplink != "" {
		l, err := netlink.LinkByName(c.Uplink)
		if err != nil {
			return nil, codedf(types.ErrInvalidNetworkConfig, "uplink %s: %v: name an interface of this node", c.Uplink, err)
		}
		return l, nil
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := netns.Routes(family, &netlink.Route{}, netlink.RT_FILTER_DST)
		if err != nil {
			return nil, fmt.Errorf("look for the node's default route: %w", err)
		}
		for _, r := range routes {
			if l, err := netlink.LinkByIndex(r.LinkIndex); err == nil {
				return l, nil
			}
		}
	}
	return nil, nil
}

// uplinkAndMTU are a pod's uplink, "" where its mode needs none, and its MTU:
// the configured ones, or the node's. MTU 0 leaves it to the kernel.
func (c *Config) uplinkAndMTU() (uplink string, mtu int, err error) {
	uplink, mtu = c.Uplink, int(c.MTU)
	if c.Mode == link.HostDevice || mtu != 0 && (uplink != "" || !link.NeedsUplink(c.Mode)) {
		return uplink, mtu, nil
	}
	l, err := c.uplink()
	if err != nil || l == nil {
		return "", mtu, err
	}
	if mtu == 0 {
		mtu = l.Attrs().MTU
	}
	if link.NeedsUplink(c.Mode) {
		uplink = l.Attrs().Name
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
