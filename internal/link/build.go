// SPDX-License-Identifier: Apache-2.0

package link

// The steps that all ways share: handles into both namespaces, what is ours
// and how it is taken away again, addresses, routes and neighbours.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// linkGroup marks the pod's interface as ours, and a bridge, in the very message
// that creates it, so that even an Add that is killed right after can be told from somebody
// else's interface ("mst" in ASCII).
const linkGroup = 0x6d7374

// aliasPrefix starts the alias that is set last: it marks a complete pod, and
// tells a person who reads `ip link` whose interface this is.
const aliasPrefix = "mustang pod "

// builder holds both ends of a connection in the making.
type builder struct {
	Spec
	nodeNS, podNS *os.File // podNS is nil when the pod's namespace is gone
	node, pod     *netlink.Handle
	pending       []pendingAddr
	defaults      map[int]bool // families whose default route in the pod is ours
	lan           []netip.Addr // the node's addresses in the pod's networks, by its uplink; of each family the one that it speaks under first
	met           bool         // what leads the node to the pod's addresses may be this pod's
}

// pendingAddr is an IPv6 address that was added, and does not receive yet.
type pendingAddr struct {
	h  *netlink.Handle
	ip netip.Addr
}

// open gets handles into the current namespace and the one at podPath. An
// empty podPath stands for a pod whose namespace is gone.
func open(podPath string) (*builder, error) {
	b := &builder{defaults: make(map[int]bool)}
	var err error
	if b.nodeNS, err = netns.Current(); err != nil {
		return nil, err
	}
	if b.node, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		b.close()
		return nil, fmt.Errorf("netlink in the node's namespace: %w", err)
	}
	if podPath == "" {
		return b, nil
	}
	if b.podNS, err = netns.Open(podPath); err != nil {
		b.close()
		return nil, err
	}
	if err := b.inPod(func() (err error) {
		b.pod, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	}); err != nil {
		b.close()
		return nil, fmt.Errorf("netlink in %s: %w", podPath, err)
	}
	return b, nil
}

func (b *builder) close() {
	for _, h := range []*netlink.Handle{b.node, b.pod} {
		if h != nil {
			h.Close()
		}
	}
	for _, f := range []*os.File{b.nodeNS, b.podNS} {
		if f != nil {
			f.Close()
		}
	}
}

// inPod runs fn with the thread, which Add has locked, in the pod's namespace.
func (b *builder) inPod(fn func() error) error {
	if err := netns.Visit(b.podNS, b.nodeNS, fn); err != nil {
		return fmt.Errorf("in the pod: %w", err)
	}
	return nil
}

// find returns nil when there is no such link.
func find(h *netlink.Handle, name string) (netlink.Link, error) {
	l, err := h.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", name, err)
	}
	return l, nil
}

// must is find for a link that was just made.
func must(h *netlink.Handle, name string) (netlink.Link, error) {
	l, err := find(h, name)
	if err == nil && l == nil {
		err = fmt.Errorf("look up %s: it vanished", name)
	}
	return l, err
}

// clearHalfBuilt removes what a killed Add left, and refuses what it does not
// own or what is complete.
func (b *builder) clearHalfBuilt() error {
	l, err := find(b.pod, b.IfName)
	if err != nil {
		return err
	}
	if l == nil && b.Mode != HostDevice {
		return b.removeHost()
	}
	if l != nil {
		if l.Attrs().Group != linkGroup && !b.halfNetkit(l) {
			return fmt.Errorf("%s in %s is %w: remove it or choose another interface name", b.IfName, b.NetNS, ErrForeign)
		}
		if strings.HasPrefix(l.Attrs().Alias, aliasPrefix) {
			return fmt.Errorf("%s in %s: %w", b.IfName, b.NetNS, ErrExists)
		}
	}
	return b.remove()
}

// remove deletes both sides; absent is success.
func (b *builder) remove() error {
	if b.Mode == HostDevice {
		return b.giveBack()
	}
	var errs []error
	if b.pod != nil {
		// An alias that is another pod's: somebody uses one namespace for two.
		errs = append(errs, del(b.pod, b.IfName, func(a *netlink.LinkAttrs) bool {
			return a.Group == linkGroup && (a.Alias == "" || a.Alias == aliasPrefix+b.Name)
		}))
	}
	if b.met {
		errs = append(errs, b.leaveNode())
	}
	return errors.Join(append(errs, b.removeHost())...)
}

// removeHost deletes the host's end. A mode without one has nothing of the
// pod's on the host.
func (b *builder) removeHost() error {
	if !traitsOf[b.Mode].pair {
		return nil
	}
	return del(b.node, b.HostIfName, func(*netlink.LinkAttrs) bool { return true })
}

func del(h *netlink.Handle, name string, ours func(*netlink.LinkAttrs) bool) error {
	l, err := find(h, name)
	if err != nil || l == nil || !ours(l.Attrs()) {
		return err
	}
	// Between looking and deleting, the other end's deletion may take this one. What
	// the kernel never deletes is none of ours: a pod gave its loopback that name.
	if err := h.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("delete %s: %w", name, err)
	}
	return nil
}

func (b *builder) markComplete(index int) error {
	alias := aliasPrefix + b.Name
	if b.Mode == HostDevice {
		alias += deviceMark + b.Uplink
	}
	if err := b.pod.LinkSetAlias(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}, alias); err != nil {
		return fmt.Errorf("set alias of %s: %w", b.IfName, err)
	}
	return nil
}

// attrs are what every link of ours is created with. The MAC is always given:
// a kernel-chosen one invites udev to change it under us.
func (b *builder) attrs(name string, mac net.HardwareAddr) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name, a.MTU, a.HardwareAddr = name, b.MTU, mac
	return a
}

func (b *builder) podMAC() net.HardwareAddr {
	if b.MAC != nil {
		return b.MAC
	}
	return randomMAC()
}

// randomMAC returns a locally administered unicast address. It must not be
// another's, and is no secret.
func randomMAC() net.HardwareAddr {
	mac := net.HardwareAddr(binary.NativeEndian.AppendUint64(nil, rand.Uint64())[:6])
	mac[0] = mac[0]&^0x03 | 0x02
	return mac
}

// podBase prepares the pod's interface: sysctls before it goes up, so that its
// IPv6 addresses are usable at once, then addresses.
func (b *builder) podBase(eth netlink.Link, p4, p6 netip.Prefix) error {
	if err := b.inPod(func() error { return b.ifSysctls(b.IfName, b.IPv6.IsValid(), endOfPod) }); err != nil {
		return err
	}
	if err := up(b.pod, loopback); err != nil {
		return err
	}
	if err := up(b.pod, eth); err != nil {
		return err
	}
	for _, p := range []netip.Prefix{p4, p6} {
		if err := b.addAddr(b.pod, eth, p); err != nil {
			return err
		}
	}
	return nil
}

// loopback is the one of any namespace: the kernel gives it the first index
// (LOOPBACK_IFINDEX).
var loopback = &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo", Index: 1}}

func up(h *netlink.Handle, l netlink.Link) error {
	if err := h.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s up: %w", l.Attrs().Name, err)
	}
	return nil
}

// awaitAddrs returns when all added IPv6 addresses receive. Even without
// duplicate detection, the kernel makes an address's local route in the
// background; what arrives before is dropped or sent back.
func (b *builder) awaitAddrs() error {
	end := time.Now().Add(settleDeadline)
	for _, p := range b.pending {
		for {
			r, err := p.h.RouteGet(p.ip.AsSlice())
			if err == nil && len(r) > 0 && r[0].Type == unix.RTN_LOCAL {
				break
			}
			if time.Now().After(end) {
				return fmt.Errorf("address %s is not local %s after it was added", p.ip, settleDeadline)
			}
			time.Sleep(200 * time.Microsecond)
		}
	}
	return nil
}

// settleDeadline is far beyond what the kernel needs.
const settleDeadline = 10 * time.Second

// settle returns when a link transmits. The end of a pair that goes up first
// has no carrier yet, and what it sends is dropped until the kernel's link
// watch has run, some time after the other end went up. Asking for the link's
// state makes it run (since 6.8), and shows that it has. A bridge transmits from the
// start, and the link watch runs only once it has lost its ports, or its address.
func settle(h *netlink.Handle, l netlink.Link) error {
	for end := time.Now().Add(settleDeadline); ; time.Sleep(200 * time.Microsecond) {
		now, err := h.LinkByIndex(l.Attrs().Index)
		if err != nil {
			return fmt.Errorf("look up %s: %w", l.Attrs().Name, err)
		}
		if state := now.Attrs().OperState; state == netlink.OperUp || state == netlink.OperUnknown && now.Type() == "bridge" {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s stays %s after it was set up", l.Attrs().Name, now.Attrs().OperState)
		}
	}
}

// addAddr does nothing for the zero prefix: the family is not wanted.
func (b *builder) addAddr(h *netlink.Handle, l netlink.Link, p netip.Prefix) error {
	if !p.IsValid() {
		return nil
	}
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
		if !p.Addr().IsLinkLocalUnicast() { // a lookup would need its interface
			b.pending = append(b.pending, pendingAddr{h, p.Addr()})
		}
	}
	if err := h.AddrReplace(l, a); err != nil {
		return fmt.Errorf("add address %s to %s: %w", p, l.Attrs().Name, err)
	}
	return nil
}

// addNeigh makes a permanent neighbour: it is never asked for, so the first
// packet does not wait.
func addNeigh(h *netlink.Handle, l netlink.Link, ip netip.Addr, mac net.HardwareAddr) error {
	n := &netlink.Neigh{LinkIndex: l.Attrs().Index, IP: ip.AsSlice(), HardwareAddr: mac,
		State: netlink.NUD_PERMANENT, Family: family(ip)}
	if err := h.NeighSet(n); err != nil {
		return fmt.Errorf("add neighbour %s to %s: %w", ip, l.Attrs().Name, err)
	}
	return nil
}

// addHostRoute leads the pod's own address to its interface.
// mtu is the route's own, in bytes; 0 leaves it to the interface.
func addHostRoute(h *netlink.Handle, l netlink.Link, ip netip.Addr, mtu int) error {
	r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(single(ip)), Scope: netlink.SCOPE_LINK, MTU: mtu}
	if err := h.RouteReplace(r); err != nil {
		return fmt.Errorf("add route to %s by %s: %w", ip, l.Attrs().Name, err)
	}
	return nil
}

// addDefaultRoute sets the pod's way out. A pod that has one by another
// interface keeps it: this one is its second.
func (b *builder) addDefaultRoute(l netlink.Link, gw netip.Addr, flags int) error {
	h := b.pod
	all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if gw.Is6() {
		all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(all), Gw: gw.AsSlice(), Flags: flags}
	if b.RouteMTU < b.podMTU() && CanLocalMTU(b.Mode) { // a pair: what leaves passes the node
		r.MTU = b.RouteMTU
	}
	others, err := netns.RoutesIn(h, family(gw), &netlink.Route{Table: unix.RT_TABLE_MAIN, Dst: nil}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
	if err != nil {
		return fmt.Errorf("list default routes: %w", err)
	}
	for _, o := range others {
		if o.LinkIndex != r.LinkIndex {
			return nil
		}
	}
	if err := h.RouteReplace(r); err != nil {
		return fmt.Errorf("add default route via %s by %s: %w", gw, l.Attrs().Name, err)
	}
	b.defaults[family(gw)] = true
	return nil
}

func single(ip netip.Addr) netip.Prefix { return netip.PrefixFrom(ip, ip.BitLen()) }

// only returns p's address as a single-address prefix, or the zero prefix.
func only(p netip.Prefix) netip.Prefix {
	if !p.IsValid() {
		return p
	}
	return single(p.Addr())
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func family(ip netip.Addr) int {
	if ip.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// gateways pairs each wanted family's pod address with its gateway. Who gave an
// address may have named none.
func (b *builder) gateways() (out []struct{ ip, gw netip.Addr }) {
	for _, x := range []struct {
		p  netip.Prefix
		gw netip.Addr
	}{{b.IPv4, b.Gateway4}, {b.IPv6, b.Gateway6}} {
		if x.p.IsValid() && x.gw.IsValid() {
			out = append(out, struct{ ip, gw netip.Addr }{x.p.Addr(), x.gw})
		}
	}
	return out
}
