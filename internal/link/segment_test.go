// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// segment is a network out there, which leads to the node's interface seg0: to the pods'
// uplink, a port of their bridge, or their device.
type segment struct {
	*world
	ns string // there it is wire0
}

func newSegment(t *testing.T, mode string) segment {
	t.Helper()
	s := segment{newWorld(t), newNS(t, "out")}
	out, err := netns.Open(s.ns)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	s.onNode(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "seg0"
		seg0 := &netlink.Veth{LinkAttrs: attrs, PeerName: "wire0", PeerNamespace: netlink.NsFd(out.Fd())}
		if err := netlink.LinkAdd(seg0); err != nil {
			return err
		}
		if mode == Bridge {
			br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: DefaultBridge}}
			if err := errors.Join(netlink.LinkAdd(br), netlink.LinkSetMaster(seg0, br)); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(seg0)
	})
	s.outside(func(wire netlink.Link) error { return netlink.LinkSetUp(wire) })
	s.has("10.1.0.200/16", "fd00:10:1::c8/64")
	if mode == Bridge {
		s.plugged("seg0")
	}
	return s
}

func (s segment) outside(fn func(wire netlink.Link) error) {
	s.t.Helper()
	if err := netns.Do(s.ns, func() error {
		wire, err := netlink.LinkByName("wire0")
		if err != nil {
			return err
		}
		return fn(wire)
	}); err != nil {
		s.t.Fatal(err)
	}
}

// has gives who is out there addresses.
func (s segment) has(addrs ...string) {
	s.t.Helper()
	s.outside(func(wire netlink.Link) error {
		for _, a := range addrs {
			addr, err := netlink.ParseAddr(a)
			if err != nil {
				return err
			}
			if addr.IP.To4() == nil {
				addr.Flags = unix.IFA_F_NODAD
			}
			if err := netlink.AddrAdd(wire, addr); err != nil {
				return err
			}
		}
		return nil
	})
}

// spec is the i-th pod's, of an IPAM of somebody else's.
func (s segment) spec(mode string, i int) Spec {
	spec := s.world.spec(Macvlan, i)
	spec.Mode, spec.Foreign, spec.Uplink = mode, true, "seg0"
	return spec
}

// nodeHas are the node's addresses in the pods' networks.
func (s segment) nodeHas() (out []string) {
	s.t.Helper()
	s.onNode(func() error {
		addrs, err := netns.Addrs(nil)
		for _, x := range addrs {
			a, _ := netip.AddrFromSlice(x.IP)
			if netip.PrefixFrom(podIP4(0), 16).Masked().Contains(a.Unmap()) || netip.PrefixFrom(podIP6(0), 64).Masked().Contains(a) {
				out = append(out, a.Unmap().String())
			}
		}
		return err
	})
	return out
}

func eachSegment(t *testing.T, fn func(t *testing.T, mode string)) {
	eachMode(t, func(t *testing.T, mode string) {
		if !OnSegment(mode) {
			t.Skip("its pods are behind the node, on no segment")
		}
		fn(t, mode)
	})
}

// The first address of a network may be a pod's, where nobody says that it is the gateway's.
func TestNobodyNamesAGatewayAndNoneIsInvented(t *testing.T) {
	eachSegment(t, func(t *testing.T, mode string) {
		s := newSegment(t, mode)
		spec := s.spec(mode, 0)
		spec.IPv4, spec.IPv6 = netip.MustParsePrefix("10.1.0.1/16"), netip.MustParsePrefix("fd00:10:1::1/64")
		var res Result
		s.onNode(func() (err error) { res, err = Add(spec); return err })
		if res.Gateway4.IsValid() || res.Gateway6.IsValid() || res.Default4 || res.Default6 {
			t.Errorf("got %+v", res)
		}
		if err := netns.Do(s.pods[0], func() error {
			for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
				routes, err := netns.Routes(family, &netlink.Route{}, netlink.RT_FILTER_DST)
				if err != nil || len(routes) > 0 {
					t.Errorf("default routes: %v %v", routes, err)
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if has := s.nodeHas(); len(has) > 0 {
			t.Errorf("the node took %v", has)
		}
		for _, a := range []string{"10.1.0.200", "fd00:10:1::c8"} {
			if _, err := ping(s.pods[0], netip.MustParseAddr(a), patience); err != nil {
				t.Error(err)
			}
		}
	})
}

// Nor by the routes to the node's own pods: those beyond the pod's network have no way then.
func TestLocalCIDRsNeedNoGateway(t *testing.T) {
	s := newSegment(t, Bridge)
	spec := s.spec(Bridge, 0)
	spec.LocalMTU = 9000
	for _, cidr := range []string{"10.1.0.0/24", "10.5.0.0/24", "fd00:10:1::/80", "fd00:10:5::/64"} {
		spec.LocalCIDRs = append(spec.LocalCIDRs, netip.MustParsePrefix(cidr))
	}
	s.add(spec)
	if err := netns.Do(s.pods[0], func() error {
		for dst, want := range map[string]int{"0.0.0.0/0": 0, "10.1.0.0/24": 1, "10.5.0.0/24": 0, "::/0": 0, "fd00:10:1::/80": 1, "fd00:10:5::/64": 0} {
			p := netip.MustParsePrefix(dst)
			routes, err := netns.Routes(family(p.Addr()), &netlink.Route{Dst: ipNet(p)}, netlink.RT_FILTER_DST)
			if err != nil || len(routes) != want {
				t.Errorf("routes to %s: %v %v", dst, routes, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// A gateway without a pod's own network around it is on the pod's link all the same.
func TestAGatewayMayBeLinkLocal(t *testing.T) {
	s := newSegment(t, Macvlan)
	s.has("fe80::fe/64")
	spec := s.spec(Macvlan, 0)
	spec.Gateway6 = netip.MustParseAddr("fe80::fe")
	if res := s.add(spec); !res.Default6 {
		t.Errorf("got %+v", res)
	}
}

func TestTheNodeTakesNoAddressOfARouterOutThere(t *testing.T) {
	first, second := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00:10:1::1")
	for _, c := range []struct {
		name    string
		foreign bool
		router  []string
		want    []string
	}{
		{"both families", true, []string{"10.1.0.1/16", "fd00:10:1::1/64"}, nil},
		{"IPv4 alone", true, []string{"10.1.0.1/16"}, []string{"fd00:10:1::1"}},
		{"IPv6 alone", true, []string{"fd00:10:1::1/64"}, []string{"10.1.0.1"}},
		{"nobody", true, nil, []string{"10.1.0.1", "fd00:10:1::1"}},
		{"own pools", false, []string{"10.1.0.1/16", "fd00:10:1::1/64"}, []string{"10.1.0.1", "fd00:10:1::1"}},
	} {
		eachSegment(t, func(t *testing.T, mode string) {
			if mode == HostDevice {
				t.Skip("the node has nothing on its segment")
			}
			t.Run(c.name, func(t *testing.T) {
				s := newSegment(t, mode)
				s.has(c.router...)
				for i := range s.pods {
					spec := s.spec(mode, i)
					spec.Foreign, spec.Gateway4, spec.Gateway6 = c.foreign, first, second
					stop, res := s.listen(), Result{}
					s.onNode(func() (err error) { res, err = Add(spec); return err })
					if asked := probesFor(first, stop()); i == 1 && asked > 0 && slices.Contains(c.want, "10.1.0.1") {
						t.Errorf("for the second pod the node asks %d times for its own address", asked)
					} else if i == 0 && (asked > 0) != c.foreign {
						t.Errorf("for the first pod the node asks %d times for the gateway", asked)
					}
					if !res.Default4 || !res.Default6 || res.Gateway4 != first || res.Gateway6 != second {
						t.Errorf("got %+v", res)
					}
				}
				has := s.nodeHas()
				slices.Sort(has)
				if !slices.Equal(has, c.want) {
					t.Errorf("the node has %v, not %v", has, c.want)
				}
				for _, gw := range []netip.Addr{first, second} {
					if _, err := ping(s.pods[0], gw, patience); err != nil {
						t.Error(err)
					}
				}
			})
		})
	}
}

// probesFor counts the questions for a in the name of nobody.
func probesFor(a netip.Addr, frames [][]byte) (n int) {
	for _, f := range frames {
		if len(f) >= 42 && f[12] == 8 && f[13] == 6 && bytes.Equal(f[28:32], make([]byte, 4)) && bytes.Equal(f[38:42], a.AsSlice()) {
			n++
		}
	}
	return n
}

// listen hears all frames on wire0 until it is stopped.
func (s segment) listen() (stop func() [][]byte) {
	s.t.Helper()
	var fd int
	s.outside(func(wire netlink.Link) (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0x0300); err != nil { // ETH_P_ALL
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: 0x0300, Ifindex: wire.Attrs().Index})
	})
	return func() (frames [][]byte) {
		defer unix.Close(fd)
		for {
			frame := make([]byte, 2048)
			n, from, err := unix.Recvfrom(fd, frame, 0)
			if err != nil {
				return frames
			}
			if from.(*unix.SockaddrLinklayer).Pkttype != unix.PACKET_OUTGOING {
				frames = append(frames, frame[:n])
			}
		}
	}
}

// remembers is the link address that is known out there.
func (s segment) remembers(a netip.Addr) (mac net.HardwareAddr) {
	s.t.Helper()
	s.outside(func(wire netlink.Link) error {
		all, err := netns.Neighbours(wire.Attrs().Index)
		for _, n := range all {
			if n.IP.Equal(a.AsSlice()) {
				mac = n.HardwareAddr
			}
		}
		return err
	})
	return mac
}

// An address that another pod had is known out there by that one's link address.
func TestASegmentLearnsWhoHasAnAddressNow(t *testing.T) {
	eachSegment(t, func(t *testing.T, mode string) {
		s := newSegment(t, mode)
		older := net.HardwareAddr{2, 0, 0, 0, 0, 9}
		spec := s.spec(mode, 0)
		addrs := []netip.Addr{spec.IPv4.Addr(), spec.IPv6.Addr()}
		s.outside(func(wire netlink.Link) error {
			for _, a := range addrs {
				n := &netlink.Neigh{LinkIndex: wire.Attrs().Index, IP: a.AsSlice(), HardwareAddr: older, State: netlink.NUD_REACHABLE, Family: family(a)}
				if err := netlink.NeighSet(n); err != nil {
					return err
				}
			}
			return nil
		})
		stop := s.listen()
		var res Result
		s.onNode(func() (err error) { res, err = Add(spec); return err })
		for _, a := range addrs {
			if mode == HostDevice {
				break // its neighbours by the same cable forgot all as it was taken down
			}
			for end := time.Now().Add(await(5 * time.Second)); !bytes.Equal(s.remembers(a), res.PodMAC); time.Sleep(5 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("out there %s is at %s, and not at %s", a, s.remembers(a), res.PodMAC)
				}
			}
		}
		wantARP := slices.Concat(bytes.Repeat([]byte{0xff}, 6), res.PodMAC, []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1}, res.PodMAC, addrs[0].AsSlice(), make([]byte, 6), addrs[0].AsSlice())
		wantND := slices.Concat([]byte{136, 0, 0x20, 0, 0, 0}, addrs[1].AsSlice(), []byte{2, 1}, res.PodMAC)
		var arps, advertisements int
		for _, f := range stop() {
			if bytes.Equal(f, wantARP) {
				arps++
			}
			if len(f) > 54 && f[12] == 0x86 && f[20] == unix.IPPROTO_ICMPV6 && f[54] == 136 {
				said := slices.Concat(f[54:56], f[58:]) // without the checksum
				if f[21] != 255 || !bytes.Equal(f[22:38], addrs[1].AsSlice()) || !bytes.Equal(f[:6], []byte{0x33, 0x33, 0, 0, 0, 1}) || !bytes.Equal(said, wantND) {
					t.Errorf("advertised: %x", f)
				}
				advertisements++
			}
		}
		if arps != 1 || advertisements != 1 {
			t.Errorf("%d ARP announcements and %d advertisements, not one of each", arps, advertisements)
		}
		if own := s.own(addrs[0]); len(own) > 0 {
			t.Errorf("the pod keeps itself as a neighbour: %v", own)
		}
	})
}

// own are the pod's neighbours of that address.
func (s segment) own(a netip.Addr) (out []netlink.Neigh) {
	s.t.Helper()
	if err := netns.Do(s.pods[0], func() error {
		eth, err := netlink.LinkByName(DefaultIfName)
		if err != nil {
			return err
		}
		all, err := netns.Neighbours(eth.Attrs().Index)
		out = slices.DeleteFunc(all, func(n netlink.Neigh) bool { return !n.IP.Equal(a.AsSlice()) })
		return err
	}); err != nil {
		s.t.Fatal(err)
	}
	return out
}
