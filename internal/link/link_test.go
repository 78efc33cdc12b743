// SPDX-License-Identifier: Apache-2.0

package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// What waits for a neighbour or an address does so in each of several worlds. A
// machine that has other work makes anybody wait, but not always.
func TestPodsAndNodeReachEachOther(t *testing.T) {
	eachMode(t, func(t *testing.T, mode string) {
		var late []string
		for try := range 5 {
			t.Run(fmt.Sprint(try), func(t *testing.T) { late = lateAnswers(t, mode) })
			if t.Failed() || len(late) == 0 {
				return
			}
		}
		t.Errorf("something waits in each world; in the last: %s", strings.Join(late, "; "))
	})
}

// lateAnswers wants all to reach each other, and says whose first packet took long.
func lateAnswers(t *testing.T, mode string) (late []string) {
	w := newWorld(t)
	for i := range w.pods {
		w.add(w.spec(mode, i))
	}
	gw4, gw6 := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00:10:1::1")
	if Routed(mode) {
		gw4, gw6 = netip.MustParseAddr("10.2.0.1"), netip.MustParseAddr("fd00:10:2::1")
	}
	for _, c := range []struct {
		what, from string
		to         netip.Addr
	}{
		{"pod to pod", w.pods[0], podIP4(1)},
		{"pod to pod", w.pods[0], podIP6(1)},
		{"node to pod", w.node, podIP4(0)},
		{"node to pod", w.node, podIP6(0)},
		{"pod to node", w.pods[1], gw4},
		{"pod to node", w.pods[1], gw6},
	} {
		took, err := ping(c.from, c.to, patience)
		if err != nil {
			t.Errorf("%s: %v", c.what, err)
		} else if took > await(500*time.Millisecond) {
			late = append(late, fmt.Sprintf("%s: the first packet to %s took %s", c.what, c.to, took))
		}
	}
	return late
}

func TestResultDescribesWhatWasMade(t *testing.T) {
	eachMode(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		s := w.spec(mode, 0)
		if traitsOf[mode].noMAC == "" {
			s.MAC = net.HardwareAddr{2, 0, 0, 0, 0, 7}
		}
		s.MTU = 1400
		res := w.add(s)
		if err := netns.Do(w.pods[0], func() error {
			l, err := netlink.LinkByName(DefaultIfName)
			if err != nil {
				return err
			}
			a := l.Attrs()
			if a.Index != res.PodIfIndex || a.HardwareAddr.String() != res.PodMAC.String() || s.MAC != nil && res.PodMAC.String() != s.MAC.String() || a.MTU != 1400 {
				t.Errorf("pod has index %d MAC %s MTU %d, result says %+v", a.Index, a.HardwareAddr, a.MTU, res)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if mode == HostDevice {
			return // nothing of it is on the node
		}
		w.onNode(func() error {
			l, err := netlink.LinkByIndex(res.HostIfIndex)
			if err != nil {
				return err
			}
			want := HostName("pod-0")
			if HasShim(mode) {
				want = ShimName(mode, "up0")
			}
			if l.Attrs().Name != want || l.Attrs().HardwareAddr.String() != res.HostMAC.String() {
				t.Errorf("host end is %s %s, want %s %s", l.Attrs().Name, l.Attrs().HardwareAddr, want, res.HostMAC)
			}
			parent := map[string]string{Bridge: DefaultBridge, Macvlan: "up0", IPVlan: "up0", IPVlanL3: "up0"}[mode]
			if parent == "" {
				if res.ParentIfIndex != 0 {
					t.Errorf("parent is %d, want none", res.ParentIfIndex)
				}
				return nil
			}
			if l, err = netlink.LinkByName(parent); err == nil && l.Attrs().Index != res.ParentIfIndex {
				t.Errorf("parent is %d, want %s (%d)", res.ParentIfIndex, parent, l.Attrs().Index)
			}
			return err
		})
	})
}

func TestAddTwiceIsRefusedAndDisturbsNothing(t *testing.T) {
	eachMode(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		first := w.add(w.spec(mode, 0))
		err := netns.Do(w.node, func() error { _, err := Add(w.spec(mode, 0)); return err })
		if !errors.Is(err, ErrExists) {
			t.Fatalf("second Add: %v, want ErrExists", err)
		}
		if _, err := ping(w.node, podIP4(0), patience); err != nil {
			t.Error(err)
		}
		if mode == HostDevice {
			return
		}
		w.onNode(func() error {
			_, err := netlink.LinkByIndex(first.HostIfIndex)
			return err
		})
	})
}

// halfBuild makes a pod's interface and no more.
func (b *builder) halfBuild() (err error) {
	switch {
	case HasShim(b.Mode):
		var parent netlink.Link
		if parent, err = must(b.node, "up0"); err == nil {
			_, err = b.makeSub(parent)
		}
	case b.Mode == HostDevice:
		_, err = b.takeDevice()
	case b.Mode == Netkit || b.Mode == NetkitL3:
		var eth netlink.Link
		if eth, _, err = b.makeNetkit(); err == nil {
			err = b.pod.LinkSetGroup(eth, 0) // killed even before that
		}
	default:
		_, _, err = b.makePair()
	}
	return err
}

// A killed Add leaves links without the mark that is set last.
func TestAddReplacesWhatAKilledAddLeft(t *testing.T) {
	eachMode(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		w.onNode(func() error {
			b, err := open(w.pods[0])
			if err != nil {
				return err
			}
			defer b.close()
			b.Spec = w.spec(mode, 0).withDefaults()
			return b.halfBuild()
		})
		w.add(w.spec(mode, 0))
		if _, err := ping(w.node, podIP4(0), patience); err != nil {
			t.Error(err)
		}
	})
}

// One uplink carries one kind: the kernel would let a second kind of ipvlan
// change the first.
func TestOneUplinkCarriesOneKind(t *testing.T) {
	shims := []string{Macvlan, IPVlan, IPVlanL3}
	for _, first := range shims {
		for _, second := range shims {
			if first == second {
				continue
			}
			t.Run(first+" then "+second, func(t *testing.T) {
				if err := errors.Join(Supported(first), Supported(second)); err != nil {
					t.Skip(err)
				}
				w := newWorld(t)
				w.add(w.spec(first, 0))
				err := netns.Do(w.node, func() error { _, err := Add(w.spec(second, 1)); return err })
				if err == nil || !strings.Contains(err.Error(), "carries "+first) || !strings.Contains(err.Error(), "--mode="+first) {
					t.Errorf("got %v", err)
				}
				if _, err := ping(w.node, podIP4(0), patience); err != nil {
					t.Error(err)
				}
			})
		}
	}
	t.Run("a bridge's port", func(t *testing.T) {
		w := newWorld(t)
		w.onNode(func() error {
			br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br7"}}
			if err := netlink.LinkAdd(br); err != nil {
				return err
			}
			up0, err := netlink.LinkByName("up0")
			if err != nil {
				return err
			}
			return netlink.LinkSetMaster(up0, br)
		})
		err := netns.Do(w.node, func() error { _, err := Add(w.spec(Macvlan, 0)); return err })
		if err == nil || !strings.Contains(err.Error(), "port of br7") {
			t.Errorf("got %v", err)
		}
	})
}

// Without programs a closed pair passes nothing, either way.
func TestNetkitIsClosedUntilProgramsAreAttached(t *testing.T) {
	for _, mode := range []string{Netkit, NetkitL3} {
		t.Run(mode, func(t *testing.T) {
			if err := Supported(mode); err != nil {
				t.Skip(err)
			}
			w := newWorld(t)
			s := w.spec(mode, 0)
			s.Open = false
			w.add(s)
			if _, err := ping(w.node, podIP4(0), 300*time.Millisecond); err == nil {
				t.Error("a packet from the node passed")
			}
			if _, err := ping(w.pods[0], netip.MustParseAddr("10.2.0.1"), 300*time.Millisecond); err == nil {
				t.Error("a packet from the pod passed")
			}
		})
	}
}

// The device that a pod had is the node's again, as it was.
func TestHostDeviceComesBack(t *testing.T) {
	w := newWorld(t)
	s := w.spec(HostDevice, 0)
	before := w.links(w.node)
	w.add(s)
	w.onNode(func() error {
		if l, err := netlink.LinkByName(s.Uplink); err == nil {
			t.Errorf("%s is still on the node", l.Attrs().Name)
		}
		return Delete(s)
	})
	if d := cmp.Diff(before, w.links(w.node), cmpopts.SortSlices(strings.Compare)); d != "" {
		t.Errorf("links on the node changed:\n%s", d)
	}
	w.onNode(func() error {
		l, err := netlink.LinkByName(s.Uplink)
		if err == nil && (l.Attrs().Alias != "" || l.Attrs().Group != 0) {
			t.Errorf("it keeps alias %q and group %d", l.Attrs().Alias, l.Attrs().Group)
		}
		return err
	})
	w.onNode(func() error {
		l, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		if _, err := Add(Spec{Name: "greedy", Mode: HostDevice, NetNS: w.pods[0], Uplink: "up0", IPv4: s.IPv4}); err == nil || !strings.Contains(err.Error(), "10.2.0.1") {
			t.Errorf("the node's own interface (%s) was taken: %v", l.Attrs().Name, err)
		}
		return nil
	})
}

// A physical device comes back by itself when its pod's namespace dies first, under
// the name that it had there, or any where that is taken. These are no such devices,
// so they are moved as the kernel does.
func TestHostDeviceThatCameBackByItselfIsTheNodesAgain(t *testing.T) {
	for _, name := range []string{DefaultIfName, "dev7"} {
		for who, finds := range map[string]func(s Spec) error{
			"Delete": Delete,
			"Delete, which knows no uplink": func(s Spec) error {
				s.Uplink = ""
				return Delete(s)
			},
			"the next Add": func(s Spec) error {
				s.Name = "next"
				_, err := Add(s)
				return errors.Join(err, Delete(s))
			},
		} {
			t.Run(who+" finds "+name, func(t *testing.T) {
				w := newWorld(t)
				s := w.spec(HostDevice, 0)
				before := w.links(w.node)
				w.add(s)
				script := fmt.Sprintf("ip link set eth0 down && { test %s = eth0 || ip link set eth0 name %s; } && ip link set %s netns %s", name, name, name, w.node)
				if out, err := exec.Command("nsenter", "--net="+s.NetNS, "sh", "-c", script).CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				if who != "the next Add" {
					s.NetNS += "-gone"
				}
				w.onNode(func() error { return finds(s) })
				if d := cmp.Diff(before, w.links(w.node), cmpopts.SortSlices(strings.Compare)); d != "" {
					t.Errorf("links on the node changed:\n%s", d)
				}
				w.onNode(func() error {
					l, err := netlink.LinkByName(w.nic(0))
					if err == nil && (l.Attrs().Alias != "" || l.Attrs().Group != 0) {
						t.Errorf("it keeps alias %q and group %d", l.Attrs().Alias, l.Attrs().Group)
					}
					return err
				})
			})
		}
	}
}

func TestDeleteIsIdempotentAndLeavesNothing(t *testing.T) {
	eachMode(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		// The bridge and the shim are the node's: make them first.
		w.add(w.spec(mode, 1))
		s := w.spec(mode, 0)
		nodeBefore, podBefore := w.links(w.node), w.links(w.pods[0])
		w.add(s)
		for range 2 {
			w.onNode(func() error { return Delete(s) })
		}
		if d := cmp.Diff(nodeBefore, w.links(w.node), cmpopts.SortSlices(strings.Compare)); d != "" {
			t.Errorf("links on the node changed:\n%s", d)
		}
		if d := cmp.Diff(podBefore, w.links(w.pods[0])); d != "" {
			t.Errorf("links in the pod changed:\n%s", d)
		}
		gone := w.spec(mode, 0)
		gone.NetNS += "-gone"
		w.onNode(func() error { return Delete(gone) })
	})
}

func TestFailedAddRollsBack(t *testing.T) {
	w := newWorld(t)
	s := w.spec(Veth, 0)
	s.IPv4 = netip.Prefix{}
	s.Gateway6 = netip.MustParseAddr("ff02::1") // no route leads via a multicast address
	before := w.links(w.node)
	err := netns.Do(w.node, func() error { _, err := Add(s); return err })
	if err == nil || !strings.Contains(err.Error(), "pod-0") {
		t.Fatalf("Add by a multicast gateway: %v, want an error that names the pod", err)
	}
	if d := cmp.Diff(before, w.links(w.node)); d != "" {
		t.Errorf("links on the node changed:\n%s", d)
	}
}

func TestForeignInterfaceIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	err := netns.Do(w.pods[0], func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = DefaultIfName
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "other"})
	})
	if err != nil {
		t.Fatal(err)
	}
	before := w.links(w.pods[0]) // its own, and gre0 and the like of a kernel that has loaded tunnels
	err = netns.Do(w.node, func() error { _, err := Add(w.spec(Veth, 0)); return err })
	if err == nil || !strings.Contains(err.Error(), "not mustang's") {
		t.Fatalf("Add: %v", err)
	}
	w.onNode(func() error { return Delete(w.spec(Veth, 0)) })
	if d := cmp.Diff(before, w.links(w.pods[0])); d != "" {
		t.Errorf("links in the pod changed:\n%s", d)
	}
}

func TestIPv4OnlyPodHasNoIPv6(t *testing.T) {
	w := newWorld(t)
	s := w.spec(Veth, 0)
	s.IPv6 = netip.Prefix{}
	w.add(s)
	err := netns.Do(w.pods[0], func() error {
		l, err := netlink.LinkByName(DefaultIfName)
		if err != nil {
			return err
		}
		addrs, err := netlink.AddrList(l, unix.AF_INET6)
		if len(addrs) > 0 {
			t.Errorf("the pod has %v", addrs)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestBadSpecIsNamed(t *testing.T) {
	ok := Spec{Name: "p", Mode: Veth, IPv4: netip.MustParsePrefix("10.1.0.2/24"), IPv6: netip.MustParsePrefix("fd00::2/64")}
	for _, c := range []struct {
		name, want string
		change     func(*Spec)
	}{
		{"unknown mode", "mode", func(s *Spec) { s.Mode = "tin-can" }},
		{"no address", "IP is missing", func(s *Spec) { s.IPv4, s.IPv6 = netip.Prefix{}, netip.Prefix{} }},
		{"families swapped", "is not IPv4", func(s *Spec) { s.IPv4 = s.IPv6 }},
		{"gateway of the wrong family", "is not IPv4", func(s *Spec) { s.Gateway4 = netip.MustParseAddr("fd00::1") }},
		{"gateway without address", "no IPv6 address", func(s *Spec) { s.IPv6 = netip.Prefix{}; s.Gateway6 = netip.MustParseAddr("fd00::1") }},
		{"gateway off the segment", "outside", func(s *Spec) { s.Mode = Bridge; s.Gateway4 = netip.MustParseAddr("10.9.0.1") }},
		{"pod is the gateway", "gateway's address", func(s *Spec) { s.Mode = Bridge; s.Gateway4 = s.IPv4.Addr() }},
		{"MTU too small for IPv6", "MTU", func(s *Spec) { s.MTU = 1000 }},
		{"MTU too large", "MTU", func(s *Spec) { s.MTU = 70000 }},
		{"no uplink", "uplink is missing", func(s *Spec) { s.Mode = Macvlan }},
		{"a MAC for ipvlan", "share their uplink's", func(s *Spec) { s.Mode = IPVlan; s.Uplink = "up0"; s.MAC = net.HardwareAddr{2, 0, 0, 0, 0, 7} }},
		{"long interface name", "interface name", func(s *Spec) { s.IfName = "sixteen-letters-" }},
		{"local MTU on a parent", "uplink's MTU", func(s *Spec) { s.Mode, s.Uplink = Macvlan, "up0"; s.LocalMTU, s.LocalCIDRs = 9000, podCIDRs }},
		{"local MTU to nowhere", "CIDRs", func(s *Spec) { s.LocalMTU = 9000 }},
		{"local MTU below the pod's", "more than the pod's MTU, 1500", func(s *Spec) { s.LocalMTU, s.LocalCIDRs = 1500, podCIDRs }},
		{"local MTU beyond a route's", "at most 65520", func(s *Spec) { s.LocalMTU, s.LocalCIDRs = 65535, podCIDRs }},
		{"local CIDR with host bits", "10.1.0.2/16", func(s *Spec) {
			s.LocalMTU, s.LocalCIDRs = 9000, []netip.Prefix{netip.MustParsePrefix("10.1.0.2/16")}
		}},
		{"BIG TCP that is small", "65537 to 524280", func(s *Spec) { s.BigTCP = 65536 }},
		{"BIG TCP of a host device", "own setting", func(s *Spec) { s.Mode, s.Uplink, s.BigTCP = HostDevice, "up0", MaxBigTCP }},
		{"broadcast address", "broadcast", func(s *Spec) { s.Mode, s.IPv4 = Bridge, netip.MustParsePrefix("10.1.0.255/25") }},
		{"multicast address", "unicast", func(s *Spec) { s.IPv4 = netip.MustParsePrefix("224.0.0.5/32") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := ok
			c.change(&s)
			if err := s.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want it to say %q", err, c.want)
			}
		})
	}
	if err := ok.Validate(); err != nil {
		t.Errorf("a good spec: %v", err)
	}
}

func TestHostNameFits(t *testing.T) {
	long := strings.Repeat("long-", 50)
	if n := HostName(long); len(n) > 15 || n != HostName(long) || n == HostName(long+"x") {
		t.Errorf("HostName gives %q", n)
	}
}
