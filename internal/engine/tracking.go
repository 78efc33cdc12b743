// SPDX-License-Identifier: Apache-2.0

package engine

// Who has the kernel track the node's connections: one rule is enough, and each
// packet that the node itself sends or receives pays for it.

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// From linux/netfilter/nf_tables.h.
const (
	nftaRuleExpressions = 4
	nftaExprName        = 1
	nftaExprData        = 2
	nftaCompatName      = 1 // of a match or a target of iptables'
)

// Expressions of nftables that take tracking, and extensions of iptables'.
var (
	trackingExprs      = []string{"ct", "nat", "masq", "redir", "connlimit", "flow_offload", "synproxy"}
	trackingExtensions = []string{"conntrack", "state", "connmark", "connbytes", "connlimit", "connlabel", "helper", "cluster",
		"MASQUERADE", "SNAT", "DNAT", "REDIRECT", "NETMAP", "CT", "CONNMARK", "CONNSECMARK", "SYNPROXY"}
)

// trackers are the chains of the calling thread's namespace whose rules have the
// kernel track connections, a text each. Of iptables-legacy it knows nothing.
func trackers() ([]string, error) {
	rules, err := nftDump(nftGetRule)
	if err != nil {
		if err = ignoreNoNFT(err); err != nil {
			return nil, fmt.Errorf("list nftables rules: %w", err)
		}
		return nil, nil
	}
	var out []string
	for _, r := range rules {
		if r.family != familyInet && r.family != unix.AF_INET && r.family != unix.AF_INET6 {
			continue
		}
		tracks, err := tracksConnections(r.attrs[nftaRuleExpressions])
		if err != nil {
			return nil, fmt.Errorf("read an nftables rule: %w", err)
		}
		chain := fmt.Sprintf("chain %s of table %s %s", r.text(nftaRuleChain), familyName(r.family), r.text(nftaRuleTable))
		if tracks && !slices.Contains(out, chain) {
			out = append(out, chain)
		}
	}
	return out, nil
}

// tracksConnections reads a rule's list of expressions.
func tracksConnections(list []byte) (bool, error) {
	elements, err := nl.ParseRouteAttr(list)
	if err != nil {
		return false, err
	}
	for _, e := range elements {
		attrs, err := attributes(e.Value)
		if err != nil {
			return false, err
		}
		name := unix.ByteSliceToString(attrs[nftaExprName])
		if slices.Contains(trackingExprs, name) {
			return true, nil
		}
		if name != "match" && name != "target" {
			continue
		}
		extension, err := attributes(attrs[nftaExprData])
		if err != nil {
			return false, err
		}
		if slices.Contains(trackingExtensions, unix.ByteSliceToString(extension[nftaCompatName])) {
			return true, nil
		}
	}
	return false, nil
}
