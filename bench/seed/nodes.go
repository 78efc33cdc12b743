// SPDX-License-Identifier: Apache-2.0

package seed

// What the articles on two nodes share.

import (
	"fmt"

	"github.com/mustang-net/mustang/bench/pairs"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/lab"
)

// Names of contestants on two nodes.
const (
	node          = "node to node"
	nodeTracked   = "node to node, tracked by conntrack"
	nodeUntracked = "node to node, conntrack there but NOTRACK"
	kernelDirect  = "kernel routing"
	kernelProxy   = "kernel routing + kube-proxy's iptables"
	kernelVXLAN   = "kernel VXLAN"
	flannel       = "flannel's shape: bridge + kernel VXLAN"
	oursDirect    = "mustang direct"
	oursLegacy    = "mustang direct, legacy host routing"
	oursVXLAN     = "mustang VXLAN"
	macvlanWire   = "macvlan on the wire"
	macvlanOurs   = "macvlan on the wire + mustang"
	ipvlanWire    = "ipvlan on the wire"
)

func podIP(label string) id     { return id(pairs.ID(label, report.PodIP)) }
func clusterIP(label string) id { return id(pairs.ID(label, report.ClusterIP)) }
func toNode(label string) id    { return id(pairs.ID(label, pairs.ToNode)) }

// pairOf is a contestant by its name, with the ways that are measured.
func pairOf(common pairs.Common, label string, ways ...string) pairs.Pair {
	p := pairs.Pair{Common: common, Label: label, By: lab.NoServices, Ways: ways}
	switch label {
	case node, report.AgainOf(node):
		p.Bare = true
	case nodeTracked:
		p.Bare, p.Rules = true, pairs.Tracked
	case nodeUntracked:
		p.Bare, p.Rules = true, pairs.NoTrack
	case kernelDirect:
		p.Join = lab.Join{Kernel: true, Mode: "direct"}
	case kernelProxy:
		p.By, p.Join = lab.IptablesNFT, lab.Join{Kernel: true, Mode: "direct"}
	case kernelVXLAN:
		p.Join = lab.Join{Kernel: true, Mode: "vxlan"}
	case flannel:
		p.Mode, p.By, p.Join, p.Masquerade = lab.Bridge, lab.IptablesNFT, lab.Join{Kernel: true, Mode: "vxlan"}, true
	case oursDirect:
		p.By, p.Join = lab.MustangTC, lab.Join{Mode: "direct", HostRouting: "ebpf"}
	case oursLegacy:
		p.By, p.Join = lab.MustangTC, lab.Join{Mode: "direct", HostRouting: "legacy"}
	case oursVXLAN:
		p.By, p.Join = lab.MustangTC, lab.Join{Mode: "vxlan", HostRouting: "ebpf"}
	}
	return p
}

// withLabs gives contestants on two nodes their labs' names.
func withLabs(prefix string, list ...run.Contestant) (out []run.Contestant) {
	for i, c := range list {
		name := fmt.Sprintf("%s%d", prefix, i)
		switch p := c.(type) {
		case pairs.Pair:
			p.Lab = name
			out = append(out, p)
		case pairs.OnWire:
			p.Lab = name
			out = append(out, run.Optional{Contestant: p})
		default:
			out = append(out, c)
		}
	}
	return out
}

func common(ask Ask) pairs.Common { return pairs.Common{Binary: ask.Binary, MTU: run.Defaults().MTU} }
