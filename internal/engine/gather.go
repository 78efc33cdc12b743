// SPDX-License-Identifier: Apache-2.0

package engine

// Fragments out of order are put together in a namespace of their own
// (bpf/lib/frag.h), while there are other nodes, whose pods' datagrams may come
// so, or clients outside. Where it cannot be, what needs it is lost.

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// gathered are the protocols whose datagrams come in fragments.
var gathered = []state.Protocol{state.UDP, state.SCTP}

// aboutGather says whether op, which is in force, changes whether there is something
// to gather for clients outside.
func (e *Engine) aboutGather(op operation) bool {
	about := slices.ContainsFunc(op.Upserts, func(b state.Binding) bool { return slices.Contains(gathered, b.Frontend.Protocol) }) ||
		slices.ContainsFunc(op.Removes, func(k state.BindingKey) bool { return slices.Contains(gathered, k.Frontend.Protocol) })
	if !about {
		return false
	}
	if on, err := e.gathers(); err == nil && on != 0 {
		// After a cleanup that failed they are to be read anew. As long as they cannot be, the device stays.
		err := e.loadServices()
		return err == nil && !slices.ContainsFunc(gathered, e.services.Serves)
	}
	want, err := e.wantsGather()
	return err != nil || want
}

// syncGather has datagrams put together while somebody may send them. It can be
// done again at any point of itself.
func (e *Engine) syncGather() error {
	want, err := e.wantsGather()
	if err != nil {
		return err
	}
	if !want {
		return e.leaveGather()
	}
	e.gatherTried = true
	index, err := peers.EnsureGather(e.holdGather)
	if err == nil {
		err = e.dp.SyncGather(index)
	}
	if err != nil {
		return errors.Join(err, e.leaveGather())
	}
	return e.putGather(uint32(index))
}

func (e *Engine) wantsGather() (bool, error) {
	n, err := e.store.Nodes()
	if err != nil {
		return false, err
	}
	if _, remotes, err := remotesOf(n); err != nil || len(remotes) > 0 {
		return true, err
	}
	edge, err := e.hasEdge()
	if err != nil || !edge {
		return false, err
	}
	err = e.loadServices()
	return err == nil && e.services != nil && slices.ContainsFunc(gathered, e.services.Serves), err
}

// holdGather keeps the calling thread's namespace.
func (e *Engine) holdGather() error {
	err := e.dp.HoldNetns()
	if errors.Is(err, datapath.ErrNoHold) {
		err = errors.Join(netns.Delete(e.gatherPath()), netns.Keep(e.gatherPath()))
	}
	return err
}

// gatherPath names the namespace where nothing else can hold it.
func (e *Engine) gatherPath() string { return filepath.Join(e.scope.StateDir, "gather") }

// leaveGather is the reverse of syncGather. The namespace goes with what holds it,
// and the device with that.
func (e *Engine) leaveGather() error {
	if err := errors.Join(e.putGather(0), e.dp.SyncGather(0)); err != nil {
		return err
	}
	return e.removeGather()
}

// removeGather removes what is on the node.
func (e *Engine) removeGather() error {
	var held error
	if e.dp != nil {
		held = e.dp.ReleaseNetns()
	}
	return errors.Join(peers.RemoveGather(), held, netns.Delete(e.gatherPath()))
}

// gathers is the device that the programs have been told, by ifindex.
func (e *Engine) gathers() (uint32, error) {
	config, _, err := e.dp.Node.Get(0)
	return config.Gather, err
}

// putGather tells the programs; 0: what comes out of order is nobody's.
func (e *Engine) putGather(index uint32) error {
	config, _, err := e.dp.Node.Get(0)
	if err != nil || config.Gather == index {
		return err
	}
	config.Gather = index
	return e.dp.Node.Put([]uint32{0}, []datapath.NodeConfig{config})
}

// gatherWarning says what is lost for want of the device.
func (e *Engine) gatherWarning() (string, error) {
	want, err := e.wantsGather()
	if err != nil || !want {
		return "", err
	}
	if _, there, err := e.findGather(); err != nil || there {
		return "", err
	}
	return "nothing puts datagrams together whose fragments come out of order, so those to isolated pods and to Services are lost; " +
		"`mustang node sync` or `mustang edge set` makes " + peers.GatherName + ", or says what is in the way; so does the agent, at its start", nil
}

// tryGather is syncGather beside a change that is in force without it.
func (e *Engine) tryGather() {
	if err := e.syncGather(); err != nil {
		e.opts.Notify(fmt.Sprintf("of datagrams whose fragments come out of order, those to isolated pods and to Services are lost: %v", err))
	}
}

// gatherCurrent says whether the device is there that the programs have been told,
// where one is wanted. What could not be made is not missed again by this engine.
func (e *Engine) gatherCurrent() (bool, error) {
	told, there, err := e.findGather()
	if err != nil || told {
		return there, err
	}
	want, err := e.wantsGather()
	return !want || e.gatherTried, err
}

// findGather says whether the programs have been told of a device, and whether it
// is there.
func (e *Engine) findGather() (told, there bool, err error) {
	on, err := e.gathers()
	if err != nil || on == 0 {
		return false, false, err
	}
	l, err := peers.FindGather()
	return true, l != nil && uint32(l.Attrs().Index) == on, err
}

// followGather makes anew what somebody took away.
func (e *Engine) followGather() error {
	current, err := e.gatherCurrent()
	if err == nil && !current {
		e.tryGather()
	}
	return err
}
