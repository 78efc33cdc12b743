// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// ForwardRules is one chain of the host's firewall that forwarded packets
// would pass, and packets redirected by eBPF do not.
type ForwardRules struct {
	Backend string `json:"backend"` // "nftables" (iptables-nft included) or "iptables-legacy"
	Table   string `json:"table"`
	Chain   string `json:"chain"`
	Rules   int    `json:"rules"` // -1: some, uncounted
	Policy  string `json:"policy,omitempty"`
}

// Firewall lists the chains at the forward hook of the calling thread's
// namespace that could drop something: those with rules or with policy drop.
func Firewall() ([]ForwardRules, error) {
	list, err := hookRules(hookForward, "filter")
	if err != nil {
		return nil, fmt.Errorf("list nftables chains: %w", err)
	}
	return list, nil
}

// hookRules is the same of a hook. Of iptables-legacy it looks at one table, of
// nftables at all, but only at nat's chains where that is the table.
func hookRules(hook uint32, table string) ([]ForwardRules, error) {
	list, err := nftHook(hook, table == "nat")
	if err != nil {
		return nil, err
	}
	for _, t := range []struct {
		family, level int
		name          string
	}{
		{unix.AF_INET, unix.SOL_IP, "IPv4"},
		{unix.AF_INET6, unix.SOL_IPV6, "IPv6"},
	} {
		if legacyHook(t.family, t.level, table, hook) {
			list = append(list, ForwardRules{Backend: "iptables-legacy", Table: table + " (" + t.name + ")", Chain: legacyChains[hook], Rules: -1})
		}
	}
	return list, nil
}

// From linux/netfilter_ipv4/ip_tables.h: IPT_SO_GET_INFO, and the same number
// for IPv6.
const iptGetInfo = 64

// iptInfo is struct ipt_getinfo.
type iptInfo struct {
	name       [32]byte
	validHooks uint32
	hookEntry  [5]uint32
	underflow  [5]uint32
	numEntries uint32
	size       uint32
}

// From linux/netfilter.h: NF_INET_PRE_ROUTING, NF_INET_FORWARD, NF_INET_POST_ROUTING.
const (
	hookPrerouting  = 0
	hookForward     = 2
	hookPostrouting = 4
)

var legacyChains = map[uint32]string{hookPrerouting: "PREROUTING", hookForward: "FORWARD", hookPostrouting: "POSTROUTING"}

// legacyHook says whether iptables-legacy has rules at a table's hook. A kernel
// without it has none. Asking does not create the table: only those in
// /proc/net/ip_tables_names are there, and the call fails for others.
func legacyHook(family, level int, table string, hook uint32) bool {
	if !legacyTable(family, table) {
		return false
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	info := iptInfo{}
	copy(info.name[:], table)
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), iptGetInfo,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	return errno == 0 && info.hookEntry[hook] != info.underflow[hook]
}

// forwardPolicies are how many IPsec policies packets meet that the calling thread's
// namespace forwards, and packets redirected by eBPF do not.
func forwardPolicies() (n int, err error) {
	list, err := netns.Policies()
	for _, p := range list {
		if p.Dir == netlink.XFRM_DIR_FWD || p.Dir == netlink.XFRM_DIR_OUT { // not those of sockets
			n++
		}
	}
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) {
		return 0, nil // a kernel without
	}
	return n, err
}

// From linux/netfilter/nf_tables.h.
const (
	nfnlSubsysNFT    = 10
	nftGetChain      = 4
	nftGetRule       = 7
	nftaChainTable   = 1
	nftaChainName    = 3
	nftaChainHook    = 4
	nftaChainPolicy  = 5
	nftaChainType    = 7
	nftaHookHooknum  = 1
	nftaRuleTable    = 1
	nftaRuleChain    = 2
	familyInet       = 1
	nfgenmsgLen      = 4
	netfilterVersion = 0
)

// nfgen is struct nfgenmsg.
type nfgen struct{ family uint8 }

func (nfgen) Len() int            { return nfgenmsgLen }
func (g nfgen) Serialize() []byte { return []byte{g.family, netfilterVersion, 0, 0} }

// nftObject is one dumped chain or rule.
type nftObject struct {
	family uint8
	attrs  map[uint16][]byte
}

func nftDump(kind int) ([]nftObject, error) {
	msgs, err := netns.Dump(func() ([][]byte, error) {
		req := nl.NewNetlinkRequest(nfnlSubsysNFT<<8|kind, unix.NLM_F_DUMP)
		req.AddData(nfgen{unix.AF_UNSPEC})
		return req.Execute(unix.NETLINK_NETFILTER, 0)
	})
	if err != nil {
		return nil, err
	}
	out := make([]nftObject, 0, len(msgs))
	for _, m := range msgs {
		if len(m) < nfgenmsgLen {
			continue
		}
		attrs, err := attributes(m[nfgenmsgLen:])
		if err != nil {
			return nil, err
		}
		out = append(out, nftObject{m[0], attrs})
	}
	return out, nil
}

func attributes(b []byte) (map[uint16][]byte, error) {
	list, err := nl.ParseRouteAttr(b)
	if err != nil {
		return nil, err
	}
	out := make(map[uint16][]byte, len(list))
	for _, a := range list {
		out[a.Attr.Type&^unix.NLA_F_NESTED] = a.Value
	}
	return out, nil
}

func (o nftObject) text(attr uint16) string {
	return unix.ByteSliceToString(o.attrs[attr])
}

// nftHook lists nftables' chains at a hook, those that translate or all others.
// A kernel without nftables has none.
func nftHook(hook uint32, nat bool) ([]ForwardRules, error) {
	chains, err := nftDump(nftGetChain)
	if err != nil {
		return nil, ignoreNoNFT(err)
	}
	var out []ForwardRules
	index := make(map[string]int)
	for _, c := range chains {
		at, err := attributes(c.attrs[nftaChainHook])
		if err != nil || c.family != familyInet && c.family != unix.AF_INET && c.family != unix.AF_INET6 {
			continue
		}
		if num := at[nftaHookHooknum]; len(num) != 4 || binary.BigEndian.Uint32(num) != hook || nat != (c.text(nftaChainType) == "nat") {
			continue
		}
		r := ForwardRules{Backend: "nftables", Table: familyName(c.family) + " " + c.text(nftaChainTable), Chain: c.text(nftaChainName)}
		if p := c.attrs[nftaChainPolicy]; len(p) == 4 && binary.BigEndian.Uint32(p) == 0 {
			r.Policy = "drop"
		}
		index[r.Table+"\x00"+r.Chain] = len(out)
		out = append(out, r)
	}
	if len(out) == 0 {
		return nil, nil
	}
	rules, err := nftDump(nftGetRule)
	if err != nil {
		return nil, ignoreNoNFT(err)
	}
	for _, r := range rules {
		if i, ok := index[familyName(r.family)+" "+r.text(nftaRuleTable)+"\x00"+r.text(nftaRuleChain)]; ok {
			out[i].Rules++
		}
	}
	return withEffect(out), nil
}

// withEffect keeps the chains that could drop something.
func withEffect(list []ForwardRules) []ForwardRules {
	var out []ForwardRules
	for _, r := range list {
		if r.Rules != 0 || r.Policy == "drop" {
			out = append(out, r)
		}
	}
	return out
}

func familyName(f uint8) string {
	switch f {
	case unix.AF_INET:
		return "ip"
	case unix.AF_INET6:
		return "ip6"
	}
	return "inet"
}
