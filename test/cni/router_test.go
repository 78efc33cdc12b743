// SPDX-License-Identifier: Apache-2.0

package cni_test

// A router out there that advertises itself (RFC 4861).

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// advertise says once to all behind the uplink that here is a router for half an hour.
func advertise() int {
	// Type, code, the kernel's checksum, hop limit, flags, lifetime in seconds, two times left open.
	text := [16]byte{134, 0, 0, 0, 64, 0, 1800 >> 8, 1800 & 0xff}
	l, err := net.InterfaceByName(uplink)
	if err == nil {
		err = sendToAll(l.Index, text[:])
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func sendToAll(index int, text []byte) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255); err != nil {
		return err
	}
	return unix.Sendto(fd, text, 0, &unix.SockaddrInet6{Addr: [16]byte{0: 0xff, 1: 2, 15: 1}, ZoneId: uint32(index)})
}

// learnsRouter says whether the node takes its default route from an advertisement.
func (n *node) learnsRouter(wait time.Duration) bool {
	n.t.Helper()
	for end := time.Now().Add(wait); ; time.Sleep(50 * time.Millisecond) {
		cmd := exec.Command("nsenter", "--net=/var/run/netns/"+n.outside(), os.Args[0])
		cmd.Env = append(os.Environ(), roleVariable+"=router")
		out, err := cmd.CombinedOutput() // fails while the router's own address is tentative
		if n.hasRouter() {
			return true
		}
		if time.Now().After(end) {
			n.t.Logf("the last advertisement: %v %s", err, out)
			return false
		}
	}
}

func (n *node) hasRouter() bool {
	n.t.Helper()
	return strings.Contains(run(n.t, "ip", "-n", n.name, "-6", "route", "show", "default"), "proto ra")
}

// Whatever makes the node forward, or one device of it: the kernel drops the
// routes of routers on all interfaces at the first that does.
func TestForward_TheNodeKeepsItsRouters(t *testing.T) {
	sctp := mapping(8081, "sctp", "")
	for name, conf := range map[string]func(config) config{
		"a pod":                             func(c config) config { return c },
		"an IPv4 pod, by the door":          func(c config) config { return c.with("ipam", v4Pool).ports(sctp) },
		"a masqueraded pod, with fragments": func(c config) config { return c.with("masquerade", true).ports(mapping(8081, "tcp", "")) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			run(t, "ip", "-n", n.name, "-6", "route", "del", "default")
			n.sysctl("ipv6/conf/up0/accept_ra", "1")
			if !n.learnsRouter(slow(patience)) {
				t.Fatal("the kernel takes no router's advertisement")
			}
			c, conf := n.container(), conf(n.config("veth"))
			c.add(conf)
			if !n.hasRouter() {
				t.Errorf("ADD took the default route away; accept_ra is %s", n.sysctl("ipv6/conf/up0/accept_ra", ""))
			}
			run(t, "ip", "-n", n.name, "-6", "route", "flush", "default")
			if !n.learnsRouter(slow(silence)) {
				t.Error("after ADD, no advertisement brings a default route")
			}
			c.del(conf)
		})
	}
}

// The node lives by a bridge of its administrator's: mustang sets there what it needs, that
// it forwards, and nothing else.
func TestForward_ABridgeThatWasThereKeepsItsSettings(t *testing.T) {
	settings := []string{"ipv6/conf/br0/accept_ra", "ipv6/conf/br0/accept_dad", "ipv6/conf/br0/accept_redirects", "ipv6/conf/br0/disable_ipv6",
		"ipv4/conf/br0/rp_filter", "ipv4/conf/br0/send_redirects"}
	for name, c := range map[string]struct {
		ipam any
		node string // the node's own IPv6 on the bridge
		want []string
	}{
		"IPv6 pods":                          {map[string]any{"type": "mustang", "pools": []string{"10.9.0.0/24", "fd00:9::/64"}}, "fd00:7::1/64", []string{"2", "1", "1", "0", "2", "1"}},
		"IPv4 pods":                          {v4Pool, "fd00:7::1/64", []string{"1", "1", "1", "0", "2", "1"}},
		"IPv4 pods, and a node without IPv6": {v4Pool, "", []string{"1", "1", "1", "0", "2", "1"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.livesByABridge(c.node)
			n.sysctl("ipv6/conf/br0/accept_ra", "1")
			n.sysctl("ipv4/conf/br0/rp_filter", "2")
			if c.node != "" && !n.learnsRouter(slow(patience)) {
				t.Fatal("the kernel takes no router's advertisement")
			}
			pod, conf := n.container(), n.config("bridge").with("bridge", "br0").with("ipam", c.ipam)
			pod.add(conf)
			if c.node != "" && !n.hasRouter() {
				t.Error("ADD took the default route away")
			}
			for i, key := range settings {
				if now := n.sysctl(key, ""); now != c.want[i] {
					t.Errorf("%s is %s, not %s", key, now, c.want[i])
				}
			}
			if now := n.sysctl("ipv4/conf/br0/forwarding", ""); now != "1" {
				t.Errorf("forwarding is %s", now)
			}
			pod.del(conf)
		})
	}
}

// livesByABridge makes the uplink a port of br0, which has the node's addresses then; v6 ""
// is none of IPv6, not even a link-local one.
func (n *node) livesByABridge(v6 string) {
	n.t.Helper()
	mode := "eui64"
	if v6 == "" {
		mode = "none"
	}
	for _, args := range []string{"link add br0 type bridge", "link set br0 addrgenmode " + mode, "addr flush dev up0", "link set up0 master br0",
		"link set br0 up", "addr add 192.168.7.1/24 dev br0", "route add default via 192.168.7.2"} {
		run(n.t, "ip", append([]string{"-n", n.name}, strings.Fields(args)...)...)
	}
	if v6 != "" {
		run(n.t, "ip", "-n", n.name, "addr", "add", v6, "dev", "br0", "nodad")
	}
}

// Who takes no advertisements, or took them for good, has it as it was; and what
// comes later is not trusted for it.
func TestForward_TouchesNoOtherInterface(t *testing.T) {
	n := newNode(t)
	n.sysctl("ipv6/conf/up0/accept_ra", "0")
	run(t, "ip", "-n", n.name, "link", "add", "other0", "type", "veth", "peer", "name", "other1") // somebody else's container's
	n.sysctl("ipv6/conf/other0/accept_ra", "1")
	n.sysctl("ipv6/conf/lo/forwarding", "1")
	want := map[string]string{"up0": "0", "lo": "1", "other0": "1", "default": n.sysctl("ipv6/conf/default/accept_ra", "")}
	c := n.container()
	c.add(n.config("veth"))
	for name, value := range want {
		if now := n.sysctl("ipv6/conf/"+name+"/accept_ra", ""); now != value {
			t.Errorf("accept_ra of %s is %s, not %s", name, now, value)
		}
	}
	c.del(n.config("veth"))
}

var v4Pool = map[string]any{"type": "mustang", "pools": []string{"10.9.0.0/24"}}

// sysctl is the node's, set before unless value is "".
func (n *node) sysctl(key, value string) string {
	n.t.Helper()
	script := "cat /proc/sys/net/" + key
	if value != "" {
		script = fmt.Sprintf("echo %s >/proc/sys/net/%s && %s", value, key, script)
	}
	return strings.TrimSpace(run(n.t, "ip", "netns", "exec", n.name, "sh", "-c", script))
}
