// SPDX-License-Identifier: Apache-2.0

package link

// macvlan, bridge mode: the pod's interface is a sub-interface of the node's
// uplink. A parent cannot talk to its own sub-interfaces, so the node keeps one
// more for itself, the shim. It holds the gateway's address: what pods send to
// Service addresses passes the host there, and the host reaches its pods.

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ShimName is the host's macvlan interface on an uplink.
func ShimName(uplink string) string {
	if len(uplink) <= 12 {
		return "mv-" + uplink
	}
	return HostName("shim on " + uplink)
}

func (b *builder) addMacvlan() (Result, error) {
	parent, err := find(b.node, b.Uplink)
	switch {
	case err != nil:
		return Result{}, err
	case parent == nil:
		return Result{}, fmt.Errorf("uplink %s does not exist: name an interface of this node", b.Uplink)
	case parent.Attrs().Flags&net.FlagUp == 0:
		return Result{}, fmt.Errorf("uplink %s is down: set it up first", b.Uplink)
	case b.MTU > parent.Attrs().MTU:
		return Result{}, fmt.Errorf("MTU %d is more than uplink %s has: use at most %d", b.MTU, b.Uplink, parent.Attrs().MTU)
	}
	shim, err := b.ensureShim(parent)
	if err != nil {
		return Result{}, err
	}
	eth, err := b.makeMacvlan(parent)
	if err != nil {
		return Result{}, err
	}
	if err := b.podOnSegment(eth); err != nil {
		return Result{}, err
	}
	res := pairResult(eth, shim)
	res.ParentIfIndex = parent.Attrs().Index
	return res, nil
}

// makeMacvlan creates the pod's interface directly in the pod's namespace.
func (b *builder) makeMacvlan(parent netlink.Link) (netlink.Link, error) {
	attrs := b.attrs(b.IfName, b.podMAC())
	attrs.Group = linkGroup
	attrs.ParentIndex = parent.Attrs().Index
	attrs.Namespace = netlink.NsFd(b.podNS.Fd())
	// The request goes to the node's namespace, where the parent's index means
	// the parent.
	if err := b.node.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}); err != nil {
		return nil, fmt.Errorf("create macvlan %s on %s: %w", b.IfName, b.Uplink, err)
	}
	return must(b.pod, b.IfName)
}

// ensureShim makes the host's own sub-interface, or takes the one that is there.
func (b *builder) ensureShim(parent netlink.Link) (netlink.Link, error) {
	name := ShimName(b.Uplink)
	shim, err := find(b.node, name)
	if err != nil {
		return nil, err
	}
	if shim == nil {
		attrs := b.attrs(name, randomMAC())
		attrs.MTU = parent.Attrs().MTU
		attrs.ParentIndex = parent.Attrs().Index
		err := b.node.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE})
		if err != nil && !errors.Is(err, unix.EEXIST) { // another Add may be as fast
			return nil, fmt.Errorf("create macvlan %s on %s: %w", name, b.Uplink, err)
		}
		if shim, err = must(b.node, name); err != nil {
			return nil, err
		}
	}
	if shim.Type() != "macvlan" || shim.Attrs().ParentIndex != parent.Attrs().Index {
		return nil, fmt.Errorf("%s is in the way: mustang needs that name for its macvlan on %s", name, b.Uplink)
	}
	return shim, b.holdGateway(shim)
}
