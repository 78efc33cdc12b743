// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
)

// What a kernel lacks is told in the words that docs/kernels.md has: a person
// who reads one finds the other.
func TestStatusSaysWhatTheKernelLacksAsTheDocsDo(t *testing.T) {
	docs, err := os.ReadFile("../../docs/kernels.md")
	if err != nil {
		t.Fatal(err)
	}
	none, no4 := datapath.Features{}, datapath.Features{BigTCP6: true}
	sentences := append(none.Without(), no4.Without()...)
	if len(none.Without()) < 4 || len(no4.Without()) < 4 {
		t.Fatalf("a kernel that has nothing is said to lack only %q", sentences)
	}
	for _, s := range sentences {
		if !strings.Contains(string(docs), s) {
			t.Errorf("docs/kernels.md does not say %q", s)
		}
	}
	all := datapath.Features{TCX: true, SetRetval: true, BigTCP6: true, BigTCP4: true, EndSockets: true}
	if said := all.Without(); len(said) > 0 {
		t.Errorf("a kernel that has everything is said to lack %q", said)
	}
}

// The test's own kernel ends sockets and has BIG TCP: other tests do both.
func TestProbeFindsWhatOtherTestsUse(t *testing.T) {
	f := datapath.Probe()
	if !f.EndSockets || !f.BigTCP6 {
		t.Errorf("sockets ended %v, BIG TCP for IPv6 %v, on a kernel that has both", f.EndSockets, f.BigTCP6)
	}
}

// Who reads a list from JSON need not ask whether there is one.
func TestListsOfNothingAreLists(t *testing.T) {
	w := newTool(t)
	look := func(when string, more ...string) {
		t.Helper()
		for _, line := range append(more, "svc ls", "ep ls", "pod ls", "policy ls", "node ls", "node set", "edge show", "status", "lab ls") {
			if out := w.ok(append(strings.Fields(line), "-o", "json")...); strings.Contains(out, "null") {
				t.Errorf("%s, %s:\n%s", when, line, out)
			}
		}
	}
	look("nothing")
	ns := w.netns + "-1"
	w.sh("ip netns add %s && ip -n %s link add h1 type veth peer name eth0 netns %s && ip -n %s addr add 10.8.0.1/32 dev eth0 && ip -n %s link set eth0 up", ns, w.netns, ns, ns, ns)
	t.Cleanup(func() { w.sh("ip netns del %s", ns) })
	w.ok("ep", "add", "--ifname=eth0", "--netns=/var/run/netns/"+ns, "--service-path=tc")
	w.ok("node", "add", "n2", "--address", "10.3.0.2")
	w.ok("svc", "add", "--service", "10.96.0.1:80")
	const allow = "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: a}, spec: {podSelector: {matchLabels: {a: b}}, policyTypes: [Egress]}}"
	if _, errs, code := w.run(allow, "policy", "apply", "-f", "-"); code != 0 {
		t.Fatal(errs)
	}
	look("little", "why 192.0.2.7 192.0.2.1:80", "why 192.0.2.7 192.0.2.1")
}
