// SPDX-License-Identifier: Apache-2.0

package engine

// This node's devices change under our feet: a NIC gets another MTU, is
// restarted, which takes its routes along, comes back as another, or gets this node's
// address after the list of nodes was there.

import (
	"errors"
	"maps"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
	"github.com/mustang-net/mustang/internal/store"
)

// FollowDevices brings what depends on this node's devices up to date: the ways
// to other nodes, their programs, pods' MTU. changed says whether there was
// something to do. ErrUntold: a pod's MTU alone does not follow.
func (e *Engine) FollowDevices() (changed bool, err error) {
	if e.dp == nil {
		return false, errReadOnly
	}
	n, err := e.store.Nodes()
	if err != nil {
		return false, err
	}
	if len(n.Nodes) == 0 {
		edge, err := e.hasEdge()
		if err == nil && edge { // else the rules masquerade, whatever the routes are
			err = e.syncMasquerade()
		}
		return false, err
	}
	current, err := e.devicesCurrent(n)
	if err != nil {
		return false, err
	}
	if current {
		if err := e.syncMasquerade(); err != nil { // how pods get outside is decided anew
			return false, err
		}
		return len(n.Telling) > 0, e.tellAgain(n)
	}
	return true, e.changeNodes(func(all store.Nodes) (store.Nodes, error) { return all, nil })
}

// devicesCurrent says whether everything is as the devices that are there ask.
func (e *Engine) devicesCurrent(n store.Nodes) (bool, error) {
	self, remotes, err := remotesOf(n)
	if err != nil {
		return false, err
	}
	if self.Name == "" {
		return true, nil // a NIC is away: what there is waits for it
	}
	current, err := e.selfCurrent(self, remotes)
	if err != nil || !current {
		return false, err
	}
	mtu, tunnel, err := podMTU(n)
	if err != nil || mtu != n.ToldMTU() || tunnel != n.Tunnel {
		return false, err
	}
	set, _, err := routingOf(n, remotes)
	if err != nil {
		return false, err
	}
	if config, _, err := e.dp.Node.Get(0); err != nil || (config.Flags&bpfgen.NodeEbpf != 0) != (set.HostRouting == state.RoutingEBPF) {
		return false, err
	}
	devices, err := peers.Devices(set.Devices, self, remotes)
	if err != nil {
		return false, err
	}
	if set.HostRouting == state.RoutingEBPF && len(remotes) > 0 {
		attached := e.dp.WireDevices()
		for _, d := range devices {
			if !slices.Contains(attached, d.Index) {
				return false, nil
			}
		}
	}
	overlay, current, err := e.overlayCurrent(self, remotes)
	if err != nil || !current {
		return false, err
	}
	current, err = e.overlayCarries(overlay)
	if err != nil || !current {
		return false, err
	}
	current, err = e.gatherCurrent()
	if err != nil || !current {
		return false, err
	}
	return peers.RoutesCurrent(remotes, overlay)
}

// overlayCarries says whether the tunnel's device, if there is one, has its programs: without them anybody's
// packets come out of it.
func (e *Engine) overlayCarries(overlay *peers.Overlay) (bool, error) {
	if overlay == nil {
		return true, nil
	}
	edge, err := e.hasEdge()
	turns, unknown := e.turns()
	if err = errors.Join(err, unknown); err != nil {
		return false, err
	}
	return e.dp.OverlayCarries(overlay.Ifindex(), edge, turns)
}

// selfCurrent says whether the tables are of this node, by the name that it has now:
// before the machine had its address, its entry was one of the others.
func (e *Engine) selfCurrent(self state.Node, remotes []state.Node) (bool, error) {
	config, _, err := e.dp.Node.Get(0)
	others, noTable := e.dp.Peers.All()
	return config.Ip4 == datapath.FromAddr(self.Addr(true)) && config.Ip6 == datapath.FromAddr(self.Addr(false)) &&
		maps.Equal(others, refsByAddr(remotes)), errors.Join(err, noTable)
}

// overlayCurrent is the tunnel's device as it is, nil where none is needed, and
// whether it is as it should be.
func (e *Engine) overlayCurrent(self state.Node, remotes []state.Node) (*peers.Overlay, bool, error) {
	if !tunnelled(remotes) {
		return nil, true, nil
	}
	mtu, err := peers.UnderlayMTU(remotes)
	if err != nil {
		return nil, false, err
	}
	l, err := netlink.LinkByName(peers.OverlayName)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, false, nil
	}
	config, _, tableErr := e.dp.Node.Get(0)
	if err = errors.Join(err, tableErr); err != nil {
		return nil, false, err
	}
	a := l.Attrs()
	o, err := peers.OverlayOf(self, remotes, a.Index, mtu)
	return o, a.MTU == peers.OverlayMTU(self, mtu) && uint32(a.Index) == config.Overlay, err
}

// FollowEdge is SetEdge when the devices that want names are not those at work,
// or have other addresses. changed says whether they were not.
func (e *Engine) FollowEdge(want Edge) (changed bool, err error) {
	nics, err := findNICs(want)
	if err != nil {
		return false, err
	}
	have, err := e.Edge()
	if err != nil {
		return false, err
	}
	takes := want.takes(nics)
	slices.SortFunc(takes, netip.Addr.Compare)
	slices.SortFunc(have.Addresses, netip.Addr.Compare)
	indexes, err := e.dp.Edges()
	gone, unknown := e.dp.GoneEdges()
	if err := errors.Join(err, unknown); err != nil {
		return false, err
	}
	var wanted []int
	for _, n := range nics {
		wanted = append(wanted, n.index)
	}
	slices.Sort(wanted)
	if slices.Equal(wanted, indexes) && len(gone) == 0 && slices.Equal(takes, have.Addresses) && wears(nics, have) {
		return false, errors.Join(e.followDoor(), e.followGather(), e.syncMasquerade())
	}
	return true, e.SetEdge(want)
}

// wears says that what flows wear is there, of each family that there is any of.
func wears(nics []nic, have EdgeStatus) bool {
	here := map[bool]bool{} // by whether of IPv4
	lost := map[bool]bool{true: true, false: true}
	for _, n := range nics {
		for _, a := range n.addrs {
			here[a.Is4()] = true
			if a == have.IP4 || a == have.IP6 {
				lost[a.Is4()] = false
			}
		}
	}
	return !(here[true] && lost[true]) && !(here[false] && lost[false])
}
