// SPDX-License-Identifier: Apache-2.0

package cni_test

// One test for each sentence of the spec 1.1.0 that binds a plugin, by the
// sentence's words: CHECK and STATUS.

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestCHECK_MustConsultPrevResult(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		conf := n.config(mode).with("masquerade", true)
		a := c.add(conf)
		n.refused(c.call("CHECK", conf), 7, "prevResult")
		c.ok(c.call("CHECK", conf.prev(a)))
		other := strings.Replace(a.stdout, a.address(0), "10.9.0.200", 1)
		n.refused(c.call("CHECK", conf.with("prevResult", json.RawMessage(other))), 100, "10.9.0.200 is missing")
		other = strings.Replace(a.stdout, `"name":"eth0"`, `"name":"eth7"`, 1)
		n.refused(c.call("CHECK", conf.with("prevResult", json.RawMessage(other))), 100, "no interface eth0")
		c.del(conf)
	})
}

func TestCHECK_MustHandleBeingCalledImmediatelyAfterADD(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		conf := n.config(mode).with("masquerade", true)
		a := c.add(conf)
		c.ok(c.call("CHECK", conf.prev(a)))
		c.del(conf)
	})
}

func TestCHECK_MustAllowALaterPluginToHaveModifiedRoutes(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		a := c.add(n.config(mode))
		run(t, "ip", "-n", c.ns, "route", "add", "blackhole", "10.77.0.0/16")
		run(t, "ip", "-n", c.ns, "route", "del", "default")
		later := a
		later.stdout = strings.Replace(a.stdout, `{"dst":"0.0.0.0/0","gw":"`+a.Routes[0].Gw+`"},`, "", 1)
		c.ok(c.call("CHECK", n.config(mode).prev(later)))
		n.refused(c.call("CHECK", n.config(mode).prev(a)), 100, "route to 0.0.0.0/0")
		c.del(n.config(mode))
	})
}

func TestCHECK_ShouldReturnAnErrorIfAResourceIsMissingOrInvalid(t *testing.T) {
	in := func(c *container, args ...string) { run(c.t, "ip", append([]string{"-n", c.ns}, args...)...) }
	breaks := []struct {
		brk  func(c *container, a answer)
		says string
	}{
		{func(c *container, _ answer) { in(c, "link", "set", "eth0", "down") }, "eth0 in the container is down"},
		{func(c *container, _ answer) {
			in(c, "link", "set", "eth0", "down")
			in(c, "link", "set", "eth0", "name", "gone0")
		}, "interface eth0"},
		{func(c *container, a answer) { in(c, "addr", "del", a.IPs[0].Address, "dev", "eth0") }, "is missing from eth0"},
		{func(c *container, a answer) { in(c, "addr", "del", a.IPs[1].Address, "dev", "eth0") }, "is missing from eth0"},
		{func(c *container, _ answer) { in(c, "link", "set", "eth0", "mtu", "1400") }, "has MTU 1400, not 1500"},
		{func(c *container, _ answer) { in(c, "route", "del", "default") }, "route to 0.0.0.0/0"},
		{func(c *container, _ answer) { in(c, "-6", "route", "del", "default") }, "route to ::/0"},
		{func(c *container, a answer) { os.Remove(filepath.Join(c.state(), "cni", "addresses", a.address(1))) }, "not reserved"},
		{func(c *container, _ answer) { c.forgetRecords() }, "no complete record"},
		{func(c *container, _ answer) {
			run(c.t, "nsenter", "--net=/var/run/netns/"+c.name, "nft", "flush", "ruleset")
		}, "not masqueraded"},
		{func(c *container, _ answer) { c.dropEndpoints() }, "endpoint"},
	}
	eachMode(t, func(t *testing.T, n *node, mode string) {
		for _, x := range breaks {
			c := n.container()
			conf := n.config(mode).with("masquerade", true)
			a := c.add(conf)
			c.ok(c.call("CHECK", conf.prev(a)))
			x.brk(c, a)
			n.refused(c.call("CHECK", conf.prev(a)), 100, x.says)
			if x.says == "interface eth0" {
				in(c, "link", "set", "gone0", "name", "eth0")
			}
			c.del(conf)
			n.device(mode)
		}
	})
}

func TestCHECK_LooksForARouteInItsOwnTable(t *testing.T) {
	n := newNode(t)
	c := n.container()
	ipam := map[string]any{"type": "mustang", "pools": []string{"10.9.0.0/24", "fd00:9::/64"},
		"routes": []any{map[string]any{"dst": "10.77.0.0/16", "table": 77}, map[string]any{"dst": "fd00:77::/64", "table": 1077}}}
	conf := n.config("veth").with("ipam", ipam)
	a := c.add(conf)
	c.ok(c.call("CHECK", conf.prev(a)))
	for _, gone := range []struct{ family, route, table string }{{"-4", "10.77.0.0/16", "77"}, {"-6", "fd00:77::/64", "1077"}} {
		run(t, "ip", gone.family, "-n", c.ns, "route", "del", gone.route, "table", gone.table)
		run(t, "ip", gone.family, "-n", c.ns, "route", "add", "unreachable", gone.route) // is another
		n.refused(c.call("CHECK", conf.prev(a)), 100, "route to "+gone.route+" is missing")
	}
	c.del(conf)
}

// On the node, where prevResult does not lead.
func TestCHECK_NamesWhatSomebodyBrokeOnTheNode(t *testing.T) {
	n := newNode(t)
	for _, x := range []struct {
		args string // HOST is the host's end, ADDR the pod's address
		says string
	}{
		{"ip link set HOST down", "on the node is down"},
		{"tc qdisc del dev HOST clsact", "not attached"},
	} {
		c := n.container()
		a := c.add(n.config("veth"))
		args := strings.NewReplacer("HOST", a.Interfaces[0].Name, "ADDR", a.address(0)).Replace(x.args)
		run(t, "nsenter", append([]string{"--net=/var/run/netns/" + n.name}, strings.Fields(args)...)...)
		n.refused(c.call("CHECK", n.config("veth").prev(a)), 100, x.says)
		c.del(n.config("veth"))
	}
}

// Each routed mode has one.
func TestCHECK_NamesTheNodesRouteToThePodThatIsGone(t *testing.T) {
	for _, mode := range modesOnce(t) {
		t.Run(mode, func(t *testing.T) {
			if !slices.Contains([]string{"veth", "netkit", "netkit-l3"}, mode) {
				t.Skip("these pods are on a segment")
			}
			n := newNode(t)
			for i, family := range []string{"-4", "-6"} {
				c := n.container()
				a := c.add(n.config(mode))
				run(t, "ip", "-n", n.name, family, "route", "del", a.address(i))
				n.refused(c.call("CHECK", n.config(mode).prev(a)), 100, "the node's route to "+a.address(i)+" is missing")
				c.del(n.config(mode))
			}
		})
	}
}

// A bridge has the smallest MTU of its pods, whoever they are.
func TestCHECK_PodsOfABridgeMayHaveAnyMTU(t *testing.T) {
	for _, local := range []string{"auto", "off"} {
		t.Run("localMTU "+local, func(t *testing.T) {
			n := newNode(t)
			run(t, "ip", "-n", n.name, "link", "set", uplink, "mtu", "1400")
			conf := n.config("bridge").with("localMTU", local)
			first, second := n.container(), n.container()
			a := first.add(conf)
			if a.Interfaces[0].Mtu != 1400 {
				t.Errorf("the first pod's bridge: %s", a.stdout)
			}
			first.ok(first.call("CHECK", conf.prev(a)))
			second.add(conf.with("mtu", 1300))
			first.ok(first.call("CHECK", conf.prev(a)))
			second.del(conf)
			first.ok(first.call("CHECK", conf.prev(a)))
			third := n.container()
			b := third.add(conf)
			third.ok(third.call("CHECK", conf.prev(b)))
			first.del(conf)
			third.del(conf)
		})
	}
}

func TestSTATUS_MustExitWithZeroIfReady(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		a := n.ok(n.exec(n.command(binary, "STATUS", n.config(mode))))
		if a.stdout != "" {
			t.Errorf("output on success: %s", a.stdout)
		}
	})
}

func TestSTATUS_MustExitNonZeroIfItKnowsThatItCannotServiceADD(t *testing.T) {
	n := newNode(t)
	status := func(conf config) answer { return n.exec(n.command(binary, "STATUS", conf)) }
	n.refused(status(n.config("veth").with("bpffs", "/tmp/none")), 50, "not on a bpffs")
	n.refused(status(n.config("macvlan").with("uplink", "eth9")), 50, "uplink eth9")
	n.refused(status(n.config("veth").with("cgroupRoot", "/tmp")), 50, "cgroup2")
	n.refused(status(n.config("veth").with("mode", "carrier-pigeon")), 7, "carrier-pigeon")
	full := n.config("veth").with("ipam", map[string]any{"type": "mustang", "pools": []string{"10.9.0.0/30"}})
	n.ok(status(full))
	c := n.container()
	c.add(full)
	n.refused(status(full), 50, "10.9.0.0/30")
	n.refused(n.container().call("ADD", full), 102, "10.9.0.0/30")
	n.refused(status(full.with("bpffs", "/tmp/none")), 51, "bpffs")
	c.del(full)
	n.ok(status(full))
}

func TestSTATUS_MustExitNonZeroInEachModeIfADDCannotWork(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		status := func(conf config) answer { return n.exec(n.command(binary, "STATUS", conf)) }
		n.refused(status(n.config(mode).with("bpffs", "/tmp/none")), 50, "not on a bpffs")
		n.refused(status(n.config(mode).with("cgroupRoot", "/tmp")), 50, "cgroup2")
		n.refused(status(n.config(mode).with("uplink", "eth9")), 50, "uplink eth9")
		n.refused(status(n.config(mode).with("ipam", map[string]any{"type": "no-such-plugin"})), 50, "no-such-plugin")
	})
}

// A kernel without a mode: the message has the key and the value.
func TestErrors_OfUnsupportedFieldsMustContainKeyAndValue(t *testing.T) {
	n := newNode(t)
	has := modesOnce(t)
	for _, mode := range []string{"veth", "bridge", "macvlan", "ipvlan", "ipvlan-l3", "netkit", "netkit-l3", "host-device"} {
		if slices.Contains(has, mode) || os.Getenv("MUSTANG_TEST_MODES") != "" {
			continue
		}
		c := n.container()
		n.refused(c.call("ADD", n.config(mode)), 2, "mode "+mode)
		n.refused(n.exec(n.command(binary, "STATUS", n.config(mode))), 50, "mode "+mode)
		c.del(n.config(mode))
	}
}

func TestSTATUS_MustNotBeReliedOnAndDoesNotPreventOtherRequests(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		full := n.config(mode).with("name", "small").with("ipam", map[string]any{"type": "mustang", "pools": []string{"10.29.0.0/30"}})
		c := n.container()
		a := c.add(full) // nobody asked for STATUS before
		what := "10.29.0.0/30"
		if mode == "host-device" { // which is what there is one of
			what = "dev0"
		}
		n.refused(n.exec(n.command(binary, "STATUS", full)), 50, what)
		c.ok(c.call("CHECK", full.prev(a)))
		c.del(full)
		n.ok(n.exec(n.command(binary, "STATUS", full)))
	})
}
