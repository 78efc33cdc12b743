// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/lab"
)

// joins are all ways of joining nodes.
func joins() []lab.Join {
	var out []lab.Join
	for _, routing := range []string{"legacy", "ebpf"} {
		for _, mode := range []string{"direct", "vxlan"} {
			out = append(out, lab.Join{Mode: mode, HostRouting: routing})
		}
		out = append(out, lab.Join{Mode: "vxlan", HostRouting: routing, Underlay: "ipv6", VNI: 77, Port: 8472})
	}
	return out
}

func nameOf(j lab.Join) string {
	name := j.Mode + "/" + j.HostRouting
	if j.Underlay != "" {
		name += "/over " + j.Underlay
	}
	return name
}

var families = map[string]bool{"ipv4": false, "ipv6": true}

// TestNodes runs the whole table.
func TestNodes(t *testing.T) {
	for _, mode := range modes() {
		for _, j := range joins() {
			t.Run(fmt.Sprintf("%s/%s", mode, nameOf(j)), func(t *testing.T) {
				w := newWorld(t, lab.Config{Mode: mode}, j)
				for family, ipv6 := range families {
					t.Run(family, func(t *testing.T) { w.on(t, ipv6).table() })
				}
			})
		}
	}
}

func (w *world) table() {
	for _, to := range []*lab.Pod{w.near, w.far} {
		for by, at := range map[string]netip.AddrPort{"pod": w.direct(to), "clusterip": w.vip(to)} {
			for _, c := range []struct {
				name string
				run  func(*world, *lab.Pod, netip.AddrPort)
				pod  bool // by pod address only
			}{
				{"tcp", (*world).tcp, false},
				{"bulk", (*world).bulk, false},
				{"udp", (*world).udp, false},
				{"datagrams", (*world).datagrams, false},
				{"refused", (*world).refused, true},
				{"ping", (*world).ping, true},
			} {
				if c.pod && by != "pod" {
					continue
				}
				w.t.Run(fmt.Sprintf("%s/%s/%s", to.Name, by, c.name), func(t *testing.T) {
					c.run(w.on(t, w.ipv6), to, at)
				})
			}
		}
	}
}
