// SPDX-License-Identifier: Apache-2.0

package cni_test

import (
	"encoding/json"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// chain is a list of plugins as a runtime executes it.
type chain struct {
	*container
	list    []config
	results []answer
}

func (c *container) chain(list ...config) *chain { return &chain{container: c, list: list} }

func (x *chain) one(command string, conf config, env ...string) answer {
	x.t.Helper()
	if conf["type"] == "mustang-cni" {
		return x.call(command, conf, env...)
	}
	return x.plugin(conf["type"].(string), command, conf, env...)
}

func (x *chain) add() answer {
	x.t.Helper()
	for i, conf := range x.list {
		if i > 0 {
			conf = conf.prev(x.results[i-1])
		}
		x.results = append(x.results, x.ok(x.one("ADD", conf)))
	}
	return x.results[len(x.results)-1]
}

func (x *chain) del() {
	x.t.Helper()
	for i := len(x.list) - 1; i >= 0; i-- {
		x.ok(x.one("DEL", x.list[i].prev(x.results[len(x.results)-1])))
	}
}

func previousPlugin(n *node, kind string) config {
	ipam := map[string]any{"type": "host-local", "dataDir": filepath.Join(n.dir, "host-local"),
		"ranges": []any{[]any{map[string]any{"subnet": "10.4.0.0/24"}}}, "routes": []any{map[string]any{"dst": "0.0.0.0/0"}}}
	c := config{"cniVersion": "1.0.0", "name": "net-" + kind, "type": kind, "ipam": ipam}
	switch kind {
	case "bridge":
		return c.with("isGateway", true).with("bridge", "cni0")
	case "macvlan", "ipvlan":
		return c.with("master", uplink)
	case "host-device":
		return c.with("device", "dev0")
	}
	return c
}

func TestChain_BehindEveryPluginPrevResultPassesUntouched(t *testing.T) {
	for _, kind := range []string{"ptp", "bridge", "macvlan", "ipvlan", "host-device"} {
		t.Run(kind, func(t *testing.T) {
			n := newNode(t)
			n.device(kind)
			c := n.container()
			first := previousPlugin(n, kind)
			me := n.config("chained").with("cniVersion", "1.0.0").with("name", first["name"])
			if a := c.plugin(kind, "ADD", first); a.status != 0 {
				t.Skipf("this kernel: %s", a.stdout)
			}
			c.ok(c.plugin(kind, "DEL", first))
			tuning := config{"cniVersion": "1.0.0", "name": first["name"], "type": "tuning", "sysctl": map[string]any{"net.ipv4.ip_unprivileged_port_start": "80"}}
			// The node's shared state (tables, bridge) comes with the first.
			warm := n.container().chain(first, me)
			warm.add()
			warm.del()
			n.device(kind)
			before := n.traces()
			x := c.chain(first, me, tuning)
			x.add()
			var want, got any
			json.Unmarshal([]byte(x.results[0].stdout), &want)
			json.Unmarshal([]byte(x.results[1].stdout), &got)
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("prevResult was touched:\n%s", d)
			}
			endpoints, _ := filepath.Glob(filepath.Join(n.state(), "endpoints", "*.json"))
			if len(endpoints) != 1 {
				t.Errorf("%d endpoints", len(endpoints))
			}
			c.ok(c.call("CHECK", me.prev(x.results[2])))
			if kind == "ptp" || kind == "bridge" {
				if !n.pings(c.ns, "10.4.0.1") || !n.pings(n.name, x.results[0].address(0)) {
					t.Error("node and container do not reach each other")
				}
			}
			x.del()
			x.call("DEL", me.prev(x.results[2])) // again
			after := n.traces()
			if d := cmp.Diff(before, after); d != "" {
				t.Errorf("left behind (+) or missing (-):\n%s", d)
			}
		})
	}
}

func TestChain_ServicesAndPolicyHoldBehindAnotherPlugin(t *testing.T) {
	for _, kind := range []string{"ptp", "bridge", "macvlan"} {
		t.Run(kind, func(t *testing.T) {
			n := newNode(t)
			first := previousPlugin(n, kind)
			var remove []func()
			add := func(app string) *container {
				c := n.container()
				me := n.config("chained").with("cniVersion", "1.0.0").with("name", first["name"]).with("args", labelled(app))
				x := c.chain(first, me)
				x.add()
				remove = append(remove, x.del)
				if app == "server" {
					n.tool("svc", "add", "--service", "10.96.0.10:80", "--protocol", "tcp", "--backend", net.JoinHostPort(x.results[0].address(0), "80"))
				}
				return c
			}
			server, friend, foe := add("server"), add("friend"), add("foe")
			server.server(":80")
			doors := []string{"10.4.0.2:80", "10.96.0.10:80"}
			n.knock(doors, map[*container]bool{friend: true, foe: true})
			n.isolate("server", "friend")
			n.knock(doors, map[*container]bool{friend: true, foe: false})
			n.tool("policy", "rm", "default/server")
			for _, del := range remove {
				del()
			}
		})
	}
}

// portMapped is mustang, native or behind ptp, with portmap after it.
func portMapped(n *node, native string) []config {
	ports := map[string]any{"portMappings": []any{map[string]any{"hostPort": 8081, "containerPort": 80, "protocol": "tcp"}}}
	portmap := config{"cniVersion": "1.0.0", "name": "net", "type": "portmap", "capabilities": map[string]any{"portMappings": true}, "runtimeConfig": ports}
	if native == "chained" {
		return []config{previousPlugin(n, "ptp").with("name", "net"), n.config("chained").with("cniVersion", "1.0.0").with("name", "net"), portmap}
	}
	return []config{n.config(native).with("cniVersion", "1.0.0").with("name", "net"), portmap}
}

func TestChain_WhatPortmapTranslatedReturnsRight(t *testing.T) {
	for _, mode := range append(modesOnce(t), "chained") {
		t.Run(mode, func(t *testing.T) {
			if mode == "host-device" {
				t.Skip(ownNetwork)
			}
			n := newNode(t)
			server, client := n.container(), n.container()
			list := portMapped(n, mode)
			xs := server.chain(list...)
			xs.add()
			xc := client.chain(list[:len(list)-1]...)
			xc.add()
			server.server(":80")
			if got := n.reaches(n.outside(), "192.168.7.1:8081"); !strings.HasPrefix(got, "hello 192.168.7.2:") {
				t.Errorf("from outside: %q", got)
			}
			if mode == "macvlan" || mode == "ipvlan" {
				// On one segment a reply does not pass the host: portmap's own
				// masquerade (of the pods' network) is what brings it back.
				t.Log(n.reaches(client.ns, "192.168.7.1:8081"))
			} else if got := n.reaches(client.ns, "192.168.7.1:8081"); !strings.HasPrefix(got, "hello ") {
				t.Errorf("from a pod of this node: %q", got)
			}
			xc.del()
			xs.del()
		})
	}
}

// A rule of the user's own, which nobody told mustang of.
func TestChain_WhatAUsersRuleTranslatedReturnsRight(t *testing.T) {
	n := newNode(t)
	server, client := n.container(), n.container()
	a := server.add(n.config("veth"))
	client.add(n.config("veth"))
	server.server(":80")
	run(t, "nsenter", "--net=/var/run/netns/"+n.name, "nft", "add table ip mine; add chain ip mine pre { type nat hook prerouting priority -100; }; add rule ip mine pre ip daddr 192.168.7.77 tcp dport 99 dnat to "+a.address(0)+":80")
	run(t, "ip", "-n", n.outside(), "route", "add", "192.168.7.77", "via", "192.168.7.1")
	for _, from := range []string{n.outside(), client.ns} {
		if got := n.reaches(from, "192.168.7.77:99"); !strings.HasPrefix(got, "hello ") {
			t.Errorf("from %s: %q", from, got)
		}
	}
	server.del(n.config("veth"))
	client.del(n.config("veth"))
}

// Whoever changes the MAC address before mustang is followed; after it, the programs
// drop what the pod sends, and CHECK says so, whatever the result of the list says.
func TestChain_TuningChangesTheMACAddressBeforeMustang(t *testing.T) {
	n := newNode(t)
	me := n.config("chained").with("cniVersion", "1.0.0").with("name", "net")
	tuning := config{"cniVersion": "1.0.0", "name": "net", "type": "tuning", "mac": "02:00:00:00:00:07"}
	for _, list := range [][]config{{previousPlugin(n, "ptp").with("name", "net"), tuning, me}, {previousPlugin(n, "ptp").with("name", "net"), me, tuning}} {
		c := n.container()
		x := c.chain(list...)
		a := x.add()
		check := c.call("CHECK", me.prev(a))
		if list[1]["type"] == "tuning" {
			n.ok(check)
			if !n.pings(c.ns, "192.168.7.1") {
				t.Error("the node is not reached")
			}
		} else {
			n.refused(check, 100, "its programs drop what does not come from")
		}
		x.del()
	}
}

// limited is how many packets have passed the bandwidth plugin's limits, on the way to pods or from them.
func (n *node) limited() (packets int) {
	var qdiscs []struct {
		Kind    string `json:"kind"`
		Packets int    `json:"packets"`
	}
	if err := json.Unmarshal([]byte(run(n.t, "tc", "-n", n.name, "-s", "-j", "qdisc", "show")), &qdiscs); err != nil {
		n.t.Fatal(err)
	}
	for _, q := range qdiscs {
		if q.Kind == "tbf" {
			packets += q.Packets
		}
	}
	return packets
}

// unlimited wants no limit on what another pod of list sends to an address.
func (n *node) unlimited(list []config, address string) {
	n.t.Helper()
	for i := range list {
		list[i] = list[i].with("runtimeConfig", nil)
	}
	x := n.container().chain(list...)
	x.add()
	was := n.limited()
	for range 10 {
		if !n.pings(x.ns, address) {
			n.t.Error("pods do not reach each other")
		}
	}
	if now := n.limited(); now >= was+10 { // some look for neighbours
		n.t.Errorf("between pods, %d packets have passed the limits, then %d", was, now)
	}
	x.del()
}

// The bandwidth plugin brings qdiscs of its own to the host's end. They see what passes the host's stack, and nothing
// of what programs hand from pod to pod.
func TestChain_BandwidthComesAfter(t *testing.T) {
	for _, mode := range []string{"veth", "chained"} {
		t.Run(mode, func(t *testing.T) {
			n := newNode(t)
			rc := map[string]any{"bandwidth": map[string]any{"ingressRate": 10_000_000, "ingressBurst": 1_000_000, "egressRate": 10_000_000, "egressBurst": 1_000_000}}
			list := []config{n.config("veth").with("cniVersion", "1.0.0").with("name", "net").with("runtimeConfig", rc)}
			if mode == "chained" {
				list = []config{previousPlugin(n, "ptp").with("name", "net"), n.config("chained").with("cniVersion", "1.0.0").with("name", "net").with("runtimeConfig", rc)}
			}
			list = append(list, config{"cniVersion": "1.0.0", "name": "net", "type": "bandwidth", "capabilities": map[string]any{"bandwidth": true}, "runtimeConfig": rc})
			c := n.container()
			x := c.chain(list...)
			a := x.add()
			was := n.limited()
			if !n.pings(n.name, a.address(0)) || !n.pings(c.ns, "192.168.7.1") {
				t.Error("node and container do not reach each other")
			}
			if now := n.limited(); now < was+4 { // two packets each
				t.Errorf("with the node, %d packets have passed the limits, then %d", was, now)
			}
			n.unlimited(slices.Clone(list[:len(list)-1]), a.address(0))
			c.ok(c.call("CHECK", list[len(list)-2].prev(a)))
			x.del()
		})
	}
}

func TestMasquerade_OnlyTowardsTheOutside(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		n.masquerades(mode, "nftables")
	})
}

// Where there is an edge, and no pod whose programs are inside, no connection of
// the node's is tracked.
func TestMasquerade_ByProgramsAtTheEdge(t *testing.T) {
	for _, mode := range modesOnce(t) {
		t.Run(mode, func(t *testing.T) {
			n := newNode(t)
			n.tool("edge", "set", "--dev", uplink)
			by := "nftables"
			if slices.Contains([]string{"veth", "bridge", "netkit", "netkit-l3"}, mode) {
				by = "ebpf"
			}
			n.masquerades(mode, by)
		})
	}
}

// Containers and the command line's pods share the table, and each leaves the other's.
func TestMasquerade_OfPodsByTheCommandLineIsTheirs(t *testing.T) {
	n := newNode(t)
	outside := &container{node: n, id: "outside", ns: n.outside()}
	outside.server(":80")
	conf := n.config("veth").with("masquerade", true)
	c, pod := n.container(), n.container()
	a := c.add(conf)
	n.tool("pod", "add", "b", "--netns", pod.path(), "--ip", "10.9.0.99", "--masquerade")
	wears := func(when, ns string) {
		t.Helper()
		if got := strings.TrimPrefix(n.reaches(ns, "192.168.7.2:80"), "hello "); !strings.HasPrefix(got, "192.168.7.1:") {
			t.Errorf("%s: seen as %q", when, got)
		}
	}
	wears("both are there", pod.ns)
	n.ok(n.exec(n.command(binary, "GC", conf.with("cni.dev/valid-attachments", []any{map[string]any{"containerID": c.id, "ifname": "eth0"}}))))
	wears("after GC", pod.ns)
	c.del(conf)
	wears("after the last DEL", pod.ns)
	a = c.add(conf)
	n.tool("pod", "rm", "b")
	wears("after the last pod rm", c.ns)
	c.ok(c.call("CHECK", conf.prev(a)))
	c.del(conf)
	n.tool("pod", "add", "b", "--netns", pod.path(), "--ip", "10.9.0.99", "--masquerade")
	n.tool("pod", "rm", "b") // the node's cleanup looks for the table
}

// masquerades fails unless a pod wears the node's address, towards the outside only.
func (n *node) masquerades(mode, by string) {
	t := n.t
	t.Helper()
	if mode == "host-device" {
		t.Skip(ownNetwork)
	}
	outside := &container{node: n, id: "outside", ns: n.outside()}
	outside.server(":80")
	conf := n.config(mode).with("masquerade", true).with("masqueradeExclude", []string{"192.168.8.0/24"})
	run(t, "ip", "-n", n.outside(), "addr", "add", "192.168.8.1/32", "dev", "lo")
	run(t, "ip", "-n", n.outside(), "route", "add", "10.9.0.0/24", "via", "192.168.7.1")
	c := n.container()
	a := c.add(conf)
	for to, want := range map[string]string{"192.168.7.2:80": "192.168.7.1", "[fd00:7::2]:80": "fd00:7::1", "192.168.8.1:80": a.address(0)} {
		got := strings.TrimSpace(strings.TrimPrefix(n.reaches(c.ns, to), "hello "))
		if from, err := netip.ParseAddrPort(got); err != nil || from.Addr().String() != want {
			t.Errorf("to %s: seen as %s, want %s", to, got, want)
		}
	}
	if said := n.tool("status", "-o", "json"); !strings.Contains(said, `"by": "`+by+`"`) {
		t.Errorf("not by %s: %s", by, said)
	}
	rules := run(t, "ip", "netns", "exec", n.name, "nft", "list", "ruleset")
	for _, tracks := range []string{"type nat hook", "\t\tmasquerade"} { // either does
		if strings.Contains(rules, tracks) != (by == "nftables") {
			t.Errorf("by %s, and with %q or without:\n%s", by, tracks, rules)
		}
	}
	c.ok(c.call("CHECK", conf.prev(a)))
	c.del(conf)
}
