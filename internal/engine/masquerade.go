// SPDX-License-Identifier: Apache-2.0

package engine

// Masquerade: which pods wear the node's address towards the outside, and who sees
// to it. The programs do, past the host's stack, wherever all ways to the outside
// (ways.go) lead by the edge's devices; else the kernel's nftables do it for all
// pods, and each packet of the node's passes its connection tracking.

import (
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/masquerade"
	"github.com/mustang-net/mustang/internal/state"
)

// MasqueradeStatus is who masquerades the node's pods.
type MasqueradeStatus struct {
	Pods    int      `json:"pods"`    // that are masqueraded
	By      string   `json:"by"`      // "ebpf" or "nftables"
	Because []string `json:"because"` // why not by eBPF
}

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
	var values []uint8
	for _, p := range masqueradeInside(ep.Masquerade) {
		k := datapath.InsideKeyOf(group, p)
		keys, values = append(keys, k), append(values, datapath.InsideValueOf(k))
	}
	if err := e.dp.Inside.Put(keys, values); err != nil {
		return err
	}
	if err := e.dp.Masquerade.Put([]uint32{ep.ID}, []uint32{group}); err != nil {
		return err
	}
	byPrograms, err := e.masquerades()
	if err != nil || byPrograms && ep.Placement == state.HostEnd {
		return err
	}
	list := []state.Endpoint{ep}
	if byPrograms { // which have done it for the others
		if list, err = e.masqueraded(); err != nil {
			return err
		}
	}
	if err := e.masqueradeByRules(list); err != nil {
		return err
	}
	return e.putMasquerade(false)
}

// masqueraded are the endpoints that are, by their records: while one is installed it is not
// known yet, and others need not be.
func (e *Engine) masqueraded() (list []state.Endpoint, err error) {
	records, err := e.store.LookEndpoints()
	groups, unread := e.dp.Masquerade.All()
	for id, ep := range records {
		if group := groups[id]; group != 0 && group == masqueradeGroup(ep.Masquerade) {
			list = append(list, ep)
		}
	}
	return list, errors.Join(err, unread)
}

// leftMasquerade decides anew who masquerades when the last endpoint that the programs
// cannot do it for is gone.
func (e *Engine) leftMasquerade(ep state.Endpoint) {
	inPod := func(ep state.Endpoint) bool { return ep.Masquerade != nil && ep.Placement == state.InPod }
	if inPod(ep) && !slices.ContainsFunc(slices.Collect(maps.Values(e.known)), inPod) {
		e.tryMasquerade()
	}
}

// lostMasquerade is an endpoint's by the tables alone; nil: it is not masqueraded.
func (e *Engine) lostMasquerade(id uint32) (*state.Masquerade, error) {
	group, _, err := e.dp.Masquerade.Get(id)
	if err != nil || group == 0 {
		return nil, err
	}
	inside, err := e.dp.Inside.All()
	m := &state.Masquerade{}
	for k := range inside {
		if k.Group == group {
			m.Inside = append(m.Inside, datapath.PrefixInside(k))
		}
	}
	return m, err
}

// unmasquerade is the reverse of masquerade.
func (e *Engine) unmasquerade(ep state.Endpoint) error {
	group, _, err := e.dp.Masquerade.Get(ep.ID)
	if err != nil || group == 0 {
		return err
	}
	if ep.Owner == state.OwnerCLI {
		if err := masquerade.Locked(e.scope.StateDir, func() error { return e.leaveGroup(ep) }); err != nil {
			return err
		}
	}
	return e.dp.Masquerade.Put([]uint32{ep.ID}, []uint32{0})
}

// leaveGroup takes ep out of its group of rules, which goes with its last pod.
func (e *Engine) leaveGroup(ep state.Endpoint) error {
	table, group := e.masqueradeTable(), masquerade.PodGroup(insideOf(ep))
	if err := table.Remove(group, ep.Addrs()); err != nil {
		return err
	}
	if left, err := table.Members(group); err == nil && len(left) > 0 {
		return nil
	}
	masqueraded, err := e.dp.Masquerade.All()
	if err != nil {
		return err
	}
	delete(masqueraded, ep.ID)
	return table.Drop(group, len(masqueraded) > 0)
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
	used := map[uint32]bool{bpfgen.InsideAll: true}
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
	if len(w.notMasqueraded) > 0 {
		// The rules are there before programs have nothing to give: no flow goes out undressed.
		if err := e.masqueradeByRules(slices.Collect(maps.Values(e.known))); err != nil {
			return err
		}
		return errors.Join(e.putMasquerade(false), e.putWays(w))
	}
	if err := errors.Join(e.putWays(w), e.putMasquerade(true)); err != nil {
		return err
	}
	return e.dropRules()
}

// syncGroups brings who is masqueraded to what the endpoints' records say: an
// earlier mustang that was here meanwhile did not write it down.
func (e *Engine) syncGroups() error {
	groups := map[uint32]uint32{}
	inside, err := e.dp.Inside.All()
	if err != nil {
		return err
	}
	maps.DeleteFunc(inside, func(k datapath.InsideKey, _ uint8) bool { return k.Group != bpfgen.InsideAll })
	for id, ep := range e.known {
		group := masqueradeGroup(ep.Masquerade)
		if group == 0 {
			continue
		}
		groups[id] = group
		for _, p := range masqueradeInside(ep.Masquerade) {
			k := datapath.InsideKeyOf(group, p)
			inside[k] = datapath.InsideValueOf(k)
		}
	}
	return errors.Join(replace(e.dp.Inside, inside), replace(e.dp.Masquerade, groups))
}

// SetInside says where pods are, on all nodes: towards these networks every pod keeps its
// address, whoever masquerades.
func (e *Engine) SetInside(list []netip.Prefix) error {
	if e.dp == nil {
		return errReadOnly
	}
	inside, err := e.dp.Inside.All()
	if err != nil {
		return err
	}
	maps.DeleteFunc(inside, func(k datapath.InsideKey, _ uint8) bool { return k.Group == bpfgen.InsideAll })
	for _, p := range masquerade.Join(list) {
		k := datapath.InsideKeyOf(bpfgen.InsideAll, p)
		inside[k] = datapath.InsideValueOf(k)
	}
	return errors.Join(replace(e.dp.Inside, inside), masquerade.Locked(e.scope.StateDir, func() error {
		return e.masqueradeTable().SetInside(list)
	}))
}

// RestoreMasquerade brings the kernel's part back where somebody has flushed it. groups does
// that for the groups that are not the engine's, and says whether it had to.
func (e *Engine) RestoreMasquerade(groups func() (bool, error)) (restored bool, err error) {
	if e.dp == nil {
		return false, nil
	}
	hollow, err := e.dropHollow()
	if err != nil {
		return false, err
	}
	if restored, err = groups(); err != nil {
		return restored, err
	}
	restored = restored || hollow
	inside, err := e.dp.Inside.All()
	var list []netip.Prefix
	for k := range inside {
		if k.Group == bpfgen.InsideAll {
			list = append(list, datapath.PrefixInside(k))
		}
	}
	if err != nil || len(list) == 0 && !restored {
		return restored, err
	}
	knows, err := e.masqueradeTable().KnowsInside()
	if err != nil || knows && !restored {
		return restored, err
	}
	return true, errors.Join(e.SetInside(list), e.syncMasquerade())
}

// dropHollow takes away what somebody has left of the kernel's part without its rules, so that
// all of it is missing, and comes back.
func (e *Engine) dropHollow() (hollow bool, err error) {
	err = masquerade.Locked(e.scope.StateDir, func() (err error) {
		table := e.masqueradeTable()
		if hollow, err = table.Hollow(); err != nil || !hollow {
			return err
		}
		return table.Delete()
	})
	return hollow, err
}

// noRules says why the kernel masquerades nobody, when it is to; "": it does.
func (e *Engine) noRules() (string, error) {
	table := e.masqueradeTable()
	if hooked, err := table.Hooked(); err != nil || !hooked {
		return fmt.Sprintf("nftables table %s has no chain %s, as after `nft flush ruleset`", table.Name, masquerade.HookChain), err
	}
	if hollow, err := table.Hollow(); err != nil || hollow {
		return fmt.Sprintf("nftables table %s has chains without rules, as after `nft flush table`", table.Name), err
	}
	return "", nil
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

// masqueradeByRules has the kernel masquerade these endpoints, of which the CNI
// plugin's own enter its sets by itself.
func (e *Engine) masqueradeByRules(list []state.Endpoint) error {
	list = slices.DeleteFunc(slices.Clone(list), func(ep state.Endpoint) bool { return ep.Masquerade == nil })
	if len(list) == 0 {
		return nil
	}
	return masquerade.Locked(e.scope.StateDir, func() error {
		table := e.masqueradeTable()
		for _, ep := range list {
			if ep.Owner != state.OwnerCLI {
				continue
			}
			inside := insideOf(ep)
			if err := table.Add(masquerade.PodGroup(inside), inside, ep.Addrs()); err != nil {
				return err
			}
		}
		return table.Hook()
	})
}

// lingerPause is between two looks at all of the kernel's connections, which may be very many.
const lingerPause = 30 * time.Second

// dropRules takes the kernel's part away when no flow needs it any more.
func (e *Engine) dropRules() error {
	if e.lingers && time.Since(e.lingered) < lingerPause {
		return nil // Settle looks again
	}
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
	e.lingered = time.Now()
	used, err := masquerade.InUse(func(a netip.Addr) bool { return pods[a] })
	if e.lingers = err != nil || used; e.lingers { // who cannot tell leaves it
		return nil
	}
	return table.Unhook()
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
	why, err := e.noRules()
	if err == nil && why != "" {
		err = fmt.Errorf("nobody masquerades endpoint %d: %s", ep.ID, why)
	}
	return err
}
