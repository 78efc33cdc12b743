// SPDX-License-Identifier: Apache-2.0

package masquerade

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/nft"
)

// A kernel without nftables has no groups, and says so to who wants packets to pass them; nobody waits for it.
func TestAKernelWithoutNftables(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("nftables needs root")
	}
	alone(t)
	if err := nft.Check(); !errors.Is(err, nft.ErrNone) {
		if line, _ := os.ReadFile("/proc/cmdline"); strings.Contains(string(line), "module_blacklist=nf_tables") {
			t.Fatalf("this kernel is to have no nftables: %v", err)
		}
		t.Skipf("this kernel has nftables (%v); test/vm/suite runs this in a guest without it", err)
	}
	table, group := Table{"mst-none-test"}, Group("net", nil)
	pods := []netip.Addr{netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")}
	for name, do := range map[string]func() error{
		"Add":       func() error { return table.Add(group, nil, pods) },
		"Remove":    func() error { return table.Remove(group, pods) },
		"SetInside": func() error { return table.SetInside(prefixes("10.0.0.0/24", "fd00::/64")) },
		"Keep":      func() error { return table.Keep(nil) },
		"Drop":      func() error { return table.Drop(group, false) },
		"Delete":    func() error { return table.Delete() },
	} {
		if err := do(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if missing, err := table.Missing(group, pods); err != nil || len(missing) > 0 {
		t.Errorf("%v are missing (%v)", missing, err)
	}
	if have, err := table.Members(group); err != nil || len(have) > 0 {
		t.Errorf("members %v (%v)", have, err)
	}
	for name, ask := range map[string]func() (bool, error){"hooked": table.Hooked, "hollow": table.Hollow, "knows inside": table.KnowsInside} {
		if is, err := ask(); err != nil || is {
			t.Errorf("%s: %v (%v)", name, is, err)
		}
	}
	if err := table.Hook(); !errors.Is(err, nft.ErrNone) {
		t.Errorf("Hook: %v, want %v", err, nft.ErrNone)
	}
}
