// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net/netip"
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
