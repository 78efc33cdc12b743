// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// OverlayName is the tunnel's device. One carries the packets of all nodes: the
// program at its egress says to which.
const OverlayName = "mst-vxlan"

// Bytes that the tunnel adds: the outer network header, UDP, VXLAN (RFC 7348),
// and the inner link header.
const (
	overhead4 = 20 + 8 + 8 + 14
	overhead6 = 40 + 8 + 8 + 14
)

// minMTU6 is the least MTU by which a device has IPv6 (RFC 8200 5). With less, the
// kernel takes its addresses and routes away.
const minMTU6 = 1280

// Overlay is the tunnel's device.
type Overlay struct {
	Index int
	MTU   int // bytes of the longest packet that fits through the tunnel
	// Whole says that nobody cuts the outer packet, as over IPv6. So programs have to be told
	// what fits, and of a route's MTU bpf_fib_lookup tells them only where it is locked.
	Whole bool
	Own   []netip.Prefix
	wire  []netip.Addr // of this node, between nodes, that it has by now
}

// Ifindex is the device's; 0: there is none.
func (o *Overlay) Ifindex() int {
	if o == nil {
		return 0
	}
	return o.Index
}

// Addr is the address of a family as which this node speaks through the tunnel: the one
// that pods reach it by there, so that a server that answers from wherever the route says
// answers from where it was asked. A node without one of the family has only the device's.
func (o *Overlay) Addr(is4 bool) netip.Addr {
	if o == nil {
		return netip.Addr{}
	}
	all := slices.Clone(o.wire)
	for _, p := range o.Own {
		all = append(all, p.Addr())
	}
	for _, a := range all {
		if a.Is4() == is4 {
			return a
		}
	}
	return netip.Addr{}
}

// hasIPv6 says whether the device takes routes of IPv6: a kernel may have none, a node's new
// devices none, and one that is narrower than minMTU6 has none either.
func (o *Overlay) hasIPv6() bool {
	if o == nil {
		return true // lead says what is missing
	}
	off, err := os.ReadFile(netns.Sysctl("ipv6/conf/" + OverlayName + "/disable_ipv6"))
	return err == nil && strings.TrimSpace(string(off)) == "0"
}

// lead makes r a route into the tunnel.
func (o *Overlay) lead(r *netlink.Route, is4 bool) error {
	if o == nil {
		return errors.New("the tunnel has no device")
	}
	r.LinkIndex, r.Scope, r.MTU = o.Index, netlink.SCOPE_LINK, o.MTU
	r.MTULock = o.Whole
	if a := o.Addr(is4); a.IsValid() {
		r.Src = a.AsSlice()
	}
	return nil
}

// EnsureOverlay makes the tunnel's device, or brings it to what set says. self
// is this node; where it has no address of a family between nodes, it speaks through
// the tunnel as the first address of its pods' networks, which no pod has.
func EnsureOverlay(self state.Node, remotes []state.Node, set state.NodeSettings, underlay int) (*Overlay, error) {
	want := overlayDevice(set, OverlayMTU(self, underlay))
	have, err := netlink.LinkByName(OverlayName)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		have, err = nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", OverlayName, err)
	}
	if v, ok := have.(*netlink.Vxlan); have != nil && (!ok || !v.FlowBased || v.Port != want.Port) {
		if err := netlink.LinkDel(have); err != nil {
			return nil, fmt.Errorf("remove %s, which is another than wanted: %w", OverlayName, err)
		}
		have = nil
	}
	if have == nil {
		if err := netlink.LinkAdd(want); err != nil {
			return nil, fmt.Errorf("create %s at UDP port %d: %w; is another VXLAN device there? choose another port", OverlayName, set.Port, err)
		}
		if have, err = netlink.LinkByName(OverlayName); err != nil {
			return nil, fmt.Errorf("look up %s: %w", OverlayName, err)
		}
	}
	o, err := OverlayOf(self, remotes, have.Attrs().Index, underlay)
	if err != nil {
		return nil, err
	}
	err = o.setUp(self, have, want.MTU)
	if errors.Is(err, unix.EADDRINUSE) { // the device opens its port when it comes up
		err = fmt.Errorf("%w; is another VXLAN device at UDP port %d? choose another port", err, set.Port)
	}
	return o, err
}

// OverlayOf describes the tunnel's device with that index.
func OverlayOf(self state.Node, remotes []state.Node, index, underlay int) (*Overlay, error) {
	over := Overhead(self, remotes)
	o := &Overlay{Index: index, MTU: underlay - over, Whole: over == overhead6}
	for _, p := range self.PodCIDRs {
		o.Own = append(o.Own, netip.PrefixFrom(p.Addr(), p.Addr().BitLen()))
	}
	local, err := netns.Addrs(nil)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range local {
		ip, _ := netip.AddrFromSlice(a.IP)
		// The kernel refuses a route from an address that it still asks others about.
		if slices.Contains(self.Addrs, ip.Unmap()) && a.Flags&unix.IFA_F_TENTATIVE == 0 {
			o.wire = append(o.wire, ip.Unmap())
		}
	}
	return o, nil
}

func overlayDevice(set state.NodeSettings, mtu int) *netlink.Vxlan {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = OverlayName, mtu
	return &netlink.Vxlan{
		LinkAttrs: attrs, FlowBased: true, Port: int(set.Port),
		// RFC 6935: tunnels may leave the outer checksum of IPv6 to the inner one.
		UDP6ZeroCSumTx: true, UDP6ZeroCSumRx: true,
	}
}

// OverlayMTU is that of the tunnel's device: the wire's, and where it has to have
// IPv6 no less than that takes. The routes by it say what fits; the program that
// pushes headers must not be held to less than the wire.
func OverlayMTU(self state.Node, underlay int) int {
	if hasIPv6(self.PodCIDRs) {
		return max(underlay, minMTU6)
	}
	return underlay
}

func hasIPv6(list []netip.Prefix) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Addr().Is6() })
}

// setUp finishes the device.
func (o *Overlay) setUp(self state.Node, l netlink.Link, mtu int) error {
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"set MTU of", func() error { return netlink.LinkSetMTU(l, mtu) }},
		{"set the link address of", func() error { return setVTEP(self, l) }},
		{"accept what comes by", acceptStrays},
		{"turn off ARP of", func() error { return netlink.LinkSetARPOff(l) }},
		{"turn on IPv6 of", o.turnOnIPv6},
		{"set up", func() error { return netlink.LinkSetUp(l) }},
		{"give addresses to", func() error { return o.setAddrs(l) }},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s %s: %w", step.what, OverlayName, err)
		}
	}
	return nil
}

// acceptStrays has the device take what the routes do not lead back by it: another
// node's own packets to our pods, who is itself met on the wire.
func acceptStrays() error {
	return setSysctls(map[string]string{"ipv4/conf/" + OverlayName + "/rp_filter": "2"})
}

// turnOnIPv6 is for a node whose new devices have none, where the device needs it.
func (o *Overlay) turnOnIPv6() error {
	if !hasIPv6(o.Own) {
		return nil
	}
	return setSysctls(map[string]string{"ipv6/conf/" + OverlayName + "/disable_ipv6": "0"})
}

func setVTEP(self state.Node, l netlink.Link) error {
	if len(self.Addrs) == 0 {
		return nil
	}
	mac := VTEP(self.Addrs[0])
	if bytes.Equal(l.Attrs().HardwareAddr, mac) {
		return nil
	}
	return netlink.LinkSetHardwareAddr(l, mac)
}

// Overhead is how many bytes the tunnel takes from a packet, in the family that
// takes most of those in use.
func Overhead(self state.Node, remotes []state.Node) int {
	for _, n := range remotes {
		if n.Mode == state.NodeVXLAN && n.Underlay(self).Is6() {
			return overhead6
		}
	}
	return overhead4
}

func (o *Overlay) setAddrs(l netlink.Link) error {
	have, err := netns.Addrs(l)
	if err != nil {
		return err
	}
	for _, a := range have {
		if p := prefixOf(a.IPNet); !p.Addr().IsLinkLocalUnicast() && !slices.Contains(o.Own, p) {
			if err := netlink.AddrDel(l, &a); err != nil {
				return err
			}
		}
	}
	for _, p := range o.Own {
		if p.Addr().Is6() && !haveIPv6() {
			continue
		}
		if slices.ContainsFunc(have, func(a netlink.Addr) bool { return prefixOf(a.IPNet) == p }) {
			continue // replaced, it would be news to who follows addresses, and so without end
		}
		a := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrReplace(l, a); err != nil {
			return err
		}
	}
	return nil
}

// RemoveOverlay removes the tunnel's device. Absent is success.
func RemoveOverlay() error {
	l, err := netlink.LinkByName(OverlayName)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err == nil {
		err = netlink.LinkDel(l)
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", OverlayName, err)
	}
	return nil
}

// VTEP is the link address that frames in the tunnel to a node carry: each node
// answers to the one that its address makes, so that none has to be told.
func VTEP(a netip.Addr) net.HardwareAddr {
	b := a.As16()
	return net.HardwareAddr{0x02, 0x6d, b[12], b[13], b[14], b[15]}
}
