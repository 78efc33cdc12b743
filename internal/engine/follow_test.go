// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// follows is what FollowDevices says.
func (n *node) follows() (changed bool) {
	n.t.Helper()
	n.must(func(e *Engine) (err error) { changed, err = e.FollowDevices(); return err })
	return changed
}

// behindARouter is a list whose nodes need no routes of ours.
func behindARouter() []state.Node {
	return []state.Node{
		{Name: "n1", Addrs: []netip.Addr{netip.MustParseAddr("10.3.1.1"), netip.MustParseAddr("fd00:3:1::1")}, Mode: state.NodeDirect,
			PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}},
		{Name: "n2", Addrs: []netip.Addr{netip.MustParseAddr("10.3.2.1"), netip.MustParseAddr("fd00:3:2::1")}, Mode: state.NodeDirect,
			PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.10.0.0/24")}},
	}
}

// A list that came before this node's address made its own entry another's: its pods
// would be strangers' for as long as nothing else changes.
func TestANodeFindsItselfOnceItHasItsAddress(t *testing.T) {
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	w.wire(0, 1)
	n.run("ip route add default via 198.51.100.9 && ip -6 route add default via 2001:db8::9")
	n.must(func(e *Engine) error { return e.ApplyNodes(state.OwnerCLI, behindARouter(), peers.SettingsSpec{}) })
	if n.follows() {
		t.Error("something follows, and the node is on no list")
	}
	n.run("ip addr add 10.3.1.1/32 dev lo && ip addr add fd00:3:1::1/128 dev lo")
	n.must(func(e *Engine) error {
		_, warnings, err := e.nodesStatus()
		if !strings.Contains(strings.Join(warnings, "\n"), "taken for another") {
			t.Errorf("status warns of %q", warnings)
		}
		return err
	})
	if !n.follows() {
		t.Error("nothing follows the node's address")
	}
	n.must(func(e *Engine) error {
		self := behindARouter()[0]
		config, _, err := e.dp.Node.Get(0)
		if config.Ip4 != datapath.FromAddr(self.Addrs[0]) || config.Ip6 != datapath.FromAddr(self.Addrs[1]) {
			t.Errorf("programs are told that the node is %v and %v", config.Ip4, config.Ip6)
		}
		if ref, other, _ := e.dp.Peers.Get(datapath.FromAddr(self.Addrs[0])); other {
			t.Errorf("the node is the other node %#x", ref)
		}
		if ref, other, _ := e.dp.Nets.Get(datapath.PrefixOf(self.PodCIDRs[0])); other {
			t.Errorf("its pods are those of the other node %#x", ref)
		}
		return err
	})
	if n.follows() {
		t.Error("it goes on")
	}
}
