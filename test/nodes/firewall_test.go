// SPDX-License-Identifier: Apache-2.0

package nodes_test

import "strings"

// What a firewall at the host's forward hook sees of packets between pods of two
// nodes is what tells the two ways of forwarding apart.
func (w *world) forwardHook() {
	w.t.Helper()
	for _, n := range w.lab.Nodes()[:2] {
		w.run(&n.Space, "nft add table inet see")
		w.run(&n.Space, "nft add chain inet see f { type filter hook forward priority 0 ; }")
		w.run(&n.Space, "nft add rule inet see f counter")
	}
	for _, ipv6 := range families {
		sub := w.on(w.t, ipv6)
		sub.tcp(w.far, sub.direct(w.far))
		sub.bulk(w.far, sub.vip(w.far))
		sub.udp(w.far, sub.vip(w.far))
		w.run(&w.client.Space, "ping -c 1 -W 30 %s", sub.ip(w.far))
	}
	for _, n := range w.lab.Nodes()[:2] {
		seen := w.run(&n.Space, "nft list chain inet see f")
		if none := strings.Contains(seen, "packets 0 "); none != (w.join.HostRouting == "ebpf") {
			w.t.Errorf("the forward hook of %s saw:\n%s", n.Name, seen)
		}
	}
}
