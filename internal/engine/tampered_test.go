// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// What pods need of the node, and somebody has taken away, is named.
func TestStatusNamesWhatPodsNeedAndIsGone(t *testing.T) {
	n := newNode(t)
	n.run("sysctl -qw net.ipv6.conf.all.forwarding=1")
	a := n.pod(1)
	n.must(func(e *Engine) error {
		_, err := e.AddEndpoint(context.Background(), EndpointSpec{Netns: a, IfName: "eth0", Owner: state.OwnerCNI, Masquerade: &state.Masquerade{}})
		return err
	})
	ruleset := filepath.Join(t.TempDir(), "ruleset")
	n.run("(echo flush ruleset && nft list ruleset) > %s", ruleset)
	for _, c := range []struct{ breaks, mends, says string }{
		{"sysctl -qw net.ipv4.ip_forward=0", "sysctl -qw net.ipv4.ip_forward=1", "net.ipv4.ip_forward is 0"},
		{"sysctl -qw net.ipv6.conf.all.forwarding=0", "sysctl -qw net.ipv6.conf.all.forwarding=1", "net.ipv6.conf.all.forwarding is 0"},
		{"nft flush table inet $(nft list tables | grep -o 'mustang.*')", "nft -f " + ruleset, "nobody masquerades pods"},
		{"nft flush ruleset", "true", "nobody masquerades pods"},
	} {
		said := func() (out bool) {
			n.must(func(e *Engine) error {
				s, err := e.Status()
				out = slices.ContainsFunc(s.Warnings, func(w string) bool { return strings.Contains(w, c.says) })
				return err
			})
			return out
		}
		if said() {
			t.Errorf("before %s: %s", c.breaks, c.says)
		}
		n.run("%s", c.breaks)
		if !said() {
			t.Errorf("after %s: nothing of %s", c.breaks, c.says)
		}
		n.run("%s", c.mends)
	}
}

// What is inside, and the hook, come back after a flush.
func TestAFlushedTableIsRestored(t *testing.T) {
	n := newNode(t)
	a := n.pod(1)
	n.must(func(e *Engine) error {
		if _, err := e.AddEndpoint(context.Background(), EndpointSpec{Netns: a, IfName: "eth0", Owner: state.OwnerCNI, Masquerade: &state.Masquerade{}}); err != nil {
			return err
		}
		return e.SetInside([]netip.Prefix{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("fd09::/48")})
	})
	restores := func(groups, want bool) {
		t.Helper()
		n.must(func(e *Engine) error {
			got, err := e.RestoreMasquerade(func() (bool, error) { return groups, nil })
			if got != want {
				t.Errorf("restored: %v, want %v", got, want)
			}
			return err
		})
	}
	before := n.run("nft list ruleset")
	restores(false, false)
	for _, groups := range []bool{false, true} {
		for _, flush := range []string{"nft flush table inet $(nft list tables | grep -o 'mustang.*')", "nft flush ruleset"} {
			n.run("%s", flush)
			restores(groups, true)
			if got := n.run("nft list ruleset"); strings.Count(got, "\t\tmasquerade\n") != 1 {
				t.Errorf("after %s, nobody masquerades, by\n%s", flush, got)
			}
		}
		for _, what := range []string{"10.9.0.0/16", "fd09::/48", "hook postrouting"} {
			if got := n.run("nft list ruleset"); strings.Count(got, what) != strings.Count(before, what) || !strings.Contains(got, what) {
				t.Errorf("%s is not in\n%s\nas it was in\n%s", what, got, before)
			}
		}
	}
	restores(false, false)
}
