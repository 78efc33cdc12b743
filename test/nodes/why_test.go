// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"net/netip"
	"strings"

	"github.com/mustang-net/mustang/lab"
)

// `mustang why` follows a packet out of the node, and says in which dress.
func (w *world) why() {
	w.t.Helper()
	node := w.lab.Nodes()[0]
	worn, err := node.AddPod(deadline(w.t), "worn", lab.MasqueradeArgs()...)
	w.must(err)
	for family, ipv6 := range families {
		w := w.on(w.t, ipv6)
		outside, far, own, at := w.lab.Outside().IPv4, w.ip(w.far), w.ip(worn), node.IPv4
		if ipv6 {
			outside, at = w.lab.Outside().IPv6, node.IPv6
		}
		for _, q := range []struct{ from, to netip.Addr }{{own, far}, {own, outside}, {w.ip(w.near), outside}} {
			to := q.to
			text := w.mustang(node, "why", q.from.String(), netip.AddrPortFrom(to, 80).String())
			want := []string{"FORWARDED", "it passes, and leaves the node"}
			switch ebpf := w.join.HostRouting == "ebpf"; {
			case to == outside && ebpf && q.from != own:
				want = append(want, "it passes, and leaves the node by "+lab.Uplink+" past the host's stack")
			case to == outside && ebpf:
				want = append(want, "masqueraded as "+at.String()+", and leaves the node by "+lab.Uplink+" past the host's stack")
			case w.join.Mode == "vxlan" && ebpf:
				want = append(want, "in the tunnel from ", "past the host's stack")
			case ebpf:
				want = append(want, "it passes, and leaves the node by "+lab.Wire+" past the host's stack")
			}
			for _, part := range want {
				if !strings.Contains(text, part) {
					w.t.Errorf("%s to %s: no %q in\n%s", family, to, part, text)
				}
			}
		}
	}
}
