// SPDX-License-Identifier: Apache-2.0

package cni_test

// Pods on a segment that is somebody else's: IPAM knows what is on it.

import (
	"os/exec"
	"strings"
	"testing"
)

// eachSegment runs fn in the modes whose pods are neighbours of others; dev is where the
// outside is on their segment. Gateways' addresses stay on the node: each test has networks
// of its own.
func eachSegment(t *testing.T, fn func(t *testing.T, n *node, mode, dev string)) {
	for _, mode := range modesOnce(t) {
		t.Run(mode, func(t *testing.T) {
			dev := map[string]string{"macvlan": uplink, "ipvlan": uplink, "host-device": "dev0", "bridge": "dev0"}[mode]
			if dev == "" {
				t.Skip("the node is the router of these pods, by mustang's own design")
			}
			n, first := warm.lend(t, "segment "+mode)
			n.device(mode)
			if first && mode == "bridge" {
				n.bridgeWith(n.deviceNamed(dev))
			}
			fn(t, n, mode, dev)
		})
	}
}

// bridgeWith makes the pods' bridge, with a port that leads outside.
func (n *node) bridgeWith(port string) {
	n.t.Helper()
	for _, args := range []string{"add mst-br0 type bridge", "set " + port + " master mst-br0", "set mst-br0 up", "set " + port + " up"} {
		run(n.t, "ip", append([]string{"-n", n.name, "link"}, strings.Fields(args)...)...)
	}
	n.eventually("the bridge has a carrier", func() bool {
		return strings.Contains(run(n.t, "ip", "-n", n.name, "link", "show", "mst-br0"), "state UP")
	})
}

func (n *node) outsideHas(dev string, addrs ...string) {
	n.t.Helper()
	for _, a := range addrs {
		args := []string{"-n", n.outside(), "addr", "add", a, "dev", dev}
		if strings.Contains(a, ":") {
			args = append(args, "nodad")
		}
		run(n.t, "ip", args...)
		args[3] = "del"
		n.t.Cleanup(func() { exec.Command("ip", args[:7]...).Run() })
	}
}

// routes are the pod's, of both families.
func (c *container) routes() string {
	c.t.Helper()
	return run(c.t, "ip", "-n", c.ns, "route") + run(c.t, "ip", "-n", c.ns, "-6", "route")
}

func TestSegment_AGatewayThatIPAMDoesNotNameIsNone(t *testing.T) {
	eachSegment(t, func(t *testing.T, n *node, mode, dev string) {
		n.outsideHas(dev, "10.8.1.200/24", "fd00:8:1::c8/64")
		n.ipamThatGives(`"ips":[{"address":"10.8.1.1/24"},{"address":"fd00:8:1::1/64"}],
			"routes":[{"dst":"10.99.0.0/16"},{"dst":"fd00:99::/64"},{"dst":"10.98.0.0/16","gw":"10.8.1.200"},{"dst":"0.0.0.0/0"},{"dst":"::/0"}]`)
		conf := n.config(mode).with("ipam", map[string]any{"type": "fake-ipam"})
		c := n.container()
		a := c.add(conf)
		if a.IPs[0].Gateway != "" || a.IPs[1].Gateway != "" {
			t.Errorf("got %s", a.stdout)
		}
		for _, r := range a.Routes {
			if want := map[string]string{"10.99.0.0/16": "", "fd00:99::/64": "", "10.98.0.0/16": "10.8.1.200"}; r.Gw != want[r.Dst] || strings.HasSuffix(r.Dst, "/0") {
				t.Errorf("route %+v", r)
			}
		}
		out := c.routes()
		for _, want := range []string{"10.99.0.0/16 dev eth0", "fd00:99::/64 dev eth0", "10.98.0.0/16 via 10.8.1.200 dev eth0"} {
			if !strings.Contains(out, want) {
				t.Errorf("no route %s:\n%s", want, out)
			}
		}
		if strings.Contains(out, "default") {
			t.Errorf("routes:\n%s", out)
		}
		if has := run(t, "ip", "-n", n.name, "addr"); strings.Contains(has, " 10.8.1.") || strings.Contains(has, " fd00:8:1::") {
			t.Errorf("the node took an address:\n%s", has)
		}
		for _, to := range []string{"10.8.1.200", "fd00:8:1::c8"} {
			if !n.pings(c.ns, to) {
				t.Errorf("the pod does not reach %s", to)
			}
		}
		c.ok(c.call("CHECK", conf.prev(a)))
		c.del(conf)
	})
}

func TestSegment_TheDefaultRoutesOwnGatewayIsObeyed(t *testing.T) {
	eachSegment(t, func(t *testing.T, n *node, mode, dev string) {
		n.outsideHas(dev, "10.8.2.254/24", "10.8.2.1/24", "fe80::fe/64")
		run(t, "ip", "-n", n.outside(), "addr", "replace", "fd00:99::1/128", "dev", "lo")
		run(t, "ip", "-n", n.outside(), "route", "replace", "fd00:8:2::/64", "dev", dev)
		n.ipamThatGives(`"ips":[{"address":"10.8.2.2/24","gateway":"10.8.2.1"},{"address":"fd00:8:2::2/64"}],
			"routes":[{"dst":"0.0.0.0/0","gw":"10.8.2.254"},{"dst":"::/0","gw":"fe80::fe"},{"dst":"10.99.0.0/16"}]`)
		conf := n.config(mode).with("ipam", map[string]any{"type": "fake-ipam"})
		c := n.container()
		a := c.add(conf)
		if len(a.Routes) != 3 || a.Routes[0].Gw != "10.8.2.254" || a.IPs[0].Gateway != "10.8.2.1" || a.IPs[1].Gateway != "fe80::fe" {
			t.Errorf("got %s", a.stdout)
		}
		out := c.routes()
		for _, want := range []string{"default via 10.8.2.254 dev eth0", "default via fe80::fe dev eth0", "10.99.0.0/16 via 10.8.2.1 dev eth0"} {
			if !strings.Contains(out, want) {
				t.Errorf("no route %s:\n%s", want, out)
			}
		}
		if !n.pings(c.ns, "fd00:99::1") {
			t.Error("the pod does not reach what is behind its router")
		}
		c.ok(c.call("CHECK", conf.prev(a)))
		c.del(conf)
	})
}

// The second pod finds the node's programs on the uplink.
func TestSegment_ARoutersAddressStaysWithTheRouter(t *testing.T) {
	eachSegment(t, func(t *testing.T, n *node, mode, dev string) {
		if mode == "host-device" {
			t.Skip(ownNetwork)
		}
		n.outsideHas(dev, "10.8.3.1/24", "fd00:8:3::1/64")
		conf := n.config(mode).with("ipam", map[string]any{"type": "fake-ipam"})
		var pods []*container
		for _, last := range []string{"2", "3"} {
			n.ipamThatGives(`"ips":[{"address":"10.8.3.` + last + `/24","gateway":"10.8.3.1"},{"address":"fd00:8:3::` + last + `/64","gateway":"fd00:8:3::1"}]`)
			c := n.container()
			if a := c.add(conf); a.IPs[0].Gateway != "10.8.3.1" || a.IPs[1].Gateway != "fd00:8:3::1" || len(a.Routes) != 2 {
				t.Errorf("got %s", a.stdout)
			}
			if has := run(t, "ip", "-n", n.name, "addr"); strings.Contains(has, " 10.8.3.") || strings.Contains(has, " fd00:8:3::") {
				t.Errorf("the node took the router's address:\n%s", has)
			}
			pods = append(pods, c)
		}
		for _, c := range pods {
			for _, to := range []string{"10.8.3.1", "fd00:8:3::1"} {
				if !n.pings(c.ns, to) {
					t.Errorf("the pod does not reach %s", to)
				}
			}
			c.del(conf)
		}
	})
}

// Programs let a pod announce its own address, and by then they know it.
func TestSegment_NeighboursLearnWhoHasAnAddressNow(t *testing.T) {
	eachSegment(t, func(t *testing.T, n *node, mode, dev string) {
		if mode == "host-device" {
			t.Skip("its neighbours by the same cable forgot all as it was taken down")
		}
		n.outsideHas(dev, "10.9.0.200/24", "fd00:9::c8/64")
		addrs, older := []string{"10.9.0.77", "fd00:9::77"}, "02:00:00:00:00:09"
		for _, a := range addrs {
			run(t, "ip", "-n", n.outside(), "neigh", "replace", a, "lladdr", older, "nud", "reachable", "dev", dev)
		}
		conf := n.config(mode).with("runtimeConfig", map[string]any{"ips": addrs})
		c := n.container()
		a := c.add(conf)
		mac := a.Interfaces[len(a.Interfaces)-1].Mac // the pod's
		for _, addr := range addrs {
			n.eventually(addr+" is known where it is now", func() bool {
				return strings.Contains(run(t, "ip", "-n", n.outside(), "neigh", "show", addr), mac)
			})
			if !n.pings(n.outside(), addr) {
				t.Errorf("%s is not reached", addr)
			}
		}
		c.del(conf)
	})
}
