// SPDX-License-Identifier: Apache-2.0

package cni_test

// Host ports without the portmap plugin: mustang's own.

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func mapping(host int, protocol, hostIP string) map[string]any {
	return map[string]any{"hostPort": host, "containerPort": 80, "protocol": protocol, "hostIP": hostIP}
}

func (c config) ports(list ...map[string]any) config {
	return c.with("runtimeConfig", map[string]any{"portMappings": list})
}

// portsTable is all that the node has of Services.
func (n *node) portsTable() string { return n.entries("mst_services_v2") + n.entries("mst_slots_v1") }

// ported is a pod with host ports, native or behind ptp.
func (n *node) ported(mode string, list ...map[string]any) *chain {
	if mode == "chained" {
		c := n.container()
		run(n.t, "ip", "-n", c.ns, "link", "set", "lo", "up") // as runtimes do
		return c.chain(previousPlugin(n, "ptp").with("name", "net"), n.config(mode).with("cniVersion", "1.0.0").with("name", "net").ports(list...))
	}
	return n.container().chain(n.config(mode).ports(list...))
}

var everyPort = []map[string]any{
	mapping(8081, "tcp", ""), mapping(8081, "udp", ""), mapping(8082, "tcp", "192.168.7.1"), mapping(8082, "udp", "fd00:7::1"),
	mapping(8083, "tcp", "127.0.0.1"), mapping(8083, "udp", "0.0.0.0"),
}

func TestPorts_LeadToThePodFromEverywhere(t *testing.T) {
	for _, mode := range append(modesOnce(t), "chained") {
		t.Run(mode, func(t *testing.T) {
			if mode == "host-device" {
				t.Skip(ownNetwork)
			}
			n := newNode(t)
			warm := n.ported(mode, everyPort...)
			warm.add()
			warm.del()
			before, ports := n.traces(), n.portsTable()
			x := n.ported(mode, everyPort...)
			pod := x.add()
			x.server(":80")
			other := n.ported(mode)
			other.add()
			v6 := mode != "chained"
			for who, from := range map[string]string{"outside": n.outside(), "the node": n.name, "a pod": other.ns, "the pod itself": x.ns} {
				for _, to := range []string{"192.168.7.1:8081", "udp 192.168.7.1:8081", "192.168.7.1:8082", "udp 192.168.7.1:8083", "[fd00:7::1]:8081", "udp [fd00:7::1]:8081", "udp [fd00:7::1]:8082"} {
					if strings.Contains(to, "[") && !v6 {
						continue
					}
					out, err := n.dials(from, to, patience)
					if err != nil || !strings.HasPrefix(out, "hello ") {
						t.Errorf("%s to %s: %v %s", who, to, err, out)
						continue
					}
					saw := netip.MustParseAddrPort(strings.TrimSpace(strings.TrimPrefix(out, "hello "))).Addr()
					if who == "outside" && saw.String() != "192.168.7.2" && saw.String() != "fd00:7::2" {
						t.Errorf("%s to %s is seen as %s", who, to, saw)
					}
				}
			}
			for _, to := range []string{"127.0.0.1:8083", "127.0.0.1:8081", "udp 127.0.0.1:8081", "[::1]:8081"} {
				if strings.Contains(to, "[") && !v6 {
					continue
				}
				if out, err := n.dials(n.name, to, patience); err != nil || !strings.HasPrefix(out, "hello ") {
					t.Errorf("the node to %s: %v %s", to, err, out)
				}
				if out, err := n.dials(other.ns, to, silence); err == nil {
					t.Errorf("a pod's own loopback leads elsewhere at %s: %s", to, out)
				}
			}
			n.noLoopbackFromOutside(8083)
			for _, to := range []string{"192.168.7.1:8083", "udp [fd00:7::1]:8083", "udp 192.168.7.1:8082", "192.168.7.1:8084"} {
				if out, err := n.dials(n.outside(), to, silence); err == nil {
					t.Errorf("outside reaches %s, which no mapping names: %s", to, out)
				}
			}
			me := x.list[len(x.list)-1]
			x.ok(x.call("CHECK", me.prev(pod)))
			other.del()
			x.del()
			n.same(stripped(before), stripped(n.traces()))
			if now := n.portsTable(); now != ports {
				t.Errorf("host ports stay:\n%s\nbefore:\n%s", now, ports)
			}
			if out, err := n.dials(n.outside(), "192.168.7.1:8081", silence); err == nil {
				t.Errorf("after DEL: %s", out)
			}
		})
	}
}

// Pods wear the node's address in flows of their own, not in answers to clients outside.
func TestPorts_LeadToAMasqueradedPodAsWell(t *testing.T) {
	for _, mode := range modesOnce(t) {
		t.Run(mode, func(t *testing.T) {
			if mode == "host-device" {
				t.Skip(ownNetwork)
			}
			n := newNode(t)
			c, conf := n.container(), n.config(mode).with("masquerade", true).ports(everyPort...)
			c.add(conf)
			c.server(":80")
			for to, saw := range map[string]string{
				"192.168.7.1:8081": "192.168.7.2:", "udp 192.168.7.1:8081": "192.168.7.2:",
				"[fd00:7::1]:8081": "[fd00:7::2]:", "udp [fd00:7::1]:8081": "[fd00:7::2]:",
			} {
				if got := n.reaches(n.outside(), to); !strings.HasPrefix(got, "hello "+saw) {
					t.Errorf("from outside to %s: %q", to, got)
				}
			}
			c.del(conf)
		})
	}
}

func TestPorts_AreOnePodsAndCHECKMissesThem(t *testing.T) {
	n := newNode(t)
	conf := n.config("veth").ports(mapping(8081, "tcp", ""))
	c := n.container()
	a := c.add(conf)
	empty := n.portsTable()
	second := n.container()
	n.refused(second.call("ADD", conf), 103, "host port tcp 0.0.0.0:8081 is taken")
	second.del(conf)
	if now := n.portsTable(); now != empty {
		t.Errorf("a refused ADD changed the ports:\n%s", now)
	}
	c.ok(c.call("CHECK", conf.prev(a)))
	n.refused(c.call("CHECK", n.config("veth").ports(mapping(8085, "tcp", "")).prev(a)), 100, "host port tcp 0.0.0.0:8085 does not lead to")
	// Another address' port, and another protocol's, are others.
	third := n.config("veth").ports(mapping(8081, "udp", ""))
	second.add(third)
	second.del(third)
	c.del(conf)
	second.add(conf) // and now it is free
	second.del(conf)
}

// Without the record of the pod, and by GC.
func TestPorts_GoWithThePodWhateverIsLost(t *testing.T) {
	n := newNode(t)
	conf := n.config("veth").ports(mapping(8081, "tcp", ""))
	warm := n.container()
	warm.add(conf)
	warm.del(conf)
	ports := n.portsTable()
	lost := n.container()
	lost.add(conf)
	run(t, "rm", "-r", n.state()+"/cni/attachments")
	lost.del(n.config("veth"))
	if now := n.portsTable(); now != ports {
		t.Errorf("after DEL without a record:\n%s", now)
	}
	dead := n.container()
	dead.add(conf)
	run(t, "ip", "netns", "del", dead.ns)
	n.ok(n.exec(n.command(binary, "GC", n.config("veth").with("cni.dev/valid-attachments", []any{}))))
	if now := n.portsTable(); now != ports {
		t.Errorf("after GC:\n%s", now)
	}
}

// Killed at any instant, the ports go with the pod; and a pod that is there has
// all of its ports.
func TestPorts_SurviveAKill(t *testing.T) {
	n := newNode(t)
	conf := n.config("veth").ports(mapping(8081, "tcp", ""), mapping(8081, "udp", ""))
	whole := n.timeOfADD(conf)
	ports := n.portsTable()
	for i := range 16 {
		c := n.container()
		command := []string{"ADD", "DEL"}[i%2]
		if command == "DEL" {
			c.add(conf)
		}
		c.kill(command, conf, rand.N(whole))
		if i%4 < 2 {
			c.del(conf)
		} else {
			n.ok(n.exec(n.command(binary, "GC", conf.with("cni.dev/valid-attachments", []any{}))))
		}
		if now := n.portsTable(); now != ports {
			t.Fatalf("round %d (%s killed): ports stay:\n%s", i, command, now)
		}
		again := n.container()
		again.add(conf)
		again.del(conf)
	}
}

func TestPorts_WhatCannotBeFailsByName(t *testing.T) {
	n := newNode(t)
	for says, m := range map[string]map[string]any{
		"hostPort 0":   {"hostPort": 0, "containerPort": 80}, // and TCP, as with the portmap plugin
		"hostIP":       {"hostPort": 80, "containerPort": 80, "protocol": "tcp", "hostIP": "here"},
		"portMappings": {"hostPort": 80, "containerPort": 80, "protocol": "tcp", "hostIP": "fe80::1%eth0"},
	} {
		n.refused(n.container().call("ADD", n.config("veth").ports(m)), 7, says)
	}
	n.refused(n.container().call("ADD", n.config("veth").ports(mapping(80, "tcp", ""), mapping(80, "tcp", ""))), 7, "twice")
	for _, m := range []map[string]any{{"hostPort": 80, "containerPort": 80, "protocol": "pigeon"}, {"hostPort": 70000, "containerPort": 80}} {
		n.refused(n.container().call("ADD", n.config("veth").ports(m)), 6, "")
	}
}

// The name as Kubernetes writes it, and none. Who takes a pod away needs no ports: a runtime gives the same configuration
// again, and must get rid of what it was.
func TestPorts_WordsThatAreNotOurs(t *testing.T) {
	n := newNode(t)
	c := n.container()
	conf := n.config("veth").ports(mapping(8081, "TCP", ""), mapping(8082, "", ""))
	c.add(conf)
	c.server(":80")
	for _, to := range []string{"192.168.7.1:8081", "192.168.7.1:8082"} {
		if got := n.reaches(n.outside(), to); !strings.HasPrefix(got, "hello ") {
			t.Errorf("%s: %q", to, got)
		}
	}
	c.del(conf.ports(mapping(8081, "pigeon", ""))) // of which there is a record
	n.container().del(conf.ports(mapping(8081, "pigeon", "")))
	n.ok(n.exec(n.command(binary, "GC", conf.ports(mapping(8081, "pigeon", "")).with("cni.dev/valid-attachments", []any{}))))
}

// A node that cannot give its own sockets host ports says so each time.
func TestPorts_AreServedToAllOrADDFails(t *testing.T) {
	n := newNode(t)
	conf := n.config("veth").with("servicePath", "tc").ports(mapping(8081, "tcp", ""))
	bad := conf.with("cgroupRoot", n.dir)
	for range 2 {
		c := n.container()
		n.refused(c.call("ADD", bad), 999, "open the node's host ports")
		c.del(bad)
	}
	c := n.container()
	c.add(conf)
	c.server(":80")
	for _, from := range []string{n.name, n.outside()} {
		if got := n.reaches(from, "192.168.7.1:8081"); !strings.HasPrefix(got, "hello ") {
			t.Errorf("from %s: %q", from, got)
		}
	}
	c.del(conf)
}

// Where both plugins of a list declare the capability, both do it, and neither
// is in the other's way.
func TestPorts_BesidePortmapBothLead(t *testing.T) {
	n := newNode(t)
	list := portMapped(n, "veth")
	x := n.container().chain(list[0].with("runtimeConfig", list[1]["runtimeConfig"]), list[1])
	x.add()
	x.server(":80")
	for _, from := range []string{n.outside(), n.name, x.ns} {
		if got := n.reaches(from, "192.168.7.1:8081"); !strings.HasPrefix(got, "hello ") {
			t.Errorf("from %s: %q", from, got)
		}
	}
	x.del()
	if out, err := n.dials(n.outside(), "192.168.7.1:8081", silence); err == nil {
		t.Errorf("after DEL: %s", out)
	}
}

// noLoopbackFromOutside sends to the node's loopback from the wire.
func (n *node) noLoopbackFromOutside(port int) {
	n.t.Helper()
	mac := strings.Fields(run(n.t, "ip", "-n", n.name, "-o", "link", "show", uplink))
	at := mac[slices.Index(mac, "link/ether")+1]
	run(n.t, "ip", "netns", "exec", n.outside(), "sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1", "net.ipv4.conf."+uplink+".route_localnet=1")
	run(n.t, "ip", "-n", n.outside(), "route", "add", "127.0.0.1", "via", "192.168.7.1", "dev", uplink, "src", "192.168.7.2", "table", "7")
	run(n.t, "ip", "-n", n.outside(), "rule", "add", "pref", "0", "to", "127.0.0.1", "lookup", "7")
	run(n.t, "ip", "-n", n.outside(), "rule", "add", "pref", "1", "lookup", "local")
	run(n.t, "ip", "-n", n.outside(), "rule", "del", "pref", "0", "lookup", "local")
	run(n.t, "ip", "-n", n.outside(), "neigh", "replace", "192.168.7.1", "lladdr", at, "dev", uplink)
	if out, err := n.dials(n.outside(), fmt.Sprintf("127.0.0.1:%d", port), silence); err == nil {
		n.t.Errorf("from outside, the node's loopback leads to a pod: %s", out)
	}
}

// stripped leaves out what comes and goes with a test's namespaces.
func stripped(traces map[string]string) map[string]string {
	for k := range traces {
		if strings.HasPrefix(k, "netns ") || strings.HasPrefix(k, "mount nsfs") || strings.Contains(k, "/run/netns/") {
			delete(traces, k)
		}
	}
	return traces
}

// What a port is for clients outside stands beside what it is for others: one number,
// one row, also of a loopback's.
func TestPorts_AreListedOnce(t *testing.T) {
	n := newNode(t)
	x := n.ported("veth", mapping(8081, "tcp", ""), mapping(8083, "tcp", "127.0.0.1"))
	x.add()
	var list []struct {
		ID       int
		Service  string
		Port     int
		Backends []string
	}
	out, err := n.toolCommand("svc", "ls", "-o", "json").Output()
	if err == nil {
		err = json.Unmarshal(out, &list)
	}
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, s := range list {
		at := fmt.Sprint(s.Service, " ", s.Port)
		if s.ID == 0 || seen[at] {
			t.Errorf("%s has number %d, or is there twice: %s", at, s.ID, out)
		}
		seen[at] = true
	}
	if len(seen) != 5 { // 8081 of all addresses and both loopbacks, and 8083
		t.Errorf("the ports are %v", seen)
	}
	x.del()
}
