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
