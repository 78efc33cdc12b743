// SPDX-License-Identifier: Apache-2.0

package link

import (
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/netns"
)

// TestBundlesBeyondTheNode: what a pod sends others at once, and how long the
// packets are that its bundles are cut into.
func TestBundlesBeyondTheNode(t *testing.T) {
	const big = 131072
	for _, c := range []struct {
		name   string
		change func(*Spec)
		now    int // bytes that leave the node at once
		late   int // the same once a tunnel has come
		route  string
		note   string
	}{
		{"as they are", func(s *Spec) { s.BigTCP = 0 }, 65536, 65536, "::/0 via fe80::a9fe:a18 mtu 0", ""},
		{"BIG TCP", func(*Spec) {}, big, 65481, "::/0 via fe80::a9fe:a18 mtu 1492", ""},
		{"beside a local MTU", func(s *Spec) { s.LocalMTU, s.LocalCIDRs = MaxLocalMTU, podCIDRs }, 90*1448 + 321, 65481, "::/0 via fe80::a9fe:a18 mtu 1492", ""},
		{"over a narrow wire", func(s *Spec) { s.RouteMTU = 1400 }, big, 65481, "::/0 via fe80::a9fe:a18 mtu 1392", ""},
		{"over a narrow wire, as told at the end", func(s *Spec) { s.ToNodes = func() (int, bool, error) { return 1400, false, nil } }, big, 65481, "::/0 via fe80::a9fe:a18 mtu 1392", ""},
		{"in front of a tunnel", func(s *Spec) { s.RouteMTU, s.Tunnel = 1450, true }, 65536, 65536, "::/0 via fe80::a9fe:a18 mtu 1450", "tunnel"},
		{"the narrowest IPv6", func(s *Spec) { s.MTU = 1280 }, 65536, 65405, "::/0 via fe80::a9fe:a18 mtu 0", "needs an MTU of 1288"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			s := w.spec(Veth, 0)
			s.BigTCP = big
			c.change(&s)
			res := w.add(s)
			pod := attrsOf(t, w.pods[0], DefaultIfName)
			if pod.TSOMaxSize == 0 {
				t.Skip("this kernel has no BIG TCP")
			}
			if got := beyondNode(pod, pod.GSOMaxSize); got != c.now {
				t.Errorf("%d bytes leave the node at once, want %d", got, c.now)
			}
			if r := routes(t, w.pods[0], DefaultIfName); !slices.Contains(r, c.route) {
				t.Errorf("routes are %q, want %s", r, c.route)
			}
			has4 := pod.GSOIPv4MaxSize > 0 // else that is said, too
			said := slices.DeleteFunc(res.BigTCP.Notes, func(n string) bool { return !has4 && strings.Contains(n, "for IPv4: off, because this kernel") })
			if notes := strings.Join(said, "; "); !strings.Contains(notes, c.note) || (c.note == "") != (notes == "") {
				t.Errorf("notes are %q, want one of %q", notes, c.note)
			}
			if err := netns.Do(w.pods[0], func() error { return BundleForTunnel(&netlink.Handle{}, pod.Index) }); err != nil {
				t.Fatal(err)
			}
			if c.late < c.now && !has4 && c.now <= legacyGSO {
				c.late = c.now // nothing was large
			}
			if a := attrsOf(t, w.pods[0], DefaultIfName); beyondNode(a, a.GSOMaxSize) != c.late {
				t.Errorf("%d bytes at once in front of a tunnel, want %d", beyondNode(a, a.GSOMaxSize), c.late)
			}
		})
	}
}
