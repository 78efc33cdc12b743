// SPDX-License-Identifier: Apache-2.0

package engine

// Other nodes: who they are, and how their pods are reached from here. The list
// in the store is the truth; routes, tables and programs follow it.

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
	"github.com/mustang-net/mustang/internal/store"
)

// Nodes is the list of nodes, this one included, by name, and the settings.
func (e *Engine) Nodes() (list []state.Node, set state.NodeSettings, err error) {
	n, err := e.store.Nodes()
	return n.Nodes, settingsOf(n), err
}

// MaxNodes is how many nodes there may be, this one included.
func (e *Engine) MaxNodes() (int, error) {
	slots, err := e.dp.MaxRemotes()
	return int(slots) - 1, err
}

func settingsOf(n store.Nodes) state.NodeSettings {
	if n.Settings == nil {
		return peers.DefaultSettings()
	}
	return *n.Settings
}

// routingOf is settingsOf with the host routing that there can be. By a device without a link header (bare) programs see
// nothing of what comes: where a node without a tunnel is reached by one, the host's stack forwards.
func routingOf(n store.Nodes, remotes []state.Node) (set state.NodeSettings, bare string, err error) {
	set = settingsOf(n)
	if set.HostRouting != state.RoutingEBPF {
		return set, "", nil
	}
	if bare, err = peers.BareWay(remotes); bare != "" {
		set.HostRouting = state.RoutingLegacy
	}
	return set, bare, err
}

// AddNode adds a node, or replaces the owner's own of that name.
func (e *Engine) AddNode(n state.Node) error {
	return e.changeNodes(func(all store.Nodes) (store.Nodes, error) {
		i := slices.IndexFunc(all.Nodes, func(o state.Node) bool { return o.Name == n.Name })
		if i >= 0 && all.Nodes[i].Owner != n.Owner {
			return all, fmt.Errorf("node %s belongs to %s: remove it there", n.Name, all.Nodes[i].Owner)
		}
		others := all.Nodes
		if i >= 0 {
			others = slices.Delete(slices.Clone(all.Nodes), i, i+1)
		}
		if err := peers.SetOf(others).Conflict(n); err != nil {
			return all, err
		}
		all.Nodes = append(slices.Clone(others), n)
		return all, nil
	})
}

// RemoveNode removes a node. Flows to and from the others' pods stay as they are.
func (e *Engine) RemoveNode(name string, owner state.Owner) error {
	return e.changeNodes(func(all store.Nodes) (store.Nodes, error) {
		i := slices.IndexFunc(all.Nodes, func(o state.Node) bool { return o.Name == name })
		if i < 0 {
			return all, fmt.Errorf("node %s: %w; `mustang node ls` lists those that exist", name, ErrNotFound)
		}
		if all.Nodes[i].Owner != owner {
			return all, fmt.Errorf("node %s belongs to %s: remove it there", name, all.Nodes[i].Owner)
		}
		all.Nodes = slices.Delete(slices.Clone(all.Nodes), i, i+1)
		return all, nil
	})
}

// ApplyNodes makes the owner's nodes exactly list, and sets what change says.
func (e *Engine) ApplyNodes(owner state.Owner, list []state.Node, change peers.SettingsSpec) error {
	return e.changeNodes(func(all store.Nodes) (store.Nodes, error) {
		var out []state.Node
		for _, n := range all.Nodes {
			if n.Owner != owner {
				out = append(out, n)
			}
		}
		set := peers.SetOf(out)
		for _, n := range list {
			n.Owner = owner
			if err := set.Add(n); err != nil {
				return all, err
			}
			out = append(out, n)
		}
		if all.Nodes = out; e.opts.Node.Name != "" {
			all.Self = e.opts.Node.Name
		}
		return withSettings(owner, all, change)
	})
}

// SetNode changes this node's own settings.
func (e *Engine) SetNode(change peers.SettingsSpec) error {
	return e.changeNodes(func(all store.Nodes) (store.Nodes, error) { return withSettings(state.OwnerCLI, all, change) })
}

// withSettings tells a person at once of a name that no device has. An agent begins while one
// is away, as it goes on when one goes.
func withSettings(owner state.Owner, all store.Nodes, change peers.SettingsSpec) (store.Nodes, error) {
	set, err := change.Apply(settingsOf(all))
	if err == nil && owner == state.OwnerCLI && !slices.Equal(set.Devices, settingsOf(all).Devices) {
		err = peers.CheckDevices(set.Devices)
	}
	all.Settings = &set
	return all, err
}

// changeNodes journals the list that fn makes of the present one, then writes
// and applies it.
func (e *Engine) changeNodes(fn func(store.Nodes) (store.Nodes, error)) error {
	if e.dp == nil {
		return errReadOnly
	}
	was, err := e.store.Nodes()
	if err != nil {
		return err
	}
	now, err := fn(was)
	if err != nil {
		return err
	}
	now.Nodes = slices.Clone(now.Nodes)
	if now.PodMTU, now.Tunnel, err = podMTU(now); err != nil {
		return err
	}
	now.Telling = nil
	slices.SortFunc(now.Nodes, func(a, b state.Node) int { return strings.Compare(a.Name, b.Name) })
	slots, err := e.dp.MaxRemotes()
	if err != nil {
		return err
	}
	if err := giveRefs(was, &now, slots); err != nil {
		return err
	}
	op := operation{Kind: opNodes, Nodes: &now, NodesBefore: &was}
	if err := e.begin(op); err != nil {
		return err
	}
	err = e.applyNodes(op)
	if err != nil && !errors.Is(err, ErrUntold) {
		return privilege(err) // undone, or the journal stays
	}
	return errors.Join(err, e.done())
}

// giveRefs numbers nodes that are new or have changed: a flow whose entry has
// the old number is judged anew.
func giveRefs(was store.Nodes, now *store.Nodes, slots uint32) error {
	used, before := map[uint32]bool{}, make(map[string]state.Node, len(was.Nodes))
	for _, n := range was.Nodes {
		before[n.Name] = n
	}
	for i := range now.Nodes {
		n := &now.Nodes[i]
		n.Ref = 0
		if o := before[n.Name]; o.Equal(*n) {
			n.Ref = o.Ref
		}
		used[n.Ref&0xffff] = n.Ref != 0
	}
	slot := uint32(1)
	for i := range now.Nodes {
		n := &now.Nodes[i]
		if n.Ref != 0 {
			continue
		}
		for used[slot] {
			slot++
		}
		if slot >= slots {
			return fmt.Errorf("all %d nodes of the table are in use; remove one", slots-1)
		}
		used[slot] = true
		now.LastRef = now.LastRef%0xffff + 1
		n.Ref = now.LastRef<<16 | slot
	}
	return nil
}

// applyNodes makes the journal's list the present one. One that cannot be is
// undone: the list before takes its place.
func (e *Engine) applyNodes(op operation) error {
	was := store.Nodes{}
	if op.NodesBefore != nil {
		was = *op.NodesBefore
	}
	telling := untilTold(was, *op.Nodes)
	err := e.store.PutNodes(telling)
	if err == nil {
		err = e.syncNodes(*op.Nodes)
	}
	if err == nil {
		return e.tellPods(telling, *op.Nodes)
	}
	if op.NodesBefore == nil {
		return err
	}
	before := *op.NodesBefore
	before.LastRef = op.Nodes.LastRef // flows may have met who was there for a moment
	undo := errors.Join(e.store.PutNodes(before), e.syncNodes(before))
	if undo == nil {
		undo = e.done()
	}
	return errors.Join(err, undo)
}

// Self is the node of the list that this machine is; without one, the zero node.
func (e *Engine) Self() (state.Node, error) {
	n, err := e.store.Nodes()
	if err != nil {
		return state.Node{}, err
	}
	return peers.Self(n.Nodes, n.Self)
}

// remotesOf are the other nodes, and this one.
func remotesOf(n store.Nodes) (self state.Node, remotes []state.Node, err error) {
	self, err = peers.Self(n.Nodes, n.Self)
	for _, other := range n.Nodes {
		if other.Name != self.Name {
			remotes = append(remotes, other)
		}
	}
	return self, remotes, err
}

// syncNodes brings routes, devices, tables and programs to what n says. It can
// be done again at any point of itself.
func (e *Engine) syncNodes(n store.Nodes) error {
	self, remotes, err := remotesOf(n)
	if err != nil {
		return err
	}
	set, _, err := routingOf(n, remotes)
	if err != nil {
		return err
	}
	devices, err := peers.Devices(set.Devices, self, remotes)
	if err != nil {
		return err
	}
	overlay, err := e.syncOverlay(self, remotes, set)
	if err != nil {
		return err
	}
	// What is sent must find its way before somebody is told to send it.
	if err := e.syncRemotes(self, remotes, set, overlay); err != nil {
		return err
	}
	if err := e.syncWire(devices, remotes, set, overlay); err != nil {
		return err
	}
	notes, err := peers.SyncRoutes(remotes, overlay)
	if away := peers.CheckDevices(set.Devices); away != nil {
		notes = append(notes, away.Error())
	}
	for _, note := range notes {
		e.opts.Notify(note)
	}
	e.tryGather()
	e.tryMasquerade()
	return err
}

// syncWire attaches the node's own programs. Without other nodes there is
// nothing for them to do.
func (e *Engine) syncWire(devices []peers.Device, remotes []state.Node, set state.NodeSettings, overlay *peers.Overlay) error {
	var netdevs []int
	if set.HostRouting == state.RoutingEBPF && len(remotes) > 0 {
		if err := e.dp.EnsureWire(); err != nil {
			return err
		}
		for _, d := range devices {
			netdevs = append(netdevs, d.Index)
		}
	}
	edge, err := e.hasEdge()
	if err != nil {
		return err
	}
	turns, err := e.turns()
	if err != nil {
		return err
	}
	return e.dp.SyncWire(netdevs, overlay.Ifindex(), edge, turns)
}

// syncRemotes writes the tables of nodes, then what leads to them. For a moment packets may be for or from a node that
// is gone or new: they are dropped.
func (e *Engine) syncRemotes(self state.Node, remotes []state.Node, set state.NodeSettings, overlay *peers.Overlay) error {
	config, _, err := e.dp.Node.Get(0)
	if err != nil {
		return err
	}
	if config.Key == 0 {
		config.Key = rand.Uint32() | 1
	}
	config.Overlay, config.Vni, config.Port = uint32(overlay.Ifindex()), set.VNI, datapath.Port(set.Port)
	config.Flags &= bpfgen.NodeMasquerade
	if set.HostRouting == state.RoutingEBPF {
		config.Flags |= bpfgen.NodeEbpf
	}
	config.Ip4, config.Ip6 = datapath.FromAddr(self.Addr(true)), datapath.FromAddr(self.Addr(false))
	own := datapath.EdgeConfig{Ip4: datapath.FromAddr(overlay.Addr(true)), Ip6: datapath.FromAddr(overlay.Addr(false))}
	outside, _, err := e.dp.Remotes.Get(0)
	if err != nil {
		return err
	}
	slots := map[uint32]datapath.Remote{0: outside} // which is decided apart (ways.go)
	nets := map[datapath.Prefix]uint32{}
	for _, n := range remotes {
		r := datapath.Remote{Ref: n.Ref, Mac: [6]uint8(peers.VTEP(n.Addrs[0]))}
		if n.Mode == state.NodeVXLAN {
			r.Flags, r.Addr = bpfgen.RemoteTunnel, datapath.FromAddr(n.Underlay(self))
			for _, a := range n.Addrs {
				// Its own packets to our pods come by the tunnel, under whatever address they have.
				nets[datapath.PrefixOf(netip.PrefixFrom(a, a.BitLen()))] = n.Ref
			}
		}
		slots[n.Ref&0xffff] = r
		for _, p := range n.PodCIDRs {
			nets[datapath.PrefixOf(p)] = n.Ref
		}
	}
	return errors.Join(
		e.putConfig(config),
		e.dp.Edge.Put([]uint32{bpfgen.EdgeTunnel}, []datapath.EdgeConfig{own}),
		e.putRemotes(slots), replace(e.dp.Peers, refsByAddr(remotes)), replace(e.dp.Nets, nets))
}

// refsByAddr are what flows' entries call nodes by, by their addresses.
func refsByAddr(remotes []state.Node) map[datapath.Addr]uint32 {
	out := map[datapath.Addr]uint32{}
	for _, n := range remotes {
		for _, a := range n.Addrs {
			out[datapath.FromAddr(a)] = n.Ref
		}
	}
	return out
}

// putConfig makes want what the programs know of this node. What is kept of flows is void when
// that has changed: a tunnel has come, say, that pods' own packets must not lead into.
func (e *Engine) putConfig(want datapath.NodeConfig) error {
	was, _, err := e.dp.Node.Get(0)
	if err != nil || was == want {
		return err
	}
	return errors.Join(e.dp.Node.Put([]uint32{0}, []datapath.NodeConfig{want}), e.dp.VoidFlows())
}

// putRemotes makes the table of nodes exactly want. What is kept of flows to and
// from them is void when one has changed.
func (e *Engine) putRemotes(want map[uint32]datapath.Remote) error {
	changed, err := replaced(e.dp.Remotes, want)
	if !changed {
		return err
	}
	return errors.Join(err, e.dp.VoidFlows())
}

// replace makes a table's content exactly want.
func replace[K, V comparable](t *datapath.Table[K, V], want map[K]V) error {
	_, err := replaced(t, want)
	return err
}

// replaced is replace; changed says whether that was needed.
func replaced[K, V comparable](t *datapath.Table[K, V], want map[K]V) (changed bool, err error) {
	have, err := t.All()
	if err != nil {
		return false, err
	}
	var put, gone []K
	var values []V
	for k, v := range want {
		if have[k] != v {
			put, values = append(put, k), append(values, v)
		}
	}
	for k := range have {
		if _, ok := want[k]; !ok {
			gone = append(gone, k)
		}
	}
	return len(put)+len(gone) > 0, errors.Join(t.Put(put, values), t.Delete(gone))
}

// tunnelled says whether some node is reached through the tunnel.
func tunnelled(remotes []state.Node) bool {
	return slices.ContainsFunc(remotes, func(n state.Node) bool { return n.Mode == state.NodeVXLAN })
}

func (e *Engine) syncOverlay(self state.Node, remotes []state.Node, set state.NodeSettings) (*peers.Overlay, error) {
	if !tunnelled(remotes) {
		return nil, peers.RemoveOverlay()
	}
	for _, n := range remotes {
		if n.Mode == state.NodeVXLAN && !n.Underlay(self).IsValid() {
			return nil, fmt.Errorf("node %s is reached by vxlan, and this node has no address of its families in the list: add this node, with its own", n.Name)
		}
	}
	mtu, err := peers.UnderlayMTU(remotes)
	if err != nil {
		return nil, err
	}
	return peers.EnsureOverlay(self, remotes, set, mtu)
}
