// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/lab"
)

// routeMTU is that of the client's default route, 0: its interface's.
func (w *world) routeMTU() (mtu int) {
	w.t.Helper()
	family := map[bool]string{false: "-4", true: "-6"}[w.ipv6]
	_, after, found := strings.Cut(w.run(&w.client.Space, "ip %s route show default", family), " mtu ")
	if found {
		fmt.Sscan(after, &mtu)
	}
	return mtu
}

// Pods there already and pods to come are told what fits through the tunnel, and
// no more when there is none any longer.
func TestPodsAreToldWhatFits(t *testing.T) {
	w := newWorld(t, lab.Config{}, lab.Join{Mode: "direct"})
	first := w.lab.Nodes()[0]
	for _, c := range []struct {
		join lab.Join
		want int
	}{
		{lab.Join{Mode: "direct"}, 0},
		{lab.Join{Mode: "vxlan"}, 1450},
		{lab.Join{Mode: "vxlan", Underlay: "ipv6"}, 1430},
		{lab.Join{Mode: "direct"}, 0},
		{lab.Join{Mode: "vxlan", HostRouting: "legacy"}, 1450},
	} {
		w.must(w.lab.Join(deadline(t), c.join))
		for _, ipv6 := range families {
			if got := w.on(t, ipv6).routeMTU(); got != c.want {
				t.Errorf("%s, IPv6 %t: the pod's route has MTU %d, want %d", nameOf(c.join), ipv6, got, c.want)
			}
		}
	}
	late := w.pod(first, "late")
	if r := w.run(&late.Space, "ip route show default"); !strings.Contains(r, "mtu 1450") {
		t.Errorf("a pod that came later has %s", r)
	}
	w.run(&late.Space, "ip route replace default via 169.254.10.24 dev eth0 onlink mtu 1300")
	w.must(w.lab.Join(deadline(t), lab.Join{Mode: "direct"}))
	if r := w.run(&late.Space, "ip route show default"); !strings.Contains(r, "mtu 1300") {
		t.Errorf("a user's own MTU became %s", r)
	}
}

// BIG TCP's bundles go to other nodes as they are: the host's stack refuses none, whose segments are as long
// as the wire lets them be. A tunnel takes no larger bundles than the kernel's own: pods that are there when it
// comes, and those that come later, send none. They would be cut to single segments.
func TestBundlesToOtherNodes(t *testing.T) {
	const segments = 8 << 20 / 1398 // of what bulk sends, were each a packet of its own
	w := newWorld(t, lab.Config{BigTCP: 196608}, lab.Join{Mode: "direct"})
	first := w.lab.Nodes()[0]
	sent := func() (packets uint64) {
		w.must(first.Do(func() error {
			wire, err := netlink.LinkByName(lab.Wire)
			if err == nil {
				packets = wire.Attrs().Statistics.TxPackets
			}
			return err
		}))
		return packets
	}
	refused := func() (packets int) {
		_, after, _ := strings.Cut(w.run(&first.Space, "cat /proc/net/snmp6"), "Ip6InTooBigErrors")
		fmt.Sscan(after, &packets)
		return packets
	}
	for _, join := range []lab.Join{{Mode: "direct"}, {Mode: "direct", HostRouting: "legacy"}, {Mode: "vxlan"},
		{Mode: "vxlan", HostRouting: "legacy"}, {Mode: "vxlan", Underlay: "ipv6"}} {
		w.must(w.lab.Join(deadline(t), join))
		for _, p := range []*lab.Pod{w.client, w.pod(first, fmt.Sprintf("late%d", len(first.Pods())))} {
			for _, ipv6 := range families {
				before, beforeRefused := sent(), refused()
				sub := w.by(podPlace(p)).on(t, ipv6)
				sub.bulk(w.far, sub.direct(w.far))
				if n := sent() - before; n > segments/2 {
					t.Errorf("%s, IPv6 %t: %s sent 8 MiB in %d packets, nearly segment by segment (%d)", nameOf(join), ipv6, p.Name, n, segments)
				}
				if n := refused() - beforeRefused; n > 0 {
					t.Errorf("%s, IPv6 %t: the stack refused %d bundles of %s", nameOf(join), ipv6, n, p.Name)
				}
			}
		}
	}
}

// A wire that takes less than pods think: who sends too much is told, and what
// may be cut is cut.
func (w *world) wireThatShrinks() {
	w.t.Helper()
	for _, n := range w.lab.Nodes() {
		w.run(&n.Space, "ip link set %s mtu 1380", lab.Wire)
	}
	if w.join.Mode == "vxlan" {
		// Nobody tells an inner packet's sender what happens outside: the nodes have to look.
		w.must(w.lab.Join(deadline(w.t), w.join))
	}
	for family, ipv6 := range families {
		w.t.Run(family, func(t *testing.T) {
			sub := w.on(t, ipv6)
			cmd := w.client.Command(context.Background(), "ping", "-c", "2", "-i", "0.2", "-W", "10", "-M", "do", "-s", "1400", sub.ip(w.far).String())
			out, err := cmd.CombinedOutput()
			text := strings.ToLower(string(out))
			if err == nil || !strings.Contains(text, "frag needed") && !strings.Contains(text, "too big") && !strings.Contains(text, "too long") {
				t.Errorf("an echo that does not fit: %v\n%s", err, out)
			}
			sub.bulk(w.far, sub.direct(w.far))
			sub.bulk(w.far, sub.vip(w.far))
		})
	}
}

// A router may have a node's NIC take less of IPv6 than of all else: what a tunnel over
// IPv6 carries is less, too, for nobody cuts or answers what does not fit outside.
func TestAWireThatTakesLessOfIPv6(t *testing.T) {
	j := lab.Join{Mode: "vxlan", Underlay: "ipv6", HostRouting: "ebpf"}
	w := newWorld(t, lab.Config{}, j)
	for _, n := range w.lab.Nodes() {
		w.run(&n.Space, "sysctl -qw net.ipv6.conf.%s.mtu=1400", lab.Wire)
	}
	w.must(w.lab.Join(deadline(t), j))
	for family, ipv6 := range families {
		t.Run(family, func(t *testing.T) {
			sub := w.on(t, ipv6)
			if got := sub.routeMTU(); got != 1330 {
				t.Errorf("the pod's route has MTU %d, want 1330", got)
			}
			sub.bulk(w.far, sub.direct(w.far))
			sub.datagrams(w.far, sub.direct(w.far))
		})
	}
}

// Who sends too much for a Service's way is told, though the node's address is the other
// end to both: a pod whose client is behind a narrow uplink, and a client whose packets
// a wire, a tunnel over IPv6 or a pod does not take.
func TestWaysOfServicesThatAreNarrow(t *testing.T) {
	for what, j := range map[string]lab.Join{"direct": {Mode: "direct"}, "vxlan": {Mode: "vxlan", Underlay: "ipv6"}} {
		t.Run(what, func(t *testing.T) {
			j.HostRouting = "ebpf"
			w := newWorld(t, lab.Config{}, j)
			first, second, o := w.lab.Nodes()[0], w.lab.Nodes()[1], w.lab.Outside()
			w.mustang(first, "edge", "set", "--dev", lab.Uplink, "--dev", lab.Wire)
			for i, p := range []*lab.Pod{w.near, w.far} {
				for k, a := range []netip.Addr{p.IPv4, p.IPv6} {
					w.mustang(first, "svc", "add", "--service", netip.AddrPortFrom([]netip.Addr{lab.VIP4(20 + i), lab.VIP6(20 + i)}[k], vipPort).String(),
						"--node-port", fmt.Sprint(30080+i), "--backend", netip.AddrPortFrom(a, serverPort).String())
				}
			}
			at := func(ipv6 bool, port uint16) netip.AddrPort {
				if ipv6 {
					return netip.AddrPortFrom(first.IPv6, port)
				}
				return netip.AddrPortFrom(first.IPv4, port)
			}
			client := w.by(w.outsidePlace())
			if what == "direct" { // a wire, which here is narrower than the uplink
				for _, n := range []*lab.Node{first, second} {
					w.run(&n.Space, "ip link set %s mtu 1400", lab.Wire)
				}
			}
			for family, ipv6 := range families {
				t.Run(family, func(t *testing.T) {
					sub := client.on(t, ipv6)
					sub.learns(at(ipv6, 30081))
					sub.bulk(w.far, at(ipv6, 30081))
				})
			}
			w.run(&first.Space, "ip link set %s mtu 1320", lab.Uplink)
			for family, ipv6 := range families {
				t.Run(family+" behind a narrow uplink", func(t *testing.T) {
					// As of a client further away, who does not know of it.
					route := fmt.Sprintf("%s dev %s advmss 1440 mtu lock 1320", at(ipv6, 0).Addr(), lab.Uplink)
					w.run(&o.Space, "ip route replace %s", route)
					sub := client.on(t, ipv6)
					sub.bulk(w.near, at(ipv6, 30080))
					sub.bulk(w.far, at(ipv6, 30081))
				})
			}
		})
	}
}
