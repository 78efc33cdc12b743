// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net/netip"
	"testing"
	"time"
)

// Where not all addresses take node ports, flows wear one that does: answers to
// another would be taken for the node's own.
func TestFlowsWearAnAddressThatTakesNodePorts(t *testing.T) {
	w := newEdgeWorld(t)
	w.must(func(e *Engine) error {
		return e.SetEdge(Edge{Devices: []string{"w0", "w1"}, Prefixes: []netip.Prefix{
			netip.MustParsePrefix("198.51.101.0/24"), netip.MustParsePrefix("2001:db8:1::/64"),
		}})
	})
	w.serve(w.other, "other", 8080)
	w.replace([]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, nil)
	each(t, func(t *testing.T, network string, v6 bool) {
		to := map[bool]string{false: "198.51.101.1", true: "2001:db8:1::1"}[v6]
		name, saw, err := askFor(5*time.Second, w.client, network, netip.AddrPortFrom(netip.MustParseAddr(to), 30080).String())
		if err != nil || name != "other" || saw.String() != to {
			t.Errorf("%q saw %v, %v; want other, which sees %s", name, saw, err, to)
		}
	})
}
