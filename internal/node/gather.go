// SPDX-License-Identifier: Apache-2.0

package node

// Fragments out of order: a network namespace that does nothing else puts
// datagrams together for the programs, which cannot hold a packet
// (bpf/lib/frag.h). To put them together is the stack's, for whoever needs whole
// packets: the node's own would do so for each packet of the node's, for nothing.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/nft"
)

const (
	// GatherName is the device that leads to the namespace where datagrams are put
	// together. They come back by it.
	GatherName  = "mst-gather"
	gatherOther = "mst-gather-end" // there
	gatherTable = "mustang-fragments"
)

// gatherMAC is that of both ends, as programs write it (GATHER_MAC, bpf/lib/frag.h):
// without ARP, the kernel takes a device's own for that of each of its neighbours.
var gatherMAC = net.HardwareAddr{0x02, 0x6d, 0x73, 0x74, 0, 2}

// gatherAddr is the device's own: to one without an address, a reverse path filter
// is strict that is not switched off.
var gatherAddr = netip.MustParsePrefix("169.254.10.25/32")

// EnsureGather makes the namespace and the device, unless they are there, and
// answers the device's ifindex. hold is called on a thread in the new namespace,
// which nothing else keeps. It can be done again.
func EnsureGather(hold func() error) (int, error) {
	l, err := FindGather()
	if err != nil || l != nil {
		return indexOf(l), err
	}
	if err := RemoveGather(); err != nil {
		return 0, err
	}
	space, err := netns.New()
	if err != nil {
		return 0, err
	}
	defer space.Close()
	// First what a kernel may lack: no device comes and goes for it, which whoever follows devices would see.
	if err := netns.DoFile(space, gatherHere); err != nil {
		return 0, err
	}
	if err := makeGather(space); err != nil {
		return 0, errors.Join(fmt.Errorf("make %s: %w", GatherName, err), RemoveGather())
	}
	if err := netns.DoFile(space, func() error { return errors.Join(setUpGatherEnd(), hold()) }); err != nil {
		return 0, errors.Join(fmt.Errorf("make the namespace behind %s: %w", GatherName, err), RemoveGather())
	}
	// What is up is whole.
	if l, err = linkNamed(GatherName); err == nil && l == nil {
		err = fmt.Errorf("%s is gone right after it was made", GatherName)
	}
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	if err != nil {
		return 0, errors.Join(err, RemoveGather())
	}
	return indexOf(l), nil
}

func indexOf(l netlink.Link) int {
	if l == nil {
		return 0
	}
	return l.Attrs().Index
}

// FindGather is the device when it is whole; else nil.
func FindGather() (netlink.Link, error) {
	l, err := linkNamed(GatherName)
	if err != nil || l == nil {
		return nil, err
	}
	a := l.Attrs()
	// One end of two in the same namespace has no number of another.
	if l.Type() != "veth" || a.NetNsID < 0 || a.Flags&net.FlagUp == 0 || a.HardwareAddr.String() != gatherMAC.String() {
		return nil, nil
	}
	return l, nil
}

// RemoveGather removes the device, and with it its other end; and what mustang had
// in its place once. Absent is success.
func RemoveGather() error {
	if err := removeOldTables(); err != nil {
		return err
	}
	l, err := linkNamed(GatherName)
	if err != nil || l == nil {
		return err
	}
	if err := netlink.LinkDel(l); err != nil && !errors.As(err, new(netlink.LinkNotFoundError)) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove %s: %w", GatherName, err)
	}
	return nil
}

func makeGather(space *os.File) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = GatherName, doorDevice, gatherMAC
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: gatherOther, PeerHardwareAddr: gatherMAC, PeerMTU: doorDevice, PeerNamespace: netlink.NsFd(space.Fd())}
	if err := netlink.LinkAdd(pair); err != nil {
		return err
	}
	err := setSysctls(map[string]string{
		"ipv4/conf/" + GatherName + "/forwarding":    "1", // to pods
		"ipv4/conf/" + GatherName + "/rp_filter":     "2", // what comes back came in elsewhere
		"ipv6/conf/" + GatherName + "/addr_gen_mode": "1", // none: nobody is to be met there
	})
	if err := errors.Join(err, forwardIPv6(GatherName)); err != nil {
		return err
	}
	own := &netlink.Addr{IPNet: ipNet(gatherAddr), Scope: int(netlink.SCOPE_LINK)}
	return errors.Join(netlink.LinkSetARPOff(pair), netlink.AddrAdd(pair, own))
}

// setUpGatherEnd has the calling thread's namespace, which is new, send all back.
func setUpGatherEnd() error {
	err := setSysctls(map[string]string{
		"ipv4/ip_forward":                              "1",
		"ipv4/conf/all/rp_filter":                      "0",
		"ipv4/conf/" + gatherOther + "/rp_filter":      "0",
		"ipv4/conf/all/send_redirects":                 "0",
		"ipv4/conf/" + gatherOther + "/send_redirects": "0",
		"ipv6/conf/all/forwarding":                     "1",
		"ipv6/conf/" + gatherOther + "/addr_gen_mode":  "1",
	})
	if err != nil {
		return err
	}
	l, err := netlink.LinkByName(gatherOther)
	if err != nil {
		return err
	}
	if err := errors.Join(netlink.LinkSetARPOff(l), netlink.LinkSetUp(l)); err != nil {
		return err
	}
	for _, all := range []*net.IPNet{{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, {IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}} {
		err := netlink.RouteAdd(&netlink.Route{Dst: all, LinkIndex: l.Attrs().Index, Scope: netlink.SCOPE_LINK})
		if err != nil && (all.IP.To4() != nil || haveIPv6()) {
			return fmt.Errorf("route by %s: %w", gatherOther, err)
		}
	}
	return nil
}

func haveIPv6() bool {
	_, err := os.Stat(netns.Sysctl("ipv6"))
	return err == nil
}

// gatherHere has the calling thread's namespace put fragments together before it
// routes them, which it does for as long as a rule wants whole packets (tproxy's is
// the cheapest: it needs no connection tracking). Nothing ever meets the rule.
func gatherHere() error {
	if err := nft.Check(); err != nil {
		return err
	}
	c, err := nft.Connect()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	t := c.AddTable(&nftables.Table{Name: gatherTable, Family: nftables.TableFamilyINet})
	held := c.AddChain(&nftables.Chain{Name: "held", Table: t}) // in no hook
	c.AddRule(&nftables.Rule{Table: t, Chain: held, Exprs: []expr.Any{
		&expr.Immediate{Register: 1, Data: binary.BigEndian.AppendUint16(nil, 1)},
		&expr.TProxy{Family: unix.NFPROTO_UNSPEC, TableFamily: byte(nftables.TableFamilyINet), RegPort: 1}, // of both
	}})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("add the nftables table %s: %w", gatherTable, err)
	}
	return nil
}

// removeOldTables removes those that mustang made in the node's own namespace once.
func removeOldTables() error {
	c, err := nft.Connect()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	for _, family := range []nftables.TableFamily{nftables.TableFamilyINet, nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		c.DelTable(&nftables.Table{Name: gatherTable, Family: family})
		if err := c.Flush(); err != nil && !nft.Absent(err) && !nft.Unsupported(err) { // as a kernel without nftables, or without it for a family
			return fmt.Errorf("remove the nftables table %s: %w", gatherTable, err)
		}
	}
	return nil
}

// forwardIPv6 leaves the node its routers.
func forwardIPv6(name string) error {
	err := netns.ForwardIPv6(netns.Sysctl("ipv6/conf"), name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6
		return fmt.Errorf("have %s forward IPv6: %w", name, err)
	}
	return nil
}

func setSysctls(settings map[string]string) error {
	for key, value := range settings {
		err := os.WriteFile(netns.Sysctl(key), []byte(value), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6
			return fmt.Errorf("set sysctl net/%s=%s: %w", key, value, err)
		}
	}
	return nil
}
