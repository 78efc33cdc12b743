// SPDX-License-Identifier: Apache-2.0

package lab

// How much pods send at once: local MTU and BIG TCP.

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// MaxBigTCP is the kernel's GSO_MAX_SIZE, in bytes: what `mustang pod add --big-tcp` gives.
const MaxBigTCP = 8 * 65535

func (c Config) validateSizes() error {
	if n, err := strconv.Atoi(c.LocalMTU); c.LocalMTU != "" && c.LocalMTU != "auto" && c.LocalMTU != "off" && (err != nil || n <= 0) {
		return fmt.Errorf("local MTU %q is unknown: use auto, off or a number of bytes", c.LocalMTU)
	}
	if c.BigTCP != 0 && (c.BigTCP <= 65536 || c.BigTCP > MaxBigTCP) {
		return fmt.Errorf("big TCP size %d is out of range: use 65537 to %d", c.BigTCP, MaxBigTCP)
	}
	return nil
}

// sizeArgs are pod add's on a node with these pods.
func (c Config) sizeArgs(pods ...netip.Prefix) []string {
	var args []string
	if c.Services.servicePath() != "" {
		cidrs := c.LocalCIDRs
		if cidrs == nil {
			cidrs = pods
		}
		if c.LocalMTU == "off" {
			cidrs = nil
		}
		for _, p := range cidrs {
			args = append(args, "--local-cidr="+p.String())
		}
		if c.LocalMTU != "" {
			args = append(args, "--local-mtu="+c.LocalMTU)
		}
	}
	if c.BigTCP != 0 {
		args = append(args, fmt.Sprintf("--big-tcp=%d", c.BigTCP))
	}
	return args
}

// widenWire makes an end of a wire, which is in the current namespace, one that
// sends as much at once as pods do.
func (l *Lab) widenWire(name string) error {
	if l.cfg.BigTCP == 0 {
		return nil
	}
	wire, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("look up %s: %w", name, err)
	}
	for _, set := range []func(netlink.Link, int) error{
		netlink.LinkSetGSOMaxSize, netlink.LinkSetGROMaxSize, netlink.LinkSetGSOIPv4MaxSize, netlink.LinkSetGROIPv4MaxSize,
	} {
		err := set(wire, l.cfg.BigTCP)
		if errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("make %s send %d bytes at once: this kernel has no BIG TCP (%w)", name, l.cfg.BigTCP, errors.ErrUnsupported)
		}
		if err != nil {
			return fmt.Errorf("make %s send %d bytes at once: %w", name, l.cfg.BigTCP, err)
		}
	}
	return nil
}
