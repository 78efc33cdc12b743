// SPDX-License-Identifier: Apache-2.0

package masquerade

import (
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// alone puts the test's thread, which dies with it, into a network namespace.
func alone(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
}

func nftRun(t *testing.T, script string) string {
	t.Helper()
	cmd := exec.Command("nft", "-f", "-")
	if script == "" {
		cmd = exec.Command("nft", "list", "ruleset")
	}
	cmd.Stdin = strings.NewReader(script)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

func has(t *testing.T, parts map[string]bool) {
	t.Helper()
	rules := nftRun(t, "")
	for part, want := range parts {
		if strings.Contains(rules, part) != want {
			t.Errorf("%q: %v, want %v, in\n%s", part, !want, want, rules)
		}
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var (
	excluded = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}
	one, two = netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd00::2")
)

// Groups are there without anything passing them; the hook comes and goes, in
// any order with them.
func TestAHookIsApartFromGroups(t *testing.T) {
	for name, first := range map[string]bool{"hook first": true, "groups first": false} {
		t.Run(name, func(t *testing.T) {
			alone(t)
			table := Table{DefaultTable}
			if first {
				ok(t, table.Hook())
			}
			ok(t, table.Add("a", excluded, []netip.Addr{one}))
			ok(t, table.Add("b", nil, []netip.Addr{two}))
			ok(t, table.Add("a", excluded, []netip.Addr{one})) // again
			hooked, err := table.Hooked()
			ok(t, err)
			if hooked != first {
				t.Errorf("hooked: %v", hooked)
			}
			has(t, map[string]bool{"type nat hook": first, "\t\tmasquerade\n": first, "jump group-a\n\t\tjump group-b\n\t}": true, "10.9.0.1": true, "fd00::2": true})
			for range 2 {
				ok(t, table.Hook())
			}
			has(t, map[string]bool{"type nat hook postrouting": true, "jump inside\n\t\tjump groups\n\t}": true})
			ok(t, table.Keep([]string{"b"}))
			has(t, map[string]bool{"group-a": false, "pods4-a": false, "jump group-b": true, "type nat hook": true})
			for range 2 {
				ok(t, table.Unhook())
			}
			has(t, map[string]bool{"type nat hook": false, "masquerade": false, "jump group-b": true})
			ok(t, table.Keep(nil))
			has(t, map[string]bool{"table": false})
			ok(t, table.Unhook())
			ok(t, table.Delete())
		})
	}
}

// The plugin removes its own groups, not the command line's, nor what an ADD that is
// under way counts on.
func TestEachRemovesItsOwnGroups(t *testing.T) {
	alone(t)
	table, pods := Table{DefaultTable}, PodGroup(excluded)
	ok(t, table.Add(pods, excluded, []netip.Addr{one}))
	ok(t, table.Add("a", nil, []netip.Addr{two}))
	ok(t, table.Hook())
	ok(t, table.Keep(nil))
	has(t, map[string]bool{"group-a": false, "jump group-" + pods: true, "10.9.0.1": true, "type nat hook": true})
	ok(t, table.Drop(pods, true))
	has(t, map[string]bool{"group-": false, "type nat hook": true})
	ok(t, table.Keep([]string{"coming"}))
	has(t, map[string]bool{"type nat hook": true})
	ok(t, table.Add(pods, excluded, nil))
	ok(t, table.Drop(pods, false))
	has(t, map[string]bool{"table": false})
}

// What is inside stays known; nobody's packets are tracked for it.
func TestATableWithoutGroupsIsOffItsHook(t *testing.T) {
	alone(t)
	table := Table{DefaultTable}
	ok(t, table.SetInside(excluded))
	ok(t, table.Hook())
	ok(t, table.Add("a", nil, []netip.Addr{one}))
	for range 2 {
		ok(t, table.Keep(nil))
		has(t, map[string]bool{"group-a": false, "10.9.0.0/16": true, "type nat hook": false, "masquerade": false})
	}
}

// Who flushes chains takes the rules, and leaves chains and sets. What is there without a
// rule because nobody needs one is not meant.
func TestATableWithoutItsRulesIsHollow(t *testing.T) {
	alone(t)
	table := Table{DefaultTable}
	is := func(when string, want bool) {
		t.Helper()
		if got, err := table.Hollow(); err != nil || got != want {
			t.Errorf("%s: hollow: %v, %v; want %v", when, got, err, want)
		}
	}
	is("no table", false)
	ok(t, table.SetInside(nil))
	is("nothing is inside", false)
	for _, flush := range []string{"table inet mustang", "chain inet mustang postrouting", "chain inet mustang worn", "chain inet mustang groups", "chain inet mustang group-a"} {
		ok(t, table.Add("a", excluded, []netip.Addr{one}))
		is("a group", false)
		ok(t, table.Hook())
		is("and the hook", false)
		nftRun(t, "flush "+flush+"\n")
		is("after flush "+flush, true)
		ok(t, table.Delete())
	}
	ok(t, table.Add("a", nil, []netip.Addr{one}))
	ok(t, table.Hook())
	ok(t, table.Unhook())
	is("off its hook", false)
}

// What an earlier version made stays for as long as a pod of it does.
func TestGroupsOfEarlierVersions(t *testing.T) {
	alone(t)
	nftRun(t, `table inet mustang {
		set pods4-old { type ipv4_addr; elements = { 10.9.0.7 }; }
		set pods6-old { type ipv6_addr; }
		chain inside { }
		chain out-old { type nat hook postrouting priority srcnat
			jump inside
			ip saddr @pods4-old ip daddr != @pods4-old masquerade
		}
	}
`)
	table := Table{DefaultTable}
	ok(t, table.Add("new", excluded, []netip.Addr{one}))
	ok(t, table.Hook())
	ok(t, table.Keep([]string{"old", "new"}))
	members, err := table.Members("old")
	ok(t, err)
	if len(members) != 1 {
		t.Errorf("of the old group: %v", members)
	}
	has(t, map[string]bool{"chain out-old": true, "jump out-old": false, "jump group-new": true})
	ok(t, table.Keep([]string{"new"}))
	has(t, map[string]bool{"out-old": false, "pods4-old": false, "jump group-new": true})
}

func TestATableIsOurs(t *testing.T) {
	for table, want := range map[string]bool{"inet mustang": true, "inet mustang-0011aabb": true, "inet mustangs": false, "ip mustang": false, "inet nat": false} {
		if IsOurs(table) != want {
			t.Errorf("%s: %v", table, !want)
		}
	}
}

// chain is a chain's rules, as nft shows them.
func chain(t *testing.T, name string) (rules []string) {
	t.Helper()
	out, err := exec.Command("nft", "list", "chain", "inet", DefaultTable, name).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "\t\t") {
			rules = append(rules, strings.TrimSpace(line))
		}
	}
	return rules
}

// A group's packets wear the node's address by their source, unless they go to what is
// inside or to the group, and each rule is there once however often it is made.
func TestAGroupsRules(t *testing.T) {
	alone(t)
	table := Table{DefaultTable}
	for range 2 {
		ok(t, table.Add("a", excluded, []netip.Addr{one, two}))
		ok(t, table.Hook())
		ok(t, table.Unhook())
		ok(t, table.Hook())
	}
	var want []string
	for _, p := range append(slices.Clone(AlwaysInside), excluded...) {
		family := "ip"
		if p.Addr().Is6() {
			family = "ip6"
		}
		want = append(want, family+" daddr "+strings.TrimSuffix(p.String(), "/32")+" return")
	}
	want = append(want, "ip saddr @pods4-a ip daddr != @pods4-a counter packets 0 bytes 0 jump worn",
		"ip6 saddr @pods6-a ip6 daddr != @pods6-a counter packets 0 bytes 0 jump worn")
	if got := chain(t, "group-a"); !slices.Equal(got, want) {
		t.Errorf("the group's chain is\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if got := chain(t, wornChain); !slices.Equal(got, []string{"masquerade"}) {
		t.Errorf("the last chain is %q", got)
	}
	// One that is not there is success, and keeps nobody else in.
	ok(t, table.Remove("a", []netip.Addr{netip.MustParseAddr("10.9.0.9"), one}))
	if left, err := table.Members("a"); err != nil || !slices.Equal(left, []netip.Addr{two}) {
		t.Errorf("members are %v, %v", left, err)
	}
}
