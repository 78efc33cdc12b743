// SPDX-License-Identifier: Apache-2.0

package link

// BIG TCP: segments are bundled to more than 64 KiB on their way through the
// stack. The size is a property of the device, for all that leaves by it. What a
// later device cannot send at once the kernel cuts in software, to single
// segments, which costs several times what bundling saves: so the size never
// exceeds what the node's way out takes. See docs/mtu.md.

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

const (
	// DefaultBigTCP is three times what is possible without, in bytes.
	DefaultBigTCP = 3 * legacyGSO
	// MaxBigTCP is the kernel's limit (GSO_MAX_SIZE).
	MaxBigTCP = 8 * 65535

	legacyGSO = 65536
)

// ErrNoBigTCP says that the kernel knows no BIG TCP, of either family.
var ErrNoBigTCP = errors.New("this kernel has no BIG TCP: it came with Linux 5.19 for IPv6 and 6.3 for IPv4")

// BigTCP is what came of Spec.BigTCP, in bytes; 0: off.
type BigTCP struct {
	IPv4, IPv6 int
	Notes      []string // sentences for the user, when it is less than asked for
}

func (s Spec) validateBigTCP() error {
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

// bigTCP sets the sizes of a pod's link: of both ends where it has two.
func (b *builder) bigTCP() (BigTCP, error) {
	var out BigTCP
	if b.BigTCP == 0 {
		return out, nil
	}
	ends, err := b.ends()
	if err != nil {
		return out, err
	}
	ways, err := b.waysOut()
	if err != nil {
		return out, err
	}
	lacking := 0
	for i, f := range gsoFamilies {
		size := b.BigTCP
		for _, w := range ways {
			if takes := f.gsoOf(w.Attrs()); takes > 0 && takes < size {
				size = takes
				out.Notes = append(out.Notes, fmt.Sprintf("BIG TCP for %s: %s instead of %d bytes, because %s sends no more at once; `ip link set dev %s %s %d` raises it, up to %d",
					f.name, sizeName(size), b.BigTCP, w.Attrs().Name, w.Attrs().Name, f.option, b.BigTCP, w.Attrs().TSOMaxSize))
			}
		}
		if size <= legacyGSO {
			continue
		}
		got, err := f.set(ends, size)
		if err != nil {
			return out, err
		}
		if got == 0 {
			lacking++
			out.Notes = append(out.Notes, fmt.Sprintf("BIG TCP for %s: off, because this kernel does not have it", f.name))
		}
		*[]*int{&out.IPv6, &out.IPv4}[i] = got
	}
	if lacking == len(gsoFamilies) {
		return out, ErrNoBigTCP
	}
	return out, nil
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

// set changes all ends and returns the size that the kernel then says they have:
// an older one ignores what it does not know, or refuses it. 0: none of it.
func (f gsoFamily) set(ends []linkEnd, size int) (int, error) {
	for _, e := range ends {
		name := e.link.Attrs().Name
		for _, set := range []func(*netlink.Handle, netlink.Link, int) error{f.gso, f.gro} {
			err := set(e.h, e.link, size)
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
				return 0, nil
			}
			if err != nil {
				return 0, fmt.Errorf("set %s %d of %s: %w", f.option, size, name, err)
			}
		}
		now, err := e.h.LinkByIndex(e.link.Attrs().Index)
		if err != nil {
			return 0, fmt.Errorf("look up %s: %w", name, err)
		}
		if f.gsoOf(now.Attrs()) != size {
			return 0, nil
		}
	}
	return size, nil
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
		routes, err := netns.Dump(func() ([]netlink.Route, error) {
			return b.node.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN, Dst: nil}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
		})
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
