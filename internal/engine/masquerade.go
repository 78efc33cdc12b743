// SPDX-License-Identifier: Apache-2.0

package engine

// The outside: which pods wear the node's address towards it, and who sees to
// that. The programs do, past the host's stack, wherever all ways to the outside
// lead by the edge's devices; else the kernel's nftables do it for all pods, and
// each packet of the node's passes its connection tracking. Pods that keep their
// addresses need less to go past the stack: that nobody else translates.

import (
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/masquerade"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// MasqueradeStatus is who masquerades the node's pods.
type MasqueradeStatus struct {
	Pods    int      `json:"pods"`    // that are masqueraded
	By      string   `json:"by"`      // "ebpf" or "nftables"
	Because []string `json:"because"` // why not by eBPF
}

// OutsideStatus is who forwards pods' packets to the outside.
type OutsideStatus struct {
	By      string   `json:"by"`      // "ebpf" or "stack"
	Because []string `json:"because"` // why not by eBPF
}

// cliNetwork names the pods that no plugin masquerades.
const cliNetwork = "mustang pod"

func (e *Engine) masqueradeTable() masquerade.Table {
	return masquerade.TableFor(e.scope.StateDir, DefaultStateDir)
}

// masqueradeGroup is the number of those that are masqueraded alike.
func masqueradeGroup(m *state.Masquerade) uint32 {
	if m == nil {
		return 0
	}
	h := fnv.New32a()
	for _, p := range masqueradeInside(m) {
		h.Write([]byte(p.String()))
	}
	return max(h.Sum32(), 1)
}

// masqueradeInside are all destinations towards which m's pods keep their addresses.
func masqueradeInside(m *state.Masquerade) []netip.Prefix {
	all := slices.Concat(masquerade.AlwaysInside, m.Inside)
	for i, p := range all {
		all[i] = p.Masked()
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// masquerade writes down how ep appears to the outside, before it is there.
func (e *Engine) masquerade(ep state.Endpoint) error {
	group := masqueradeGroup(ep.Masquerade)
	if group == 0 {
		return e.unmasquerade(ep)
	}
	var keys []datapath.InsideKey
	for _, p := range masqueradeInside(ep.Masquerade) {
		keys = append(keys, datapath.InsideKeyOf(group, p))
	}
	if err := e.dp.Inside.Put(keys, slices.Repeat([]uint8{1}, len(keys))); err != nil {
		return err
	}
	if err := e.dp.Masquerade.Put([]uint32{ep.ID}, []uint32{group}); err != nil {
		return err
	}
	byPrograms, err := e.masquerades()
	if err != nil || byPrograms && ep.Placement == state.HostEnd {
		return err
	}
	if err := e.masqueradeByRules([]state.Endpoint{ep}); err != nil {
		return err
	}
	return e.putMasquerade(false)
}

// unmasquerade is the reverse.
func (e *Engine) unmasquerade(ep state.Endpoint) error {
	group, _, err := e.dp.Masquerade.Get(ep.ID)
	if err != nil || group == 0 {
		return err
	}
	if ep.Owner == state.OwnerCLI {
		if err := e.masqueradeTable().Remove(masquerade.Group(cliNetwork, insideOf(ep)), ep.Addrs()); err != nil {
			return err
		}
	}
	return e.dp.Masquerade.Put([]uint32{ep.ID}, []uint32{0})
}

func insideOf(ep state.Endpoint) []netip.Prefix {
	if ep.Masquerade == nil {
		return nil
	}
	return ep.Masquerade.Inside
}

// pruneMasquerade forgets the groups that no endpoint is in.
func (e *Engine) pruneMasquerade(known map[uint32]state.Endpoint) error {
	all, err := e.dp.Inside.All()
	if err != nil || len(all) == 0 {
		return err
	}
	used := map[uint32]bool{}
	for id := range known {
		group, _, err := e.dp.Masquerade.Get(id)
		if err != nil {
			return err
		}
		used[group] = true
	}
	var gone []datapath.InsideKey
	for k := range all {
		if !used[k.Group] {
			gone = append(gone, k)
		}
	}
	return e.dp.Inside.Delete(gone)
}

// masquerades says whether the programs have been told to.
func (e *Engine) masquerades() (bool, error) {
	config, _, err := e.dp.Node.Get(0)
	return config.Flags&bpfgen.NodeMasquerade != 0, err
}

// syncMasquerade decides who masquerades, as things are now. It can be done again
// at any point of itself. Flows that have begun the one way go on that way.
func (e *Engine) syncMasquerade() error {
	if err := e.loadEndpoints(); err != nil {
		return err
	}
	if err := e.syncGroups(); err != nil {
		return err
	}
	w, err := e.ways()
	if err != nil {
		return err
	}
	if err := errors.Join(replace(e.dp.Wear, w.devices), e.putOutside(len(w.notKeeping) == 0)); err != nil {
		return err
	}
	if len(w.notMasqueraded) > 0 {
		if err := e.masqueradeByRules(slices.Collect(maps.Values(e.known))); err != nil {
			return err
		}
		return e.putMasquerade(false)
	}
	if err := e.putMasquerade(true); err != nil {
		return err
	}
	return e.dropRules()
}

// syncGroups brings who is masqueraded to what the endpoints' records say: an
// earlier mustang that was here meanwhile did not write it down.
func (e *Engine) syncGroups() error {
	groups, inside := map[uint32]uint32{}, map[datapath.InsideKey]uint8{}
	for id, ep := range e.known {
		group := masqueradeGroup(ep.Masquerade)
		if group == 0 {
			continue
		}
		groups[id] = group
		for _, p := range masqueradeInside(ep.Masquerade) {
			inside[datapath.InsideKeyOf(group, p)] = 1
		}
	}
	return errors.Join(replace(e.dp.Inside, inside), replace(e.dp.Masquerade, groups))
}

// tryMasquerade is syncMasquerade beside a change that is in force without it.
func (e *Engine) tryMasquerade() {
	if err := e.syncMasquerade(); err != nil {
		e.opts.Notify(fmt.Sprintf("who masquerades pods stays as it was: %v", err))
	}
}

func (e *Engine) putMasquerade(on bool) error {
	config, _, err := e.dp.Node.Get(0)
	if err != nil || on == (config.Flags&bpfgen.NodeMasquerade != 0) {
		return err
	}
	config.Flags ^= bpfgen.NodeMasquerade
	return e.dp.Node.Put([]uint32{0}, []datapath.NodeConfig{config})
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
	return e.dp.Remotes.Put([]uint32{0}, []datapath.Remote{want})
}

// masqueradeByRules has the kernel masquerade these endpoints, of which the CNI
// plugin's own enter its sets by itself.
func (e *Engine) masqueradeByRules(list []state.Endpoint) error {
	table, wanted := e.masqueradeTable(), false
	for _, ep := range list {
		if ep.Masquerade == nil {
			continue
		}
		wanted = true
		if ep.Owner != state.OwnerCLI {
			continue
		}
		inside := insideOf(ep)
		if err := table.Add(masquerade.Group(cliNetwork, inside), inside, ep.Addrs()); err != nil {
			return err
		}
	}
	if !wanted {
		return nil
	}
	return table.Hook()
}

// dropRules takes the kernel's part away as soon as no flow needs it.
func (e *Engine) dropRules() error {
	table := e.masqueradeTable()
	hooked, err := table.Hooked()
	if err != nil || !hooked {
		return err
	}
	pods := map[netip.Addr]bool{}
	for _, ep := range e.known {
		for _, a := range ep.Addrs() {
			pods[a] = ep.Masquerade != nil
		}
	}
	used, err := masquerade.InUse(func(a netip.Addr) bool { return pods[a] })
	if e.lingers = err == nil && used; e.lingers || err != nil { // who cannot tell leaves it
		return nil
	}
	return table.Unhook()
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
	if settingsOf(n).HostRouting != state.RoutingEBPF {
		chains = append([]string{"host routing is legacy (`mustang node set --host-routing ebpf`)"}, chains...)
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
		w.notMasqueraded = append(w.notMasqueraded, others...)
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

// wear is what pods wear behind each device of the edge: its first address that
// takes node ports, whose answers the edge looks at.
func (e *Engine) wear() (map[uint32]datapath.Wear, error) {
	out := map[uint32]datapath.Wear{}
	edges, err := e.dp.Edges()
	if err != nil || e.services == nil {
		return out, err
	}
	takes := e.services.NodeAddresses()
	for _, index := range edges {
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			continue // it is going
		}
		addrs, err := netns.Addrs(l)
		if err != nil {
			return nil, fmt.Errorf("list addresses of %s: %w", l.Attrs().Name, err)
		}
		var w datapath.Wear
		for _, a := range addrs {
			ip, _ := netip.AddrFromSlice(a.IP)
			ip = ip.Unmap()
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
	slices.Sort(out)
	return out, nil
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

// masqueradeStatus is nil when no pod is masqueraded.
func (e *Engine) masqueradeStatus() (*MasqueradeStatus, error) {
	if err := e.loadEndpoints(); err != nil {
		return nil, err
	}
	s := &MasqueradeStatus{By: "nftables", Because: []string{}}
	for _, ep := range e.known {
		if ep.Masquerade != nil {
			s.Pods++
		}
	}
	if s.Pods == 0 {
		return nil, nil
	}
	on, err := e.masquerades()
	if err != nil {
		return nil, err
	}
	if on {
		s.By = "ebpf"
		return s, nil
	}
	w, err := e.ways()
	s.Because = append(s.Because, w.notMasqueraded...)
	return s, err
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

// checkMasquerade says what is missing of ep's masquerade.
func (e *Engine) checkMasquerade(ep state.Endpoint) error {
	if ep.Masquerade == nil {
		return nil
	}
	group, _, err := e.dp.Masquerade.Get(ep.ID)
	if err != nil {
		return err
	}
	if group != masqueradeGroup(ep.Masquerade) {
		return fmt.Errorf("endpoint %d is not masqueraded in the tables", ep.ID)
	}
	on, err := e.masquerades()
	if err != nil || on && ep.Placement == state.HostEnd {
		return err
	}
	table := e.masqueradeTable()
	hooked, err := table.Hooked()
	if err == nil && !hooked {
		err = fmt.Errorf("nobody masquerades endpoint %d: nftables table %s has no chain %s", ep.ID, table.Name, masquerade.HookChain)
	}
	return err
}
