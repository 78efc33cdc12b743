// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// A client outside reaches pods of both nodes by a node port of the first, by the
// first segment it sends, and is told what address the pod saw: the first node's.
func (w *world) nodePortsFromOutside() {
	w.t.Helper()
	for family, ipv6 := range families {
		sub := w.on(w.t, ipv6).by(w.outsidePlace())
		for _, p := range []*lab.Pod{w.near, w.far} {
			at := sub.at(p, echoed)["nodeport"]
			wears := sub.seen(p, at)
			for _, network := range []string{"tcp", "udp"} {
				w.t.Run(fmt.Sprintf("%s/%s/%s", family, p.Name, network), func(t *testing.T) {
					name, saw, err := askFrom(sub.from.space, network, at)
					if err != nil || name != p.Name || saw != wears {
						t.Errorf("%q saw %v, %v; want %q, which sees %v", name, saw, err, p.Name, wears)
					}
				})
			}
		}
	}
}

// Pods use another node's ports by its address: to pods of either node, and to the
// node itself.
func (w *world) nodePortsOfAnotherNode() {
	w.t.Helper()
	first := w.lab.Nodes()[0]
	itself := &lab.Pod{Space: first.Space, Name: "itself", IPv4: first.Wire4, IPv6: first.Wire6}
	w.serve(itself)
	servers := []*lab.Pod{w.near, w.far, itself}
	for ip, vip := range map[netip.Addr]netip.Addr{itself.IPv4: lab.VIP4(echoed.vip + 2), itself.IPv6: lab.VIP6(echoed.vip + 2)} {
		w.mustang(first, "svc", "add", "--service", netip.AddrPortFrom(vip, vipPort).String(),
			"--node-port", fmt.Sprint(echoed.node+2), "--backend", netip.AddrPortFrom(ip, serverPort).String())
	}
	for _, vip := range []netip.Addr{lab.VIP4(29), lab.VIP6(29)} {
		w.mustang(first, "svc", "add", "--service", netip.AddrPortFrom(vip, vipPort).String(), "--node-port", "30089")
	}
	asker := w.pod(w.lab.Nodes()[1], "asker")
	for _, at := range []netip.Addr{first.Wire4, first.Wire6} {
		if w.join.Underlay != "" && at.Is6() != (w.join.Underlay == "ipv6") {
			continue // the other nodes do not know this one by it
		}
		if _, _, err := askFrom(&asker.Space, "tcp", netip.AddrPortFrom(at, 30089)); !errors.Is(err, unix.ECONNREFUSED) {
			w.t.Errorf("%s, a Service without backends: %v; want it refused", at, err)
		}
		for i, p := range servers {
			for _, network := range []string{"tcp", "udp"} {
				w.t.Run(fmt.Sprintf("%s/%s/%s", at, p.Name, network), func(t *testing.T) {
					name, _, err := askFrom(&asker.Space, network, netip.AddrPortFrom(at, echoed.node+uint16(i)))
					if err != nil || name != p.Name {
						t.Errorf("%q, %v; want %q", name, err, p.Name)
					}
				})
			}
		}
	}
}

// askFrom is who answered a client, and the address that it saw. A connection
// takes one segment.
func askFrom(o *lab.Space, network string, to netip.AddrPort) (name string, saw netip.Addr, err error) {
	err = o.Do(func() error {
		c, err := net.DialTimeout(network, to.String(), patience)
		if err != nil {
			return err
		}
		defer c.Close()
		if tcp, ok := c.(*net.TCPConn); ok {
			if again, err := sentAgain(tcp); err != nil || again > 0 {
				return fmt.Errorf("%d segments were sent again before there was a connection: %v", again, err)
			}
		}
		c.SetDeadline(time.Now().Add(patience))
		if _, err := fmt.Fprint(c, "?"); err != nil {
			return err
		}
		buf := make([]byte, 100) // in one piece, of either protocol
		n, _ := c.Read(buf)
		fields := strings.Fields(string(buf[:n]))
		if len(fields) < 2 {
			return fmt.Errorf("the answer is %q", buf[:n])
		}
		name = fields[0]
		saw, err = netip.ParseAddr(fields[1])
		return err
	})
	return name, saw, err
}

// sentAgain is how many segments a connection has sent again so far.
func sentAgain(c *net.TCPConn) (n uint32, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var info *unix.TCPInfo
	outer := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if err = errors.Join(outer, err); err != nil {
		return 0, err
	}
	return info.Total_retrans, nil
}
