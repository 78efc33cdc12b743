// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// Somebody else's tunnel may have the port: who is told of it knows what to do.
func TestATunnelsPortThatIsTaken(t *testing.T) {
	n := newDoorNode(t)
	n.run("ip link add other type vxlan id 5 dstport 4789 dev nic && ip link set other up")
	self := state.Node{Name: "n1", Addrs: []netip.Addr{netip.MustParseAddr("10.3.0.1")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24")}}
	set := DefaultSettings()
	if _, err := EnsureOverlay(self, nil, set, 1500); err == nil || !strings.Contains(err.Error(), "choose another port") {
		t.Errorf("at another's port: %v", err)
	}
	set.Port = 8472
	if _, err := EnsureOverlay(self, nil, set, 1500); err != nil {
		t.Error(err)
	}
}

// A node without IPv6 reaches other nodes' IPv4 pods, though these have IPv6 as well: whoever makes a cluster
// dual-stack node by node has both kinds.
func TestNodesWithIPv6BesideOneWithout(t *testing.T) {
	n := newDoorNode(t)
	n.run("sysctl -qw net.ipv6.conf.default.disable_ipv6=1")
	self := state.Node{Name: "n1", Addrs: []netip.Addr{netip.MustParseAddr("198.51.100.1")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24")}}
	other := state.Node{Name: "n2", Mode: state.NodeVXLAN, Addrs: []netip.Addr{netip.MustParseAddr("198.51.100.9")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.1.0/24"), netip.MustParsePrefix("fd00:10:1:1::/64")}}
	remotes := []state.Node{other}
	for _, mtu := range []int{1500, 1200} { // at the second the kernel takes IPv6 away by itself
		o, err := EnsureOverlay(self, remotes, DefaultSettings(), mtu)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			notes, err := SyncRoutes(remotes, o)
			want := fmt.Sprintf("this node has no IPv6, so there is no way to %s, of node n2", other.PodCIDRs[1])
			if err != nil || !slices.Contains(notes, want) {
				t.Fatalf("MTU %d: %q, %v; want the note %q", mtu, notes, err, want)
			}
		}
		if current, err := RoutesCurrent(remotes, o); err != nil || !current {
			t.Errorf("MTU %d: the routes are current: %v, %v", mtu, current, err)
		}
		if have, err := podRoutes(); err != nil || len(have[other.PodCIDRs[0]]) != 1 {
			t.Errorf("MTU %d: routes to IPv4 pods: %v, %v", mtu, have[other.PodCIDRs[0]], err)
		}
	}
	// With IPv6 pods of its own, the device has it all the same.
	self.PodCIDRs = append(self.PodCIDRs, netip.MustParsePrefix("fd00:10:1::/64"))
	o, err := EnsureOverlay(self, remotes, DefaultSettings(), 1500)
	if err != nil {
		t.Fatal(err)
	}
	if notes, err := SyncRoutes(remotes, o); err != nil || len(notes) > 0 {
		t.Errorf("with IPv6: %q, %v", notes, err)
	}
	if have, err := podRoutes(); err != nil || len(have[other.PodCIDRs[1]]) != 1 {
		t.Errorf("with IPv6: routes to IPv6 pods: %v, %v", have[other.PodCIDRs[1]], err)
	}
}
