// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
)

// child makes a pod with a macvlan of up0, by hand.
func (n *node) child(i int) string {
	n.t.Helper()
	pod := fmt.Sprintf("%s-m%d", n.name, i)
	n.namespace(pod)
	n.run("ip link add link up0 name mv%d netns %s type macvlan mode bridge", i, pod)
	n.run("ip -n %s link set mv%d name eth0 && ip -n %s link set eth0 up && ip -n %s addr add 10.8.0.%d/24 dev eth0", pod, i, pod, pod, i)
	return netns.Path(pod)
}

// A parent's program lets out whom its table knows: after a reset it would be nobody.
func TestResetFreesTheParent(t *testing.T) {
	resets := map[string]func(n *node) error{
		"an open scope":               func(n *node) error { return n.do((*Engine).Reset) },
		"tables that nobody can read": func(n *node) error { return Reset(context.Background(), n.scope, n.opts.Notify) },
	}
	for attach, noTCX := range map[string]bool{"tcx": false, "clsact": true} {
		for what, reset := range resets {
			t.Run(attach+", "+what, func(t *testing.T) {
				if !noTCX && !datapath.Probe().TCX {
					t.Skip("this kernel has no tcx")
				}
				n := newNode(t)
				n.opts.NoTCX = noTCX
				n.run("ip link add up0 type veth peer name up1 && ip link set up0 up && ip link set up1 up")
				for i := 1; i <= 2; i++ {
					if _, err := n.add(n.child(i)); err != nil {
						t.Fatal(err)
					}
				}
				if err := reset(n); err != nil {
					t.Fatal(err)
				}
				if f := n.run("tc filter show dev up0 egress"); strings.Contains(f, "mustang:") {
					t.Errorf("left behind: %s", f)
				}
				n.ping(n.child(3), "10.8.0.1")
			})
		}
	}
}

// What a scope made on its node goes with a reset, even when the state directory, or the
// bpffs with tables and links, was lost before.
func TestResetAfterALossLeavesNothing(t *testing.T) {
	losses := map[string]func(Scope) error{
		"the state directory": func(s Scope) error { return os.RemoveAll(s.StateDir) },
		"the bpffs":           func(s Scope) error { return datapath.Remove(s.BPFFS) },
	}
	for attach, noTCX := range map[string]bool{"tcx": false, "clsact": true} {
		for lost, lose := range losses {
			t.Run(attach+", "+lost, func(t *testing.T) {
				if !noTCX && !datapath.Probe().TCX {
					t.Skip("this kernel has no tcx")
				}
				n := newNode(t)
				n.opts.NoTCX = noTCX
				w := &edgeWorld{node: n, home: netns.Path(n.name)}
				w.wire(0, 1)
				if !noTCX {
					n.run("tc qdisc add dev w0 clsact")
					addForeignFilter(t, "w0") // so that ours there are filters, too
				}
				if _, err := n.add(n.pod(1)); err != nil {
					t.Fatal(err)
				}
				w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0"}}) })
				w.tunnelled()
				for what, made := range n.marks() {
					if made == "" && (what != "filters" || noTCX) {
						t.Fatalf("no %s were made, so none can be left", what)
					}
				}
				if err := lose(n.scope); err != nil {
					t.Fatal(err)
				}
				if err := Reset(context.Background(), n.scope, n.opts.Notify); err != nil {
					t.Fatal(err)
				}
				for what, left := range n.marks() {
					if left != "" {
						t.Errorf("%s are left: %s", what, left)
					}
				}
			})
		}
	}
}

// marks is what a scope may have made on its node besides pins and files.
func (n *node) marks() map[string]string {
	n.t.Helper()
	return map[string]string{
		"routes":  n.run("ip route show proto 109; ip -6 route show proto 109"),
		"devices": n.run("ip -o link | grep '^[0-9]*: mst-' || true"),
		"filters": n.run("for d in $(ip -o link | sed 's/^[0-9]*: \\([^:@]*\\).*/\\1/'); do for at in ingress egress; do tc filter show dev $d $at | grep -o 'mustang:[^ ]*' | sed \"s/^/$d /\"; done; done; true"),
	}
}
