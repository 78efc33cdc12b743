// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"net/netip"
	"strings"
	"testing"
	"unicode"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/state"
)

func TestFilterOfEnds(t *testing.T) {
	plain := Flow{
		Source:      End{Address: netip.MustParseAddr("10.1.0.2"), Namespace: "shop", Pod: "web"},
		Destination: End{Address: netip.MustParseAddr("10.1.0.4"), Port: 8080, Namespace: "shop", Pod: "db"},
	}
	led := plain
	led.Service = &ServiceRef{Frontend: netip.MustParseAddrPort("10.96.0.1:80"), Number: 1}
	for _, x := range []struct {
		name       string
		filter     Filter
		plain, led bool
	}{
		{"a Service's prefix", Filter{To: []string{"10.96.0.0/12"}}, false, true},
		{"a Service's address", Filter{To: []string{"10.96.0.1"}}, false, true},
		{"another Service's address", Filter{To: []string{"10.96.0.2"}}, false, false},
		{"the backend's address", Filter{To: []string{"10.1.0.4"}}, true, true},
		{"the backend's name", Filter{To: []string{"shop/db"}}, true, true},
		{"a Service sends nothing", Filter{From: []string{"10.96.0.0/12"}}, false, false},
		{"both ends", Filter{From: []string{"web"}, To: []string{"10.96.0.1"}}, false, true},
		{"IPv4 written as IPv6", Filter{To: []string{"::ffff:10.1.0.4"}}, true, true},
		{"a prefix of IPv4 written as IPv6", Filter{From: []string{"::ffff:10.1.0.0/112"}}, true, true},
		{"a Service of IPv4 written as IPv6", Filter{Services: []string{"::ffff:10.96.0.1"}}, false, true},
		{"its port, too", Filter{Services: []string{"[::ffff:10.96.0.1]:80"}}, false, true},
	} {
		if err := x.filter.Check(); err != nil {
			t.Errorf("%s: %v", x.name, err)
		}
		if got := x.filter.Match(plain); got != x.plain {
			t.Errorf("%s: a flow without a Service matches: %v", x.name, got)
		}
		if got := x.filter.Match(led); got != x.led {
			t.Errorf("%s: a flow by a Service matches: %v", x.name, got)
		}
	}
}

// A drop at the edge is told as that, by a flow and by a metric.
func TestEveryDirectionHasALabel(t *testing.T) {
	for direction, name := range datapath.DirectionNames {
		if name == "" || strings.ContainsFunc(name, func(r rune) bool { return r != '_' && !unicode.IsLower(r) }) {
			t.Errorf("direction %d is called %q: a label is a word", direction, name)
		}
	}
}

func TestCheckLetsWhatCanMatchPass(t *testing.T) {
	for _, f := range []Filter{
		{Protocols: []string{"tcp", "UDP", "sctp", "icmpv6", "arp", "ipv6", "protocol 47", "ethertype 0x88cc"}},
		{From: []string{"web", "shop/web", "10.0.0.1", "fd00::1", "10.0.0.1/8", "fd00::/8", "10.0.0.300"}},
		{Services: []string{"1", "10.96.0.1", "10.96.0.1:80", "[fd00::1]:80", "fd00::0", "fd00:0:0:0:0:0:0:0"}},
		{Pods: []string{"web", "shop/web", "Web_1"}, Namespaces: []string{"shop-1"}},
		{From: []string{"1.2.3.4", "fd00::2"}, To: []string{"fd00::1"}}, {From: []string{"web"}, To: []string{"fd00::1"}},
	} {
		if err := f.Check(); err != nil {
			t.Errorf("%+v: %v", f, err)
		}
	}
}

func TestCheckRefusesWhatCannotMatch(t *testing.T) {
	for _, f := range []Filter{
		{From: []string{"10.0.0/24"}}, {To: []string{"[fd00::1]"}}, {From: []string{"fd00:zz"}}, {To: []string{"10.0.0.0/99"}}, {From: []string{"10.0.0.1:80"}},
		{Reasons: []string{"no_route"}, Verdicts: []string{"forwarded"}},
		{Pods: []string{"a/b/c"}}, {Pods: []string{"shop/"}}, {From: []string{"a/b/c"}}, {Namespaces: []string{"A_b"}},
		{Services: []string{"10.96.0.100:0"}}, {Services: []string{"[fd00::1]:0"}},
		{Services: []string{"fe80::1%eth0"}}, {Services: []string{"[fe80::1%eth0]:80"}}, {To: []string{"fe80::1%eth0"}},
		{From: []string{"1.2.3.4"}, To: []string{"fd00::1"}}, {From: []string{"fd00::/8"}, To: []string{"10.0.0.0/8", "1.2.3.4"}},
	} {
		if err := f.Check(); err == nil {
			t.Errorf("%+v is taken", f)
		}
	}
}

// A pod without a name has no namespace in its name, and is in one nonetheless.
func TestANamespaceHasItsPodsWithoutAName(t *testing.T) {
	for in, ref := range map[string]state.PodRef{"shop": {Namespace: "shop"}, "default": {}, "front": {Namespace: "front", Name: "web"}} {
		flow := Flow{Source: endOf(state.Endpoint{ID: 1, Netns: "/var/run/netns/a", Pod: ref})}
		for _, ns := range []string{"shop", "default", "front"} {
			if got := (Filter{Namespaces: []string{ns}}).Match(flow); got != (ns == in) {
				t.Errorf("--namespace %s of a pod in %s: %v", ns, in, got)
			}
		}
	}
}
