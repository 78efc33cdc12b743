// SPDX-License-Identifier: Apache-2.0

// This file switches a node, or one of a machine's daemons, off and on again.

package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Off ends a node as a power cut does: every process at once, and with them its
// mounts, its links, its control groups and all that the kernel held for it. Its disk stays.
func Off(name, node string) error {
	c, err := running(name)
	if err != nil {
		return err
	}
	if !slices.Contains(c.Config.nodes(), node) {
		return fmt.Errorf("cluster %q has no node %q", name, node)
	}
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if pid := c.pid(node); pid != 0 {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	if err := c.killMembers(node); err != nil {
		return err
	}
	// A kubelet waits three seconds for each container whose group it finds and whose
	// process it does not.
	if err := removeCgroups(c.cgroupsOf(node)); err != nil {
		return err
	}
	// The cable by name: a namespace goes some time after its last process.
	err = inNetns(c.netns(ControlPlane), func(h *netlink.Handle) error {
		cable, err := h.LinkByName(node)
		if _, gone := err.(netlink.LinkNotFoundError); gone {
			return nil
		}
		if err != nil {
			return err
		}
		return h.LinkDel(cable)
	})
	if err != nil {
		return err
	}
	return c.removeNetns(node)
}

// On starts a node that was switched off: from its disk, with a new cable.
func On(name, node string) error {
	c, err := running(name)
	if err != nil {
		return err
	}
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if c.pid(node) != 0 {
		return fmt.Errorf("node %s of cluster %q runs", node, name)
	}
	var s spec
	text, err := os.ReadFile(c.path(node, "spec.json"))
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		return err
	}
	if err := errors.Join(c.makeCgroups(), newNetns(c.netns(node))); err != nil {
		return err
	}
	var routes []netlink.Route
	err = inNetns(c.netns(ControlPlane), func(h *netlink.Handle) error {
		bridge, err := h.LinkByName("br0")
		if err != nil {
			return err
		}
		if err := c.plug(h, bridge, node); err != nil {
			return err
		}
		routes, err = h.RouteList(bridge, netlink.FAMILY_ALL)
		return err
	})
	if err == nil {
		err = c.configureNode(node)
	}
	if err == nil && c.Config.CNI == BridgeCNI {
		err = c.copyRoutes(node, routes)
	}
	if err != nil {
		return err
	}
	return c.start(s, nil)
}

// copyRoutes gives a node the control plane's routes to the other nodes' pods.
func (c *cluster) copyRoutes(node string, routes []netlink.Route) error {
	return inNetns(c.netns(node), func(h *netlink.Handle) error {
		for _, r := range routes {
			if r.Gw == nil || r.Gw.Equal(address4(node).AsSlice()) || r.Gw.Equal(address6(node).AsSlice()) {
				continue
			}
			if err := h.RouteReplace(&netlink.Route{Dst: r.Dst, Gw: r.Gw}); err != nil {
				return fmt.Errorf("route %s by %s: %w", r.Dst, r.Gw, err)
			}
		}
		return nil
	})
}

// Stop ends a daemon of a machine, and it stays ended until Start.
func Stop(name, machine, daemon string) error {
	c, err := running(name)
	if err != nil {
		return err
	}
	if err := writeFile(c.path(machine, "kubernetes", filepath.Base(stopped(daemon))), "", 0o644); err != nil {
		return err
	}
	for _, pid := range c.members(machine) {
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		program, _, _ := strings.Cut(string(args), "\x00")
		if filepath.Base(program) == daemon {
			return unix.Kill(pid, unix.SIGTERM)
		}
	}
	return fmt.Errorf("no %s runs on %s", daemon, machine)
}

// Start lets a daemon run again.
func Start(name, machine, daemon string) error {
	c, err := running(name)
	if err != nil {
		return err
	}
	return os.Remove(c.path(machine, "kubernetes", filepath.Base(stopped(daemon))))
}
