// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/lab"
)

// A wire may lose packets, deliver them twice, or in another order: what TCP makes
// good between bare nodes it makes good between pods, by their own address and
// through a Service; datagrams whose fragments overtake the first one arrive, too,
// also where that one is to be judged or translated (docs/datapath.md).
func TestABadWire(t *testing.T) {
	type asks func(*world, *lab.Pod, netip.AddrPort)
	for _, mode := range []string{"direct", "vxlan"} {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, lab.Join{Mode: mode, HostRouting: "ebpf"})
			for _, c := range []struct {
				name, netem string
				asks        []asks
			}{
				{"loses", "loss 1%", []asks{(*world).tcp, (*world).bulk}},
				{"repeats", "duplicate 10%", []asks{(*world).tcp, (*world).bulk}},
				{"reorders", "delay 2ms reorder 30%", []asks{(*world).tcp, (*world).bulk, (*world).udp, (*world).datagrams}},
				{"reorders, and the pod is isolated", "delay 2ms reorder 30%", []asks{(*world).tcp, (*world).datagrams}},
			} {
				if strings.HasSuffix(c.name, "isolated") {
					w.policy(fmt.Sprintf("[{from: [{ipBlock: {cidr: %s/32}}, {ipBlock: {cidr: %s/128}}]}]", w.client.IPv4, w.client.IPv6))
				}
				t.Run(c.name, func(t *testing.T) {
					for _, n := range w.lab.Nodes() {
						w.on(t, false).netem(n, c.netem)
					}
					for _, ipv6 := range families {
						sub := w.on(t, ipv6)
						for _, ask := range c.asks {
							ask(sub, w.far, sub.direct(w.far))
							ask(sub, w.far, sub.vip(w.far))
						}
					}
				})
			}
		})
	}
}

// netem makes a node's wire bad in the direction from it.
func (w *world) netem(n *lab.Node, how string) {
	w.t.Helper()
	args := append([]string{"tc", "qdisc", "replace", "dev", lab.Wire, "root", "netem"}, strings.Fields(how)...)
	out, err := n.Command(deadline(w.t), args...).CombinedOutput()
	if err != nil && strings.Contains(string(out), "qdisc kind is unknown") {
		w.t.Skip("this kernel has no netem (CONFIG_NET_SCH_NETEM)")
	}
	if err != nil {
		w.t.Fatalf("%s: %v: %s", how, err, out)
	}
}
