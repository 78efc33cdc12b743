// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
	"testing"
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
