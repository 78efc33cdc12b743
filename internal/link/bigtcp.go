// SPDX-License-Identifier: Apache-2.0

package link

// BIG TCP: segments are bundled to more than 64 KiB on their way through the
// stack. The size is a property of the device, for all that leaves by it. What a
// later device cannot send at once the kernel cuts in software, to single
// segments, which costs several times what bundling saves. So what leaves the
// node is never bundled to more than the node's way out takes: by the size
// itself, or, where segments to the node's own pods are longer than to all others
// (local MTU), by how many segments a bundle may have. See docs/mtu.md.

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

const (
	// MaxBigTCP is the kernel's limit (GSO_MAX_SIZE), in bytes, and what is given to
	// who names no size.
	MaxBigTCP = 8 * 65535

	legacyGSO   = 65536
	gsoHeaders  = 321 // bytes of a bundle that TCP leaves to headers (MAX_TCP_HEADER + 1)
	leastHeader = 52  // bytes that a packet has besides its segment: of IPv4, TCP and its timestamps
	jumboHeader = 8   // bytes of the IPv6 option that says how long a larger bundle is
	leastMTU6   = 1280
)

// ErrNoBigTCP says that the kernel knows no BIG TCP, of either family.
var ErrNoBigTCP = errors.New("this kernel has no BIG TCP: it came with Linux 5.19 for IPv6 and 6.3 for IPv4")

// BigTCP is what came of Spec.BigTCP, in bytes; 0: off.
type BigTCP struct {
	IPv4, IPv6 int
	Notes      []string // sentences for the user, when it is less than asked for
}

// ValidateBigTCP checks the one field, for who has another name for it.
func (s Spec) ValidateBigTCP() error {
	if s.BigTCP != 0 && s.Mode == HostDevice {
		return errors.New("big TCP is a device's own setting: with host-device, set it on the device (`ip link set … gso_max_size`)")
	}
	if s.BigTCP != 0 && (s.BigTCP <= legacyGSO || s.BigTCP > MaxBigTCP) {
		return fmt.Errorf("big TCP size %d is out of range: use %d to %d", s.BigTCP, legacyGSO+1, MaxBigTCP)
	}
	return nil
}

// gsoFamily is one family's settings of a device.
type gsoFamily struct {
	name     string
	gso, gro func(*netlink.Handle, netlink.Link, int) error
	gsoOf    func(*netlink.LinkAttrs) int
	option   string // of ip link set
}

// IPv6 first: its attribute is the older, and setting it lowers the other to
// match when it is small.
var gsoFamilies = []gsoFamily{
	{"IPv6", (*netlink.Handle).LinkSetGSOMaxSize, (*netlink.Handle).LinkSetGROMaxSize,
		func(a *netlink.LinkAttrs) int { return int(a.GSOMaxSize) }, "gso_max_size"},
	{"IPv4", (*netlink.Handle).LinkSetGSOIPv4MaxSize, (*netlink.Handle).LinkSetGROIPv4MaxSize,
		func(a *netlink.LinkAttrs) int { return int(a.GSOIPv4MaxSize) }, "gso_ipv4_max_size"},
}

// bundle sets how much the pod's link takes at once: both ends of it where it has
// two. That a kernel has no BIG TCP is an error for who asked for it.
func (b *builder) bundle() (BigTCP, error) {
	var out BigTCP
	if b.BigTCP == 0 && b.LocalMTU == 0 {
		return out, nil
	}
	ends, err := b.ends()
	if err != nil {
		return out, err
	}
	beyond, notes, err := b.sizesBeyond()
	if err != nil {
		return out, err
	}
	out.Notes = notes
	device := beyond
	if b.LocalMTU > 0 && ends[0].link.Attrs().TSOMaxSize > 0 { // which a kernel without BIG TCP does not tell
		if err := ends[0].limitSegments(slices.Min(beyond)); err != nil {
			return out, err
		}
		device = []int{MaxBigTCP, MaxBigTCP}
	}
	lacking := 0
	for i, f := range gsoFamilies {
		if device[i] <= legacyGSO {
			continue
		}
		has, err := f.set(ends, device[i], beyond[i])
		if err != nil {
			return out, err
		}
		if has && f.option == "gso_max_size" && CanLocalMTU(b.Mode) {
			if err := b.leaveJumboRoom(ends[0]); err != nil {
				return out, err
			}
		}
		switch {
		case b.BigTCP == 0 || beyond[i] <= legacyGSO:
		case has:
			*[]*int{&out.IPv6, &out.IPv4}[i] = beyond[i]
		default:
			lacking++
			out.Notes = append(out.Notes, fmt.Sprintf("BIG TCP for %s: off, because this kernel does not have it", f.name))
		}
	}
	if lacking == len(gsoFamilies) {
		return out, ErrNoBigTCP
	}
	return out, nil
}

// sizesBeyond are the bytes of the largest bundle for who is not on this node, by
// gsoFamilies, and what to tell about it.
func (b *builder) sizesBeyond() (sizes []int, notes []string, err error) {
	if b.BigTCP > 0 && b.Tunnel {
		notes = append(notes, "BIG TCP: off beyond this node, because pods of other nodes are reached by a tunnel, which takes no larger bundles")
	}
	if b.BigTCP == 0 || b.Tunnel {
		return []int{legacyGSO, legacyGSO}, notes, nil
	}
	ways, err := b.waysOut()
	if err != nil {
		return nil, nil, err
	}
	for _, f := range gsoFamilies {
		size := b.BigTCP
		if f.option == "gso_max_size" && CanLocalMTU(b.Mode) && b.IPv6.IsValid() && b.toOthers() < leastMTU6+jumboHeader {
			size = legacyGSO
			notes = append(notes, fmt.Sprintf("BIG TCP for IPv6: off, because it needs an MTU of %d", leastMTU6+jumboHeader))
		}
		for _, w := range ways {
			if takes := f.gsoOf(w.Attrs()); takes > 0 && takes < size {
				size = takes
				notes = append(notes, fmt.Sprintf("BIG TCP for %s: %s instead of %d bytes, because %s sends no more at once; `ip link set dev %s %s %d` raises it, up to %d",
					f.name, sizeName(size), b.BigTCP, w.Attrs().Name, w.Attrs().Name, f.option, b.BigTCP, w.Attrs().TSOMaxSize))
			}
		}
		sizes = append(sizes, size)
	}
	return sizes, notes, nil
}

// limitSegments keeps bundles to others than the node's pods within size bytes:
// their segments are no longer than the pod's MTU lets them be. Without timestamps
// they are a little longer; but a limit for those would cost all others.
func (e linkEnd) limitSegments(size int) error {
	most := max((size-gsoHeaders)/(e.link.Attrs().MTU-leastHeader), 1)
	if err := e.h.LinkSetGSOMaxSegs(e.link, most); err != nil {
		return fmt.Errorf("set gso_max_segs %d of %s: %w", most, e.link.Attrs().Name, err)
	}
	return nil
}

// beyondNode is how many bytes a pod's interface sends at once to others than the
// node's pods, in bundles of at most size bytes.
func beyondNode(a *netlink.LinkAttrs, size uint32) int {
	return min(int(size), int(a.GSOMaxSegs)*(a.MTU-leastHeader)+gsoHeaders)
}

// JumboRoom is what the MTU of a pod's IPv6 default route is to be, mtu (0: the
// interface's) but for BIG TCP. The kernel, when it forwards a large bundle, holds
// its segments against the MTU as if each had the header that tells the bundle's
// length, and drops it (ip6_pkt_too_big).
func JumboRoom(a *netlink.LinkAttrs, mtu int) int {
	if beyondNode(a, a.GSOMaxSize) <= legacyGSO {
		return mtu
	}
	return WithJumboRoom(a, mtu)
}

// WithJumboRoom is what JumboRoom makes of an MTU for bundles that are large.
func WithJumboRoom(a *netlink.LinkAttrs, mtu int) int { return cmp.Or(mtu, a.MTU) - jumboHeader }

// leaveJumboRoom shortens the pod's IPv6 default routes by this interface.
func (b *builder) leaveJumboRoom(pod linkEnd) error {
	l, err := must(b.pod, b.IfName) // as it is now
	if err != nil {
		return err
	}
	routes, err := netns.RoutesIn(pod.h, unix.AF_INET6, &netlink.Route{LinkIndex: l.Attrs().Index, Table: unix.RT_TABLE_MAIN, Dst: nil},
		netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
	if err != nil {
		return fmt.Errorf("list IPv6 default routes: %w", err)
	}
	for _, r := range routes {
		if r.MTU = JumboRoom(l.Attrs(), r.MTU); r.MTU == 0 {
			continue
		}
		if err := pod.h.RouteReplace(&r); err != nil {
			return fmt.Errorf("set MTU %d of the IPv6 default route: %w", r.MTU, err)
		}
	}
	return nil
}

// toOthers is the MTU towards others than the node's pods.
func (b *builder) toOthers() int { return min(b.podMTU(), cmp.Or(b.RouteMTU, b.podMTU())) }

// BundleForTunnel keeps the bundles of a pod's interface within what a tunnel
// takes; h is of the pod's namespace. What other limit there was is not known
// afterwards: one that is lower stays, and none is lifted.
func BundleForTunnel(h *netlink.Handle, index int) error {
	l, err := h.LinkByIndex(index)
	if err != nil {
		return fmt.Errorf("look up interface %d: %w", index, err)
	}
	if a := l.Attrs(); beyondNode(a, max(a.GSOMaxSize, a.GSOIPv4MaxSize)) <= legacyGSO {
		return nil
	}
	return linkEnd{h, l}.limitSegments(legacyGSO)
}

func sizeName(size int) string {
	if size <= legacyGSO {
		return "off"
	}
	return fmt.Sprint(size)
}

// linkEnd is a device of the pod's link, where it is.
type linkEnd struct {
	h    *netlink.Handle
	link netlink.Link
}

func (b *builder) ends() ([]linkEnd, error) {
	eth, err := must(b.pod, b.IfName)
	if err != nil {
		return nil, err
	}
	ends := []linkEnd{{b.pod, eth}}
	if traitsOf[b.Mode].pair {
		host, err := must(b.node, b.HostIfName)
		if err != nil {
			return nil, err
		}
		ends = append(ends, linkEnd{b.node, host})
	}
	return ends, nil
}

// set lets all ends send gso bytes at once, and gather gro. It asks the kernel
// what they have then: an older one ignores what it does not know, or refuses it.
// false: it has not got it.
func (f gsoFamily) set(ends []linkEnd, gso, gro int) (bool, error) {
	for _, e := range ends {
		name := e.link.Attrs().Name
		err := f.gso(e.h, e.link, gso)
		if err == nil && gro > legacyGSO {
			err = f.gro(e.h, e.link, gro)
		}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("set %s %d of %s: %w", f.option, gso, name, err)
		}
		now, err := e.h.LinkByIndex(e.link.Attrs().Index)
		if err != nil {
			return false, fmt.Errorf("look up %s: %w", name, err)
		}
		if f.gsoOf(now.Attrs()) != gso {
			return false, nil
		}
	}
	return true, nil
}

// waysOut are the node's devices by which the pod's packets leave it: the uplink
// that the pod's interface is built on, else those of the default routes.
func (b *builder) waysOut() ([]netlink.Link, error) {
	if HasShim(b.Mode) {
		l, err := must(b.node, b.Uplink)
		return []netlink.Link{l}, err
	}
	var indexes []int
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := netns.RoutesIn(b.node, family, &netlink.Route{Table: unix.RT_TABLE_MAIN, Dst: nil}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
		if err != nil {
			return nil, fmt.Errorf("list the node's default routes: %w", err)
		}
		for _, r := range routes {
			indexes = append(indexes, r.LinkIndex)
			for _, hop := range r.MultiPath {
				indexes = append(indexes, hop.LinkIndex)
			}
		}
	}
	var out []netlink.Link
	seen := map[int]bool{0: true}
	for _, i := range indexes {
		if seen[i] {
			continue
		}
		seen[i] = true
		l, err := b.node.LinkByIndex(i)
		if err != nil {
			return nil, fmt.Errorf("look up the node's way out, interface %d: %w", i, err)
		}
		out = append(out, l)
	}
	return out, nil
}
