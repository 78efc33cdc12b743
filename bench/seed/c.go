// SPDX-License-Identifier: Apache-2.0

package seed

// Article C: direct routing against VXLAN, over the size of messages.

import (
	"strconv"
	"time"

	"github.com/mustang-net/mustang/bench/pairs"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
)

var c = Article{Name: "C", Title: "Direct routing against VXLAN, 64 B to 64 KiB", Full: 13 * time.Minute, Quick: 105 * time.Second, plan: planC, claims: claimsC()}

// Sizes of messages, in bytes: small and large ones of the claims, and where the
// article looked at the CPU.
const (
	small  = 64
	large  = 65536
	mpSize = 1440
)

func sizesC(quick bool) []int {
	if quick {
		return []int{small, mpSize, large}
	}
	out := []int{mpSize}
	for n := small; n <= large; n *= 2 {
		out = append(out, n)
	}
	return out
}

func sized(m report.Metric, n int) report.Metric { return m.Of(":" + strconv.Itoa(n)) }

func planC(ask Ask) (run.Plan, error) {
	c := common(ask)
	p := run.Plan{Options: options(ask.Quick), BuildTime: buildTime,
		Contestants: withLabs("sc", pairOf(c, node), pairOf(c, report.AgainOf(node)), pairOf(c, kernelDirect, report.PodIP, pairs.ToNode), pairOf(c, kernelVXLAN, report.PodIP),
			pairOf(c, flannel, pairs.ToNode), pairOf(c, oursDirect, report.PodIP), pairOf(c, oursVXLAN, report.PodIP)),
		Profiled: []string{string(sized(report.StreamRate, mpSize))}, ProfileTime: profileTime(ask.Quick),
		Settings: report.Settings{Base: node, Modes: []string{report.Veth}},
	}
	hides := pairOf(c, flannel)
	hides.Lab = "schide"
	plain := pairOf(c, kernelDirect)
	plain.Lab = "scseen"
	p.Facts = []run.Fact{pairs.HidesPods(hides), pairs.HidesPods(plain)}
	for _, mode := range []report.Metric{report.StreamRate, report.RRRate} {
		for _, n := range sizesC(ask.Quick) {
			p.Scenarios = append(p.Scenarios, string(sized(mode, n)))
		}
	}
	return p, nil
}

func claimsC() []claim {
	bare, direct, vxlan := id(node), podIP(kernelDirect), podIP(kernelVXLAN)
	ours, oursVX := podIP(oursDirect), podIP(oursVXLAN)
	bw, lat := sized(report.StreamRate, large), sized(report.RRRate, small)
	softirq := func(p report.Profile) float64 { return p.Busy * p.Softirq }
	return []claim{
		ratioClaim{"direct routing is close to node to node: bandwidth (kernel routing, 64 KiB)", 1, direct, bare, bw, .9, false},
		ratioClaim{"direct routing is close to node to node: bandwidth (mustang, 64 KiB)", 1, ours, bare, bw, .9, false},
		ratioClaim{"direct routing is close to node to node: latency (kernel routing, 64 B, as rate)", 1, direct, bare, lat, .9, false},
		ratioClaim{"direct routing is close to node to node: latency (mustang, 64 B, as rate)", 1, ours, bare, lat, .9, false},
		ratioClaim{"direct routing has 40 % more bandwidth than VXLAN (kernel's, 64 KiB)", 1.4, direct, vxlan, bw, 1.2, false},
		ratioClaim{"the same at 1440 B", 1.4, direct, vxlan, sized(report.StreamRate, mpSize), 1.2, false},
		ratioClaim{"direct routing has 5 to 10 % less latency than VXLAN (kernel's, 64 B, as rate)", 1.08, direct, vxlan, lat, 1.03, false},
		ratioClaim{"ours: mustang's VXLAN loses less bandwidth than the kernel's (64 KiB)", 0, oursVX, vxlan, bw, 1.1, false},
		ratioClaim{"ours: mustang's VXLAN loses less latency than the kernel's (64 B, as rate)", 0, oursVX, vxlan, lat, 1.05, false},
		profileClaim{text: "VXLAN needs more softirq for the same bytes (messages of 1440 B)", of: vxlan, to: direct, scenario: string(sized(report.StreamRate, mpSize)),
			what: "in softirq a byte", limit: 1.1, spent: softirq},
		ratioClaim{"from a pod to another node, direct routing still routes: as fast as from pod to pod", 1, toNode(kernelDirect), direct, bw, .95, false},
		ratioClaim{"from a pod to another node, the overlay goes through NAT and loses little (against direct routing)", 1, toNode(flannel), toNode(kernelDirect), bw, .8, false},
		factClaim{"but it hides the pod's address, which direct routing does not",
			map[string]bool{pairs.HidesPods(pairs.Pair{Label: flannel}).Name: true, pairs.HidesPods(pairs.Pair{Label: kernelDirect}).Name: false}},
	}
}
