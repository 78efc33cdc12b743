// SPDX-License-Identifier: Apache-2.0

package engine

// The edge: Services for clients outside, at the node's NIC, and for the node's
// own sockets.

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
)

// Edge is how a node serves clients that are no pods.
type Edge struct {
	// Devices are the NICs behind which clients outside are; none: no such clients
	// are served. The addresses of lo are theirs, too.
	Devices []string
	// Prefixes choose which addresses of Devices take node ports; none: all.
	Prefixes []netip.Prefix
	// Ports are the source ports that flows from outside wear, which the host's
	// own sockets leave alone; zero: DefaultPorts.
	Ports PortRange
	// Host gives Services to the node's own sockets, and to pods that share its
	// network namespace.
	Host bool
}

// PortRange is First to Last, both included.
type PortRange struct{ First, Last uint16 }

// DefaultPorts lie above those that Linux gives to sockets by itself.
var DefaultPorts = PortRange{61000, 65535}

// EdgeStatus is the edge as it is.
type EdgeStatus struct {
	Devices   []string
	Addresses []netip.Addr // that take node ports
	IP4, IP6  netip.Addr   // that flows from outside wear
	Ports     PortRange
	Host      bool
	Door      string // the device by which the node's own SCTP meets Services; "": none is needed
}

// nic is one of an edge's devices.
type nic struct {
	index int
	addrs []netip.Addr
}

// SetEdge makes the edge what want says; what it was before does not matter. A
// zero Edge takes it away. What cannot be done leaves the edge as it was.
func (e *Engine) SetEdge(want Edge) error {
	if err := e.loadServices(); err != nil {
		return err
	}
	if e.services == nil {
		return errReadOnly
	}
	if want.Ports == (PortRange{}) {
		want.Ports = DefaultPorts
	}
	if want.Ports.First == 0 || want.Ports.Last <= want.Ports.First {
		return fmt.Errorf("the edge's ports %d-%d are no range; give FIRST-LAST, as 61000-65535", want.Ports.First, want.Ports.Last)
	}
	if _, err := findNICs(want); err != nil {
		return err
	}
	e.warnOfPorts(want)
	before, err := e.edgeBefore()
	if err != nil {
		return err
	}
	op := operation{Kind: opEdge, Edge: &want, EdgeBefore: &before}
	if err := e.begin(op); err != nil {
		return err
	}
	if err := e.applyEdge(op); err != nil {
		return privilege(err) // undone, or the journal stays
	}
	return e.done()
}

// CheckPrefixes refuses an edge whose prefixes hold no address of its devices: no node port
// would work. All else of it would.
func (want Edge) CheckPrefixes() error {
	nics, err := findNICs(want)
	if err == nil && len(nics) > 0 && len(want.takes(nics)) == 0 {
		err = fmt.Errorf("none of the addresses of %v is in %v; give prefixes that hold one, or none", want.Devices, want.Prefixes)
	}
	return err
}

// noAddress is what no device has.
var noAddress = netip.PrefixFrom(netip.IPv4Unspecified(), 32)

// edgeBefore is the edge as it is, to return to.
func (e *Engine) edgeBefore() (Edge, error) {
	now, err := e.Edge()
	was := Edge{Ports: cmp.Or(now.Ports, DefaultPorts), Host: now.Host}
	for _, a := range now.Addresses {
		was.Prefixes = append(was.Prefixes, netip.PrefixFrom(a, a.BitLen()))
	}
	if len(was.Prefixes) == 0 { // which would be all
		was.Prefixes = append(was.Prefixes, noAddress)
	}
	for _, name := range now.Devices {
		if _, gone := netlink.LinkByName(name); gone == nil {
			was.Devices = append(was.Devices, name)
		}
	}
	return was, err
}

// applyEdge makes the journal's edge the present one. One that cannot be is
// undone: the edge before takes its place.
func (e *Engine) applyEdge(op operation) error {
	if err := e.loadServices(); err != nil {
		return err
	}
	err := e.putEdge(*op.Edge)
	if err == nil {
		return nil
	}
	undo := e.putEdge(*op.EdgeBefore)
	if undo == nil {
		undo = e.done()
	}
	return errors.Join(err, undo)
}

// putEdge can be done again at any point of itself.
func (e *Engine) putEdge(want Edge) error {
	nics, err := findNICs(want)
	if err != nil {
		return err
	}
	takes := want.takes(nics)
	before, _, err := e.dp.Edge.Get(bpfgen.EdgeWire)
	if err != nil {
		return err
	}
	config := want.config(nics)
	config.Door = before.Door
	if config.PortFirst != before.PortFirst || config.PortCount != before.PortCount {
		if err := e.dp.Frontends.Worn(before); err != nil {
			return err
		}
	}
	turns := false
	if len(nics) > 0 {
		turns, err = e.needsTurns(takes, config)
	}
	if err == nil && turns {
		err = e.ensureTurns()
	}
	if err != nil {
		return err
	}
	if err := errors.Join(e.dp.Edge.Put([]uint32{bpfgen.EdgeWire}, []datapath.EdgeConfig{config}), e.services.SetNodeAddresses(takes)); err != nil {
		return err
	}
	e.turning = false // the tunnel's device goes by the NICs
	err = errors.Join(e.attachEdges(nics, turns), e.syncTunnelEdge(), e.setHost(want.Host), e.syncDoor())
	e.turning = turns && err == nil
	e.tryGather()
	e.tryMasquerade()
	return err
}

// config is what the programs are told: flows wear the first address of each family
// that takes node ports, for answers are looked for at those. Where none does, any.
func (want Edge) config(nics []nic) datapath.EdgeConfig {
	config := datapath.EdgeConfig{PortFirst: want.Ports.First, PortCount: want.Ports.Last - want.Ports.First + 1}
	addrs := want.takes(nics)
	for _, n := range nics {
		addrs = append(addrs, n.addrs...)
	}
	for _, a := range addrs {
		if a.Is4() && config.Ip4 == (datapath.Addr{}) {
			config.Ip4 = datapath.FromAddr(a)
		} else if a.Is6() && config.Ip6 == (datapath.Addr{}) {
			config.Ip6 = datapath.FromAddr(a)
		}
	}
	return config
}

// syncTunnelEdge lets answers to clients outside come by the tunnel, where there
// is one.
func (e *Engine) syncTunnelEdge() error {
	n, err := e.store.Nodes()
	if err != nil || len(n.Nodes) == 0 {
		return err
	}
	return e.syncNodes(n)
}

// takes are the addresses that take node ports, each once.
func (want Edge) takes(nics []nic) (out []netip.Addr) {
	for _, n := range nics {
		for _, a := range n.addrs {
			if !slices.Contains(out, a) && (len(want.Prefixes) == 0 || slices.ContainsFunc(want.Prefixes, func(p netip.Prefix) bool { return p.Contains(a) })) {
				out = append(out, a)
			}
		}
	}
	return out
}

func findNICs(want Edge) ([]nic, error) {
	var out []nic
	for _, name := range want.Devices {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return nil, fmt.Errorf("interface %q: %w; `ip link` lists those of this node", name, err)
		}
		if l.Attrs().Flags&net.FlagLoopback != 0 {
			return nil, fmt.Errorf("interface %q is a loopback, by which no client comes; give the NICs: addresses of lo take node ports at each", name)
		}
		if !peers.HasLinkHeader(l.Attrs().HardwareAddr) {
			return nil, fmt.Errorf("interface %q (%s) carries IP without a link header, which the edge's programs need; give the NICs behind which clients are", name, l.Type())
		}
		addrs, err := edgeAddrs(l)
		if err != nil {
			return nil, err
		}
		n := nic{index: l.Attrs().Index}
		for _, a := range addrs {
			ip, ok := netip.AddrFromSlice(a.IP)
			ip = ip.Unmap()
			passing := unix.IFA_F_DADFAILED
			if ip.Is6() { // of IPv4 the same bit says that another of the same network came first
				passing |= unix.IFA_F_TEMPORARY
			}
			if ok && a.Flags&passing == 0 {
				n.addrs = append(n.addrs, ip)
			}
		}
		out = append(out, n)
	}
	if len(out) > 0 && !slices.ContainsFunc(out, func(n nic) bool { return len(n.addrs) > 0 }) {
		return nil, fmt.Errorf("none of the interfaces %v has a global address, nor has lo; give one of them one first", want.Devices)
	}
	return out, nil
}

// edgeAddrs are the global addresses of a device, and those of lo: where each machine is a
// router among others, they are the machine's, and its NICs may have none.
func edgeAddrs(l netlink.Link) (out []netlink.Addr, err error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("look up lo: %w", err)
	}
	for _, l := range []netlink.Link{l, lo} {
		addrs, err := netns.Addrs(l)
		if err != nil {
			return nil, fmt.Errorf("list addresses of %s: %w", l.Attrs().Name, err)
		}
		for _, a := range addrs {
			if a.Scope == unix.RT_SCOPE_UNIVERSE {
				out = append(out, a)
			}
		}
	}
	return out, nil
}

// warnOfPorts says when the edge's ports do not lie above those that the host's own
// sockets are given: these may be the edge's, or servers listen there.
// Each flow looks before it takes a port; a socket does not.
func (e *Engine) warnOfPorts(want Edge) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	var first, last uint16
	if err != nil || len(want.Devices) == 0 {
		return
	}
	if _, err := fmt.Sscan(string(text), &first, &last); err != nil || last < want.Ports.First {
		return
	}
	if first > want.Ports.Last {
		e.opts.Notify(fmt.Sprintf("the edge's ports %d-%d lie below those that the node's sockets are given (%d-%d), where servers listen; give it others",
			want.Ports.First, want.Ports.Last, first, last))
		return
	}
	e.opts.Notify(fmt.Sprintf("the node's sockets are given ports %d-%d, of which the edge uses some (%d-%d); give it others, or narrow net.ipv4.ip_local_port_range",
		first, last, want.Ports.First, want.Ports.Last))
}

func (e *Engine) attachEdges(nics []nic, turns bool) error {
	now, err := e.dp.Edges()
	gone, unknown := e.dp.GoneEdges()
	if err := errors.Join(err, unknown); err != nil {
		return err
	}
	for _, n := range nics {
		if err := e.dp.AttachEdge(n.index, turns); err != nil {
			return err
		}
	}
	for _, index := range append(now, gone...) {
		if !slices.ContainsFunc(nics, func(n nic) bool { return n.index == index }) {
			err = errors.Join(err, e.dp.DetachEdge(index))
		}
	}
	return err
}

// hasEdge says whether there is an edge, be it that its NICs are gone: it waits for
// others to be set.
func (e *Engine) hasEdge() (bool, error) {
	here, err := e.dp.Edges()
	gone, unknown := e.dp.GoneEdges()
	return len(here)+len(gone) > 0, errors.Join(err, unknown)
}

// setHost enters the node's own namespace among those whose sockets get
// Services, or takes it out.
func (e *Engine) setHost(on bool) error {
	home, err := netns.Cookie()
	if err != nil {
		return err
	}
	if !on {
		return e.dp.Netns.Delete([]uint64{home})
	}
	if err := e.dp.EnsureSock(e.scope.cgroupRoot); err != nil {
		return err
	}
	return e.dp.Netns.Put([]uint64{home}, []datapath.NetnsInfo{{Flags: bpfgen.EPNode | bpfgen.EPServiceSocket}})
}

// Edge is the edge as it is.
func (e *Engine) Edge() (EdgeStatus, error) {
	var s EdgeStatus
	if err := e.loadServices(); err != nil || e.services == nil {
		return s, err
	}
	s.Addresses = e.services.NodeAddresses()
	config, _, err := e.dp.Edge.Get(bpfgen.EdgeWire)
	if err != nil {
		return s, err
	}
	s.IP4, s.IP6 = datapath.ToAddr(config.Ip4), datapath.ToAddr(config.Ip6)
	if config.PortCount > 0 {
		s.Ports = PortRange{config.PortFirst, config.PortFirst + config.PortCount - 1}
	}
	indexes, err := e.dp.Edges()
	if err != nil {
		return s, err
	}
	gone, err := e.dp.GoneEdges()
	if err != nil {
		return s, err
	}
	for _, i := range indexes {
		l, err := netlink.LinkByIndex(i)
		if err != nil {
			gone = append(gone, i)
			continue
		}
		s.Devices = append(s.Devices, l.Attrs().Name)
	}
	for _, i := range gone {
		s.Devices = append(s.Devices, fmt.Sprintf("interface %d, which is gone", i))
	}
	home, err := netns.Cookie()
	if err != nil {
		return s, err
	}
	if config.Door != 0 {
		s.Door = peers.DoorName
	}
	_, s.Host, err = e.dp.Netns.Get(home)
	return s, err
}
