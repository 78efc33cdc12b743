// SPDX-License-Identifier: Apache-2.0

package lab

// Host devices: the node has a NIC for each pod, and all of them are plugged
// into a switch outside, which is the pods' gateway.

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const outsideSwitch = "sw0"

// makeSwitch makes the switch of the current namespace, which is outside.
func (l *Lab) makeSwitch() error {
	// Its own address: else it has its lowest port's, and pods' neighbour entries lead nowhere when that comes or goes.
	if err := l.makeBridge(outsideSwitch, net.HardwareAddr{2, 0, 0, 0, 0, 1}); err != nil {
		return err
	}
	if err := linkUp(outsideSwitch); err != nil {
		return err
	}
	sw, err := netlink.LinkByName(outsideSwitch)
	if err != nil {
		return fmt.Errorf("look up %s: %w", outsideSwitch, err)
	}
	for _, x := range []struct {
		pods netip.Prefix
		own  netip.Addr
	}{{PodCIDR4, l.outside.IPv4}, {PodCIDR6, l.outside.IPv6}} {
		a := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(nth(x.pods, 1), x.pods.Bits())), Flags: unix.IFA_F_NOPREFIXROUTE}
		if x.own.Is6() {
			a.Flags |= unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(sw, a); err != nil {
			return fmt.Errorf("add address %s to %s: %w", a, outsideSwitch, err)
		}
		// Outside is one machine: pods see one address of it, as in the other modes.
		r := &netlink.Route{LinkIndex: sw.Attrs().Index, Dst: ipNet(x.pods), Src: x.own.AsSlice()}
		if err := netlink.RouteAdd(r); err != nil {
			return fmt.Errorf("add route to %s by %s: %w", x.pods, outsideSwitch, err)
		}
	}
	return nil
}

// plugNIC gives the node a NIC that is plugged into the switch.
func (l *Lab) plugNIC(name string) error {
	out, err := vns.GetFromPath(l.outside.NetNS)
	if err != nil {
		return err
	}
	defer out.Close()
	if err := l.Node().Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = name, l.cfg.MTU
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name, PeerNamespace: netlink.NsFd(out)})
	}); err != nil {
		return fmt.Errorf("create NIC %s: %w", name, err)
	}
	return l.outside.Do(func() error {
		port, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("look up %s: %w", name, err)
		}
		sw, err := netlink.LinkByName(outsideSwitch)
		if err != nil {
			return fmt.Errorf("look up %s: %w", outsideSwitch, err)
		}
		if err := netlink.LinkSetMaster(port, sw); err != nil {
			return fmt.Errorf("plug %s into %s: %w", name, outsideSwitch, err)
		}
		return linkUp(name)
	})
}

// pullNIC takes a NIC away, wherever its pod left it. Absent is success.
func (l *Lab) pullNIC(name string) error {
	if name == "" {
		return nil
	}
	return l.outside.Do(func() error {
		port, err := netlink.LinkByName(name)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return nil
		}
		if err == nil {
			err = netlink.LinkDel(port)
		}
		if err != nil {
			return fmt.Errorf("remove NIC %s: %w", name, err)
		}
		return nil
	})
}
