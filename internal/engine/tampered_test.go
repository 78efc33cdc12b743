// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
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
	for _, c := range []struct{ breaks, mends, says string }{
		{"sysctl -qw net.ipv4.ip_forward=0", "sysctl -qw net.ipv4.ip_forward=1", "net.ipv4.ip_forward is 0"},
		{"sysctl -qw net.ipv6.conf.all.forwarding=0", "sysctl -qw net.ipv6.conf.all.forwarding=1", "net.ipv6.conf.all.forwarding is 0"},
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
