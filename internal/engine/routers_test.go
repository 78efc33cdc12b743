// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
)

// A pod's link-local router is told to its programs, and with the pod it goes.
func TestALinkLocalRouterIsTold(t *testing.T) {
	n := newNode(t)
	a, b := n.pod(1), n.pod(2)
	n.run("nsenter --net=%s ip route add default via fe80::1 dev eth0", a)
	told := func(id uint32) (router datapath.Addr) {
		n.must(func(e *Engine) (err error) { router, _, err = e.dp.Routers.Get(id); return err })
		return router
	}
	ep, err := n.add(a)
	if err != nil {
		t.Fatal(err)
	}
	if got := datapath.ToAddr(told(ep.ID)); got != netip.MustParseAddr("fe80::1") {
		t.Errorf("its router is %v", got)
	}
	n.must(func(e *Engine) error { return e.RemoveEndpoint(ep.ID) })
	next, err := n.add(b)
	if err != nil {
		t.Fatal(err)
	}
	if got := told(next.ID); got != (datapath.Addr{}) {
		t.Errorf("of endpoint %d, after %d, it is %v", next.ID, ep.ID, got)
	}
}
