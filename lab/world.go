// SPDX-License-Identifier: Apache-2.0

package lab

// The node and the outside: namespaces, the wire between them, routes, sysctls.

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"
	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

func (l *Lab) makeWorld() error {
	prefix := "mst-" + l.cfg.Name + "-"
	nodeNS, err := createNetNS(prefix + "n1")
	if err != nil {
		return err
	}
	outNS, err := createNetNS(prefix + "out")
	if err != nil {
		return err
	}
	env := l.info.mark()
	l.node = &Node{Space: Space{nodeNS, env}, Name: "n1", IPv4: nth(WireCIDR4, 1), IPv6: nth(WireCIDR6, 1),
		lab: l, services: map[string]bool{}}
	l.outside = &Outside{Space{outNS, env}, nth(WireCIDR4, 2), nth(WireCIDR6, 2)}

	if err := l.outside.Do(func() error { return setSysctls(quickIPv6) }); err != nil {
		return fmt.Errorf("outside: %w", err)
	}
	if err := l.node.Do(l.nodeSysctls); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	if err := l.makeWire(outNS); err != nil {
		return err
	}
	out := l.outside
	to4, to6 := []netip.Prefix{ServiceCIDR4}, []netip.Prefix{ServiceCIDR6}
	if l.cfg.Mode != HostDevice {
		to4, to6 = append(to4, PodCIDR4), append(to6, PodCIDR6)
	}
	if err := out.Do(func() error {
		if err := setUp(out.IPv4, out.IPv6, l.node.IPv4, l.node.IPv6, to4, to6); err != nil || l.cfg.Mode != HostDevice {
			return err
		}
		return l.makeSwitch()
	}); err != nil {
		return fmt.Errorf("outside: %w", err)
	}
	any4, any6 := netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")
	if err := l.node.Do(func() error {
		return setUp(l.node.IPv4, l.node.IPv6, out.IPv4, out.IPv6, []netip.Prefix{any4}, []netip.Prefix{any6})
	}); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	// Outside's end went up first, without a carrier.
	for _, x := range []struct {
		space *Space
		ip    netip.Addr
	}{{&out.Space, out.IPv6}, {&l.node.Space, l.node.IPv6}} {
		if err := x.space.Do(func() error { return settleWire(x.ip) }); err != nil {
			return err
		}
	}
	return nil
}

// settleWire returns when the current namespace's end of the wire transmits and
// its IPv6 address receives. Asking for a link's state makes the kernel's link
// watch run; an address's local route the kernel makes in the background.
func settleWire(ip6 netip.Addr) error {
	for end := time.Now().Add(2 * time.Second); ; time.Sleep(200 * time.Microsecond) {
		l, err := netlink.LinkByName(Uplink)
		if err != nil {
			return fmt.Errorf("look up %s: %w", Uplink, err)
		}
		r, err := netlink.RouteGet(ip6.AsSlice())
		if l.Attrs().OperState == netlink.OperUp && err == nil && len(r) > 0 && r[0].Type == unix.RTN_LOCAL {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s is %s and %s is not local after both were set up", Uplink, l.Attrs().OperState, ip6)
		}
	}
}

// quickIPv6 makes addresses usable at once.
var quickIPv6 = map[string]string{
	"ipv6/conf/all/disable_ipv6":     "0",
	"ipv6/conf/default/disable_ipv6": "0",
	"ipv6/conf/default/accept_dad":   "0",
	"ipv6/conf/default/accept_ra":    "0",
}

// nodeSysctls makes a router of the node. What a new namespace inherits differs
// between machines, so all that matters is set.
func (l *Lab) nodeSysctls() error {
	if err := setSysctls(quickIPv6); err != nil {
		return err
	}
	err := setSysctls(map[string]string{
		"ipv4/ip_forward":              "1",
		"ipv6/conf/all/forwarding":     "1",
		"ipv6/conf/default/forwarding": "1",
		"ipv4/conf/all/rp_filter":      "0",
		"ipv4/conf/default/rp_filter":  "0",
		// Services between pods of one segment come in and leave by one interface.
		"ipv4/conf/all/send_redirects":     "0",
		"ipv4/conf/default/send_redirects": "0",
	})
	if err != nil || l.cfg.Mode != Bridge {
		return err
	}
	value := map[bool]string{false: "0", true: "1"}[l.cfg.BridgeNF]
	err = setSysctls(map[string]string{
		"bridge/bridge-nf-call-iptables":  value,
		"bridge/bridge-nf-call-ip6tables": value,
	})
	if errors.Is(err, fs.ErrNotExist) {
		if !l.cfg.BridgeNF {
			return nil // what is not there is off
		}
		return errors.New("net.bridge.bridge-nf-call-iptables does not exist: load br_netfilter, or use a kernel with CONFIG_BRIDGE_NETFILTER")
	}
	return err
}

// setSysctls writes keys under net/ in the calling thread's namespace.
func setSysctls(settings map[string]string) error {
	for key, value := range settings {
		if err := os.WriteFile(filepath.Join("/proc/sys/net", key), []byte(value), 0); err != nil {
			return fmt.Errorf("set sysctl net/%s=%s: %w", key, value, err)
		}
	}
	return nil
}

// makeWire lays the veth pair between node and outside, each end created where
// it belongs.
func (l *Lab) makeWire(outNS string) error {
	out, err := vns.GetFromPath(outNS)
	if err != nil {
		return err
	}
	defer out.Close()
	return l.node.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = Uplink, l.cfg.MTU
		err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: Uplink, PeerNamespace: netlink.NsFd(out)})
		if err != nil {
			return fmt.Errorf("create wire %s: %w", Uplink, err)
		}
		return l.widenWire()
	})
}

// setUp gives the current namespace its loopback, its end of the wire with
// addresses, and routes by the other end.
func setUp(ip4, ip6, via4, via6 netip.Addr, to4, to6 []netip.Prefix) error {
	if err := linkUp("lo"); err != nil {
		return err
	}
	if err := linkUp(Uplink); err != nil {
		return err
	}
	wire, err := netlink.LinkByName(Uplink)
	if err != nil {
		return fmt.Errorf("look up %s: %w", Uplink, err)
	}
	for _, p := range []netip.Prefix{netip.PrefixFrom(ip4, WireCIDR4.Bits()), netip.PrefixFrom(ip6, WireCIDR6.Bits())} {
		a := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(wire, a); err != nil {
			return fmt.Errorf("add address %s to %s: %w", p, Uplink, err)
		}
	}
	for _, to := range append(append([]netip.Prefix(nil), to4...), to6...) {
		via := via4
		if to.Addr().Is6() {
			via = via6
		}
		r := &netlink.Route{LinkIndex: wire.Attrs().Index, Dst: ipNet(to), Gw: via.AsSlice()}
		if err := netlink.RouteAdd(r); err != nil {
			return fmt.Errorf("add route to %s via %s: %w", to, via, err)
		}
	}
	return nil
}

func linkUp(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("look up %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
