// SPDX-License-Identifier: Apache-2.0

package link

// host-device: an interface of the node's is moved into the pod, and comes back
// when the pod goes. What it is connected to is the pod's network, with its
// gateway out there. The alias remembers the device's name on the node; a
// physical one comes back by itself, under the pod's name for it, when the pod's
// namespace dies first. What else it was like on the node, where the pod has no
// hand in it, is the caller's to remember.

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// deviceMark stands before the device's name in the alias; alone with it on a
// device that is being moved.
const deviceMark = " has device "

// Device is what a host's device is like on the node, of what a pod's is given or can
// change.
type Device struct {
	MAC net.HardwareAddr `json:"mac,omitempty"`
	MTU int              `json:"mtu,omitempty"` // bytes
}

func (b *builder) addHostDevice() (Result, error) {
	eth, err := b.takeDevice()
	if err != nil {
		return Result{}, err
	}
	if b.MTU > 0 {
		if err := b.pod.LinkSetMTU(eth, b.MTU); err != nil {
			return Result{}, fmt.Errorf("set the MTU of %s: %w", b.Uplink, err)
		}
	}
	if b.MAC != nil {
		if err := b.pod.LinkSetHardwareAddr(eth, b.MAC); err != nil {
			return Result{}, fmt.Errorf("set the MAC address of %s: %w", b.Uplink, err)
		}
	}
	if eth, err = must(b.pod, b.IfName); err != nil {
		return Result{}, err
	}
	if err := b.lease(eth, nil, func() error { return b.attachInner(eth) }); err != nil {
		return Result{}, err
	}
	if err := b.attachInner(eth); err != nil {
		return Result{}, err
	}
	if err := b.podOnSegment(eth); err != nil {
		return Result{}, err
	}
	return Result{PodIfIndex: eth.Attrs().Index, PodMAC: eth.Attrs().HardwareAddr, PodMTU: eth.Attrs().MTU}, nil
}

// takeDevice moves the device into the pod. It is marked before it leaves, so
// that whoever finds it knows where it belongs.
func (b *builder) takeDevice() (netlink.Link, error) {
	dev, err := find(b.node, b.Uplink)
	if err != nil {
		return nil, err
	}
	if dev == nil {
		return nil, fmt.Errorf("uplink %s does not exist: name an interface of this node that no pod has", b.Uplink)
	}
	if err := b.unused(dev); err != nil {
		return nil, err
	}
	b.Device = &Device{dev.Attrs().HardwareAddr, dev.Attrs().MTU}
	if b.Taking != nil {
		if err := b.Taking(*b.Device); err != nil {
			return nil, err
		}
	}
	alias := strings.TrimSpace(deviceMark) + " " + b.Uplink
	if err := mark(b.node, dev, alias, linkGroup); err != nil {
		return nil, err
	}
	// The move sets it down; one that the kernel does not move stays up.
	if err := b.node.LinkSetNsFd(dev, int(b.podNS.Fd())); err != nil {
		return nil, fmt.Errorf("move %s into the pod: %w", b.Uplink, err)
	}
	if dev, err = must(b.pod, b.Uplink); err != nil {
		return nil, err
	}
	// Who asked for the same device meanwhile has taken its marks off, as of one that was left behind.
	if err := mark(b.pod, dev, alias, linkGroup); err != nil {
		return nil, err
	}
	if err := b.pod.LinkSetName(dev, b.IfName); err != nil {
		return nil, fmt.Errorf("rename %s to %s: %w", b.Uplink, b.IfName, err)
	}
	return must(b.pod, b.IfName)
}

// unused refuses a device that the node itself lives by.
func (b *builder) unused(dev netlink.Link) error {
	a := dev.Attrs()
	if a.Flags&net.FlagLoopback != 0 || a.MasterIndex != 0 {
		return fmt.Errorf("uplink %s is a loopback or a port: name an interface that nothing else uses", b.Uplink)
	}
	addrs, err := netns.AddrsIn(b.node, dev)
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", b.Uplink, err)
	}
	for _, x := range addrs {
		if x.Scope == unix.RT_SCOPE_UNIVERSE {
			return fmt.Errorf("uplink %s has the node's address %s: name an interface that the node does not use, or take the address off it", b.Uplink, x.IPNet)
		}
	}
	all, err := list(b.node)
	if err != nil {
		return err
	}
	for _, l := range all {
		if buildsOn(l, dev) {
			return fmt.Errorf("uplink %s carries %s (%s), which would be cut off: name an interface that nothing else uses, or remove that", b.Uplink, l.Attrs().Name, l.Type())
		}
	}
	return nil
}

// buildsOn says whether l, of the same namespace, is a VLAN, a sub-interface or a tunnel
// upon dev: one that names it, and is not the other end of a pair. Or dev is a bridge or a
// bond, and l its port.
func buildsOn(l, dev netlink.Link) bool {
	a, d := l.Attrs(), dev.Attrs()
	if a.MasterIndex == d.Index {
		return true
	}
	if vx, ok := l.(*netlink.Vxlan); ok {
		return vx.VtepDevIndex == d.Index
	}
	pair := d.ParentIndex == a.Index && d.NetNsID < 0
	return a.ParentIndex == d.Index && a.NetNsID < 0 && !pair
}

// giveBack undoes takeDevice, from wherever it stopped.
func (b *builder) giveBack() error {
	if b.pod != nil {
		inPod, err := b.marked()
		if err != nil {
			return err
		}
		for _, dev := range inPod {
			// One that cannot be moved never was: the pod made it, and its marks. So
			// it did with a second one.
			dev, err = b.moveBack(dev)
			if errors.Is(err, unix.EINVAL) {
				continue
			}
			if err == nil {
				err = b.restore(dev)
			}
			if err != nil {
				return err
			}
			break
		}
	}
	return b.reclaim()
}

// marked are the pod's interfaces with the marks of its device: first the one that has the
// name that it was given, then its own, as after an Add that was killed before renaming it,
// then any, for the pod may have renamed it. Another with its marks was made by the pod.
func (b *builder) marked() ([]netlink.Link, error) {
	all, err := list(b.pod)
	if err != nil {
		return nil, fmt.Errorf("in the pod: %w", err)
	}
	names := []string{b.IfName, b.Uplink}
	rank := func(l netlink.Link) int {
		if i := slices.Index(names, l.Attrs().Name); i >= 0 {
			return i
		}
		return len(names)
	}
	all = slices.DeleteFunc(all, func(l netlink.Link) bool { return l.Attrs().Group != linkGroup || !b.isDevice(l) || b.others(l) })
	slices.SortStableFunc(all, func(x, y netlink.Link) int { return cmp.Compare(rank(x), rank(y)) })
	return all, nil
}

// reclaim undoes takeDevice where the device is on the node: a killed Add did not
// move it, or the kernel brought it back, under the pod's name for it or another.
// Whoever wants the device next does it, too: a namespace dies when it pleases, and
// that may be after its pod's Delete.
func (b *builder) reclaim() error {
	links, err := netns.Dump(b.node.LinkList)
	if err != nil {
		return fmt.Errorf("list the node's links: %w", err)
	}
	var errs []error
	for _, dev := range links {
		name, alias := deviceName(dev), dev.Attrs().Alias
		if dev.Attrs().Group == linkGroup && b.isDevice(dev) && (name == b.Uplink || strings.HasPrefix(alias, aliasPrefix+b.Name+deviceMark)) {
			if err = rename(b.node, dev, name); err == nil {
				err = b.restore(dev)
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// moveBack has the device renamed on the node: in the pod its name may be another's.
func (b *builder) moveBack(dev netlink.Link) (netlink.Link, error) {
	name := deviceName(dev)
	if err := b.pod.LinkSetDown(dev); err != nil {
		return nil, fmt.Errorf("set %s down: %w", dev.Attrs().Name, err)
	}
	if err := b.inPod(func() error {
		msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
		msg.Index = int32(dev.Attrs().Index)
		req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
		req.AddData(msg)
		req.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(b.nodeNS.Fd()))))
		req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
		_, err := req.Execute(unix.NETLINK_ROUTE, 0)
		return err
	}); err != nil {
		return nil, fmt.Errorf("move %s out of the pod: %w", name, err)
	}
	return must(b.node, name)
}

// restore makes a device that is on the node again what it was like there. Its marks go
// last: by them it is found as long as that has failed.
func (b *builder) restore(dev netlink.Link) error {
	a := dev.Attrs()
	was := b.before(a)
	if len(was.MAC) > 0 && !bytes.Equal(was.MAC, a.HardwareAddr) {
		if err := b.node.LinkSetDown(dev); err != nil { // as most drivers need it
			return fmt.Errorf("set %s down: %w", a.Name, err)
		}
		if err := b.node.LinkSetHardwareAddr(dev, was.MAC); err != nil {
			return fmt.Errorf("set the MAC address of %s back to %s: %w", a.Name, was.MAC, err)
		}
	}
	if was.MTU != 0 && was.MTU != a.MTU {
		if err := b.node.LinkSetMTU(dev, was.MTU); err != nil {
			return fmt.Errorf("set the MTU of %s back to %d: %w", a.Name, was.MTU, err)
		}
	}
	return mark(b.node, dev, "", 0)
}

// before is what a device was like on the node. Where nobody remembers it has the address
// that it was built with, if it was built with one.
func (b *builder) before(dev *netlink.LinkAttrs) Device {
	if b.Device != nil {
		return *b.Device
	}
	return Device{MAC: dev.PermHWAddr}
}

// rename leaves a device down, unless it has that name.
func rename(h *netlink.Handle, dev netlink.Link, name string) error {
	if dev.Attrs().Name == name {
		return nil
	}
	if err := h.LinkSetDown(dev); err != nil {
		return fmt.Errorf("set %s down: %w", dev.Attrs().Name, err)
	}
	if err := h.LinkSetName(dev, name); err != nil {
		return fmt.Errorf("rename %s to %s: %w", dev.Attrs().Name, name, err)
	}
	return nil
}

// isDevice says whether dev is by its alias the device that the pod was given. The pod
// may have written that, so it gets no other device's name on the node.
func (b *builder) isDevice(dev netlink.Link) bool {
	name := deviceName(dev)
	return name != "" && (b.Uplink == "" || name == b.Uplink)
}

// others says whether a complete device in the pod is another pod's: somebody
// uses one namespace for two.
func (b *builder) others(dev netlink.Link) bool {
	alias := dev.Attrs().Alias
	return strings.HasPrefix(alias, aliasPrefix) && !strings.HasPrefix(alias, aliasPrefix+b.Name+deviceMark)
}

// deviceName is the name on the node of a device that is ours for a while.
func deviceName(l netlink.Link) string {
	_, name, _ := strings.Cut(" "+l.Attrs().Alias, deviceMark)
	return name
}

func mark(h *netlink.Handle, dev netlink.Link, alias string, group int) error {
	if err := h.LinkSetAlias(dev, alias); err != nil {
		return fmt.Errorf("set alias of %s: %w", dev.Attrs().Name, err)
	}
	if err := h.LinkSetGroup(dev, group); err != nil {
		return fmt.Errorf("set group of %s: %w", dev.Attrs().Name, err)
	}
	return nil
}
