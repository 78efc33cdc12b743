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
	c, err := dialSCTP(p, dst)
	if err != nil {
		w.t.Errorf("%v: %v", dst, err)
		return ""
	}
	defer c.Close()
	w.must(c.SetDeadline(deadline()))
	name, client, err := who(c)
	w.must(err)
	if client.Addr() != address(p, w.ipv6) || plain(c.RemoteAddr()) != dst {
		w.t.Errorf("%s sees %v, want the node, %v; the peer is %v, want %v", name, client, address(p, w.ipv6), c.RemoteAddr(), dst)
	}
	return name
}
