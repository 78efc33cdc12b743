// SPDX-License-Identifier: Apache-2.0

// Package observe looks at a node and changes nothing: its flows as they are
// opened, closed, refused and dropped; whether a packet would pass, and why;
// and what is counted, as metrics. It takes no lock, so it works beside an agent
// as well as without one.
package observe

import (
	"fmt"

	"github.com/cilium/ebpf/rlimit"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/store"
)

// Node is a node to look at. Its methods may be called concurrently.
type Node struct {
	dp    *datapath.Datapath
	store store.Store
}

// Open opens the node whose pins are in bpffs and whose records are in
// stateDir, as engine.Scope names them.
func Open(bpffs, stateDir string) (*Node, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("lift the limit of locked memory: %w; run as root", err)
	}
	dp, err := datapath.OpenPinned(bpffs)
	if err != nil {
		return nil, err
	}
	return &Node{dp: dp, store: store.At(stateDir)}, nil
}

// Close lets go of the node.
func (n *Node) Close() error { return n.dp.Close() }
