// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/lab"
)

// routes are a node's, to pods of other nodes.
func (w *world) routes(n *lab.Node) string {
	w.t.Helper()
	return w.run(&n.Space, "ip -4 route show proto 109") + w.run(&n.Space, "ip -6 route show proto 109")
}

// A node that vanishes takes its own routes along; what others' pods say to each
// other does not stop.
func (w *world) removedNode() {
	w.t.Helper()
	first, third := w.lab.Nodes()[0], w.lab.Nodes()[2]
	c, err := w.dial("tcp", w.direct(w.far))
	w.must(err)
	defer c.Close()
	_, _, err = greeting(c)
	w.must(err)
	if r := w.routes(first); !strings.Contains(r, third.PodNet4.String()) || !strings.Contains(r, third.PodNet6.String()) {
		w.t.Fatalf("no routes to the third node's pods:\n%s", r)
	}
	w.mustang(first, "node", "rm", "n3")
	r := w.routes(first)
	if strings.Contains(r, third.PodNet4.String()) || strings.Contains(r, third.PodNet6.String()) || strings.Count(r, "\n") != 2 {
		w.t.Errorf("after node rm:\n%s", r)
	}
	if ls := w.mustang(first, "node", "ls"); strings.Contains(ls, "n3") || !strings.Contains(ls, "n2") {
		w.t.Errorf("after node rm:\n%s", ls)
	}
	fmt.Fprint(c, "still there")
	buf := make([]byte, 11)
	if _, err := c.Read(buf); err != nil || string(buf) != "still there" {
		w.t.Errorf("the connection to the second node: %q, %v", buf, err)
	}
	// It may come back.
	w.must(w.lab.Join(deadline(w.t), w.join))
	if r := w.routes(first); !strings.Contains(r, third.PodNet4.String()) {
		w.t.Errorf("after joining again:\n%s", r)
	}
}

func TestForeignRoutesStay(t *testing.T) {
	w := newWorld(t, lab.Config{}, lab.Join{Mode: "direct"})
	first, second := w.lab.Nodes()[0], w.lab.Nodes()[1]
	w.mustang(first, "node", "rm", "n2")
	w.run(&first.Space, "ip route add %s via %s proto bird", second.PodNet4, second.Wire4)
	w.must(w.lab.Join(deadline(t), lab.Join{Mode: "direct"}))
	w.tcp(w.far, w.direct(w.far))
	w.mustang(first, "node", "rm", "n2")
	if r := w.run(&first.Space, "ip route show proto bird"); !strings.Contains(r, second.PodNet4.String()) {
		t.Errorf("the routing daemon's route is gone: %s", w.run(&first.Space, "ip route"))
	}
}

// After a reset, nothing is left of what carries packets to other nodes.
func (w *world) reset() {
	w.t.Helper()
	n := w.lab.Nodes()[0]
	w.mustang(n, "reset")
	if r := w.routes(n); r != "" {
		w.t.Errorf("after reset:\n%s", r)
	}
	if links := w.run(&n.Space, "ip -br link show type vxlan"); links != "" {
		w.t.Errorf("after reset:\n%s", links)
	}
	for _, dev := range []string{lab.Uplink, lab.Wire} {
		if f := w.run(&n.Space, "tc filter show dev %s ingress", dev); f != "" {
			w.t.Errorf("after reset, at %s:\n%s", dev, f)
		}
	}
}

// What is wrong is said in a sentence, and nothing has changed.
func TestBadNodesAreNamed(t *testing.T) {
	w := newWorld(t, lab.Config{}, lab.Join{Mode: "direct"})
	n := w.lab.Nodes()[0]
	before := w.mustang(n, "node", "ls", "-o", "json")
	for line, want := range map[string]string{
		"add X --address 10.3.0.9":                                      "node name",
		"add n9 --address 10.3.0.9,10.3.0.10":                           "of one family",
		"add n9 --address 127.0.0.1":                                    "cannot be reached",
		"add n9 --address 10.3.0.2":                                     "is node n2's",
		"add n9 --address 10.3.0.9 --pod-cidr 10.1.1.128/25":            "overlaps 10.1.1.0/24 of node n2",
		"add n9 --address 10.3.0.9 --pod-cidr 10.9.0.1/24":              "is not a network",
		"add n9 --address 10.3.0.9 --pod-cidr 10.3.0.8/29 --mode vxlan": "pod CIDR 10.3.0.8/29 has the address 10.3.0.9 of node n9",
		"add n9 --address 10.3.0.9 --pod-cidr 10.3.0.0/29 --mode vxlan": "pod CIDR 10.3.0.0/29 has the address 10.3.0.1 of node n1",
		"add n9 --address 10.3.0.9 --pod-cidr fd00:9::/64":              "no address of its family",
		"add n9 --address 10.3.0.9 --mode tunnel":                       "use direct or vxlan",
		"rm n9":                     "node n9: not found",
		"set --host-routing kernel": "use ebpf or legacy",
		"set --vni 16777216":        "out of range",
		"set --devices nosuch0":     "does not exist",
		"add n9 --address fd00:10:3::9 --pod-cidr fd00:9::1/64":       "is not a network",
		"add n9 --address 10.3.0.9 --pod-cidr 10.9.0.0/24,10.9.0.0/8": "is not a network",
	} {
		_, err := n.Mustang(deadline(t), append([]string{"node"}, strings.Fields(line)...)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("node %s: %v, want it to say %q", line, err, want)
		}
	}
	if after := w.mustang(n, "node", "ls", "-o", "json"); after != before {
		t.Errorf("the list changed:\n%s\n%s", before, after)
	}
}
