// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// The boundary of modes whose programs sit inside the pod: what a pod with
// CAP_NET_RAW or CAP_NET_ADMIN does to pass its own hook by is caught at the
// parent's egress and at the destination's ingress. See docs/boundary.md.

var (
	inPodModes  = []lab.Mode{lab.Macvlan, lab.IPVlan, lab.IPVlanL3}
	netkitModes = []lab.Mode{lab.Netkit, lab.NetkitL3} // nothing in the pod is behind their hook, but for the type of what is sent
)

func TestBoundaryInsideThePod(t *testing.T) {
	for _, mode := range modes() {
		if !slices.Contains(inPodModes, mode) && !slices.Contains(netkitModes, mode) {
			continue
		}
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode, lab.MustangTC)
			w.addLegacyPod(lab.Veth)
			for _, family := range []string{"ipv4", "ipv6"} {
				t.Run(family, func(t *testing.T) { w.on(t, family).boundary(mode) })
			}
		})
	}
}

func (w *world) boundary(mode lab.Mode) {
	type test struct {
		name string
		run  func(*world)
	}
	tests := []test{
		{"through its own hook with another's address", (*world).throughItsHook},
		{"changed behind its own hook", (*world).changedBehindItsHook},
		{"as a router", (*world).asARouter},
	}
	if slices.Contains(netkitModes, mode) {
		tests = []test{{"as another type", (*world).asAnotherType}}
	} else if mode == lab.Macvlan {
		tests = append(tests,
			test{"past its own hook, out of the node", (*world).pastItsHook},
			test{"past its own hook, as the node", (*world).asTheNode},
			test{"past its own hook, to a sibling with another's address", (*world).toASibling},
			test{"a sibling that the pod made itself", (*world).macvlanSibling},
			test{"a sibling that the pod made itself, by way of the node", (*world).byWayOfTheNode})
	} else {
		if mode == lab.IPVlan { // in l3 mode the kernel sends nothing well-formed past the queue
			tests = append(tests, test{"past its own hook, out of the node", (*world).pastItsHook})
		}
		tests = append(tests,
			test{"a sibling that the pod made itself", func(w *world) { w.ipvlanSibling(mode) }},
			test{"a sibling that the pod made itself, with what the pod forwards", func(w *world) { w.forwardedInThePod(mode) }})
	}
	tests = append(tests,
		test{"what is honest still passes", (*world).outside},
		test{"what the node forwards for others still passes", (*world).outsideForLegacy})
	for _, c := range tests {
		w.t.Run(c.name, func(t *testing.T) {
			sub := *w
			sub.t = t
			c.run(&sub)
		})
	}
}

const parentLink = "parent" // how drops at a parent's egress are shown

func (w *world) out() netip.Addr {
	if w.ipv6 {
		return w.lab.Outside().IPv6
	}
	return w.lab.Outside().IPv4
}

// nobodys are addresses that no pod and no node has: of the pods' network, of
// the wire, and of neither.
func (w *world) nobodys() []netip.Addr {
	if w.ipv6 {
		return []netip.Addr{netip.MustParseAddr("fd00:10:1::fa"), netip.MustParseAddr("fd00:10:2::fa"), netip.MustParseAddr("2001:db8::fa")}
	}
	return []netip.Addr{netip.MustParseAddr("10.1.0.250"), netip.MustParseAddr("10.2.0.250"), netip.MustParseAddr("192.0.2.250")}
}

func (w *world) pastItsHook() {
	eth0, parent := w.child("eth0"), w.parentMAC()
	w.counts("hook_bypassed", parentLink, func() {
		w.bypass(eth0, frame{eth0.mac, parent, address(w.client, w.ipv6), w.out()})
	})
	w.counts("spoofed_address", parentLink, func() {
		w.bypass(eth0, frame{eth0.mac, parent, address(w.servers[0], w.ipv6), w.out()})
	})
}

// asTheNode uses the link address that the node itself has on the wire.
func (w *world) asTheNode() {
	eth0, node := w.child("eth0"), w.nodeLink(lab.Uplink)
	for _, src := range append(w.nobodys(), w.nodeAddress()) {
		w.counts("spoofed_address", parentLink, func() {
			w.bypass(eth0, frame{node.mac, w.parentMAC(), src, w.out()})
		})
	}
}

func (w *world) toASibling() {
	eth0 := w.child("eth0")
	w.counts("spoofed_mac", "to_pod", func() {
		w.bypass(eth0, frame{eth0.mac, w.macOf(w.servers[1]), address(w.servers[0], w.ipv6), address(w.servers[1], w.ipv6)})
	})
}

func (w *world) macvlanSibling() {
	own := w.makeSibling(lab.Macvlan, "own0")
	defer w.remove("own0")
	w.counts("unknown_child", parentLink, func() {
		w.bypass(own, frame{own.mac, w.parentMAC(), address(w.client, w.ipv6), w.out()})
	})
	w.counts("spoofed_mac", "to_pod", func() {
		w.bypass(own, frame{own.mac, w.macOf(w.servers[1]), address(w.client, w.ipv6), address(w.servers[1], w.ipv6)})
	})
}

// byWayOfTheNode lets the node's routing carry what the wire would not take.
func (w *world) byWayOfTheNode() {
	own := w.makeSibling(lab.Macvlan, "own0")
	defer w.remove("own0")
	shim := w.nodeLink("mv-" + lab.Uplink)
	w.counts("spoofed_address", parentLink, func() {
		w.bypass(own, frame{own.mac, shim.mac, w.nobodys()[0], w.out()})
	})
}

// ipvlanSibling sends from addresses that are nobody's, or the node's: the link
// address is every sibling's, so only the sender's namespace tells.
func (w *world) ipvlanSibling(mode lab.Mode) {
	own := w.makeSibling(mode, "own0")
	defer w.remove("own0")
	for _, src := range append(w.nobodys(), w.nodeAddress(), address(w.servers[0], w.ipv6)) {
		w.counts("spoofed_address", parentLink, func() {
			w.send(own, frame{own.mac, w.parentMAC(), src, w.out()}, false)
		})
	}
	w.counts("hook_bypassed", parentLink, func() {
		w.send(own, frame{own.mac, w.parentMAC(), address(w.client, w.ipv6), w.out()}, false)
	})
}

// forwardedInThePod is a packet without a socket: the pod routes it from an
// interface of its own to the sibling that it made.
func (w *world) forwardedInThePod(mode lab.Mode) {
	w.makeSibling(mode, "own0")
	defer w.remove("own0")
	in, from := w.makePair("in0", "in1")
	defer w.remove("in0")
	w.routeBy("own0", w.out(), w.parentMAC())
	for _, src := range w.nobodys() {
		w.counts("spoofed_address", parentLink, func() {
			w.bypass(from, frame{from.mac, in.mac, src, w.out()})
		})
	}
}

func (w *world) throughItsHook() {
	eth0, parent := w.child("eth0"), w.parentMAC()
	w.counts("spoofed_address", "from_pod", func() {
		w.send(eth0, frame{eth0.mac, parent, address(w.servers[0], w.ipv6), w.out()}, false)
	})
	w.counts("spoofed_mac", "from_pod", func() {
		w.send(eth0, frame{net.HardwareAddr{2, 0, 0, 0, 0, 9}, parent, address(w.client, w.ipv6), w.out()}, false)
	})
}

// asAnotherType sends what its link header says is one thing, and its socket another: the kernel goes by the socket.
func (w *world) asAnotherType() {
	eth0 := w.child("eth0")
	f := frame{eth0.mac, eth0.mac, address(w.servers[0], w.ipv6), w.out()}
	for _, said := range []uint16{unix.ETH_P_ARP, unix.ETH_P_IP, unix.ETH_P_IPV6} {
		if said == bits.ReverseBytes16(f.protocol()) {
			continue
		}
		b := f.bytes()
		binary.BigEndian.PutUint16(b[12:], said)
		w.counts("ethertype", "from_pod", func() { w.put(eth0, b, f.protocol(), false) })
	}
}

// asARouter: on one wire with others, a pod that is believed to be their router has what they send.
func (w *world) asARouter() {
	outside := &w.lab.Outside().Space
	if !w.ipv6 {
		return
	}
	believes := func(value string) {
		w.must(outside.Do(func() error {
			files, err := filepath.Glob("/proc/sys/net/ipv6/conf/*/accept_ra")
			for _, f := range files {
				err = errors.Join(err, os.WriteFile(f, []byte(value), 0))
			}
			return err
		}))
	}
	believes("2")
	defer believes("0")
	eth0 := w.child("eth0")
	w.counts("spoofed_address", "from_pod", func() {
		w.must(w.client.Do(func() error {
			fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255), unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, eth0.index))
			advertisement := []byte{134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0} // for half an hour
			if err == nil {
				err = unix.Sendto(fd, advertisement, 0, &unix.SockaddrInet6{Addr: netip.MustParseAddr("ff02::1").As16(), ZoneId: uint32(eth0.index)})
			}
			if errors.Is(err, unix.ENOBUFS) { // so it hears of the drop
				err = nil
			}
			return err
		}))
		w.outside() // what was sent before has come by now
	})
	w.must(outside.Do(func() error {
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Protocol: unix.RTPROT_RA}, netlink.RT_FILTER_PROTOCOL)
		if len(routes) > 0 {
			w.t.Errorf("the pod is the router of who is outside: %v", routes)
		}
		return err
	}))
}

// outsideForLegacy is a connection out of the node from a pod that is not
// mustang's, on a link of its own.
func (w *world) outsideForLegacy() {
	legacyPod := &lab.Pod{Space: lab.Space{NetNS: "/var/run/netns/" + w.legacyName()}, Name: legacy}
	l, err := w.greet(w.lab.Outside().Space, w.out())
	w.must(err)
	defer l.Close()
	c, err := dial(legacyPod, "tcp", plain(l.Addr()), 0)
	w.must(err)
	defer c.Close()
	var seen string
	if _, err := fmt.Fscanln(c, &seen); err != nil || seen != legacyAddress(w.ipv6).String() {
		w.t.Errorf("outside saw %q, %v; want the pod's address", seen, err)
	}
}

// greet listens in a namespace, and tells the first who comes its address.
func (w *world) greet(s lab.Space, addr netip.Addr) (l net.Listener, err error) {
	err = s.Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	})
	if err != nil {
		return nil, err
	}
	go func() {
		if c, err := l.Accept(); err == nil {
			fmt.Fprintln(c, plain(c.RemoteAddr()).Addr())
			c.Close()
		}
	}()
	return l, nil
}

// outside is a connection from the pod out of the node, and one from there into it.
func (w *world) outside() {
	w.t.Helper()
	out, addr := w.lab.Outside(), w.out()
	l, err := w.greet(out.Space, addr)
	w.must(err)
	defer l.Close()
	c, err := dial(w.client, "tcp", plain(l.Addr()), 0)
	w.must(err)
	defer c.Close()
	var seen string
	if _, err := fmt.Fscanln(c, &seen); err != nil || seen != address(w.client, w.ipv6).String() {
		w.t.Errorf("outside saw %q, %v; want the pod's address", seen, err)
	}
	var in net.Conn
	w.must(out.Do(func() (err error) {
		d := net.Dialer{Timeout: patience, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0))}
		in, err = d.Dial("tcp", w.direct(0).String())
		return err
	}))
	defer in.Close()
	in.SetDeadline(time.Now().Add(patience))
	name, client, err := who(in)
	w.must(err)
	if name != w.servers[0].Name || client.Addr() != addr {
		w.t.Errorf("from outside: %s answered and saw %s", name, client)
	}
}
