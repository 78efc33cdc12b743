// SPDX-License-Identifier: Apache-2.0

package link

// Addresses that the network itself gives out (DHCP): whoever asks for them
// needs an interface that is there and up. It has its programs by then, as an
// endpoint without addresses: that one may send broadcasts and nothing else.

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Lease is what a network gave. A zero gateway is none, as where Spec.Foreign.
type Lease struct {
	IPv4, IPv6         netip.Prefix
	Gateway4, Gateway6 netip.Addr
}

// CanLease says whether pods of a mode can ask the network: they need a segment,
// and a link address of their own there.
func CanLease(mode string) bool { return traitsOf[mode].noLease == "" }

// lease asks for the addresses, where they are not given: with the interface as
// it will be, but down again afterwards, so that it comes up with all programs.
// host is the other end of the pair, nil in modes without.
func (b *builder) lease(eth, host netlink.Link, attach func() error) error {
	if b.Lease == nil {
		return nil
	}
	if err := attach(); err != nil {
		return err
	}
	if host != nil {
		if err := up(b.node, host); err != nil {
			return err
		}
	}
	if err := b.podBase(eth, netip.Prefix{}, netip.Prefix{}); err != nil {
		return err
	}
	if host != nil {
		if err := settle(b.node, host); err != nil {
			return err
		}
	}
	l, err := b.Lease()
	if err != nil {
		return err
	}
	if err := b.pod.LinkSetDown(eth); err != nil {
		return fmt.Errorf("set %s down: %w", b.IfName, err)
	}
	if host != nil {
		if err := b.node.LinkSetDown(host); err != nil {
			return fmt.Errorf("set %s down: %w", b.HostIfName, err)
		}
	}
	b.IPv4, b.IPv6, b.Gateway4, b.Gateway6 = l.IPv4, l.IPv6, l.Gateway4, l.Gateway6
	return b.validateAddrs()
}
