// SPDX-License-Identifier: Apache-2.0

package masquerade

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
)

func prefixes(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestPrefixesAreJoined(t *testing.T) {
	for name, test := range map[string]struct{ in, want []netip.Prefix }{
		"none":                   {},
		"two halves":             {prefixes("10.0.0.0/24", "10.0.1.0/24"), prefixes("10.0.0.0/23")},
		"neighbours, no halves":  {prefixes("10.0.1.0/24", "10.0.2.0/24"), prefixes("10.0.1.0/24", "10.0.2.0/24")},
		"four quarters":          {prefixes("10.0.3.0/24", "10.0.0.0/24", "10.0.2.0/24", "10.0.1.0/24"), prefixes("10.0.0.0/22")},
		"one in another":         {prefixes("10.0.0.0/16", "10.0.7.0/24"), prefixes("10.0.0.0/16")},
		"the other family":       {prefixes("fd00::/64", "fd00:0:0:1::/64", "10.0.0.0/8"), prefixes("10.0.0.0/8", "fd00::/63")},
		"not at its first place": {prefixes("10.0.0.9/24"), prefixes("10.0.0.0/24")},
		"everything":             {prefixes("0.0.0.0/1", "128.0.0.0/1"), prefixes("0.0.0.0/0")},
	} {
		if got := Join(test.in); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// TestInsideStaysWithoutPods: what is inside is known also while no pod is
// masqueraded, and another answer replaces it.
func TestInsideStaysWithoutPods(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("nftables needs root")
	}
	alone(t)
	table, pod := Table{"mst-inside-test"}, []netip.Addr{netip.MustParseAddr("10.0.0.5")}
	group := Group("net", nil)
	tell := func(list ...string) func() error {
		return func() error { return table.SetInside(prefixes(list...)) }
	}
	three := map[string]bool{"10.0.0.0/24": true, "10.0.2.0/23": true, "fd00::/64": true, "ip daddr @inside4 accept": true, "ip6 daddr @inside6 accept": true}
	for i, step := range []struct {
		do   func() error
		want map[string]bool
	}{
		{tell("10.0.0.0/24", "10.0.2.0/24", "10.0.3.0/24", "fd00::/64"), three},
		{func() error { return table.Add(group, nil, pod) }, three},
		{func() error { return table.Remove(group, pod) }, three},
		{func() error { return table.Keep(nil) }, three},
		{tell("10.0.0.0/24"), map[string]bool{"10.0.0.0/24": true, "10.0.2.0": false, "fd00": false, "ip daddr @inside4 accept": true, "@inside6": false}},
		{tell("255.255.255.0/24", "ffff::/16"), map[string]bool{"255.255.255.0": true, "ffff::": true, "10.0.0.0": false}},
		{tell("0.0.0.0/0"), map[string]bool{"0.0.0.0": true, "ffff::": false}},
		{tell(), map[string]bool{"accept": false, "0.0.0.0": false}},
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		rules := nftRun(t, "")
		for part, want := range step.want {
			if strings.Contains(rules, part) != want {
				t.Errorf("step %d: %q is there: %t, want %t, in\n%s", i, part, !want, want, rules)
			}
		}
		if knows, err := table.KnowsInside(); err != nil || knows != (i < 7) {
			t.Errorf("step %d: somebody has said what is inside: %t (%v)", i, knows, err)
		}
	}
	for range 2 { // what is gone is success
		if err := table.Delete(); err != nil {
			t.Error(err)
		}
	}
}

// A large cluster's networks, none beside another: the kernel's answers to as many rules found no room in a socket.
func TestManyNetworksAreInside(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("nftables needs root")
	}
	alone(t)
	table := Table{"mst-inside-test"}
	var list []netip.Prefix
	for i := range 10_000 {
		list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i << 1)}), 24),
			netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 4: byte(i >> 7), 5: byte(i << 1)}), 48))
	}
	for range 2 {
		if err := table.SetInside(list); err != nil {
			t.Fatal(err)
		}
	}
	rules := nftRun(t, "")
	for _, p := range []netip.Prefix{list[0], list[1], list[len(list)-2], list[len(list)-1]} {
		if !strings.Contains(rules, p.String()) {
			t.Errorf("%v is not inside", p)
		}
	}
}
