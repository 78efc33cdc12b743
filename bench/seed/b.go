// SPDX-License-Identifier: Apache-2.0

package seed

// Article B: from node to node; host routing, RR and CRR, with 1 and 32 connections, what
// CPU they take, and flame graphs.

import (
	"time"

	"github.com/mustang-net/mustang/bench/pairs"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
)

var b = Article{Name: "B", Title: "From node to node: host routing, connections, CPU", Full: 13 * time.Minute, Quick: 110 * time.Second, plan: planB, claims: claimsB()}

// crowd is the article's 32 processes.
const crowd = "*32"

func planB(ask Ask) (run.Plan, error) {
	c := common(ask)
	both := []string{report.PodIP, report.ClusterIP}
	p := run.Plan{Options: options(ask.Quick), BuildTime: buildTime,
		Contestants: withLabs("sb", pairOf(c, node), pairOf(c, report.AgainOf(node)), pairOf(c, nodeTracked), pairOf(c, nodeUntracked),
			pairOf(c, kernelProxy, both...), pairOf(c, oursLegacy, report.PodIP), pairOf(c, oursDirect, both...)),
		Scenarios: []string{"stream", "stream" + crowd, "rr", "rr" + crowd, "crr", "crr" + crowd},
		Profiled:  []string{"stream", "rr", "crr"}, ProfileTime: profileTime(ask.Quick),
		Settings: report.Settings{Base: node, Modes: []string{report.Veth}},
	}
	p.Contestants = append(p.Contestants, encrypted(c)...)
	if ask.Quick {
		p.Scenarios = []string{"stream", "rr", "rr" + crowd, "crr", "crr" + crowd}
		p.Profiled = []string{"rr"}
		for i, c := range p.Contestants {
			p.Contestants[i] = onlyLoads(c, quickB)
		}
	}
	return p, nil
}

// quickB leaves out what no claim needs.
func quickB(s report.Subject) ([]string, bool) {
	switch s.ID {
	case nodeTracked, nodeUntracked:
		return []string{"rr", "crr", "crr" + crowd}, false
	case string(podIP(oursLegacy)):
		return []string{"stream", "rr"}, false
	case string(podIP(kernelProxy)):
		return []string{"stream", "rr", "crr"}, false
	}
	return nil, true
}

func claimsB() []claim {
	bare, direct, vip := id(node), podIP(oursDirect), clusterIP(oursDirect)
	proxy, proxyVIP := podIP(kernelProxy), clusterIP(kernelProxy)
	var out []claim
	for _, m := range []struct {
		metric report.Metric
		name   string
		limit  float64
	}{{report.StreamRate, "one stream", .9}, {report.StreamRate.Of(crowd), "32 streams", .9}, {report.RRRate, "requests", .9}, {report.RRRate.Of(crowd), "requests on 32 connections", .9},
		{report.CRRRate, "new connections", .85}, {report.CRRRate.Of(crowd), "new connections, 32 at once", .85}} {
		out = append(out, ratioClaim{"eBPF host routing equals node to node: " + m.name, 1, direct, bare, m.metric, m.limit, false})
	}
	out = append(out,
		ratioClaim{"eBPF host routing beats legacy host routing: requests", 0, direct, podIP(oursLegacy), report.RRRate, 1.05, false},
		ratioClaim{"eBPF host routing beats legacy host routing: one stream", 0, direct, podIP(oursLegacy), report.StreamRate, 1.05, false},
		ratioClaim{"eBPF beats the iptables path by ClusterIP: requests", 0, vip, proxyVIP, report.RRRate, 1.1, false},
		ratioClaim{"eBPF beats the iptables path by ClusterIP: requests on 32 connections", 0, vip, proxyVIP, report.RRRate.Of(crowd), 1.1, false},
		ratioClaim{"eBPF beats the iptables path by ClusterIP: new connections", 0, vip, proxyVIP, report.CRRRate, 1.2, false},
		ratioClaim{"eBPF beats the iptables path by ClusterIP: new connections, 32 at once", 0, vip, proxyVIP, report.CRRRate.Of(crowd), 1.2, false},
		ratioClaim{"conntrack makes the baseline's new connections collapse (32 at once; here: costs more than 5 %)", 0, id(nodeTracked), bare, report.CRRRate.Of(crowd), .95, true},
		ratioClaim{"NOTRACK gives them back (32 at once)", 0, id(nodeUntracked), id(nodeTracked), report.CRRRate.Of(crowd), 1.03, false},
		ratioClaim{"CPU at a fixed bandwidth: eBPF host routing takes no more than node to node", 1, direct, bare, report.CPUPerGB, 1.15, true},
		ratioClaim{"CPU at a fixed bandwidth: the iptables path takes more than eBPF", 0, proxy, direct, report.CPUPerGB, 1.1, false},
		ratioClaim{"CPU for 250,000 new connections/s: from 33 % to 90 % of the system, by configuration", 90. / 33, proxyVIP, vip, report.CPUPerCRR, 1.3, false},
		profileClaim{text: "the flame graph shows it: the rival's receive path crosses the veth backlog once more", of: proxy, to: direct, scenario: "rr",
			what: "in the backlog's queue a request", stacks: true, limit: 1.2, spent: func(p report.Profile) float64 {
				return p.Busy * p.Stack.Share("enqueue_to_backlog", "__netif_rx", "netif_rx")
			}},
	)
	return append(out,
		ratioClaim{"WireGuard has the higher maximum throughput than IPsec", 0, podIP(wireGuard), podIP(ipsec), report.StreamRate, 1.05, false},
		oneCPU{ratioClaim{"IPsec (AES-NI) needs far less CPU than WireGuard at the same bandwidth (here: carries more with one CPU)", 0, podIP(ipsec), podIP(wireGuard), report.StreamRate, 1.25, false},
			"WireGuard's work is done by kernel threads on any CPU, which no control group of the load holds"},
		ratioClaim{"IPsec has the better RR than WireGuard", 0, podIP(ipsec), podIP(wireGuard), report.RRRate, 1.03, false},
	)
}

// Contestants with encryption.
const (
	wireGuard = "WireGuard"
	ipsec     = "IPsec"
)

func encrypted(c pairs.Common) []run.Contestant {
	return []run.Contestant{
		run.Optional{Contestant: pairs.Encrypted{Pair: pairs.Pair{Common: c, Label: wireGuard, Lab: "sbwg", By: "none", Ways: []string{report.PodIP}}, With: pairs.WireGuard}},
		run.Optional{Contestant: pairs.Encrypted{Pair: pairs.Pair{Common: c, Label: ipsec, Lab: "sbip", By: "none", Ways: []string{report.PodIP}}, With: pairs.IPsec}},
	}
}
