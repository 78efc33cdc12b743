// SPDX-License-Identifier: Apache-2.0

package samehost

// Services by IPVS, in kube-proxy's shape: every Service's address is the node's own, on
// a dummy device, and IPVS translates what comes in for it.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/lab"
)

// IPVS is a kind of Services.
const IPVS = "ipvs"

const ipvsDevice = "kube-ipvs0"

// addIPVS puts Services before their backends on a node without any other.
func addIPVS(ctx context.Context, n *lab.Node, services []lab.Service) error {
	if _, err := exec.LookPath("ipvsadm"); err != nil {
		return fmt.Errorf("services by IPVS need ipvsadm: install the package ipvsadm (%w)", errors.ErrUnsupported)
	}
	if out, err := n.Command(ctx, "ipvsadm", "-Ln").CombinedOutput(); err != nil {
		if _, statErr := os.Stat("/proc/net/ip_vs"); statErr != nil {
			return fmt.Errorf("this kernel has no IPVS (%w)", errors.ErrUnsupported)
		}
		return fmt.Errorf("ask for IPVS: %w: %s", err, bytes.TrimSpace(out))
	}
	var rules bytes.Buffer
	for _, s := range services {
		flag := map[string]string{"tcp": "-t", "udp": "-u"}[s.Protocol]
		vip := netip.AddrPortFrom(s.VIP, s.Port)
		fmt.Fprintf(&rules, "-A %s %s -s rr\n", flag, vip)
		for _, b := range s.Backends {
			fmt.Fprintf(&rules, "-a %s %s -r %s -m\n", flag, vip, b)
		}
	}
	if err := n.Do(func() error { return ipvsAddresses(services) }); err != nil {
		return err
	}
	cmd := n.Command(ctx, "ipvsadm", "-R")
	cmd.Stdin = &rules
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("load %d Services by ipvsadm: %w: %s", len(services), err, bytes.TrimSpace(out))
	}
	return nil
}

// ipvsAddresses makes the Services' addresses the current namespace's own. They answer no
// ARP: the device is down, as kube-proxy's is.
func ipvsAddresses(services []lab.Service) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = ipvsDevice
	link := &netlink.Dummy{LinkAttrs: attrs}
	if err := netlink.LinkAdd(link); err != nil {
		return fmt.Errorf("create %s: %w", ipvsDevice, err)
	}
	done := map[netip.Addr]bool{}
	for _, s := range services {
		if done[s.VIP] {
			continue
		}
		done[s.VIP] = true
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: s.VIP.AsSlice(), Mask: net.CIDRMask(s.VIP.BitLen(), s.VIP.BitLen())}}); err != nil {
			return fmt.Errorf("add %s to %s: %w", s.VIP, ipvsDevice, err)
		}
	}
	return nil
}
