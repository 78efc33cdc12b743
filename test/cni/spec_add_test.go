// SPDX-License-Identifier: Apache-2.0

package cni_test

// One test for each sentence of the spec 1.1.0 that binds a plugin, by the
// sentence's words: ADD, and what holds for every command.

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestADD_MustOutputAResultStructure(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		dns := map[string]any{"nameservers": []any{"10.9.0.53"}, "search": []any{"example.org"}}
		a := c.add(n.config(mode).with("dns", dns))
		defer c.del(n.config(mode))
		if a.CNIVersion != "1.1.0" || !cmp.Equal(a.DNS, dns) {
			t.Errorf("version or dns: %s", a.stdout)
		}
		if len(a.IPs) != 2 || len(a.Routes) != 2 || a.Routes[0].Dst != "0.0.0.0/0" || a.Routes[1].Dst != "::/0" {
			t.Fatalf("addresses or routes: %s", a.stdout)
		}
		for _, ip := range a.IPs {
			i := a.Interfaces[*ip.Interface]
			if i.Name != "eth0" || i.Sandbox != c.path() || i.Mtu != 1500 || i.Mac == "" && mode != "netkit-l3" {
				t.Errorf("interface of %s: %+v", ip.Address, i)
			}
			if !strings.Contains(run(t, "ip", "-n", c.ns, "addr", "show", "eth0"), ip.Address) {
				t.Errorf("%s is not on the interface", ip.Address)
			}
			if ip.Gateway == "" {
				t.Errorf("no gateway: %s", a.stdout)
			}
		}
	})
}

func TestADD_OutputsTheVersionSuppliedOnInput(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		for _, v := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
			c := n.container()
			conf := n.config(mode).with("cniVersion", v)
			a := c.add(conf)
			if a.CNIVersion != v || len(a.IPs) != 2 || len(a.Interfaces) == 0 {
				t.Errorf("%s: %s", v, a.stdout)
			}
			want := map[string]string{"interfaces": "mac mtu name sandbox", "ips": "address gateway interface", "routes": "dst gw"}
			if v < "1" {
				want["interfaces"], want["ips"] = "mac name sandbox", "address gateway interface version"
			}
			if mode == "netkit-l3" { // whose interface has no link address
				want["interfaces"] = strings.TrimPrefix(want["interfaces"], "mac ")
			}
			if d := cmp.Diff(want, a.shape(t)); d != "" {
				t.Errorf("%s: the result's shape is another version's:\n%s%s", v, d, a.stdout)
			}
			c.del(conf)
		}
	})
}

// shape is which keys the last of each list in a result has.
func (a answer) shape(t *testing.T) map[string]string {
	t.Helper()
	var lists map[string]json.RawMessage
	if err := json.Unmarshal([]byte(a.stdout), &lists); err != nil {
		t.Fatal(err)
	}
	out := make(map[string]string)
	for name, text := range lists {
		var list []map[string]any
		if json.Unmarshal(text, &list) == nil && len(list) > 0 {
			out[name] = strings.Join(slices.Sorted(maps.Keys(list[len(list)-1])), " ")
		}
	}
	return out
}

func TestADD_IfAnInterfaceOfTheRequestedNameExistsMustReturnAnError(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		a := c.add(n.config(mode))
		n.refused(c.call("ADD", n.config(mode)), 101, "already")
		other := *c
		other.id = "another"
		if a := other.call("ADD", n.config(mode)); a.status == 0 {
			t.Errorf("got %s", a.stdout)
		}
		// The runtime DELs after a failed ADD: the first container keeps all.
		other.del(n.config(mode))
		c.ok(c.call("CHECK", n.config(mode).prev(a)))
		c.del(n.config(mode))
	})
}

func TestADD_IfUnableToUseTheInterfaceNameMustReturnAnError(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		for _, name := range []string{"a/b", "a name", strings.Repeat("x", 16), "..", "a:b", "lo"} {
			c := n.container()
			c.ifname = name
			if a := c.call("ADD", n.config(mode)); a.status == 0 || a.Code == 0 {
				t.Errorf("%q: status %d: %s", name, a.status, a.stdout)
			}
		}
	})
}

func TestADD_MustHandlePrevResultByPassingItThrough(t *testing.T) {
	n := newNode(t)
	c := n.container()
	ptp := config{"cniVersion": "1.0.0", "name": "n", "type": "ptp", "ipam": map[string]any{"type": "static", "addresses": []any{map[string]any{"address": "10.4.0.2/24", "gateway": "10.4.0.1"}}}}
	prev := c.ok(c.plugin("ptp", "ADD", ptp))
	conf := n.config("chained").with("cniVersion", "1.0.0")
	a := c.add(conf.prev(prev))
	var want, got any
	json.Unmarshal([]byte(prev.stdout), &want)
	json.Unmarshal([]byte(a.stdout), &got)
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	c.del(conf.prev(prev))
	n.refused(n.container().call("ADD", conf), 7, "chained")
	// Without a record, and without prevResult.
	c.add(conf.prev(prev))
	n.forgetRecords()
	c.del(conf)
	c.ok(c.plugin("ptp", "DEL", ptp))
}

// A mode that makes an interface cannot take another plugin's, and says so.
func TestADD_MustHandlePrevResultByAnErrorWhereItCannotBeTaken(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		prev := json.RawMessage(`{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[]}`)
		n.refused(n.container().call("ADD", n.config(mode).with("prevResult", prev)), 7, "chained")
	})
}

func TestPlugin_MustExitWithZeroOnSuccessAndNonZeroOnFailure(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		c := n.container()
		conf := n.config(mode)
		for _, command := range []string{"ADD", "DEL", "CHECK", "GC", "STATUS"} {
			a := n.exec(n.command(binary, command, conf.with("name", nil), c.env()...))
			n.refused(a, 7, "name")
			if a.CNIVersion != "1.1.0" {
				t.Errorf("%s: the error has no version: %s", command, a.stdout)
			}
		}
		n.ok(n.exec(n.command(binary, "STATUS", conf)))
		a := c.add(conf)
		c.ok(c.call("CHECK", conf.prev(a)))
		valid := []any{map[string]any{"containerID": c.id, "ifname": "eth0"}}
		n.ok(n.exec(n.command(binary, "GC", conf.with("cni.dev/valid-attachments", valid))))
		c.del(conf.prev(a))
		n.ok(n.exec(n.command(binary, "VERSION", conf)))
	})
}

// Names begin with a letter or digit, and have letters, digits, '_', '.' and '-'.
func TestConfig_NetworkNamesMustNotContainOtherCharacters(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		for _, name := range []string{"../up", "-net", "a/b", "a b", ""} {
			n.refused(n.container().call("ADD", n.config(mode).with("name", name)), 7, "name")
		}
	})
}

func TestVERSION_MustOutputVersionAndSupportedVersions(t *testing.T) {
	n := newNode(t)
	for _, v := range []string{"0.3.1", "1.0.0", "1.1.0"} {
		a := n.ok(n.exec(n.command(binary, "VERSION", config{"cniVersion": v})))
		var got struct{ SupportedVersions []string }
		json.Unmarshal([]byte(a.stdout), &got)
		if a.CNIVersion != v || strings.Join(got.SupportedVersions, " ") != "0.3.1 0.4.0 1.0.0 1.1.0" {
			t.Errorf("got %s", a.stdout)
		}
	}
}

func TestErrors_HaveTheCodesOfTheSpec(t *testing.T) {
	n := newNode(t)
	c := n.container()
	n.refused(c.call("ADD", n.config("veth").with("cniVersion", "9.9.9")), 1, "incompatible")
	for _, missing := range []string{"CNI_CONTAINERID", "CNI_NETNS"} { // "must contain the names of invalid variables"
		n.refused(n.exec(n.command(binary, "ADD", n.config("veth"), "CNI_IFNAME=eth0")), 4, missing)
	}
	n.refused(c.call("FROBNICATE", n.config("veth")), 4, "FROBNICATE")
	n.refused(c.call("ADD", n.config("veth").with("mtu", "big")), 6, "mtu")
	n.refused(c.call("ADD", n.config("veth"), "CNI_NETNS=/var/run/netns/none"), 8, "/var/run/netns/none")
	n.refused(c.call("ADD", n.config("veth"), "CNI_NETNS=/etc/passwd"), 8, "not a network namespace")
	n.refused(c.call("ADD", n.config("veth"), "CNI_NETNS=/var/run/netns/"+n.name), 8, "node's own")
	for _, command := range []string{"GC", "STATUS"} {
		n.refused(n.exec(n.command(binary, command, n.config("veth").with("cniVersion", "1.0.0"))), 1, command)
	}
}

func TestPlugins_MustHandleBeingExecutedConcurrentlyAcrossContainers(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		var all []*container
		var conf []config
		for i := range 8 {
			all = append(all, n.container())
			conf = append(conf, n.config(mode).with("masquerade", true))
			if mode == "host-device" { // a device for each
				conf[i]["uplink"] = n.deviceNamed(fmt.Sprintf("dev%d", i))
			}
		}
		answers := make([]answer, len(all))
		each := func(command string) {
			var wg sync.WaitGroup
			for i, c := range all {
				wg.Go(func() { answers[i] = c.call(command, conf[i]) })
			}
			wg.Wait()
		}
		each("ADD")
		seen := map[string]bool{}
		for i, a := range answers {
			all[i].ok(a)
			for j := range a.IPs {
				if seen[a.address(j)] {
					t.Errorf("%s twice", a.address(j))
				}
				seen[a.address(j)] = true
			}
		}
		if mode != "host-device" && (!n.pings(all[0].ns, answers[7].address(0)) || !n.pings(all[3].ns, answers[4].address(1))) {
			t.Error("the containers do not reach each other")
		}
		each("DEL")
		for i, a := range answers {
			all[i].ok(a)
		}
		for i := 1; mode == "host-device" && i < 8; i++ {
			run(t, "ip", "-n", n.name, "link", "del", fmt.Sprintf("dev%d", i))
		}
	})
}
