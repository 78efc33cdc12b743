// SPDX-License-Identifier: Apache-2.0

package link

import (
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// A pod on the node's own network reaches every address that the node has there, and the node speaks to it under one that lasts.
func TestANodesPassingAddressIsNotThePodsOnlyOne(t *testing.T) {
	w := newWorld(t)
	for _, a := range []string{"fd00:10:2::7/64 preferred_lft 0 nodad", "10.2.0.7/16", "fd00:10:2::8/64 preferred_lft 0 nodad"} {
		args := append([]string{"-n", filepath.Base(w.node), "addr", "add", "dev", "up0"}, strings.Fields(a)...)
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	s := w.spec(Macvlan, 0)
	s.IPv4, s.IPv6 = netip.MustParsePrefix("10.2.0.50/16"), netip.MustParsePrefix("fd00:10:2::50/64")
	s.Gateway4, s.Gateway6 = netip.MustParseAddr("10.2.0.2"), netip.MustParseAddr("fd00:10:2::2")
	w.add(s)
	var met []string
	err := netns.Do(s.NetNS, func() error {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			list, err := netlink.NeighList(0, family)
			if err != nil {
				return err
			}
			for _, n := range list {
				if n.State == netlink.NUD_PERMANENT {
					met = append(met, n.IP.String())
				}
			}
		}
		return nil
	})
	slices.Sort(met)
	if want := "[10.2.0.1 10.2.0.7 fd00:10:2::1 fd00:10:2::7 fd00:10:2::8]"; err != nil || fmt.Sprint(met) != want {
		t.Errorf("the pod knows %v (%v), want %s", met, err, want)
	}
	w.onNode(func() error {
		for pod, src := range map[string]string{"10.2.0.50": "10.2.0.1", "fd00:10:2::50": "fd00:10:2::1"} {
			routes, err := netlink.RouteGet(netip.MustParseAddr(pod).AsSlice())
			if err != nil {
				return err
			}
			if got := routes[0].Src.String(); got != src {
				t.Errorf("the node speaks to %s under %s, want %s", pod, got, src)
			}
		}
		return nil
	})
}
