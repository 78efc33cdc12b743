// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// follow has the node follow its devices once.
func (n *node) follow() error {
	return n.do(func(e *Engine) error { _, err := e.FollowDevices(); return err })
}

// routeMTUIs fails unless pod i's default route has the MTU; 0: its interface's.
func (n *node) routeMTUIs(i, want int) {
	n.t.Helper()
	got := 0
	if _, after, found := strings.Cut(n.run("ip -n %s-p%d route show default", n.name, i), " mtu "); found {
		fmt.Sscan(after, &got)
	}
	if got != want {
		n.t.Errorf("pod %d's route has MTU %d, want %d", i, got, want)
	}
}

// withPods is a node among others that has these pods.
func withPods(t *testing.T, pods ...int) *node {
	n := newNode(t)
	n.wired()
	for _, i := range pods {
		if _, err := n.add(n.pod(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.twoNodes(state.NodeDirect); err != nil {
		t.Fatal(err)
	}
	return n
}

// Nobody has to be told whose interface is gone, though its namespace is there; one whose
// other end is down is told as any.
func TestPodsWithoutAnInterfaceAreInNobodysWay(t *testing.T) {
	n := withPods(t, 2, 3, 4)
	n.run("ip link del h2 && ip link set h4 down && ip link set w0 mtu 1400")
	if err := n.follow(); err != nil {
		t.Error(err)
	}
	n.routeMTUIs(3, 1400)
	n.routeMTUIs(4, 1400)
	n.must(func(e *Engine) error {
		if op, left, err := e.pending(); left || err != nil {
			t.Errorf("the journal has %+v, %v", op, err)
		}
		return nil
	})
}

// A pod's routes are made by what was so when its endpoint came: what changes before they are there
// tells them nothing, so whoever makes them looks again.
func TestThePathChangesWhileAPodsRoutesAreMade(t *testing.T) {
	for _, mode := range []state.NodeMode{state.NodeDirect, state.NodeVXLAN} {
		t.Run(string(mode), func(t *testing.T) {
			n := newNode(t)
			n.wired()
			ep, err := n.add(n.pod(2))
			if err != nil {
				t.Fatal(err)
			}
			follows := func(when string, w Way, want int) {
				t.Helper()
				if err := w.Follow(n.scope, ep.Netns, ep.PodIndex, ep.LinkMTU); err != nil {
					t.Error(when, err)
				}
				n.routeMTUIs(2, want)
			}
			way := func() Way {
				t.Helper()
				w, err := ToNodes(n.scope)
				if err != nil {
					t.Fatal(err)
				}
				return w
			}
			alone := way()
			follows("nothing has changed", alone, 0)
			if err := n.twoNodes(mode); err != nil {
				t.Fatal(err)
			}
			n.run("ip link set w0 mtu 1400")
			if err := n.follow(); err != nil {
				t.Fatal(err)
			}
			want := map[state.NodeMode]int{state.NodeDirect: 1400, state.NodeVXLAN: 1350}[mode]
			// The routes as they are made from what was known before.
			n.run("ip -n %s-p2 route replace default via 169.254.10.24 dev eth0 onlink", n.name)
			narrow := way()
			follows("a list came", alone, want)
			n.run("ip link set w0 mtu 1500")
			if err := n.follow(); err != nil {
				t.Fatal(err)
			}
			n.run("ip -n %s-p2 route replace default via 169.254.10.24 dev eth0 onlink mtu %d", n.name, want)
			follows("it is wide again", narrow, map[state.NodeMode]int{state.NodeVXLAN: 1450}[mode])
		})
	}
}

// A pod that could not be told is told by the next try, by the same engine as by another,
// whatever has changed meanwhile.
func TestAPodThatCouldNotBeToldIsToldLater(t *testing.T) {
	const gateway = "169.254.10.24"
	for name, again := range map[string]func(n *node, e *Engine) error{
		"by the same engine": func(n *node, e *Engine) error { _, err := e.FollowDevices(); return err },
		"by another": func(n *node, e *Engine) error {
			if err := e.Close(); err != nil {
				return err
			}
			return n.follow()
		},
	} {
		for _, later := range []int{1400, 1300, 1500} {
			t.Run(fmt.Sprintf("%s, MTU %d", name, later), func(t *testing.T) {
				n := withPods(t, 2, 3)
				n.run("ip link set w0 mtu 1450")
				if err := n.follow(); err != nil {
					t.Fatal(err)
				}
				// A gateway that is out of reach: the route cannot be written.
				n.run("ip -n %[1]s-p3 route add %[2]s dev eth0 && ip -n %[1]s-p3 route replace default via %[2]s mtu 1450 && ip -n %[1]s-p3 route del %[2]s", n.name, gateway)
				n.run("ip link set w0 mtu 1400")
				e := n.open()
				defer e.Close()
				if _, err := e.FollowDevices(); err == nil {
					t.Fatal("pod 3 is told")
				}
				n.routeMTUIs(2, 1400)
				if way, err := ToNodes(n.scope); err != nil || way.MTU != 1400 {
					t.Errorf("new pods are told %d, %v, want 1400", way.MTU, err)
				}
				if _, warnings, err := e.nodesStatus(); err != nil || !strings.Contains(strings.Join(warnings, "\n"), "not all pods could be told") {
					t.Errorf("status warns of %q, %v", warnings, err)
				}
				n.run("ip link set w0 mtu %d", later)
				n.run("ip -n %s-p3 route add %s dev eth0", n.name, gateway)
				if err := again(n, e); err != nil {
					t.Error(err)
				}
				want := later
				if later == 1500 {
					want = 0 // the interface's own
				}
				n.routeMTUIs(2, want)
				n.routeMTUIs(3, want)
			})
		}
	}
}
