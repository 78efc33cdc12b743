// SPDX-License-Identifier: Apache-2.0

// Package masquerade lets pods wear their node's address towards the outside,
// by the kernel's nftables: one table a scope, and in it a group of chain and
// sets for each network. Nothing passes them, and nobody pays for the kernel's
// connection tracking, until the table is hooked: that is for when the programs
// cannot do it (internal/engine/masquerade.go). It acts in the network namespace
// of the calling thread.
package masquerade

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/nft"
)

// DefaultTable is the table of the default scope.
const DefaultTable = "mustang"

// AlwaysInside are destinations that no node's address helps to reach.
var AlwaysInside = []netip.Prefix{
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("ff00::/8"), netip.MustParsePrefix("fe80::/10"),
}

// Table is a scope's nftables table (family inet).
type Table struct {
	Name string
}

// TableFor is the table of the scope whose state is in stateDir.
func TableFor(stateDir, defaultStateDir string) Table {
	if stateDir == defaultStateDir {
		return Table{DefaultTable}
	}
	return Table{DefaultTable + "-" + digest(stateDir)}
}

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:4])
}

// Group names the rules of a network with these exclusions: other exclusions
// are another group, so that a changed configuration leaves running pods be, as
// does another way of making groups, which has a number.
func Group(network string, exclude []netip.Prefix) string {
	var words []string
	for _, p := range exclude {
		words = append(words, p.String())
	}
	slices.Sort(words)
	return digest("2 " + network + " " + strings.Join(words, " "))
}

// podPrefix is of the groups of pods that no plugin masquerades, which the engine
// makes and removes; other groups' names are digits alone.
const podPrefix = "pod-"

// PodGroup is Group for the pods that no plugin masquerades.
func PodGroup(exclude []netip.Prefix) string { return podPrefix + Group("", exclude) }

// HookChain is the one chain of a table that packets pass.
const HookChain = "postrouting"

// insideChain has the destinations that are inside for every group, groupsChain
// leads to the groups, and those lead what is to be masqueraded to wornChain. That
// is empty without the hook: from the mere existence of a rule that masquerades,
// the kernel tracks each packet.
const (
	insideChain = "inside"
	groupsChain = "groups"
	wornChain   = "worn"
)

// chainPrefix is of groups' chains; those that earlier versions made are hooked
// themselves.
const (
	chainPrefix = "group-"
	hookedGroup = "out-"
)

func chainName(group string) string { return chainPrefix + group }

// IsOurs says whether a table, as "inet mustang", is some scope's.
func IsOurs(table string) bool {
	name, inet := strings.CutPrefix(table, "inet ")
	return inet && (name == DefaultTable || strings.HasPrefix(name, DefaultTable+"-"))
}

func setName(group string, v4 bool) string {
	if v4 {
		return "pods4-" + group
	}
	return "pods6-" + group
}

func (t Table) nft() *nftables.Table {
	return &nftables.Table{Name: t.Name, Family: nftables.TableFamilyINet}
}

func (t Table) set(group string, v4 bool) *nftables.Set {
	kind := nftables.TypeIP6Addr
	if v4 {
		kind = nftables.TypeIPAddr
	}
	return &nftables.Set{Table: t.nft(), Name: setName(group, v4), KeyType: kind}
}

// unlessNone is nil for nft.ErrNone.
func unlessNone(err error) error {
	if errors.Is(err, nft.ErrNone) {
		return nil
	}
	return err
}

// Add puts pods into the group, and makes table and group when they are not
// there, all in one transaction. Doing it again is harmless. A kernel without
// nftables has no groups; who needs them is told so by Hook.
func (t Table) Add(group string, exclude []netip.Prefix, pods []netip.Addr) error {
	if err := nft.Check(); err != nil {
		return unlessNone(err)
	}
	if err := t.add(group, exclude, pods, false); err == nil || !nft.Absent(err) {
		return err // the usual case: the group is there
	}
	if err := t.add(group, exclude, pods, true); err != nil {
		return fmt.Errorf("masquerade in nftables table %s: %w", t.Name, err)
	}
	return nil
}

func (t Table) add(group string, exclude []netip.Prefix, pods []netip.Addr, create bool) error {
	c, err := nft.Connect()
	if err != nil {
		return err
	}
	sets := map[bool]*nftables.Set{true: t.set(group, true), false: t.set(group, false)}
	if create {
		table := c.AddTable(t.nft())
		chain := c.AddChain(&nftables.Chain{Name: chainName(group), Table: table})
		groups := c.AddChain(&nftables.Chain{Name: groupsChain, Table: table})
		c.AddChain(&nftables.Chain{Name: wornChain, Table: table})
		c.FlushChain(chain)
		c.AddRule(&nftables.Rule{Table: table, Chain: groups, Exprs: jump(chain.Name)})
		for _, v4 := range []bool{true, false} {
			if err := c.AddSet(sets[v4], nil); err != nil {
				return err
			}
		}
		for _, p := range append(slices.Clone(AlwaysInside), exclude...) {
			c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(destinationIn(p), &expr.Verdict{Kind: expr.VerdictReturn})})
		}
		for _, v4 := range []bool{true, false} {
			c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: podsToOthers(sets[v4], v4)})
		}
	}
	for _, a := range pods {
		if err := c.SetAddElements(sets[a.Is4()], []nftables.SetElement{{Key: a.AsSlice()}}); err != nil {
			return err
		}
	}
	return c.Flush()
}

func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func (t Table) hookChain() *nftables.Chain {
	return &nftables.Chain{Name: HookChain, Table: t.nft(), Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource}
}

// Hook lets packets pass the table, and makes it when it is not there. Doing it
// again is harmless.
func (t Table) Hook() error {
	if hooked, err := t.Hooked(); err != nil || hooked {
		return err
	}
	if err := nft.Check(); err != nil {
		return fmt.Errorf("hook nftables table %s: %w", t.Name, err)
	}
	c, err := nft.Connect()
	if err != nil {
		return err
	}
	table := c.AddTable(t.nft())
	c.AddChain(&nftables.Chain{Name: insideChain, Table: table})
	c.AddChain(&nftables.Chain{Name: groupsChain, Table: table})
	worn := c.AddChain(&nftables.Chain{Name: wornChain, Table: table})
	chain := c.AddChain(t.hookChain())
	c.FlushChain(worn)
	c.FlushChain(chain)
	c.AddRule(&nftables.Rule{Table: table, Chain: worn, Exprs: []expr.Any{&expr.Masq{}}})
	for _, to := range []string{insideChain, groupsChain} {
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: jump(to)})
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("hook nftables table %s: %w", t.Name, err)
	}
	return nil
}

// Hooked says whether packets pass the table.
func (t Table) Hooked() (bool, error) {
	c, err := nft.Connect()
	if err != nil {
		return false, err
	}
	_, err = c.ListChain(t.nft(), HookChain)
	if err == nil || nft.Absent(err) || nft.Unsupported(err) {
		return err == nil, nil
	}
	return false, fmt.Errorf("look at nftables table %s: %w", t.Name, err)
}

// Unhook is the reverse of Hook: groups stay as they are. Connections that are
// translated break, see InUse.
func (t Table) Unhook() error {
	c, err := nft.Connect()
	if err != nil {
		return err
	}
	t.unhook(c)
	if err := c.Flush(); err != nil && !nft.Absent(err) {
		return fmt.Errorf("take nftables table %s off its hook: %w", t.Name, err)
	}
	return nil
}

// unhook adds it to the transaction, which fails when there is no hook.
func (t Table) unhook(c *nftables.Conn) {
	c.FlushChain(&nftables.Chain{Name: wornChain, Table: t.nft()})
	c.FlushChain(t.hookChain())
	c.DelChain(t.hookChain())
}

// InUse says whether the kernel tracks a connection of a pod that it translates.
func InUse(isPod func(netip.Addr) bool) (bool, error) {
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil {
			return false, fmt.Errorf("list tracked connections: %w", err)
		}
		for _, f := range flows {
			src, _ := netip.AddrFromSlice(f.Forward.SrcIP)
			if isPod(src.Unmap()) && !f.Forward.SrcIP.Equal(f.Reverse.DstIP) {
				return true, nil
			}
		}
	}
	return false, nil
}

// family matches packets of one family: an inet chain sees both.
func family(v4 bool) []expr.Any {
	proto := byte(unix.NFPROTO_IPV6)
	if v4 {
		proto = unix.NFPROTO_IPV4
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
	}
}

// address loads the source's or the destination's into register 1.
func address(v4, source bool) expr.Any {
	p := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 24, Len: 16}
	if v4 {
		p.Offset, p.Len = 16, 4
	}
	if source {
		p.Offset -= p.Len
	}
	return p
}

func destinationIn(p netip.Prefix) []expr.Any {
	v4, n := p.Addr().Is4(), uint32(p.Addr().BitLen()/8)
	mask := make([]byte, n)
	for i := range p.Bits() {
		mask[i/8] |= 1 << (7 - i%8)
	}
	return append(family(v4), address(v4, false),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: n, Mask: mask, Xor: make([]byte, n)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Masked().Addr().AsSlice()})
}

func podsToOthers(set *nftables.Set, v4 bool) []expr.Any {
	return append(family(v4),
		address(v4, true), &expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID},
		address(v4, false), &expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID, Invert: true},
		&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictJump, Chain: wornChain})
}

// Members are the pods in the group.
func (t Table) Members(group string) ([]netip.Addr, error) {
	c, err := nft.Connect()
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, v4 := range []bool{true, false} {
		have, err := c.GetSetElements(t.set(group, v4))
		if err != nil && !nft.Absent(err) && !nft.Unsupported(err) {
			return nil, fmt.Errorf("read set %s of nftables table %s: %w", setName(group, v4), t.Name, err)
		}
		for _, e := range have {
			if a, ok := netip.AddrFromSlice(e.Key); ok {
				out = append(out, a)
			}
		}
	}
	return out, nil
}

// Missing are those of pods that the group does not have; none where there is no nftables.
func (t Table) Missing(group string, pods []netip.Addr) ([]netip.Addr, error) {
	if err := nft.Check(); err != nil {
		return nil, unlessNone(err)
	}
	have, err := t.Members(group)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(pods), func(a netip.Addr) bool { return slices.Contains(have, a) }), nil
}

// Remove takes pods out of the group; absent ones are success.
func (t Table) Remove(group string, pods []netip.Addr) error {
	if err := nft.Check(); err != nil {
		return unlessNone(err)
	}
	var errs []error
	for _, a := range pods { // one transaction each: an absent one fails its own only
		c, err := nft.Connect()
		if err != nil {
			return err
		}
		if err := c.SetDeleteElements(t.set(group, a.Is4()), []nftables.SetElement{{Key: a.AsSlice()}}); err != nil {
			errs = append(errs, err)
			continue
		}
		if err := c.Flush(); err != nil && !nft.Absent(err) {
			errs = append(errs, fmt.Errorf("take %s out of nftables table %s: %w", a, t.Name, err))
		}
	}
	return errors.Join(errs...)
}

// Delete removes the table, whoever is in it. One that is not there is success.
func (t Table) Delete() error {
	c, err := nft.Connect()
	if err != nil {
		return err
	}
	c.DelTable(t.nft())
	err = c.Flush()
	if err == nil || nft.Absent(err) || nft.Unsupported(err) {
		return nil
	}
	return fmt.Errorf("delete nftables table %s: %w", t.Name, err)
}
