// SPDX-License-Identifier: Apache-2.0

package service_test

// Path MTU discovery by address and through a Service: beyond the network
// outside there is another one, which takes shorter packets.

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/mustang-net/mustang/lab"
)

// farWire is outside's end of the wire to the far network, whose other end is
// the server's.
const farWire = "far0"

func (w *world) findsPathMTU() {
	w.serveFar()
	direct, by := netip.AddrPortFrom(w.farAddr(2), serverPort), netip.AddrPortFrom(vip(w.ipv6), outPort)
	for _, dst := range []netip.AddrPort{by, direct} { // the Service first, whose error must come through it
		w.learns(w.whole(dst), w.payload(wireMTU), smallMTU)
		w.bulkBy(dst, 1<<20)
	}
}

// farAddr is the router's address there (1) or the server's (2).
func (w *world) farAddr(host byte) netip.Addr {
	if w.ipv6 {
		return netip.MustParseAddr(fmt.Sprintf("fd00:10:77::%d", host))
	}
	return netip.AddrFrom4([4]byte{10, 77, 0, host})
}

func (w *world) farNet() netip.Prefix {
	return netip.PrefixFrom(w.farAddr(1), map[bool]int{false: 24, true: 64}[w.ipv6])
}

// serveFar puts a server into a namespace behind the one outside, which forwards
// to it by a narrow wire, and a Service before it.
func (w *world) serveFar() {
	w.t.Helper()
	ctx := context.Background()
	outside, node := w.lab.Outside(), w.lab.Node()
	server := w.startServerIn(&lab.Pod{Space: outside.Space, Name: "far"}, &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET})
	far := lab.Space{NetNS: fmt.Sprintf("/proc/%d/ns/net", server.Process.Pid)}
	w.must(outside.Do(func() error { return w.layFarWire(far.NetNS) }))
	w.t.Cleanup(func() {
		w.must(outside.Do(func() error {
			l, err := netlink.LinkByName(farWire)
			if err != nil {
				return err
			}
			return netlink.LinkDel(l)
		}))
	})
	all, via := netip.MustParsePrefix("0.0.0.0/0"), outside.IPv4
	if w.ipv6 {
		all, via = netip.MustParsePrefix("::/0"), outside.IPv6
	}
	w.must(far.Do(func() error { return errors.Join(w.bringUp("eth0", 2), addRoute("eth0", all, w.farAddr(1))) }))
	w.must(node.Do(func() error { return addRoute(lab.Uplink, w.farNet().Masked(), via) }))
	var services []lab.Service
	for _, protocol := range []string{"tcp", "udp"} {
		services = append(services, lab.Service{VIP: vip(w.ipv6), Port: outPort, Protocol: protocol,
			Backends: []netip.AddrPort{netip.AddrPortFrom(w.farAddr(2), serverPort)}})
	}
	w.must(node.AddServices(ctx, services))
}

// layFarWire makes a router of the current namespace, with a wire to the far one.
func (w *world) layFarWire(path string) error {
	for _, key := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+key, []byte("1"), 0); err != nil {
			return err
		}
	}
	far, err := netns.GetFromPath(path)
	if err != nil {
		return err
	}
	defer far.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = farWire, smallMTU
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerMTU: smallMTU, PeerNamespace: netlink.NsFd(far)}); err != nil {
		return fmt.Errorf("create %s: %w", farWire, err)
	}
	return w.bringUp(farWire, 1)
}

// bringUp gives a link the far network's address of a host.
func (w *world) bringUp(name string, host byte) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	a := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(w.farAddr(host), w.farNet().Bits()))}
	if w.ipv6 {
		a.Flags = syscall.IFA_F_NODAD
	}
	if err := netlink.AddrAdd(l, a); err != nil {
		return fmt.Errorf("add %s to %s: %w", a, name, err)
	}
	return netlink.LinkSetUp(l)
}

func addRoute(name string, to netip.Prefix, via netip.Addr) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(to), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("add route to %s via %s: %w", to, via, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
