// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/lab"
)

// The nodes' addresses on the wire may sit on a VLAN of it, or on a bond: the
// program is where they are.
func TestUplinksOfOtherKinds(t *testing.T) {
	for kind, steps := range map[string][]string{
		"vlan":   {"ip link add link %[1]s name upl type vlan id 5"},
		"bond":   {"ip link add upl type bond mode active-backup", "ip link set %[1]s down", "ip link set %[1]s master upl", "ip link set %[1]s up"},
		"bridge": {"ip link add upl type bridge", "ip link set %[1]s master upl"},
	} {
		for _, mode := range []string{"direct", "vxlan"} {
			t.Run(kind+"/"+mode, func(t *testing.T) {
				w := newWorld(t, lab.Config{}, lab.Join{Mode: mode, HostRouting: "ebpf"})
				for _, n := range w.lab.Nodes() {
					w.moveWire(n, kind, steps)
				}
				w.must(w.lab.Join(deadline(t), lab.Join{Mode: mode, HostRouting: "ebpf"}))
				for _, n := range w.lab.Nodes() {
					w.run(&n.Space, "nft add table inet see")
					w.run(&n.Space, "nft add chain inet see f { type filter hook forward priority 0 ; }")
					w.run(&n.Space, "nft add rule inet see f counter")
				}
				for _, ipv6 := range families {
					sub := w.on(t, ipv6)
					sub.tcp(w.far, sub.direct(w.far))
					sub.bulk(w.far, sub.vip(w.far))
					sub.datagrams(w.far, sub.direct(w.far))
				}
				for _, n := range w.lab.Nodes() {
					if f := w.run(&n.Space, "nft list chain inet see f"); !strings.Contains(f, "packets 0 ") {
						t.Errorf("the stack of %s forwarded:\n%s", n.Name, f)
					}
				}
			})
		}
	}
}

// moveWire puts a node's addresses onto a link above the wire.
func (w *world) moveWire(n *lab.Node, kind string, steps []string) {
	w.t.Helper()
	w.run(&n.Space, "ip addr flush dev %s", lab.Wire)
	for _, step := range steps {
		line := step
		if strings.Contains(line, "%") {
			line = fmt.Sprintf(step, lab.Wire)
		}
		out, err := n.Command(deadline(w.t), strings.Fields(line)...).CombinedOutput()
		if err != nil && strings.Contains(string(out), "nknown device type") {
			w.t.Skipf("this kernel has no %s", kind)
		}
		if err != nil {
			w.t.Fatalf("%s: %v: %s", line, err, out)
		}
	}
	w.run(&n.Space, "ip link set upl up")
	w.run(&n.Space, "ip addr add %s/16 dev upl", n.Wire4)
	w.run(&n.Space, "ip addr add %s/64 dev upl nodad", n.Wire6)
	eventually(w.t, "the other node is reached by "+kind, func() bool {
		return n.Command(deadline(w.t), "ip", "route", "get", n.Wire4.Next().String()).Run() == nil
	})
}
