// SPDX-License-Identifier: Apache-2.0

package engine

// The ways to the outside: which devices lead there, what pods may wear behind
// them, and why packets must pass the host's stack all the same. Pods that keep
// their addresses need less to go past it than those that are masqueraded: that
// nobody else translates.

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/masquerade"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// OutsideStatus is who forwards pods' packets to the outside.
type OutsideStatus struct {
	By      string   `json:"by"`      // "ebpf" or "stack"
	Because []string `json:"because"` // why not by eBPF
}

// ways is how pods' packets get to the outside, as things are now.
type ways struct {
	devices map[uint32]datapath.Wear
	// Why not by the programs, a sentence each.
	notMasqueraded, notKeeping []string
}

// ways looks at what the decision rests on.
func (e *Engine) ways() (w ways, err error) {
	n, err := e.store.Nodes()
	if err != nil {
		return w, err
	}
	if err := e.loadServices(); err != nil {
		return w, err
	}
	if w.devices, err = e.wear(); err != nil {
		return w, err
	}
	chains, err := othersNAT()
	if err != nil {
		return w, err
	}
	config, _, err := e.dp.Node.Get(0)
	if err != nil {
		return w, err
	}
	if settingsOf(n).HostRouting != state.RoutingEBPF {
		chains = append([]string{"host routing is legacy (`mustang node set --host-routing ebpf`)"}, chains...)
	} else if len(n.Nodes) > 0 && config.Flags&bpfgen.NodeEbpf == 0 { // routingOf
		chains = append([]string{"host routing is legacy, for nodes are reached by a device without a link header"}, chains...)
	}
	w.notMasqueraded, w.notKeeping = chains, slices.Clone(chains)
	if len(w.devices) == 0 { // then all ways are others
		w.notMasqueraded = append(w.notMasqueraded, "the edge has no device (`mustang edge set`, or the agent's --devices)")
	}
	for _, id := range slices.Sorted(maps.Keys(e.known)) {
		if ep := e.known[id]; len(w.devices) > 0 && ep.Masquerade != nil && ep.Placement == state.InPod {
			w.notMasqueraded = append(w.notMasqueraded, fmt.Sprintf("endpoint %d has its programs inside its pod", id))
			break
		}
	}
	if len(w.devices) > 0 {
		others, err := e.otherWays(w.devices)
		if err != nil {
			return w, err
		}
		bare, err := e.bare(w.devices)
		if err != nil {
			return w, err
		}
		w.notMasqueraded = append(append(w.notMasqueraded, others...), bare...)
	}
	wires := e.dp.WireDevices()
	for _, i := range wires {
		d := w.devices[uint32(i)]
		d.Answers = bpfgen.WearAnswers
		w.devices[uint32(i)] = d
	}
	if len(wires) == 0 && len(w.notKeeping) == 0 {
		w.notKeeping = append(w.notKeeping, "no device leads to other nodes")
	}
	return w, nil
}

// wear is what pods wear behind each device of the edge: of the addresses whose answers
// the edge looks at, the one that leads furthest; else the first.
func (e *Engine) wear() (map[uint32]datapath.Wear, error) {
	out := map[uint32]datapath.Wear{}
	edges, err := e.dp.Edges()
	if err != nil || e.services == nil {
		return out, err
	}
	edge, _, err := e.dp.Edge.Get(bpfgen.EdgeWire)
	if err != nil {
		return out, err
	}
	takes := withAddrs(e.services.NodeAddresses(), edge.Ip4, edge.Ip6) // answers are looked at there, too
	for _, index := range edges {
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			continue // it is going
		}
		addrs, err := edgeAddrs(l)
		if err != nil {
			return nil, err
		}
		list, err := outermost(l)
		if err != nil {
			return nil, err
		}
		slices.SortStableFunc(addrs, lastingFirst)
		for _, a := range addrs {
			ip, _ := netip.AddrFromSlice(a.IP)
			list = append(list, ip.Unmap())
		}
		var w datapath.Wear
		for _, ip := range list {
			switch {
			case !slices.Contains(takes, ip):
			case ip.Is4() && w.Ip4 == (datapath.Addr{}):
				w.Ip4 = datapath.FromAddr(ip)
			case ip.Is6() && w.Ip6 == (datapath.Addr{}):
				w.Ip6 = datapath.FromAddr(ip)
			}
		}
		if w != (datapath.Wear{}) {
			out[uint32(index)] = w
		}
	}
	return out, nil
}

// bare are devices of the edge where masqueraded pods would go out as they are: of their family there are addresses,
// and none whose answers the edge looks at.
func (e *Engine) bare(devices map[uint32]datapath.Wear) (out []string, err error) {
	worn := map[bool]bool{} // by whether of IPv4
	for _, ep := range e.known {
		for _, a := range ep.Addrs() {
			worn[a.Is4()] = worn[a.Is4()] || ep.Masquerade != nil
		}
	}
	for _, index := range slices.Sorted(maps.Keys(devices)) {
		l, err := netlink.LinkByIndex(int(index))
		if err != nil {
			continue // it is going
		}
		addrs, err := edgeAddrs(l)
		if err != nil {
			return nil, err
		}
		for v4, has := range map[bool]datapath.Addr{true: devices[index].Ip4, false: devices[index].Ip6} {
			there := slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return (a.IP.To4() != nil) == v4 })
			if worn[v4] && there && has == (datapath.Addr{}) {
				out = append(out, fmt.Sprintf("of the %s addresses of device %s none takes node ports", map[bool]string{true: "IPv4", false: "IPv6"}[v4], l.Attrs().Name))
			}
		}
	}
	slices.Sort(out)
	return out, nil
}

// lastingFirst compares addresses of a device by what the kernel, too, goes by (RFC
// 6724 5), for where its own choice is one that takes no node ports, a temporary one:
// a deprecated one comes last, before it IPv6's unique local ones.
func lastingFirst(a, b netlink.Addr) int {
	rank := func(a netlink.Addr) int {
		switch {
		case a.Flags&unix.IFA_F_DEPRECATED != 0:
			return 2
		case a.IP.To4() == nil && a.IP.IsPrivate():
			return 1
		}
		return 0
	}
	return rank(a) - rank(b)
}

// global6 stands for all that is outside, over IPv6.
var global6 = netip.MustParseAddr("2000::")

// outermost are the addresses that the node itself has behind a device towards what
// its default routes lead to, as far as there are any: of several networks, the
// gateway's, and over IPv6 no unique local one where there is a global one.
func outermost(l netlink.Link) (out []netip.Addr, err error) {
	gateways, err := gateways(l)
	if err != nil {
		return nil, err
	}
	for _, to := range gateways {
		if to.To4() == nil {
			to = global6.AsSlice()
		}
		ways, err := netlink.RouteGetWithOptions(to, &netlink.RouteGetOptions{Oif: l.Attrs().Name})
		if err != nil || len(ways) == 0 {
			continue // it is going
		}
		if a, ok := netip.AddrFromSlice(ways[0].Src); ok {
			out = append(out, a.Unmap())
		}
	}
	return out, nil
}

// gateways are those of the default routes by a device, of all their next hops.
func gateways(l netlink.Link) (out []net.IP, err error) {
	routes, err := netns.Routes(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("list default routes: %w", err)
	}
	for _, r := range routes {
		if !defaultRoute(r) {
			continue
		}
		for _, h := range append(r.MultiPath, &netlink.NexthopInfo{LinkIndex: r.LinkIndex, Gw: r.Gw}) {
			if h.LinkIndex == l.Attrs().Index && h.Gw != nil {
				out = append(out, h.Gw)
			}
		}
	}
	return out, nil
}

// otherWays are devices that lead to the outside, and are none of the edge's.
func (e *Engine) otherWays(edges map[uint32]datapath.Wear) ([]string, error) {
	inside := slices.Clone(masquerade.AlwaysInside)
	skip := map[int]bool{}
	for _, ep := range e.known {
		inside = append(inside, insideOf(ep)...)
		for _, a := range ep.Addrs() {
			inside = append(inside, netip.PrefixFrom(a, a.BitLen()))
		}
		if ep.Placement == state.HostEnd {
			skip[ep.IfIndex] = true
		}
	}
	routes, err := netns.Routes(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	var out []string
	for _, r := range routes {
		if r.Type != unix.RTN_UNICAST || r.Table == unix.RT_TABLE_LOCAL || r.Dst != nil && within(r.Dst, inside) {
			continue
		}
		hops := []int{r.LinkIndex}
		for _, h := range r.MultiPath {
			hops = append(hops, h.LinkIndex)
		}
		if drawnByPorts(r) {
			out = append(out, fmt.Sprintf("several devices lead to %s, and ports say which (fib_multipath_hash_policy), so flows between the same ends wear different addresses", r.Dst))
		}
		for _, index := range hops {
			if _, edge := edges[uint32(index)]; edge || index == 0 || skip[index] {
				continue
			}
			skip[index] = true
			l, err := netlink.LinkByIndex(index)
			if err != nil || slices.Contains([]string{"lo", peers.OverlayName, peers.DoorName, peers.GatherName}, l.Attrs().Name) {
				continue
			}
			stays, err := staysHere(l, r.Dst)
			if err != nil {
				return nil, err
			}
			if stays {
				delete(skip, index) // another route may not
				continue
			}
			out = append(out, fmt.Sprintf("device %s leads to %s, and is none of the edge's", l.Attrs().Name, r.Dst))
		}
	}
	if len(edges) > 1 {
		byPorts, err := rulesByPorts()
		if err != nil {
			return nil, err
		}
		out = append(out, byPorts...)
	}
	slices.Sort(out)
	return out, nil
}

// rulesByPorts are routing rules by more than the ends' addresses, of several devices.
func rulesByPorts() (out []string, err error) {
	rules, err := netns.Rules()
	if err != nil {
		return nil, fmt.Errorf("list routing rules: %w", err)
	}
	for _, r := range rules {
		if r.IifName == "lo" || r.IifName == peers.DoorName { // of what the node itself sends
			continue
		}
		if r.IPProto > 0 || r.Sport != nil || r.Dport != nil || r.Tos != 0 {
			out = append(out, fmt.Sprintf("routing rule %d is about protocols, ports or the type of service, so flows between the same ends may leave by several devices", r.Priority))
		}
	}
	return out, nil
}

// drawnByPorts says whether a route leads by several devices, and by more than the ends'
// addresses: the programs keep for all flows of two ends which it is.
func drawnByPorts(r netlink.Route) bool {
	family := "ipv6"
	if r.Family == netlink.FAMILY_V4 {
		family = "ipv4"
	}
	if !slices.ContainsFunc(r.MultiPath, func(h *netlink.NexthopInfo) bool { return h.LinkIndex != r.MultiPath[0].LinkIndex }) {
		return false
	}
	policy, err := os.ReadFile(netns.Sysctl(family + "/fib_multipath_hash_policy"))
	return err == nil && strings.TrimSpace(string(policy)) != "0"
}

// staysHere says whether a route leads to somebody on this machine: a pod of
// anybody's, or one behind a bridge without other ports. Its answers pass the
// node in any case, whatever address they are for.
func staysHere(l netlink.Link, dst *net.IPNet) (bool, error) {
	switch l.Type() {
	case "veth", "netkit":
		ones, bits := dst.Mask.Size()
		return ones == bits, nil
	case "dummy":
		return true, nil
	case "bridge":
		links, err := netns.Links()
		if err != nil {
			return false, fmt.Errorf("list links: %w", err)
		}
		return !slices.ContainsFunc(links, func(port netlink.Link) bool {
			return port.Attrs().MasterIndex == l.Attrs().Index && !slices.Contains([]string{"veth", "netkit", "tuntap"}, port.Type())
		}), nil
	}
	return false, nil
}

// within says whether one of list holds all of dst.
func within(dst *net.IPNet, list []netip.Prefix) bool {
	p, err := netip.ParsePrefix(dst.String())
	return err == nil && slices.ContainsFunc(list, func(q netip.Prefix) bool {
		return q.Addr().Is4() == p.Addr().Is4() && q.Bits() <= p.Bits() && q.Contains(p.Addr())
	})
}

// othersNAT are chains of others that translate sources on their way out, or
// destinations on their way in: what they do to pods' packets, they could not do
// to those that pass the stack by.
func othersNAT() ([]string, error) {
	var out []string
	for _, at := range []struct {
		hook uint32
		what string
	}{{hookPrerouting, "destinations"}, {hookPostrouting, "sources"}} {
		list, err := hookRules(at.hook, "nat")
		if err != nil {
			return nil, fmt.Errorf("list nftables chains: %w", err)
		}
		for _, c := range list {
			if !masquerade.IsOurs(c.Table) {
				out = append(out, fmt.Sprintf("chain %s of table %s (%s) may translate %s, too", c.Chain, c.Table, c.Backend, at.what))
			}
		}
	}
	return out, nil
}

// putWays tells the programs the devices, and whether they forward there.
func (e *Engine) putWays(w ways) error {
	return errors.Join(replace(e.dp.Wear, w.devices), e.putOutside(len(w.notKeeping) == 0))
}

// putOutside tells the programs whether they forward to the outside for pods that
// keep their addresses.
func (e *Engine) putOutside(on bool) error {
	have, _, err := e.dp.Remotes.Get(0)
	var want datapath.Remote
	if on {
		want.Ref = bpfgen.RemoteOutside
	}
	if err != nil || have == want {
		return err
	}
	return errors.Join(e.dp.Remotes.Put([]uint32{0}, []datapath.Remote{want}), e.dp.VoidFlows())
}

// outsideStatus is of a node among others.
func (e *Engine) outsideStatus() (*OutsideStatus, error) {
	s := &OutsideStatus{By: "ebpf", Because: []string{}}
	outside, _, err := e.dp.Remotes.Get(0)
	if err != nil || outside.Ref != 0 {
		return s, err
	}
	s.By = "stack"
	w, err := e.ways()
	s.Because = append(s.Because, w.notKeeping...)
	return s, err
}
