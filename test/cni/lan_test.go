// SPDX-License-Identifier: Apache-2.0

package cni_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// Pods on the network that the node itself is on: the gateway is the router out
// there, and node and pods meet by the shim.
func TestLAN_TheGatewayIsTheRouterOutThere(t *testing.T) {
	for _, mode := range modesOnce(t) {
		t.Run(mode, func(t *testing.T) {
			if mode != "macvlan" && mode != "ipvlan" {
				t.Skip("these pods are on no segment that the node itself is on")
			}
			n := newNode(t)
			conf := n.config(mode).with("ipam", map[string]any{"type": "mustang", "pools": []any{
				map[string]any{"subnet": "192.168.7.0/24", "start": "192.168.7.100", "gateway": "192.168.7.2"},
				map[string]any{"subnet": "fd00:7::/64", "start": "fd00:7::100", "gateway": "fd00:7::2"}}})
			// Behind the router there is more.
			for _, a := range []string{"192.168.99.1/32", "fd00:99::1/128"} {
				run(t, "ip", "-n", n.outside(), "addr", "add", a, "dev", "lo")
			}
			warm := n.container()
			warm.add(conf)
			warm.del(conf)
			c, sibling := n.container(), n.container()
			before := n.traces()
			a, b := c.add(conf), sibling.add(conf)
			if a.Routes[0].Gw != "192.168.7.2" || a.Routes[1].Gw != "fd00:7::2" {
				t.Errorf("routes: %+v", a.Routes)
			}
			for i, family := range []struct{ node, router, beyond string }{{"192.168.7.1", "192.168.7.2", "192.168.99.1"}, {"fd00:7::1", "fd00:7::2", "fd00:99::1"}} {
				for _, x := range []struct{ ns, to string }{
					{c.ns, family.router}, {c.ns, family.beyond}, {c.ns, family.node}, {c.ns, b.address(i)},
					{n.name, a.address(i)}, {n.name, family.router}, {n.outside(), a.address(i)}, {n.outside(), family.node},
				} {
					if !n.pings(x.ns, x.to) {
						t.Errorf("%s does not reach %s", x.ns, x.to)
					}
				}
			}
			if out := run(t, "ip", "-n", n.name, "addr"); strings.Contains(out, "192.168.7.2/") || strings.Contains(out, "fd00:7::2/") {
				t.Errorf("the node took the router's address:\n%s", out)
			}
			c.server(":80")
			if got := n.reaches(n.name, a.address(0)+":80"); !strings.HasPrefix(got, "hello 192.168.7.1:") {
				t.Errorf("the node is seen as %q", got)
			}
			n.nodeIsWhereItWas()
			c.ok(c.call("CHECK", conf.prev(a)))
			c.del(conf)
			sibling.del(conf)
			n.same(before, n.traces())
		})
	}
}

// Whoever is refused an address, since a pod has it, takes nothing of what leads to that pod.
func TestLAN_AnAddressThatIsRefusedStaysReached(t *testing.T) {
	for _, mode := range modesOnce(t) {
		t.Run(mode, func(t *testing.T) {
			if mode != "macvlan" && mode != "ipvlan" {
				t.Skip("no route of the node's is by a pod's address alone and outlives its interface")
			}
			n := newNode(t)
			conf := n.config(mode).with("ipam", map[string]any{"type": "fake-ipam"})
			n.ipamThatGives(`"ips":[{"address":"192.168.7.100/24","gateway":"192.168.7.2"}]`)
			tool := func(name string, c *container, ip string) (string, error) {
				out, err := n.toolCommand("pod", "add", name, "--netns", c.path(), "--mode", mode, "--uplink", uplink, "--ip", ip+"/24", "--gateway", "192.168.7.2").CombinedOutput()
				return string(out), err
			}
			a, b, refused := n.container(), n.container(), n.container()
			a.add(conf)
			if out, err := tool("b", b, "192.168.7.101"); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			before := n.traces()
			n.refused(refused.call("ADD", conf), 999, "belongs to endpoint")
			if out, err := tool("c", refused, "192.168.7.100"); err == nil || !strings.Contains(out, "belongs to endpoint") {
				t.Errorf("%v: %s", err, out)
			}
			n.ipamThatGives(`"ips":[{"address":"192.168.7.101/24","gateway":"192.168.7.2"}]`)
			n.refused(refused.call("ADD", conf), 999, "belongs to endpoint")
			n.same(before, n.traces())
			for _, address := range []string{"192.168.7.100", "192.168.7.101"} {
				if !n.pings(n.name, address) {
					t.Errorf("the node does not reach %s", address)
				}
			}
			a.del(conf)
			n.tool("pod", "rm", "b")
		})
	}
}

// nodeIsWhereItWas wants the neighbours out there to know the node by its
// uplink's link address, and not by the shim's.
func (n *node) nodeIsWhereItWas() {
	n.t.Helper()
	mac := strings.Fields(run(n.t, "ip", "-n", n.name, "-o", "link", "show", uplink))
	want := mac[slices.Index(mac, "link/ether")+1]
	run(n.t, "ip", "-n", n.outside(), "neigh", "flush", "all")
	n.pings(n.outside(), "192.168.7.1")
	if out := run(n.t, "ip", "-n", n.outside(), "neigh", "show", "192.168.7.1"); !strings.Contains(out, want) {
		n.t.Errorf("out there the node is %s, not %s", out, want)
	}
}

func TestLocalMTU_IsTowardsTheNodesOwnPools(t *testing.T) {
	for _, mode := range modesOnce(t) {
		t.Run(mode, func(t *testing.T) {
			if !slices.Contains([]string{"veth", "bridge", "netkit", "netkit-l3"}, mode) {
				t.Skip("what leaves this pod's interface is on the uplink already: there is no local MTU")
			}
			n := newNode(t)
			c, d := n.container(), n.container()
			a, b := c.add(n.config(mode)), d.add(n.config(mode))
			for i, ping := range []string{"-4", "-6"} {
				if out := run(t, "ip", "-n", c.ns, ping, "route", "get", b.address(i)); !strings.Contains(out, "mtu 65520") {
					t.Errorf("towards a sibling: %s", out)
				}
				run(t, "nsenter", "--net="+c.path(), "ping", ping, "-c1", fmt.Sprintf("-W%.0f", slow(patience).Seconds()), "-q", "-s", "60000", "-M", "do", b.address(i))
			}
			if out := run(t, "ip", "-n", c.ns, "route", "get", "192.168.7.2"); strings.Contains(out, "mtu 65520") {
				t.Errorf("towards the outside: %s", out)
			}
			c.ok(c.call("CHECK", n.config(mode).prev(a)))
			off := n.config(mode).with("localMTU", "off")
			e := n.container()
			e.add(off)
			if out := run(t, "ip", "-n", e.ns, "route"); strings.Contains(out, "mtu") {
				t.Errorf("with localMTU off: %s", out)
			}
			for _, x := range []*container{c, d, e} {
				x.del(off)
			}
		})
	}
}
