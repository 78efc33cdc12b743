// SPDX-License-Identifier: Apache-2.0

// This file wires a cluster: a network namespace for each machine, and a
// bridge in the control plane's that the nodes' eth0 are plugged into.

package kube

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const netnsDir = "/run/netns"

func (c *cluster) netnsPath(machine string) string {
	return filepath.Join(netnsDir, c.netns(machine))
}

// newNetns makes a namespace with the name that `ip netns` shows, its loopback up.
func newNetns(name string) error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	made := make(chan error)
	go func() {
		// The thread is never unlocked, so that it ends with the goroutine and
		// the new namespace is nobody else's.
		runtime.LockOSThread()
		ns, err := netns.NewNamed(name)
		if err == nil {
			err = ns.Close()
		}
		made <- err
	}()
	if err := <-made; err != nil {
		return fmt.Errorf("make namespace %s: %w", name, err)
	}
	return inNetns(name, func(h *netlink.Handle) error {
		lo, err := h.LinkByName("lo")
		if err != nil {
			return err
		}
		return h.LinkSetUp(lo)
	})
}

// inNetns calls do with a netlink socket of that namespace.
func inNetns(name string, do func(h *netlink.Handle) error) error {
	ns, err := netns.GetFromPath(filepath.Join(netnsDir, name))
	if err != nil {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	defer h.Close()
	if err := do(h); err != nil {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	return nil
}

func (c *cluster) makeNetwork() error {
	for _, machine := range c.Config.machines() {
		if err := newNetns(c.netns(machine)); err != nil {
			return err
		}
	}
	err := inNetns(c.netns(ControlPlane), func(h *netlink.Handle) error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
		if err := h.LinkAdd(bridge); err != nil {
			return err
		}
		for _, node := range c.Config.nodes() {
			if err := c.plug(h, bridge, node); err != nil {
				return fmt.Errorf("connect %s: %w", node, err)
			}
		}
		return c.configure(h, bridge, ControlPlane)
	})
	if err != nil {
		return err
	}
	for _, node := range c.Config.nodes() {
		if err := c.configureNode(node); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) configureNode(node string) error {
	return inNetns(c.netns(node), func(h *netlink.Handle) error {
		eth0, err := h.LinkByName("eth0")
		if err != nil {
			return err
		}
		return c.configure(h, eth0, node)
	})
}

// plug makes a cable between the bridge and a node's eth0, each end in place.
func (c *cluster) plug(h *netlink.Handle, bridge netlink.Link, node string) error {
	ns, err := netns.GetFromPath(c.netnsPath(node))
	if err != nil {
		return err
	}
	defer ns.Close()
	veth := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: node, MasterIndex: bridge.Attrs().Index},
		PeerName:  "eth0", PeerNamespace: netlink.NsFd(int(ns)),
	}
	if err := h.LinkAdd(veth); err != nil {
		return err
	}
	return h.LinkSetUp(veth)
}

// configure gives a machine its addresses and the default route. The control
// plane is the nodes' gateway, though nothing lies behind it: without a
// default route, connecting to an outside address fails in another way than
// tests expect.
func (c *cluster) configure(h *netlink.Handle, link netlink.Link, machine string) error {
	for _, p := range []netip.Prefix{
		netip.PrefixFrom(address4(machine), nodeNet4.Bits()), netip.PrefixFrom(address6(machine), nodeNet6.Bits()),
	} {
		addr := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD // else unusable for two seconds
		}
		if err := h.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("address %s: %w", p, err)
		}
	}
	if err := h.LinkSetUp(link); err != nil {
		return err
	}
	if machine == ControlPlane {
		return nil
	}
	for _, gateway := range []netip.Addr{controlPlane4, controlPlane6} {
		if err := h.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gateway.AsSlice()}); err != nil {
			return fmt.Errorf("default route by %s: %w", gateway, err)
		}
	}
	return nil
}

// routePods routes a node's pods to it on another machine.
func (c *cluster) routePods(machine, node string, cidrs []netip.Prefix) error {
	return inNetns(c.netns(machine), func(h *netlink.Handle) error {
		for _, cidr := range cidrs {
			gateway := address4(node)
			if cidr.Addr().Is6() {
				gateway = address6(node)
			}
			if err := h.RouteReplace(&netlink.Route{Dst: ipNet(cidr), Gw: gateway.AsSlice()}); err != nil {
				return fmt.Errorf("route %s by %s: %w", cidr, gateway, err)
			}
		}
		return nil
	})
}

// removeNetwork removes the namespaces, and with them every link.
func (c *cluster) removeNetwork() error {
	var failed error
	for _, machine := range c.Config.machines() {
		failed = errors.Join(failed, c.removeNetns(machine))
	}
	return failed
}

func (c *cluster) removeNetns(machine string) error {
	path := c.netnsPath(machine)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
