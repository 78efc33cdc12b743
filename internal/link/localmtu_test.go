// SPDX-License-Identifier: Apache-2.0

package link

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

var podCIDRs = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00:10:1::/64")}

// routes lists where a namespace's interface leads to and with what MTU.
func routes(t *testing.T, ns, ifname string) (out []string) {
	t.Helper()
	err := netns.Do(ns, func() error {
		l, err := netlink.LinkByName(ifname)
		if err != nil {
			return err
		}
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			all, err := netns.Routes(family, &netlink.Route{Table: unix.RT_TABLE_MAIN, LinkIndex: l.Attrs().Index}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_OIF)
			if err != nil {
				return err
			}
			for _, r := range all {
				if r.Dst.IP.IsLinkLocalUnicast() {
					continue
				}
				s := fmt.Sprintf("%s mtu %d", r.Dst, r.MTU)
				if r.Gw != nil {
					s = fmt.Sprintf("%s via %s mtu %d", r.Dst, r.Gw, r.MTU)
				}
				out = append(out, s)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

func attrsOf(t *testing.T, ns, ifname string) *netlink.LinkAttrs {
	t.Helper()
	var l netlink.Link
	err := netns.Do(ns, func() (err error) {
		l, err = netlink.LinkByName(ifname)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return l.Attrs()
}

func mtuOf(t *testing.T, ns, ifname string) int { return attrsOf(t, ns, ifname).MTU }

// TestLocalMTUIsInTheRoutes: the pod's interface stays as it is; routes differ.
func TestLocalMTUIsInTheRoutes(t *testing.T) {
	wider := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00:10::/32")}
	for _, c := range []struct {
		name, mode string
		cidrs      []netip.Prefix
		pod, host  []string
	}{
		{"routed", Veth, podCIDRs,
			[]string{"0.0.0.0/0 via 169.254.10.24 mtu 0", "10.1.0.0/16 via 169.254.10.24 mtu 65520",
				"::/0 via fe80::a9fe:a18 mtu 0", "fd00:10:1::/64 via fe80::a9fe:a18 mtu 65520", "fd00:10:1::2/128 mtu 0"},
			[]string{"10.1.0.2/32 mtu 1500", "fd00:10:1::2/128 mtu 1500"}},
		{"segment", Bridge, podCIDRs,
			[]string{"0.0.0.0/0 via 10.1.0.1 mtu 0", "10.1.0.0/16 mtu 65520", "10.1.0.1/32 mtu 0",
				"::/0 via fd00:10:1::1 mtu 0", "fd00:10:1::/64 mtu 65520", "fd00:10:1::1/128 mtu 0"}, nil},
		{"segment, one of several", Bridge, wider,
			[]string{"0.0.0.0/0 via 10.1.0.1 mtu 0", "10.0.0.0/8 via 10.1.0.1 mtu 65520", "10.1.0.0/16 mtu 65520", "10.1.0.1/32 mtu 0",
				"::/0 via fd00:10:1::1 mtu 0", "fd00:10:1::/64 mtu 65520", "fd00:10:1::1/128 mtu 0", "fd00:10::/32 via fd00:10:1::1 mtu 65520"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			s := w.spec(c.mode, 0)
			s.LocalMTU, s.LocalCIDRs = MaxLocalMTU, c.cidrs
			w.add(s)
			slices.Sort(c.pod)
			if diff := cmp.Diff(c.pod, routes(t, w.pods[0], DefaultIfName)); diff != "" {
				t.Errorf("the pod's routes (-want +got):\n%s", diff)
			}
			host := HostName(s.Name)
			if diff := cmp.Diff(c.host, routes(t, w.node, host)); diff != "" {
				t.Errorf("the node's routes (-want +got):\n%s", diff)
			}
			want := map[string]int{DefaultIfName: 1500, host: MaxLocalMTU}
			got := map[string]int{DefaultIfName: mtuOf(t, w.pods[0], DefaultIfName), host: mtuOf(t, w.node, host)}
			if c.mode == Bridge {
				want[DefaultBridge], got[DefaultBridge] = 1500, mtuOf(t, w.node, DefaultBridge)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("MTUs (-want +got):\n%s", diff)
			}
		})
	}
}

// A pod's second interface may be on the network of the first: what leads there leads by
// the first, also when the second has gone again.
func TestASecondInterfaceLeavesTheFirstItsRoutes(t *testing.T) {
	eachMode(t, func(t *testing.T, mode string) {
		if !CanLocalMTU(mode) {
			t.Skip("its pods have no routes of a local MTU")
		}
		w := newWorld(t)
		first, second := w.spec(mode, 0), w.spec(mode, 1)
		second.NetNS, second.IfName = first.NetNS, "net1"
		for _, s := range []*Spec{&first, &second} {
			s.LocalMTU, s.LocalCIDRs = MaxLocalMTU, podCIDRs
		}
		w.add(first)
		before := routes(t, w.pods[0], DefaultIfName)
		res := w.add(second)
		if diff := cmp.Diff(before, routes(t, w.pods[0], DefaultIfName)); diff != "" {
			t.Errorf("the first interface's routes (-before +with a second):\n%s", diff)
		}
		if res.Default4 || res.Default6 {
			t.Errorf("the default route is said to be the second's: %+v", res)
		}
		w.onNode(func() error { return Delete(second) })
		if diff := cmp.Diff(before, routes(t, w.pods[0], DefaultIfName)); diff != "" {
			t.Errorf("the first interface's routes (-before +after the second):\n%s", diff)
		}
	})
}

// TestBundlesOfALocalMTU: a link takes as much at once as the kernel has it, in no
// more segments of the pod's MTU than fit into what leaves the node at once.
func TestBundlesOfALocalMTU(t *testing.T) {
	for _, c := range []struct {
		name        string
		mtu, bigTCP int
		segs        uint32
	}{
		{"alone", 0, 0, 45},
		{"jumbo frames", 9000, 0, 7},
		{"with BIG TCP beyond the node", 0, 131072, 90},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			s := w.spec(Veth, 0)
			s.MTU, s.LocalMTU, s.LocalCIDRs, s.BigTCP = c.mtu, MaxLocalMTU, podCIDRs, c.bigTCP
			res := w.add(s)
			pod, host := attrsOf(t, w.pods[0], DefaultIfName), attrsOf(t, w.node, HostName(s.Name))
			if pod.TSOMaxSize == 0 {
				t.Skip("this kernel has no BIG TCP")
			}
			if pod.GSOMaxSegs != c.segs || host.GSOMaxSegs != 65535 {
				t.Errorf("%d segments at once from the pod, want %d; %d to it", pod.GSOMaxSegs, c.segs, host.GSOMaxSegs)
			}
			want4, asked4 := uint32(MaxBigTCP), c.bigTCP
			if pod.GSOIPv4MaxSize == 0 {
				t.Log("this kernel has no BIG TCP for IPv4")
				want4, asked4 = 0, 0
			}
			for _, a := range []*netlink.LinkAttrs{pod, host} {
				if a.GSOMaxSize != MaxBigTCP || a.GSOIPv4MaxSize != want4 {
					t.Errorf("%s takes %d and %d bytes at once, want %d and %d", a.Name, a.GSOMaxSize, a.GSOIPv4MaxSize, MaxBigTCP, want4)
				}
			}
			if res.BigTCP.IPv4 != asked4 || res.BigTCP.IPv6 != c.bigTCP {
				t.Errorf("BIG TCP is said to be %+v", res.BigTCP)
			}
		})
	}
}

// TestBridgeKeepsTheSmallestMTU: whatever comes in whatever order, what the node
// sends to a pod by the bridge fits.
func TestBridgeKeepsTheSmallestMTU(t *testing.T) {
	for _, c := range []struct {
		name        string
		local       [2]bool
		mtu         [2]int
		first, then int
	}{
		{"small, then large", [2]bool{true, true}, [2]int{1400, 1500}, 1400, 1400},
		{"large, then small", [2]bool{true, true}, [2]int{1500, 1400}, 1500, 1400},
		{"local, then not", [2]bool{true, false}, [2]int{1500, 1400}, 1500, 1400},
		{"not, then local", [2]bool{false, true}, [2]int{1400, 1500}, 1400, 1400},
		{"jumbo", [2]bool{true, true}, [2]int{9000, 9000}, 9000, 9000},
		{"without, as ever", [2]bool{false, false}, [2]int{9000, 1400}, 9000, 1400},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			for i, want := range []int{c.first, c.then} {
				s := w.spec(Bridge, i)
				s.MTU = c.mtu[i]
				if c.local[i] {
					s.LocalMTU, s.LocalCIDRs = MaxLocalMTU, podCIDRs
				}
				w.add(s)
				if got := mtuOf(t, w.node, DefaultBridge); got != want {
					t.Errorf("after %d pods the bridge has MTU %d, want %d", i+1, got, want)
				}
			}
		})
	}
}
