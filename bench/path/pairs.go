// SPDX-License-Identifier: Apache-2.0

package path

// Transactions between two nodes, which a wire joins.

import (
	"github.com/mustang-net/mustang/bench/pairs"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/lab"
)

// nodeToNode is what transactions between nodes are compared with: nobody has
// attached anything there.
const nodeToNode = "node to node"

// pairs are contestants on two nodes: the nodes themselves; in each mode pods by
// the kernel's routing and by mustang, and at last with all that mustang attaches
// to a NIC, beside which the nodes' own traffic is counted too.
func (o Options) pairs() []run.Contestant {
	if len(o.PairModes) == 0 {
		return nil
	}
	pair := func(mode, label string) pairs.Pair {
		return pairs.Pair{Common: pairs.Common{Binary: o.Binary, MTU: 1500}, Lab: "bnpair", Label: label, Mode: lab.Mode(mode),
			By: lab.NoServices, Ways: []string{report.PodIP}}
	}
	bare := pair("", nodeToNode)
	bare.Bare = true
	list := []run.Contestant{bare}
	for _, mode := range o.PairModes {
		kernel := pair(mode, "two nodes, "+mode)
		kernel.Join = lab.Join{Kernel: true, Mode: "direct"}
		ours := pair(mode, "two nodes, "+mode+" mustang-tc")
		ours.By, ours.Join = lab.MustangTC, lab.Join{Mode: "direct", HostRouting: "ebpf"}
		edge := ours
		edge.Label, edge.Edge, edge.Ways = ours.Label+" with edge", true, []string{report.PodIP, pairs.NodeToNode}
		list = append(list, kernel, ours, edge)
	}
	return list
}

// overOf is the subject that a contestant's transactions are compared with.
func overOf(c run.Contestant) string {
	if _, ok := c.(pairs.Pair); ok {
		return nodeToNode
	}
	return report.Base
}
