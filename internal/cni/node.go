// SPDX-License-Identifier: Apache-2.0

package cni

// What the plugin needs to know of its node, and to set on it.

import (
	"fmt"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/link"
)

// uplink is the configured interface, or that of the node's default route; ""
// when the node has none.
func (c *Config) uplink() (string, error) {
	if c.Uplink != "" || c.Mode == link.HostDevice {
		return c.Uplink, nil // no device is moved into a pod that nobody named
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{}, netlink.RT_FILTER_DST)
		if err != nil {
			return "", fmt.Errorf("look for the node's default route: %w", err)
		}
		for _, r := range routes {
			if l, err := netlink.LinkByIndex(r.LinkIndex); err == nil {
				return l.Attrs().Name, nil
			}
		}
	}
	return "", nil
}

// mtu is the configured one, or the uplink's. 0 leaves it to the kernel.
func (c *Config) mtu(uplink string) int {
	if c.MTU != 0 || uplink == "" || c.Mode == link.HostDevice {
		return int(c.MTU)
	}
	l, err := netlink.LinkByName(uplink)
	if err != nil {
		return 0
	}
	return l.Attrs().MTU
}

// forward lets the node route between its interfaces: pods behind it reach the
// outside by that. Nothing is written where it is on already.
func forward(v4, v6 bool) error {
	for file, wanted := range map[string]bool{
		"/proc/sys/net/ipv4/ip_forward":          v4,
		"/proc/sys/net/ipv6/conf/all/forwarding": v6,
	} {
		if !wanted {
			continue
		}
		now, err := os.ReadFile(file)
		if err == nil && strings.TrimSpace(string(now)) != "0" {
			continue
		}
		if err := os.WriteFile(file, []byte("1"), 0); err != nil {
			return fmt.Errorf("let the node forward packets: %w", err)
		}
	}
	return nil
}
