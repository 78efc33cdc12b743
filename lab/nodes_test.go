// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// Nodes are joined, have scopes of their own, and outside reaches the pods of
// each: without a network between nodes, pods do not.
func TestNodesAreJoined(t *testing.T) {
	for _, n := range []int{2, 3} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			l := build(t, Config{Name: name("n"), Nodes: n, Mode: Veth, Services: Mustang}, 1)
			var pods []*Pod
			for _, node := range l.Nodes()[1:] {
				p, err := node.AddPod(testContext(t), "pod-"+node.Name)
				if err != nil {
					t.Fatal(err)
				}
				serve(t, p)
				pods = append(pods, p)
			}
			first := l.Nodes()[0]
			for i, node := range l.Nodes()[1:] {
				for _, to := range []netip.Addr{node.Wire4, node.Wire6} {
					if out, err := first.Command(testContext(t), "ping", "-c", "1", "-W", "30", to.String()).CombinedOutput(); err != nil {
						t.Errorf("n1 to %s at %s: %v %s", node.Name, to, err, out)
					}
				}
				if !node.PodNet4.Contains(pods[i].IPv4) || !node.PodNet6.Contains(pods[i].IPv6) || node.PodNet4.Overlaps(first.PodNet4) || node.PodNet6.Overlaps(first.PodNet6) {
					t.Errorf("%s has pods in %s and %s, and %s at %s and %s", node.Name, node.PodNet4, node.PodNet6, pods[i].Name, pods[i].IPv4, pods[i].IPv6)
				}
				for _, to := range []netip.Addr{pods[i].IPv4, pods[i].IPv6} {
					askAll(t, "outside to "+node.Name, &l.Outside().Space, "tcp", netip.AddrPortFrom(to, serverPort), pods[i].Name)
					// The way leads outside, which does not forward.
					if who, _, err := ask(&first.Pods()[0].Space, "tcp", netip.AddrPortFrom(to, serverPort), 300*time.Millisecond); err == nil {
						t.Errorf("%q answered a pod of another node, and nobody has joined them", who)
					}
				}
			}
		})
	}
}

func TestWiresOfNodesHaveTheirSizes(t *testing.T) {
	l := build(t, Config{Name: name("m"), Nodes: 3, Mode: Veth, MTU: 1400, BigTCP: 100_000}, 0)
	for _, n := range l.Nodes() {
		if err := n.Do(func() error {
			for _, name := range []string{Uplink, Wire} {
				link, err := netlink.LinkByName(name)
				if err != nil {
					return err
				}
				if link.Attrs().MTU != 1400 {
					t.Errorf("%s of %s has MTU %d", name, n.Name, link.Attrs().MTU)
				}
				if a := link.Attrs(); a.GSOMaxSize != 100_000 || a.GSOIPv4MaxSize != 100_000 {
					t.Errorf("%s of %s sends %d bytes at once, %d of IPv4", name, n.Name, a.GSOMaxSize, a.GSOIPv4MaxSize)
				}
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
}
