// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// In a cluster where policies come and go, each agent hears of all of them.
func TestPoliciesThatComeAndGoLeaveNothing(t *testing.T) {
	m := New(Limits{Peers: 1 << 10, Ports: 1 << 10, Identities: 1 << 10, Prefixes: 1 << 10})
	named := func(i int) Policy {
		return Policy{Key: Key{Namespace: "ns", Name: fmt.Sprint("p", i)}, IsolatesIngress: true, Ingress: []Rule{{}, {}}}
	}
	stays := named(0)
	m.SetPolicy(stays)
	want := RuleName{stays.Key, Ingress, 1}
	number := m.names.numbers[want]
	for i := 1; i <= 3*remembered; i++ {
		p := named(i)
		m.SetPolicy(p)
		m.SetPolicy(stays) // as with each change of it
		m.DeletePolicy(p.Key)
		m.Plan()
	}
	if n := len(m.names.rules); n > 2*remembered || n != len(m.names.numbers) {
		t.Errorf("%d numbers of %d rules, of which two are there", n, len(m.names.numbers))
	}
	if got, ok := m.Rule(number); !ok || got != want {
		t.Errorf("the rule that stays is %+v (%v), want %+v", got, ok, want)
	}
}

// A pod may have an address on two interfaces, as while one takes the other's place.
func TestAnAddressOfTwoInterfaces(t *testing.T) {
	m := New(Limits{Peers: 1 << 10, Ports: 1 << 10, Identities: 1 << 10, Prefixes: 1 << 10})
	a, key := netip.MustParseAddr("10.0.0.1"), Key{Namespace: "ns", Name: "here"}
	m.SetPod(Pod{Key: key}) // nobody has published its address yet
	m.SetPod(Pod{Key: Key{Namespace: "ns", Name: "before"}, Addrs: []netip.Addr{a}})
	for id := range uint32(2) {
		m.SetEndpoint(Endpoint{ID: id + 1, Pod: key, Addrs: []netip.Addr{a}})
	}
	m.DeleteEndpoint(1)
	if p, _ := m.PodAt(a); p.Key != key {
		t.Errorf("%s is %v's after one interface went, want %v's", a, p.Key, key)
	}
	m.DeleteEndpoint(2)
	if p, _ := m.PodAt(a); p.Name != "before" {
		t.Errorf("%s is %v's without any", a, p.Key)
	}
}

// An address passes from a pod that is not gone yet to another. What is said of the first
// from then on does not bring it back.
func TestALabelIsNoClaimOnAnAddress(t *testing.T) {
	m := New(Limits{Peers: 1 << 10, Ports: 1 << 10, Identities: 1 << 10, Prefixes: 1 << 10})
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	old, now := Key{Namespace: "ns", Name: "old"}, Key{Namespace: "ns", Name: "now"}
	has := func(p Key, label string, addrs ...netip.Addr) {
		m.SetPod(Pod{Key: p, Labels: map[string]string{"l": label}, Addrs: addrs})
	}
	has(old, "1", a)
	has(now, "1", a)
	has(old, "2", a)
	has(old, "2", a, b)
	if p, _ := m.PodAt(a); p.Key != now {
		t.Errorf("after labels and another address of the old one, %s is %v's", a, p.Key)
	}
	has(old, "2", b)
	has(old, "2", a, b) // it comes again
	if p, _ := m.PodAt(a); p.Key != old {
		t.Errorf("%s is %v's, want the one's that came last", a, p.Key)
	}
	m.DeletePod(old)
	if p, _ := m.PodAt(a); p.Key != now {
		t.Errorf("%s is %v's, want the one's that is left", a, p.Key)
	}
}

// A host-network pod has the node's address, which is no pod's: what a policy says of the
// pod's labels is nothing about the node.
func TestAHostNetworkPodClaimsNoAddress(t *testing.T) {
	m := New(Limits{Peers: 1 << 10, Ports: 1 << 10, Identities: 1 << 10, Prefixes: 1 << 10})
	pod := Pod{Key: Key{Namespace: "ns", Name: "proxy"}, Labels: map[string]string{"app": "proxy"}, Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
	is := func(when string, want bool) {
		t.Helper()
		if p, known := m.PodAt(pod.Addrs[0]); known != want {
			t.Errorf("%s: the address is %v's", when, p.Key)
		}
	}
	pod.HostNetwork = true
	m.SetPod(pod)
	is("in the node's network", false)
	pod.HostNetwork = false
	m.SetPod(pod)
	is("made anew in its own", true)
	pod.HostNetwork = true
	m.SetPod(pod)
	is("made anew in the node's", false)
}

// An interface whose pod is deleted while it is still there is closed, and nobody takes
// who is there for the pod.
func TestAnInterfaceOutlivesItsPodClosed(t *testing.T) {
	m := New(Limits{Peers: 1 << 10, Ports: 1 << 10, Identities: 1 << 10, Prefixes: 1 << 10})
	pod := Pod{Key: Key{Namespace: "ns", Name: "web"}, Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}
	alike := Pod{Key: Key{Namespace: "ns", Name: "web-2"}} // keeps the identity that both have
	m.SetNamespace(state.OwnerCLI, "ns", nil)
	m.SetPod(pod)
	m.SetPod(alike)
	m.SetPolicy(Policy{Key: alike.Key, IsolatesIngress: true, Ingress: []Rule{{Peers: []Peer{{Pods: &Selector{}}}}}})
	m.SetEndpoint(Endpoint{ID: 3, Pod: alike.Key})
	m.SetEndpoint(Endpoint{ID: 1, Pod: pod.Key, Addrs: pod.Addrs})
	m.SetEndpoint(Endpoint{ID: 2, Pod: pod.Key, Addrs: []netip.Addr{netip.MustParseAddr("10.1.0.1")}}) // of its second network
	for id, got := range m.Plan().Put.Endpoints {
		if got == Unknown {
			t.Errorf("its pod is known, and endpoint %d is closed", id)
		}
	}
	m.DeletePod(pod.Key)
	change := m.Plan()
	for id := uint32(1); id <= 2; id++ {
		if got, told := change.Put.Endpoints[id]; !told || got != Unknown {
			t.Errorf("its pod is gone, and the change has %+v (%v) of endpoint %d, want it closed", got, told, id)
		}
	}
	for _, a := range []string{"10.0.0.1", "10.1.0.1"} {
		at := netip.MustParseAddr(a)
		if who, stays := change.Put.Identities[at]; who.Pod != 0 || !stays && !slices.Contains(change.Gone.Identities, at) {
			t.Errorf("its pod is gone, and %s is still its: %+v, gone %v", a, who, change.Gone.Identities)
		}
	}
}

// A namespace is called what it is called, whatever its labels say: a file may be another one's copy.
func TestANamespaceHasNoOthersName(t *testing.T) {
	m := New(Limits{Peers: 1 << 10, Ports: 1 << 10, Identities: 1 << 10, Prefixes: 1 << 10})
	shop := Selector{{Key: NamespaceName, Operator: In, Values: []string{"shop"}}}
	m.SetNamespace(state.OwnerCLI, "shop-test", map[string]string{NamespaceName: "shop", "team": "x"})
	if m.inNamespaces(shop, "shop-test") || !m.inNamespaces(shop, "shop") {
		t.Errorf("shop-test has the labels %v", m.namespaceLabels("shop-test"))
	}
	if m.namespaceLabels("shop-test")["team"] != "x" {
		t.Errorf("its own are gone: %v", m.namespaceLabels("shop-test"))
	}
}
