// SPDX-License-Identifier: Apache-2.0

package service_test

// SCTP of the node's own processes, by packet through the door, with the strict
// check of the way back (rp_filter) on every device.

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

func (w *world) sctpOfTheNode() {
	node := w.lab.Node()
	me := &lab.Pod{Space: node.Space, Name: "node", IPv4: node.IPv4, IPv6: node.IPv6}
	out := &lab.Pod{Space: w.lab.Outside().Space, Name: "elsewhere", IPv4: w.lab.Outside().IPv4, IPv6: w.lab.Outside().IPv6}
	if fd, err := sctpSocket(netip.AddrPortFrom(address(me, w.ipv6), 0)); noSCTP(err) {
		w.t.Skip("this kernel has no SCTP")
	} else if err == nil {
		unix.Close(fd)
	}
	w.startServer(out)
	w.strict()
	w.tool("edge", "set", "--dev", lab.Uplink, "--host")
	defer w.tool("edge", "rm")
	external := []string{"192.0.2.77", "2001:db8:77::1"}[map[bool]int{true: 1}[w.ipv6]]
	away := netip.AddrPortFrom([]netip.Addr{lab.VIP4(177), lab.VIP6(177)}[map[bool]int{true: 1}[w.ipv6]], vipPort)
	w.tool("svc", "add", "--service", away.String(), "--protocol", "sctp", "--external-ip", external,
		"--backend", netip.AddrPortFrom(address(out, w.ipv6), serverPort).String())
	defer w.tool("svc", "rm", "--service", away.String(), "--protocol", "sctp")

	for _, c := range []struct {
		at   netip.AddrPort
		want []*lab.Pod
	}{
		{w.service(), w.servers},
		{netip.AddrPortFrom(vip(w.ipv6), serverPort), w.servers},
		{w.twin(), w.servers[:1]},
		{away, []*lab.Pod{out}},
		{netip.AddrPortFrom(netip.MustParseAddr(external), vipPort), []*lab.Pod{out}},
	} {
		seen := map[string]int{}
		for range 15 * len(c.want) {
			seen[w.sctpFrom(me, c.at)]++
		}
		for _, p := range c.want {
			if seen[p.Name] == 0 || len(seen) != len(c.want) {
				w.t.Errorf("associations of the node with %v went to %v", c.at, seen)
				break
			}
		}
		w.sctpBulkFrom(me, c.at)
	}
	w.sctpByTheNodesAddresses(me, out)
	for what, port := range map[string]uint16{"an unknown port": 8125, "a Service without backends": sctpEmptyPort} {
		start := time.Now()
		if c, err := dialSCTP(me, netip.AddrPortFrom(vip(w.ipv6), port)); !refused(err) || time.Since(start) > slow(time.Second) {
			w.t.Errorf("%s, of the node: %v, %v after %s", what, c, err, time.Since(start))
		}
	}
	if t := w.tool("edge", "show"); !strings.Contains(t, "mst-host") {
		w.t.Errorf("edge show does not tell of the door:\n%s", t)
	}
}

// sctpByTheNodesAddresses is about node ports at each of two addresses of the node,
// and a port of one of them alone, as a host port with hostIP is.
func (w *world) sctpByTheNodesAddresses(me, out *lab.Pod) {
	first, second := address(me, w.ipv6), netip.MustParseAddr([]string{"203.0.113.9", "2001:db8:113::9"}[map[bool]int{true: 1}[w.ipv6]])
	w.inNode("sh", "-c", "ip link add second type veth peer name nobody && ip link set second up && ip link set nobody up && ip addr add dev second "+
		netip.PrefixFrom(second, second.BitLen()).String()) // after the first's, whose address flows wear
	defer w.inNode("ip", "link", "del", "second")
	w.tool("edge", "set", "--dev", lab.Uplink, "--dev", "second", "--host")
	defer w.tool("edge", "set", "--dev", lab.Uplink, "--host")
	added := netip.AddrPortFrom([]netip.Addr{lab.VIP4(178), lab.VIP6(178)}[map[bool]int{true: 1}[w.ipv6]], vipPort)
	add := func(nodePort uint16, external netip.Addr, backends ...*lab.Pod) (port uint16, remove func()) {
		args := []string{"svc", "add", "--service", added.String(), "--protocol", "sctp"}
		if nodePort != 0 {
			args = append(args, "--node-port", fmt.Sprint(nodePort))
		}
		if external.IsValid() {
			args = append(args, "--external-ip", external.String())
		}
		for _, p := range backends {
			args = append(args, "--backend", netip.AddrPortFrom(address(p, w.ipv6), serverPort).String())
		}
		w.tool(args...)
		gone := added
		added = netip.AddrPortFrom(added.Addr(), added.Port()+1)
		return gone.Port(), func() { w.tool("svc", "rm", "--service", gone.String(), "--protocol", "sctp") }
	}
	reach := func(what string, port uint16, at []netip.Addr, want []*lab.Pod) {
		w.t.Helper()
		for _, a := range at {
			to, seen := netip.AddrPortFrom(a, port), map[string]int{}
			for range 8 * len(want) {
				seen[w.sctpFrom(me, to)]++
			}
			if len(seen) != len(want) || seen[want[0].Name] == 0 {
				w.t.Errorf("%s: associations of the node with %v went to %v", what, to, seen)
			}
			w.sctpBulkFrom(me, to)
		}
	}
	refuse := func(what string, port uint16, at []netip.Addr) {
		w.t.Helper()
		for _, a := range at {
			start := time.Now()
			if c, err := dialSCTP(me, netip.AddrPortFrom(a, port)); !refused(err) || time.Since(start) > slow(time.Second) {
				w.t.Errorf("%s, by %v: %v, %v after %s", what, a, c, err, time.Since(start))
			}
		}
	}
	both := []netip.Addr{first, second}
	const other, away, none, itself = 30085, 30086, 30087, 30088

	refuse("before there is a Service", other, both)
	_, noOther := add(other, netip.Addr{}, w.servers...)
	_, noSame := add(serverPort, netip.Addr{}, w.servers[0])
	_, noAway := add(away, netip.Addr{}, out)
	_, noNone := add(none, netip.Addr{})
	one, noOne := add(0, second, w.servers[1])
	defer noOther()
	defer noAway()
	defer noNone()
	reach("node port", other, both, w.servers)
	reach("the backends' own port", serverPort, both, w.servers[:1])
	reach("a backend elsewhere", away, both, []*lab.Pod{out})
	reach("a port of one address", one, both[1:], w.servers[1:])
	refuse("the other address", one, both[:1])
	refuse("without a backend", none, both)
	refuse("no Service's port", 30099, both)
	noOne()
	refuse("a Service that is gone", one, both)

	noSame()
	w.startServer(me)
	reach("no Service's port any more, of the node's own socket", serverPort, both[:1], []*lab.Pod{me})
	_, noItself := add(itself, netip.Addr{}, me)
	defer noItself()
	for _, a := range both {
		for range 8 {
			if name := w.sctpSeenAs(me, netip.AddrPortFrom(a, itself), a); name != me.Name {
				w.t.Errorf("the node as its own backend, by %v: %q", a, name)
			}
		}
		w.sctpBulkFrom(me, netip.AddrPortFrom(a, itself))
	}
	reach("beside it", other, both[:1], w.servers)
}

func (w *world) inNode(args ...string) {
	w.t.Helper()
	if out, err := w.lab.Node().Command(context.Background(), args...).CombinedOutput(); err != nil {
		w.t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// strict sets rp_filter for all devices, until the test ends.
func (w *world) strict() {
	const key = "/proc/sys/net/ipv4/conf/all/rp_filter"
	set := func(value string) {
		w.must(w.lab.Node().Do(func() error { return os.WriteFile(key, []byte(value), 0) }))
	}
	set("1")
	w.t.Cleanup(func() { set("0") })
}

func (w *world) tool(args ...string) string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	text, err := w.lab.Node().Mustang(ctx, args...)
	if err != nil {
		w.t.Errorf("mustang %s: %v", fmt.Sprint(args), err)
	}
	return string(text)
}

// sctpFrom is who answers the node, which must see an address of the node.
func (w *world) sctpFrom(p *lab.Pod, dst netip.AddrPort) string {
	w.t.Helper()
	return w.sctpSeenAs(p, dst, address(p, w.ipv6))
}

func (w *world) sctpSeenAs(p *lab.Pod, dst netip.AddrPort, want netip.Addr) string {
	w.t.Helper()
	c, err := dialSCTP(p, dst)
	if err != nil {
		w.t.Errorf("%v: %v", dst, err)
		return ""
	}
	defer c.Close()
	w.must(c.SetDeadline(deadline()))
	name, client, err := who(c)
	w.must(err)
	if client.Addr() != want || plain(c.RemoteAddr()) != dst {
		w.t.Errorf("%s sees %v, want the node, %v; the peer is %v, want %v", name, client, want, c.RemoteAddr(), dst)
	}
	return name
}
