// SPDX-License-Identifier: Apache-2.0

package lab

// The node and the outside: namespaces, the wire between them, routes, sysctls.

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Names of the namespaces that are neither nodes nor pods.
const (
	outsideName = "out"
	switchName  = "switch"
)

func (l *Lab) makeWorld() error {
	outNS, err := createNetNS(l.nsName(outsideName))
	if err != nil {
		return err
	}
	out4, out6 := nth(WireCIDR4, 2), nth(WireCIDR6, 2)
	l.outside = &Outside{Space{NetNS: outNS, env: l.info.mark()}, out4, out6}
	// With host devices outside is the pods' gateway; else it joins nobody.
	if err := l.outside.Do(func() error { return hostSysctls(l.cfg.Mode == HostDevice) }); err != nil {
		return fmt.Errorf("outside: %w", err)
	}
	for i := range l.cfg.Nodes {
		if err := l.makeNode(i + 1); err != nil {
			return err
		}
	}
	if err := l.makeUplinks(); err != nil {
		return err
	}
	if err := l.outside.Do(l.setUpOutside); err != nil {
		return fmt.Errorf("outside: %w", err)
	}
	any4, any6 := netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")
	for _, n := range l.nodes {
		if err := n.Do(func() error {
			return setUp(Uplink, addrs(n.IPv4, WireCIDR4, n.IPv6, WireCIDR6), hop{out4, out6, []netip.Prefix{any4, any6}})
		}); err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	// Outside's end went up first, without a carrier.
	if err := l.outside.Do(func() error { return settleWire(Uplink, out6) }); err != nil {
		return err
	}
	for _, n := range l.nodes {
		if err := n.Do(func() error { return settleWire(Uplink, n.IPv6) }); err != nil {
			return err
		}
		if len(l.nodes) == 1 {
			continue
		}
		if err := l.outside.Do(func() error { return settleLink(n.Name) }); err != nil {
			return fmt.Errorf("outside: %w", err)
		}
	}
	return l.joinNodes()
}

func (l *Lab) nsName(name string) string { return "mst-" + l.cfg.Name + "-" + name }

// makeNode makes node i, from 1, without links.
func (l *Lab) makeNode(i int) error {
	name := fmt.Sprintf("n%d", i)
	ns, err := createNetNS(l.nsName(name))
	if err != nil {
		return err
	}
	cgroup, err := l.cgroupOf(name)
	if err != nil {
		return err
	}
	n := &Node{Space: Space{ns, cgroup, l.info.mark()}, Name: name, lab: l, services: map[string]bool{}}
	n.IPv4, n.IPv6 = upAddrs(i)
	n.PodNet4, n.PodNet6 = podNets(i, l.cfg.Nodes)
	l.nodes = append(l.nodes, n)
	if err := n.Do(l.nodeSysctls); err != nil {
		return fmt.Errorf("node %s: %w", name, err)
	}
	return nil
}

// cgroupOf is that of a node's processes. One that is made lies beside CgroupRoot, since each level costs a
// switch of processes some 300 instructions, and goes with who has made that.
func (l *Lab) cgroupOf(node string) (string, error) {
	if !l.cfg.ownCgroups {
		return l.cfg.CgroupRoot, nil
	}
	dir := l.cfg.CgroupRoot + "-" + node
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("make the control group of %s: %w", node, err)
	}
	return dir, nil
}

// setUpOutside finishes the current namespace, which is outside: Services' and
// pods' addresses lead to the nodes.
func (l *Lab) setUpOutside() error {
	hops := []hop{}
	for i, n := range l.nodes {
		h := hop{via4: n.IPv4, via6: n.IPv6}
		if i == 0 {
			h.to = []netip.Prefix{ServiceCIDR4, ServiceCIDR6}
		}
		if l.cfg.Mode != HostDevice {
			h.to = append(h.to, n.PodNet4, n.PodNet6)
		}
		hops = append(hops, h)
	}
	if err := setUp(Uplink, addrs(l.outside.IPv4, WireCIDR4, l.outside.IPv6, WireCIDR6), hops...); err != nil || l.cfg.Mode != HostDevice {
		return err
	}
	return l.makeSwitch()
}

// settleWire returns when the current namespace's end of a wire transmits and its
// IPv6 address receives. Asking for a link's state makes the kernel's link
// watch run; an address's local route the kernel makes in the background.
func settleWire(name string, ip6 netip.Addr) error {
	if err := settleLink(name); err != nil {
		return err
	}
	for end := time.Now().Add(settleTime); ; time.Sleep(200 * time.Microsecond) {
		r, err := netlink.RouteGet(ip6.AsSlice())
		if err == nil && len(r) > 0 && r[0].Type == unix.RTN_LOCAL {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s is not local after it was given to %s, which is up", ip6, name)
		}
	}
}

const settleTime = 30 * time.Second

// settleLink returns when an interface in the current namespace transmits and, as
// a switch's port, forwards: the kernel tells both from a queue, which may be a
// second late.
func settleLink(name string) error {
	for end := time.Now().Add(settleTime); ; time.Sleep(200 * time.Microsecond) {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("look up %s: %w", name, err)
		}
		if l.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s is %s after both its ends were set up", name, l.Attrs().OperState)
		}
	}
}

// quickIPv6 makes addresses usable at once.
var quickIPv6 = map[string]string{
	"ipv6/conf/all/disable_ipv6":     "0",
	"ipv6/conf/default/disable_ipv6": "0",
	"ipv6/conf/default/accept_dad":   "0",
	"ipv6/conf/default/accept_ra":    "0",
}

func enableIPv6() error {
	err := setSysctls(quickIPv6)
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("this kernel has no IPv6, and all in a lab have addresses of both families: boot without ipv6.disable=1")
	}
	return err
}

// hostSysctls make a host of the current namespace, or a router, which joins
// others. What a new namespace inherits differs between machines (IPv4's settings
// are the machine's own), so all that matters is set.
func hostSysctls(router bool) error {
	if err := enableIPv6(); err != nil {
		return err
	}
	forward := map[bool]string{false: "0", true: "1"}[router]
	return setSysctls(map[string]string{
		"ipv4/ip_forward":              forward,
		"ipv6/conf/all/forwarding":     forward,
		"ipv6/conf/default/forwarding": forward,
		"ipv4/conf/all/rp_filter":      "0",
		"ipv4/conf/default/rp_filter":  "0",
		// Services between pods of one segment come in and leave by one interface.
		"ipv4/conf/all/send_redirects":     "0",
		"ipv4/conf/default/send_redirects": "0",
	})
}

func (l *Lab) nodeSysctls() error {
	if err := hostSysctls(true); err != nil || l.cfg.Mode != Bridge {
		return err
	}
	return setBridgeNF(l.cfg.BridgeNF)
}

// setBridgeNF says whether what bridges of the current namespace switch passes
// iptables.
func setBridgeNF(on bool) error {
	value := map[bool]string{false: "0", true: "1"}[on]
	err := setSysctls(map[string]string{
		"bridge/bridge-nf-call-iptables":  value,
		"bridge/bridge-nf-call-ip6tables": value,
	})
	if errors.Is(err, fs.ErrNotExist) {
		if !on {
			return nil // what is not there is off
		}
		return errors.New("net.bridge.bridge-nf-call-iptables does not exist: load br_netfilter, or use a kernel with CONFIG_BRIDGE_NETFILTER")
	}
	return err
}

// setSysctls writes keys under net/ in the calling thread's namespace.
func setSysctls(settings map[string]string) error {
	for key, value := range settings {
		if err := os.WriteFile(filepath.Join("/proc/sys/net", key), []byte(value), 0); err != nil {
			return fmt.Errorf("set sysctl net/%s=%s: %w", key, value, err)
		}
	}
	return nil
}
