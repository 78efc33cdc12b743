// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// Pods of nodes that nobody joined to this one (somebody else leads there) see a pod's own address, as long as it is
// said where pods are, also when a pod comes or who masquerades is decided anew.
func TestMasqueradedPodsKeepTheirAddressAmongPods(t *testing.T) {
	w := newEdgeWorld(t)
	other := w.name + "-w1"
	w.run("ip -n %s addr add 10.77.0.5/32 dev lo && ip -n %s addr add fd77::5/128 dev lo", other, other)
	w.run("ip route add 10.77.0.0/24 via 198.51.101.9 dev w1 && ip -6 route add fd77::/64 via 2001:db8:1::9 dev w1")
	w.serve(w.other, "other", 8080)
	pods := []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24"), netip.MustParsePrefix("10.77.0.0/24"), netip.MustParsePrefix("fd77::/64")}
	sees := func(when string, own bool) {
		t.Helper()
		for i, to := range []string{"10.77.0.5:8080", "[fd77::5]:8080"} {
			want := []string{"198.51.101.1", "2001:db8:1::1"}[i]
			if own {
				want = []string{"10.9.0.2", "fd09::2"}[i]
			}
			if _, saw, err := ask(w.pod, "tcp", to); err != nil || saw.String() != want {
				t.Errorf("%s: another node's pod sees %v, %v; want %v", when, saw, err, want)
			}
		}
	}
	w.must(func(e *Engine) error {
		list, err := e.Endpoints()
		if err != nil {
			return err
		}
		for _, ep := range list {
			if err := e.RemoveEndpoint(ep.ID); err != nil {
				return err
			}
		}
		if _, err = e.AddEndpoint(context.Background(), EndpointSpec{Netns: w.pod, IfName: "eth0", Owner: state.OwnerCNI, Masquerade: &state.Masquerade{}}); err != nil {
			return err
		}
		s, err := e.masqueradeStatus()
		if err == nil && s.By != "ebpf" {
			t.Fatalf("masquerade is by %s: %q", s.By, s.Because)
		}
		return err
	})
	sees("before anybody says where pods are", false)
	w.must(func(e *Engine) error { return e.SetInside(pods) })
	sees("once it is said", true)
	w.must(func(e *Engine) error { e.known = nil; return e.syncMasquerade() })
	sees("when it is decided anew", true)
	w.must(func(e *Engine) error { return e.SetInside(pods[:1]) })
	sees("when those pods are no more", false)
}
