// SPDX-License-Identifier: Apache-2.0

package cni_test

// Containers that are gone without a DEL: a runtime that lost its state (k3s-killall, a wiped
// root of containerd) knows of none that it had, and calls GC for no list of version 1.0.0.

import (
	"strings"
	"testing"
)

func TestADD_GetsWhatDeadContainersHad(t *testing.T) {
	for _, mode := range modesOnce(t) {
		t.Run(mode, func(t *testing.T) {
			if mode == "host-device" {
				t.Skip(ownNetwork)
			}
			n := newNode(t)
			conf := n.config(mode).with("cniVersion", "1.0.0").with("masquerade", true).with("ipam", map[string]any{"type": "mustang",
				"pools": []any{map[string]any{"subnet": "10.62.7.0/24", "start": "10.62.7.2", "end": "10.62.7.4"}}})
			warm := n.container()
			warm.add(conf.ports(mapping(8081, "tcp", "")))
			warm.del(conf)
			before, ports := n.traces(), n.portsTable()
			three := func(of []*container) (out []answer) {
				t.Helper()
				for i, c := range of {
					if i == 0 {
						out = append(out, c.add(conf.ports(mapping(8081, "tcp", ""))))
					} else {
						out = append(out, c.add(conf))
					}
				}
				return out
			}
			dead, living := []*container{n.container(), n.container(), n.container()}, []*container{n.container(), n.container(), n.container()}
			three(dead)
			n.refused(living[0].call("ADD", conf), 102, "no address is free")
			for _, c := range dead {
				run(t, "ip", "netns", "del", c.ns)
			}
			given := three(living)
			for _, c := range dead { // late
				c.del(conf)
			}
			for i, c := range living {
				c.ok(c.call("CHECK", conf.prev(given[i])))
			}
			living[0].server(":80")
			if got := n.reaches(n.outside(), "192.168.7.1:8081"); !strings.HasPrefix(got, "hello ") {
				t.Errorf("the host port answers %q", got)
			}
			for _, c := range living {
				c.del(conf)
			}
			n.same(stripped(before), stripped(n.traces()))
			if now := n.portsTable(); now != ports {
				t.Errorf("host ports stay:\n%s\nbefore:\n%s", now, ports)
			}
		})
	}
}

// While addresses are left, too, a dead container has no host port.
func TestADD_GetsAHostPortThatADeadContainerHad(t *testing.T) {
	n := newNode(t)
	conf := n.config("veth").with("cniVersion", "1.0.0").ports(mapping(8081, "tcp", ""))
	dead, living := n.container(), n.container()
	dead.add(conf)
	n.refused(living.call("ADD", conf), 103, "is taken")
	run(t, "ip", "netns", "del", dead.ns)
	a := living.add(conf)
	dead.del(conf)
	living.ok(living.call("CHECK", conf.prev(a)))
	living.del(conf)
}
