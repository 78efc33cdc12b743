// SPDX-License-Identifier: Apache-2.0

package link

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// world is a node with an uplink and two pods' namespaces.
type world struct {
	t    *testing.T
	node string
	pods []string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	w := &world{t: t, node: newNS(t, "n")}
	for i := range 2 {
		w.pods = append(w.pods, newNS(t, fmt.Sprintf("p%d", i+1)))
	}
	w.onNode(func() error {
		for _, key := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/net/"+key, []byte("1"), 0); err != nil {
				return err
			}
		}
		// The wire's other end is in the node too: nobody listens there.
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "up0"
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "wire"}); err != nil {
			return err
		}
		for _, name := range []string{"lo", "up0", "wire"} {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if err := netlink.LinkSetUp(l); err != nil {
				return err
			}
		}
		// What the node's own packets to routed pods carry as their source.
		up0, _ := netlink.LinkByName("up0")
		for _, a := range []string{"10.2.0.1/16", "fd00:10:2::1/64"} {
			addr, _ := netlink.ParseAddr(a)
			addr.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(up0, addr); err != nil {
				return err
			}
		}
		return nil
	})
	return w
}

func newNS(t *testing.T, name string) string {
	t.Helper()
	path := netns.Path(fmt.Sprintf("mstlink-%d-%s", os.Getpid(), name))
	if err := netns.Create(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Delete(path); err != nil {
			t.Error(err)
		}
	})
	return path
}

func (w *world) onNode(fn func() error) {
	w.t.Helper()
	if err := netns.Do(w.node, fn); err != nil {
		w.t.Fatal(err)
	}
}

// spec is the i-th pod's, from 0. No programs will be attached, so it is open.
func (w *world) spec(mode string, i int) Spec {
	s := Spec{
		Name: fmt.Sprintf("pod-%d", i), Mode: mode, NetNS: w.pods[i], Uplink: "up0", Open: true,
		IPv4: netip.PrefixFrom(podIP4(i), 16), IPv6: netip.PrefixFrom(podIP6(i), 64),
	}
	if mode == HostDevice {
		s.Uplink = w.nic(i)
	}
	return s
}

// nic is the i-th NIC of the node, plugged into a switch that is the gateway.
// It is made when it is first asked for.
func (w *world) nic(i int) string {
	w.t.Helper()
	name := fmt.Sprintf("nic%d", i)
	w.onNode(func() error {
		if _, err := netlink.LinkByName("port" + name); err == nil {
			return nil
		}
		sw, err := netlink.LinkByName("switch")
		if err != nil {
			sw = &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "switch"}}
			if err := netlink.LinkAdd(sw); err != nil {
				return err
			}
			for _, a := range []string{"10.1.0.1/16", "fd00:10:1::1/64"} {
				addr, _ := netlink.ParseAddr(a)
				addr.Flags = unix.IFA_F_NODAD
				if err := netlink.AddrAdd(sw, addr); err != nil {
					return err
				}
			}
			if err := netlink.LinkSetUp(sw); err != nil {
				return err
			}
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "port" + name}); err != nil {
			return err
		}
		port, err := netlink.LinkByName("port" + name)
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetMaster(port, sw), netlink.LinkSetUp(port))
	})
	return name
}

// patience is that with an answer that must come.
const patience = time.Minute

// await is for tests that meet a machine in emulation: how long an answer may
// take that needs nothing but computing.
func await(d time.Duration) time.Duration {
	if os.Getenv("MUSTANG_VM") != "" {
		return 20 * d
	}
	return d
}

func podIP4(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, 0, byte(i + 2)}) }
func podIP6(i int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fd00:10:1::%d", i+2)) }

func (w *world) add(s Spec) (res Result) {
	w.t.Helper()
	w.onNode(func() (err error) { res, err = Add(s); return err })
	if s.Mode == HostDevice {
		w.plugged("port" + s.Uplink)
	}
	return res
}

// plugged waits until a port of the switch forwards: the kernel tells bridges of
// carriers from a queue, which may be a second late.
func (w *world) plugged(port string) {
	w.t.Helper()
	w.onNode(func() error {
		for end := time.Now().Add(await(30 * time.Second)); ; time.Sleep(time.Millisecond) {
			l, err := netlink.LinkByName(port)
			if err != nil || l.Attrs().OperState == netlink.OperUp {
				return err
			}
			if time.Now().After(end) {
				return fmt.Errorf("%s is %s", port, l.Attrs().OperState)
			}
		}
	})
}

// links lists the interfaces of a namespace, without those of every namespace.
func (w *world) links(path string) (names []string) {
	w.t.Helper()
	err := netns.Do(path, func() error {
		ls, err := netns.Links()
		for _, l := range ls {
			names = append(names, l.Attrs().Name)
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return names
}

// eachMode runs a test for every mode that the kernel has.
func eachMode(t *testing.T, fn func(t *testing.T, mode string)) {
	for _, mode := range Modes {
		t.Run(mode, func(t *testing.T) {
			if err := Supported(mode); err != nil {
				t.Skip(err)
			}
			fn(t, mode)
		})
	}
}
