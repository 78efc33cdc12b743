// SPDX-License-Identifier: Apache-2.0

package node

// Fragments out of order: the stack puts datagrams together for the programs,
// which cannot hold a packet (bpf/lib/frag.h).

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// gatherTable holds a rule that nothing ever meets. While it is there, this
// namespace's stack puts fragments together before it routes them, which it does
// for whoever needs whole packets (tproxy is the cheapest to want: no connection
// tracking), and sends them on in pieces of the same size, in order. For the edge
// there is one for each family, with a second rule that says where to.
const gatherTable = "mustang-fragments"

const (
	// GatherName is the device by which datagrams that were put together for the
	// edge leave the stack. Nothing ever arrives at its other end.
	GatherName  = "mst-gather"
	gatherOther = "mst-gather-end"
)

// gatherHop is what datagrams to that device are routed by, of each family.
// Without ARP there, nobody asks who has it.
var gatherHop = map[nftables.TableFamily]netip.Addr{
	nftables.TableFamilyIPv4: netip.MustParseAddr("169.254.10.25"),
	nftables.TableFamilyIPv6: netip.MustParseAddr("fe80::a9fe:a19"),
}

// gatherPriority is right behind the stack's putting together
// (NF_IP_PRI_CONNTRACK_DEFRAG), before anybody's rules.
var gatherPriority = nftables.ChainPriorityRef(*nftables.ChainPriorityConntrackDefrag + 1)

// GatherFragments has the stack put datagrams together. It can be done again.
func GatherFragments() error {
	return putGatherTable(nftables.TableFamilyINet, nil, "1")
}

// LeaveFragments is the reverse. Absent is success.
func LeaveFragments() error {
	return removeGatherTable(nftables.TableFamilyINet)
}

// EnsureGather has the stack put together what comes with mark, as far as mask
// says, and send it to a device whose ifindex this answers. It can be done again.
func EnsureGather(mark, mask uint32) (int, error) {
	l, err := ensureGatherDevice()
	if err != nil {
		return 0, err
	}
	index := l.Attrs().Index
	for _, family := range gatherFamilies() {
		if err := putGatherTable(family, gatherRule(family, index, mark, mask), fmt.Sprintf("1 %d", index)); err != nil {
			return 0, err
		}
	}
	return index, nil
}

// LeaveGather removes the rules of EnsureGather, RemoveGather its device. Absent is
// success.
func LeaveGather() error {
	return errors.Join(removeGatherTable(nftables.TableFamilyIPv4), removeGatherTable(nftables.TableFamilyIPv6))
}

func RemoveGather() error {
	l, err := doorEnd(GatherName)
	if err != nil || l == nil {
		return err
	}
	if err := netlink.LinkDel(l); err != nil {
		return fmt.Errorf("remove %s: %w", GatherName, err)
	}
	return nil
}

// HasGather says whether the device is there.
func HasGather() (bool, error) {
	l, err := doorEnd(GatherName)
	return l != nil, err
}

// gatherFamilies are those that this namespace has.
func gatherFamilies() []nftables.TableFamily {
	off, err := os.ReadFile(netns.Sysctl("ipv6/conf/" + GatherName + "/disable_ipv6"))
	if err != nil || bytes.HasPrefix(off, []byte("1")) {
		return []nftables.TableFamily{nftables.TableFamilyIPv4}
	}
	return []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6}
}

func ensureGatherDevice() (netlink.Link, error) {
	l, err := doorEnd(GatherName)
	if err != nil {
		return nil, err
	}
	if l == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = GatherName, doorDevice, []byte{0x02, 0x6d, 0x73, 0x74, 0, 2}
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: gatherOther}); err != nil {
			return nil, fmt.Errorf("create %s: %w", GatherName, err)
		}
		if l, err = doorEnd(GatherName); err == nil && l == nil {
			err = fmt.Errorf("%s is gone right after it was made", GatherName)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := setUpGather(l); err != nil {
		return nil, fmt.Errorf("set up %s: %w", GatherName, err)
	}
	return l, nil
}

func setUpGather(l netlink.Link) error {
	other, err := netlink.LinkByName(gatherOther)
	if err != nil {
		return err
	}
	for key, value := range map[string]string{
		GatherName + "/addr_gen_mode": "1", // none: nobody is to be met there
		gatherOther + "/disable_ipv6": "1",
	} {
		err := os.WriteFile(netns.Sysctl("ipv6/conf/"+key), []byte(value), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6
			return fmt.Errorf("set sysctl net/ipv6/conf/%s=%s: %w", key, value, err)
		}
	}
	for _, err := range []error{netlink.LinkSetARPOff(l), netlink.LinkSetMTU(l, doorDevice), netlink.LinkSetUp(other), netlink.LinkSetUp(l)} {
		if err != nil {
			return err
		}
	}
	if len(gatherFamilies()) == 1 {
		return nil
	}
	// Of IPv4 a device is enough.
	hop := netip.PrefixFrom(gatherHop[nftables.TableFamilyIPv6], 128)
	routes, err := netns.RoutesBy(l)
	if err != nil || slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Dst != nil && prefixOf(r.Dst) == hop }) {
		return err
	}
	return netlink.RouteReplace(&netlink.Route{Dst: ipNet(hop), LinkIndex: l.Attrs().Index, Protocol: unix.RTPROT_STATIC})
}

// gatherRule takes whole datagrams whose fragments the edge's program has marked
// to a device. What it sends is a copy.
func gatherRule(family nftables.TableFamily, index int, mark, mask uint32) []expr.Any {
	word := func(v uint32) []byte { return binaryutil.NativeEndian.PutUint32(v) }
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: word(mask), Xor: word(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: word(mark)},
		&expr.Immediate{Register: unix.NFT_REG_1, Data: gatherHop[family].AsSlice()},
		&expr.Immediate{Register: unix.NFT_REG_2, Data: word(uint32(index))},
		&expr.Dup{RegAddr: unix.NFT_REG_1, RegDev: unix.NFT_REG_2, IsRegDevSet: true},
		&expr.Verdict{Kind: expr.VerdictDrop},
	}
}

// putGatherTable makes the table, unless it is there as version says, which its
// rules carry.
func putGatherTable(family nftables.TableFamily, rule []expr.Any, version string) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	t := &nftables.Table{Name: gatherTable, Family: family}
	want := 1
	if rule != nil {
		want++
	}
	if there, err := gatherTableIs(c, t, version, want); err == nil && there {
		return nil
	}
	c.AddTable(t) // so that there is one to remove
	c.DelTable(t)
	c.AddTable(t)
	of := byte(family)
	if family == nftables.TableFamilyINet {
		of = unix.NFPROTO_UNSPEC // both
	}
	// In no hook: no packet passes it.
	held := c.AddChain(&nftables.Chain{Name: "held", Table: t})
	c.AddRule(&nftables.Rule{Table: t, Chain: held, UserData: []byte(version), Exprs: []expr.Any{
		&expr.Immediate{Register: 1, Data: binary.BigEndian.AppendUint16(nil, 1)},
		&expr.TProxy{Family: of, TableFamily: byte(family), RegPort: 1},
	}})
	if rule != nil {
		marked := c.AddChain(&nftables.Chain{Name: "marked", Table: t, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookPrerouting, Priority: gatherPriority})
		c.AddRule(&nftables.Rule{Table: t, Chain: marked, UserData: []byte(version), Exprs: rule})
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("add the nftables table %s: %w", gatherTable, err)
	}
	return nil
}

// gatherTableIs says whether the table has as many rules, each of this version.
func gatherTableIs(c *nftables.Conn, t *nftables.Table, version string, rules int) (bool, error) {
	n := 0
	chains, err := c.ListChainsOfTableFamily(t.Family)
	if err != nil {
		return false, err
	}
	for _, chain := range chains {
		if chain.Table.Name != t.Name {
			continue
		}
		list, err := c.GetRules(t, chain)
		if err != nil {
			return false, err
		}
		for _, r := range list {
			if string(r.UserData) != version {
				return false, nil
			}
			n++
		}
	}
	return n == rules, nil
}

func removeGatherTable(family nftables.TableFamily) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	c.DelTable(&nftables.Table{Name: gatherTable, Family: family})
	err = c.Flush()
	for _, absent := range []error{unix.ENOENT, unix.EINVAL, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT} { // the last of a kernel without nftables
		if errors.Is(err, absent) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("remove the nftables table %s: %w", gatherTable, err)
	}
	return nil
}
