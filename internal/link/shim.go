// SPDX-License-Identifier: Apache-2.0

package link

// What macvlan and ipvlan share: pods' interfaces are sub-interfaces of the
// node's uplink. A parent cannot talk to its own sub-interfaces, so the node
// keeps one more for itself, the shim. It holds the gateway's address: the host
// reaches its pods by it (kubelet's probes), and pods reach the host. On the
// node's own network the gateway is another's: see lan.go.

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// ShimName is the host's own sub-interface on an uplink.
func ShimName(mode, uplink string) string {
	prefix := "mv-"
	if mode != Macvlan {
		prefix = "iv-"
	}
	if len(uplink) <= 12 {
		return prefix + uplink
	}
	return HostName("shim " + prefix + uplink)
}

// HasShim says whether pods of a mode are reached by a shim.
func HasShim(mode string) bool { return mode == Macvlan || mode == IPVlan || mode == IPVlanL3 }

// subInterface describes a new sub-interface of the spec's mode.
func (b *builder) subInterface(attrs netlink.LinkAttrs) netlink.Link {
	switch b.Mode {
	case IPVlan:
		return &netlink.IPVlan{LinkAttrs: attrs, Mode: netlink.IPVLAN_MODE_L2}
	case IPVlanL3:
		return &netlink.IPVlan{LinkAttrs: attrs, Mode: netlink.IPVLAN_MODE_L3}
	}
	return &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}
}

// subMode is the reverse of subInterface: the mode of a link, or what else it
// does to its parent; "" when it leaves the parent free.
func subMode(l netlink.Link) string {
	switch l := l.(type) {
	case *netlink.Macvlan:
		return Macvlan
	case *netlink.IPVlan:
		switch l.Mode {
		case netlink.IPVLAN_MODE_L2:
			return IPVlan
		case netlink.IPVLAN_MODE_L3:
			return IPVlanL3
		}
		return "ipvlan-l3s"
	case *netlink.Macvtap, *netlink.IPVtap:
		return l.Type()
	}
	return ""
}

// uplink is the parent of the pod to be, which must bear it.
func (b *builder) uplink() (netlink.Link, error) {
	parent, err := find(b.node, b.Uplink)
	switch {
	case err != nil:
		return nil, err
	case parent == nil:
		return nil, fmt.Errorf("uplink %s does not exist: name an interface of this node", b.Uplink)
	case parent.Attrs().Flags&net.FlagUp == 0:
		return nil, fmt.Errorf("uplink %s is down: set it up first", b.Uplink)
	case b.MTU > parent.Attrs().MTU:
		return nil, fmt.Errorf("MTU %d is more than uplink %s has: use at most %d", b.MTU, b.Uplink, parent.Attrs().MTU)
	}
	return parent, b.oneKind(parent)
}

// oneKind refuses to mix: a parent carries macvlans, or ipvlans of one mode, or
// is a port. The kernel would not always refuse: a new ipvlan of another mode
// changes all that are there.
func (b *builder) oneKind(parent netlink.Link) error {
	if master := parent.Attrs().MasterIndex; master != 0 {
		name := fmt.Sprint(master)
		if l, err := b.node.LinkByIndex(master); err == nil {
			name = l.Attrs().Name
		}
		return fmt.Errorf("uplink %s is a port of %s and carries no other kind: build on %s, or on another interface", b.Uplink, name, name)
	}
	all, err := list(b.node)
	if err != nil {
		return err
	}
	for _, l := range all {
		a := l.Attrs()
		if a.ParentIndex != parent.Attrs().Index || a.NetNsID >= 0 { // that index is another namespace's
			continue
		}
		if mode := subMode(l); mode != "" && mode != b.Mode {
			return fmt.Errorf("uplink %s carries %s (%s), and one uplink carries one kind: use --mode=%s, or another uplink; when no such pod is left, `ip link del %s` frees it",
				b.Uplink, mode, a.Name, mode, a.Name)
		}
	}
	return nil
}

// list is all links.
func list(h *netlink.Handle) ([]netlink.Link, error) {
	all, err := netns.Dump(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return all, nil
}

// addSub makes a complete pod by sub-interface.
func (b *builder) addSub() (Result, error) {
	parent, err := b.uplink()
	if err != nil {
		return Result{}, err
	}
	eth, err := b.makeSub(parent)
	if err != nil {
		return Result{}, err
	}
	if err := b.lease(eth, nil, func() error { return b.attachInner(eth) }); err != nil {
		return Result{}, err
	}
	if err := b.findLAN(parent); err != nil {
		return Result{}, err
	}
	shim, err := b.ensureShim(parent)
	if err != nil {
		return Result{}, err
	}
	if err := b.attachInner(eth); err != nil {
		return Result{}, err
	}
	if err := b.podOnSegment(eth); err != nil {
		return Result{}, err
	}
	if err := b.meetNode(eth, shim); err != nil {
		return Result{}, err
	}
	res := pairResult(eth, shim)
	res.setParent(parent)
	return res, nil
}

// makeSub creates the pod's interface directly in the pod's namespace.
func (b *builder) makeSub(parent netlink.Link) (netlink.Link, error) {
	attrs := b.attrs(b.IfName, nil)
	if b.Mode == Macvlan {
		attrs.HardwareAddr = b.podMAC()
	}
	attrs.Group = linkGroup
	attrs.ParentIndex = parent.Attrs().Index
	attrs.Namespace = netlink.NsFd(b.podNS.Fd())
	// The request goes to the node's namespace, where the parent's index means
	// the parent.
	if err := b.node.LinkAdd(b.subInterface(attrs)); err != nil {
		return nil, b.createError(b.IfName, err)
	}
	return must(b.pod, b.IfName)
}

func (b *builder) createError(name string, err error) error {
	err = fmt.Errorf("create %s %s on %s: %w", b.Mode, name, b.Uplink, err)
	if errors.Is(err, unix.EBUSY) {
		err = fmt.Errorf("%w; the uplink carries another kind (one of macvlan, ipvlan, a bridge, a bond): use that, or another uplink", err)
	}
	return err
}

// ensureShim makes the host's own sub-interface, or takes the one that is there.
func (b *builder) ensureShim(parent netlink.Link) (netlink.Link, error) {
	name := ShimName(b.Mode, b.Uplink)
	shim, err := find(b.node, name)
	if err != nil {
		return nil, err
	}
	if shim == nil {
		attrs := b.attrs(name, nil)
		if b.Mode == Macvlan {
			attrs.HardwareAddr = randomMAC()
		}
		attrs.MTU = parent.Attrs().MTU
		attrs.ParentIndex = parent.Attrs().Index
		attrs.Group = linkGroup // an uninstall finds it when the uplink has another name by then
		err := b.node.LinkAdd(b.subInterface(attrs))
		if err != nil && !errors.Is(err, unix.EEXIST) { // another Add may be as fast
			return nil, b.createError(name, err)
		}
		if shim, err = must(b.node, name); err != nil {
			return nil, err
		}
	}
	if subMode(shim) != b.Mode || shim.Attrs().ParentIndex != parent.Attrs().Index {
		return nil, fmt.Errorf("%s is in the way: mustang needs that name for its %s on %s", name, b.Mode, b.Uplink)
	}
	if err := ownARP(name); err != nil {
		return nil, err
	}
	return shim, b.holdGateway(shim, endRouted)
}
