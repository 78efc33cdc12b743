// SPDX-License-Identifier: Apache-2.0

package cni_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestConfig_ContradictionsFailByName(t *testing.T) {
	n := newNode(t)
	for says, conf := range map[string]config{
		"mode":                          n.config("veth").with("mode", "pigeon"),
		"bridge":                        n.config("veth").with("bridge", "br7"),
		"ipam: type":                    n.config("veth").with("ipam", nil),
		"dhcp":                          n.config("veth").with("ipam", map[string]any{"type": "dhcp"}),
		"ipam.pools":                    n.config("veth").with("ipam", map[string]any{"type": "mustang"}),
		"belong to type":                n.config("veth").with("ipam", map[string]any{"type": "static", "pools": []string{"10.1.0.0/24"}}),
		"masqueradeExclude":             n.config("veth").with("masqueradeExclude", []string{"10.0.0.0/8"}),
		"not a network":                 n.config("veth").with("masquerade", true).with("masqueradeExclude", []string{"ten"}),
		"servicePath":                   n.config("veth").with("servicePath", "psychic"),
		"mtu: MTU 20":                   n.config("veth").with("mtu", 20),
		"runtimeConfig.mac":             n.config("veth").with("runtimeConfig", map[string]any{"mac": "01:00:00:00:00:01"}),
		"runtimeConfig.ips":             n.config("veth").with("runtimeConfig", map[string]any{"ips": []string{"10.9.0.3", "10.9.0.4"}}),
		"bigTCP: big TCP size 9000":     n.config("veth").with("bigTCP", 9000),
		"bigTCP: big TCP is a device's": n.config("host-device").with("bigTCP", 100000),
		"bigTCP: has no meaning":        n.config("chained").with("bigTCP", 100000),
		"localMTU":                      n.config("macvlan").with("localMTU", 9000),
		"localCIDRs":                    n.config("veth").with("localMTU", "off").with("localCIDRs", []string{"10.9.0.0/24"}),
		"ipam: has no":                  n.config("chained").with("ipam", map[string]any{"type": "static"}),
	} {
		n.refused(n.container().call("ADD", conf), 7, says)
	}
	if left := n.traces(); strings.Contains(left["nft"], "mustang") {
		t.Error("something was made")
	}
}

func TestConfig_UnknownFieldsWarn(t *testing.T) {
	n := newNode(t)
	c := n.container()
	pool := map[string]any{"subnet": "10.9.0.0/24", "rangeStart": "10.9.0.100"} // as host-local has it
	a := c.add(n.config("veth").with("frobnicate", 1).with("ipam", map[string]any{"type": "mustang", "pools": []any{"fd00:9::/64", pool}}))
	for _, field := range []string{`"frobnicate"`, `"ipam.pools[1].rangeStart"`} {
		if !strings.Contains(a.stderr, field) {
			t.Errorf("standard error lacks %s: %q", field, a.stderr)
		}
	}
	c.del(n.config("veth"))
}

// As the convention has them (CONVENTIONS.md, "args"), and shorter.
func TestConfig_LabelsAreAListOrAnObject(t *testing.T) {
	n := newNode(t)
	for _, labels := range []any{
		map[string]any{"app": "web", "env": "prod"},
		[]any{map[string]any{"key": "app", "value": "web"}, map[string]any{"key": "env", "value": "prod"}},
	} {
		c, conf := n.container(), n.config("veth").with("args", map[string]any{"cni": map[string]any{"labels": labels}})
		c.add(conf)
		records, _ := filepath.Glob(filepath.Join(n.state(), "endpoints", "*.json"))
		var ep struct{ Labels map[string]string }
		text, err := os.ReadFile(records[0])
		if err == nil {
			err = json.Unmarshal(text, &ep)
		}
		if d := cmp.Diff(map[string]string{"app": "web", "env": "prod"}, ep.Labels); err != nil || d != "" {
			t.Errorf("%v: %v: %s", labels, err, d)
		}
		c.del(conf)
	}
	for _, labels := range []any{"app", []any{"app"}} {
		n.refused(n.container().call("ADD", n.config("veth").with("args", map[string]any{"cni": map[string]any{"labels": labels}})), 6, "args")
	}
}

func TestConfig_CapabilitiesIPsMACAndMTU(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		rc := map[string]any{"ips": []string{"10.9.0.77/24", "fd00:9::77"}, "mac": "02:00:00:00:00:77",
			"bandwidth": map[string]any{"ingressRate": 1000}, "portMappings": []any{}}
		if strings.HasPrefix(mode, "ipvlan") || mode == "netkit-l3" {
			delete(rc, "mac")
		}
		c := n.container()
		conf := n.config(mode).with("runtimeConfig", rc).with("mtu", 1400)
		a := c.add(conf)
		last := a.Interfaces[len(a.Interfaces)-1]
		if a.address(0) != "10.9.0.77" || a.address(1) != "fd00:9::77" || rc["mac"] != nil && last.Mac != rc["mac"] || last.Mtu != 1400 {
			t.Errorf("got %s", a.stdout)
		}
		if mode != "host-device" {
			n.refused(n.container().call("ADD", conf), 102, "10.9.0.77")
		}
		c.del(conf)
	})
}

func TestConfig_MTUIsTheUplinks(t *testing.T) {
	n := newNode(t)
	for _, ns := range []string{n.name, n.outside()} {
		run(t, "ip", "-n", ns, "link", "set", uplink, "mtu", "9000")
	}
	c := n.container()
	a := c.add(n.config("veth").with("mtu", "auto"))
	if a.Interfaces[1].Mtu != 9000 {
		t.Errorf("got %s", a.stdout)
	}
	c.del(n.config("veth"))
}

// A default route with several next hops has several uplinks.
func TestConfig_UplinksAreThoseOfAllHops(t *testing.T) {
	for family, hops := range map[string][2]string{"-4": {"192.168.7.2", "192.168.8.2"}, "-6": {"fd00:7::2", "fd00:8::2"}} {
		t.Run(family, func(t *testing.T) {
			n := newNode(t)
			n.secondUplink("1400")
			for _, f := range []string{"-4", "-6"} {
				run(t, "ip", "-n", n.name, f, "route", "flush", "default")
			}
			run(t, "ip", "-n", n.name, family, "route", "add", "default", "nexthop", "via", hops[0], "dev", uplink, "nexthop", "via", hops[1], "dev", "up1")
			c := n.container()
			conf := n.config("veth").ports(mapping(8081, "tcp", ""))
			if a := c.add(conf); a.Interfaces[1].Mtu != 1400 {
				t.Errorf("the MTU is not the smallest of the uplinks': %s", a.stdout)
			}
			c.server(":80")
			for _, to := range []string{"192.168.7.1:8081", "192.168.8.1:8081", "[fd00:7::1]:8081", "[fd00:8::1]:8081"} {
				if got := n.reaches(n.outside(), to); !strings.HasPrefix(got, "hello ") {
					t.Errorf("from outside to %s: %q", to, got)
				}
			}
			c.del(conf)
			n.ok(n.exec(n.command(binary, "STATUS", n.config("macvlan"))))
			d := n.container()
			if a := d.add(n.config("macvlan")); a.Interfaces[0].Mtu != 1500 {
				t.Errorf("by macvlan the MTU is not that of the one uplink: %s", a.stdout)
			}
			d.del(n.config("macvlan"))
		})
	}
}

// secondUplink is up1, to the same outside.
func (n *node) secondUplink(mtu string) {
	n.t.Helper()
	for _, args := range []string{
		"-n NODE link add up1 mtu MTU type veth peer name up1 mtu MTU netns OUT",
		"-n NODE addr add 192.168.8.1/24 dev up1", "-n OUT addr add 192.168.8.2/24 dev up1",
		"-n NODE addr add fd00:8::1/64 dev up1 nodad", "-n OUT addr add fd00:8::2/64 dev up1 nodad",
		"-n NODE link set up1 up", "-n OUT link set up1 up",
	} {
		args = strings.NewReplacer("NODE", n.name, "OUT", n.outside(), "MTU", mtu).Replace(args)
		run(n.t, "ip", strings.Fields(args)...)
	}
}

// As far as the uplink takes it, and a warning where it takes less.
func TestConfig_BigTCPIsTheUplinks(t *testing.T) {
	n := newNode(t)
	conf := n.config("veth").with("bigTCP", 131072).with("localMTU", "off")
	for _, takes := range []string{"65536", "131072"} {
		run(t, "ip", "-n", n.name, "link", "set", uplink, "gso_max_size", takes)
		c := n.container()
		a := c.add(conf)
		if out := run(t, "ip", "-n", c.ns, "-d", "link", "show", "eth0"); !strings.Contains(out, "gso_max_size "+takes+" ") {
			t.Errorf("beyond an uplink that sends %s bytes at once: %s", takes, out)
		}
		if said := strings.Contains(a.stderr, "BIG TCP for IPv6: off instead of 131072 bytes, because "+uplink); said != (takes == "65536") {
			t.Errorf("beyond an uplink that sends %s bytes at once, standard error: %q", takes, a.stderr)
		}
		c.ok(c.call("CHECK", conf.prev(a)))
		c.del(conf)
	}
}
