// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
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
