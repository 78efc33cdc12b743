// SPDX-License-Identifier: Apache-2.0

package masquerade

import (
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
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
	runtime.LockOSThread() // never unlocked: the namespace ends with the thread
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	table, pod := Table{"mst-inside-test"}, []netip.Addr{netip.MustParseAddr("10.0.0.5")}
	group := Group("net", nil)
	rules := func() int {
		c, err := nftables.New()
		if err != nil {
			t.Fatal(err)
		}
		list, err := c.GetRules(table.nft(), &nftables.Chain{Name: insideChain, Table: table.nft()})
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	for _, step := range []func() error{
		func() error { return table.SetInside(prefixes("10.0.0.0/24", "10.0.2.0/24", "fd00::/64")) },
		func() error { return table.Add(group, nil, pod) },
		func() error { return table.Remove(group, pod) },
		func() error { return table.Keep(nil) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
		if n := rules(); n != 3 {
			t.Fatalf("%d rules say what is inside, want 3", n)
		}
	}
	if err := table.SetInside(prefixes("10.0.0.0/24")); err != nil {
		t.Fatal(err)
	}
	if n := rules(); n != 1 {
		t.Errorf("%d rules after another answer, want 1", n)
	}
	for range 2 { // what is gone is success
		if err := table.Delete(); err != nil {
			t.Error(err)
		}
	}
}
