// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

var (
	wireSelf, wireOther = netip.MustParseAddr("10.3.0.1"), netip.MustParseAddr("10.3.0.2")
	wireOther6          = netip.MustParseAddr("fd00:10:3::2")
)

// wired joins the node by w0 to another namespace, whose path it returns.
func (n *node) wired() string {
	n.t.Helper()
	name := n.name + "-n2"
	n.namespace(name)
	n.run("ip link add w0 type veth peer name eth0 netns %s && ip link set w0 up && ip -n %s link set eth0 up", name, name)
	n.run("ip addr add %v/24 dev w0 && ip -n %s addr add %v/24 dev eth0", wireSelf, name, wireOther)
	n.run("ip addr add fd00:10:3::1/64 dev w0 nodad")
	return netns.Path(name)
}

// twoNodes tells the node of itself and of the one on w0, whose pods have addresses of
// both families.
func (n *node) twoNodes(mode state.NodeMode) error {
	return n.do(func(e *Engine) error {
		return e.ApplyNodes(state.OwnerCLI, []state.Node{
			{Name: "n1", Addrs: []netip.Addr{wireSelf}, PodCIDRs: prefixes("10.1.0.0/24", "fd00:10:1::/80"), Mode: mode},
			{Name: "n2", Addrs: []netip.Addr{wireOther, wireOther6}, PodCIDRs: prefixes("10.1.1.0/24", "fd00:10:1:0:1::/80"), Mode: mode},
		}, peers.SettingsSpec{})
	})
}

func prefixes(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// tooBig tells to, from the namespace at path, that an answer of its to an echo of about
// was longer than mtu.
func (n *node) tooBig(path string, to, about netip.Addr, mtu uint16) {
	n.t.Helper()
	m := make([]byte, 8+20+8)
	m[0], m[1] = 3, 4
	binary.BigEndian.PutUint16(m[6:], mtu)
	quoted := m[8:]
	quoted[0], quoted[8], quoted[9] = 0x45, 64, unix.IPPROTO_ICMP
	binary.BigEndian.PutUint16(quoted[2:], 1500)
	copy(quoted[12:], to.AsSlice())
	copy(quoted[16:], about.AsSlice())
	sum := uint32(0) // RFC 1071
	for i := 0; i < len(m); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(m[i:]))
	}
	binary.BigEndian.PutUint16(m[2:], ^uint16(sum+sum>>16))
	err := netns.Do(path, func() error {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		return unix.Sendto(s, m, 0, &unix.SockaddrInet4{Addr: to.As4()})
	})
	if err != nil {
		n.t.Fatal(err)
	}
}

// tunnelIs fails unless the tunnel's device has the MTU, and addresses of both families.
func (n *node) tunnelIs(mtu string) {
	n.t.Helper()
	l := n.run("ip link show %s && ip addr show %[1]s", peers.OverlayName)
	for _, want := range []string{"mtu " + mtu + " ", "inet 10.1.0.0/32", "inet6 fd00:10:1::/128"} {
		if !strings.Contains(l, want) {
			n.t.Errorf("the tunnel's device is without %q:\n%s", want, l)
		}
	}
}

// podMTUIs fails unless pods are told that, with nobody's change in the way.
func (n *node) podMTUIs(want int) {
	n.t.Helper()
	n.must(func(e *Engine) error { _, err := e.FollowDevices(); return err })
	if way, err := ToNodes(n.scope); err != nil || way.MTU != want {
		n.t.Errorf("pods are told %d, %v, want %d", way.MTU, err, want)
	}
}

// Anybody may tell a node that a path carries little: pods are told what the devices say.
func TestWhatStrangersTellOfAPathNarrowsNobody(t *testing.T) {
	for _, c := range []struct {
		mode state.NodeMode
		want int
	}{{state.NodeDirect, 1500}, {state.NodeVXLAN, 1450}} {
		t.Run(string(c.mode), func(t *testing.T) {
			n := newNode(t)
			other := n.wired()
			if err := n.twoNodes(c.mode); err != nil {
				t.Fatal(err)
			}
			n.podMTUIs(c.want)
			n.tooBig(other, wireSelf, wireOther, 600)
			if r := n.run("ip route get %v", wireOther); !strings.Contains(r, "mtu 600") {
				t.Fatalf("the kernel has not learned it: %s", r)
			}
			n.podMTUIs(c.want)
			if err := n.twoNodes(c.mode); err != nil {
				t.Error(err)
			}
			for _, p := range peers.ProbeWire([]state.Node{{Name: "n2", Addrs: []netip.Addr{wireOther}}}) {
				if p.MTU != 1500 {
					t.Errorf("status asks for %d bytes, the device promises 1500", p.MTU)
				}
			}
			if c.mode == state.NodeVXLAN {
				n.tunnelIs("1500")
			}
		})
	}
}

// Where the wire is too narrow for IPv6, the tunnel's device keeps its addresses, and the
// routes say what fits.
func TestTheTunnelKeepsIPv6OverANarrowWire(t *testing.T) {
	n := newNode(t)
	n.wired()
	if err := n.twoNodes(state.NodeVXLAN); err != nil {
		t.Fatal(err)
	}
	n.run("ip link set w0 mtu 1200")
	n.podMTUIs(1150)
	n.tunnelIs("1280")
	n.run("ip link set w0 mtu 1500")
	n.podMTUIs(1450)
	n.tunnelIs("1500")
}

// A node whose new devices have no IPv6, and a strict reverse path filter, has a tunnel for its
// pods of both families.
func TestTheTunnelsDeviceMindsNoDefaults(t *testing.T) {
	n := newNode(t)
	n.wired()
	n.run("sysctl -qw net.ipv6.conf.default.disable_ipv6=1 net.ipv4.conf.default.rp_filter=1")
	if err := n.twoNodes(state.NodeVXLAN); err != nil {
		t.Fatal(err)
	}
	n.tunnelIs("1500")
	if got := n.run("sysctl -n net.ipv4.conf.%s.rp_filter", peers.OverlayName); got != "2" {
		t.Errorf("its reverse path filter is %s, want 2, which is loose", got)
	}
}
