// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/lab"
)

// statusSays waits until status does: it gives the wire less than half a second
// for an echo, and a busy machine may take that.
func (w *world) statusSays(n *lab.Node, want ...string) {
	w.t.Helper()
	w.statusIs(n, func(status string) bool {
		return !slices.ContainsFunc(want, func(text string) bool { return !strings.Contains(status, text) })
	}, "says %q", want)
}

// statusWarnsOfNothing likewise.
func (w *world) statusWarnsOfNothing(n *lab.Node) {
	w.t.Helper()
	w.statusIs(n, func(status string) bool { return !strings.Contains(status, "Warning") }, "warns of nothing")
}

func (w *world) statusIs(n *lab.Node, ok func(string) bool, format string, args ...any) {
	w.t.Helper()
	status := ""
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if status = w.mustang(n, "status"); ok(status) {
			return
		}
	}
	w.t.Errorf("status never "+format+":\n%s", append(args, status)...)
}

func TestStatusSaysHowNodesAreJoined(t *testing.T) {
	w := newWorld(t, lab.Config{}, lab.Join{Mode: "vxlan"})
	n := w.lab.Nodes()[0]
	w.statusSays(n, "this is n1; 0 others direct, 1 by vxlan; host routing ebpf at", lab.Wire, "up to 1450 bytes")
	w.statusWarnsOfNothing(n)
	w.run(&n.Space, "nft add table inet f")
	w.run(&n.Space, "nft add chain inet f f { type filter hook forward priority 0 ; policy drop ; }")
	w.statusSays(n, "`mustang node set --host-routing legacy` lets those pass")
	w.run(&n.Space, "nft delete table inet f")
	w.statusWarnsOfNothing(n)
	if n.Command(deadline(t), "ip", "xfrm", "policy", "add", "dir", "out", "dst", w.far.IPv4.String(), "tmpl", "proto", "esp").Run() == nil { // else this kernel has none
		w.statusSays(n, "IPsec policies, of which there are 1")
		w.run(&n.Space, "ip xfrm policy flush")
	}
	w.mustang(n, "node", "set", "--host-routing", "legacy")
	w.statusSays(n, "host routing legacy;")
}

// The wire is asked: a device that promises more than the way carries, and one
// whose MTU has changed since pods were told.
func TestStatusProbesTheWire(t *testing.T) {
	w := newWorld(t, lab.Config{}, lab.Join{Mode: "direct"})
	first, second := w.lab.Nodes()[0], w.lab.Nodes()[1]
	// The other end takes less, and nobody says so.
	w.run(&second.Space, "ip link set %s mtu 1400", lab.Wire)
	w.statusSays(first, "node n2 at 10.3.0.2 answers, but not 1500 bytes", "node n2 at fd00:10:3::2 answers, but not 1500 bytes")
	w.run(&first.Space, "ip link set %s mtu 1400", lab.Wire)
	w.statusSays(first, "leave pods 1400 bytes, and pods were told 1500")
	w.mustang(first, "node", "set", "--host-routing", "ebpf")
	w.statusWarnsOfNothing(first)
	w.run(&second.Space, "ip link set %s down", lab.Wire)
	w.statusSays(first, "node n2 at 10.3.0.2 does not answer an echo")
}
