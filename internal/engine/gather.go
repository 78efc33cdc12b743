// SPDX-License-Identifier: Apache-2.0

package engine

// Fragments out of order: the node's stack puts together what the programs at the
// NIC leave to it (bpf/lib/frag.h). Where it cannot, what they cannot do without
// is lost.

import (
	"errors"
	"fmt"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// syncNodesGather is for datagrams of other nodes' pods.
func (e *Engine) syncNodesGather(want bool) bool {
	change := peers.LeaveFragments
	if want {
		change = peers.GatherFragments
	}
	if err := change(); err != nil {
		e.opts.Notify(fmt.Sprintf("of datagrams whose fragments come out of order, those to isolated pods and through Services are lost: %v", err))
		return false
	}
	return want
}

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
	want, err := e.wantsGather()
	on, noTable := e.gathers()
	return errors.Join(err, noTable) != nil || !want || !on
}

// syncGather has datagrams of clients outside put together while there is an edge
// and a Service for them. It can be done again at any point of itself.
func (e *Engine) syncGather() error {
	if err := e.loadServices(); err != nil || e.services == nil {
		return err
	}
	want, err := e.wantsGather()
	if err != nil {
		return err
	}
	if !want {
		return e.leaveGather()
	}
	index, err := peers.EnsureGather(bpfgen.GatherMark, ^uint32(bpfgen.GatherIfindex))
	if err == nil {
		err = e.dp.SyncGather(index)
	}
	if err != nil {
		return errors.Join(err, e.leaveGather())
	}
	return e.putGather(bpfgen.NodeGathersEdge)
}

func (e *Engine) wantsGather() (bool, error) {
	edges, err := e.dp.Edges()
	return len(edges) > 0 && slices.ContainsFunc(gathered, e.services.Serves), err
}

// leaveGather is the reverse, quick where there is nothing.
func (e *Engine) leaveGather() error {
	there, err := peers.HasGather()
	if err != nil {
		return err
	}
	on, err := e.gathers()
	if err != nil || !on && !there {
		return err
	}
	// The flag goes last but for the device: either says that there may be more.
	if err := errors.Join(peers.LeaveGather(), e.dp.SyncGather(0), e.putGather(0)); err != nil {
		return err
	}
	return peers.RemoveGather()
}

// gathers says what the programs have been told.
func (e *Engine) gathers() (bool, error) {
	config, _, err := e.dp.Node.Get(0)
	return config.Flags&bpfgen.NodeGathersEdge != 0, err
}

// putGather tells the programs: with 0 what comes out of order is nobody's.
func (e *Engine) putGather(flag uint32) error {
	config, _, err := e.dp.Node.Get(0)
	if err != nil || config.Flags&bpfgen.NodeGathersEdge == flag {
		return err
	}
	config.Flags = config.Flags&^bpfgen.NodeGathersEdge | flag
	return e.dp.Node.Put([]uint32{0}, []datapath.NodeConfig{config})
}

// tryGather is syncGather beside a change that is in force without it.
func (e *Engine) tryGather() {
	if err := e.syncGather(); err != nil {
		e.opts.Notify(fmt.Sprintf("of clients' datagrams to Services, those whose fragments come out of order are lost: %v", err))
	}
}

// followGather makes the device anew that somebody took away.
func (e *Engine) followGather() error {
	on, err := e.gathers()
	if err != nil || !on {
		return err
	}
	there, err := peers.HasGather()
	if err == nil && !there {
		e.tryGather()
	}
	return err
}
