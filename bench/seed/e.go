// SPDX-License-Identifier: Apache-2.0

package seed

// Article E: latency of a container against its host, from one machine to another.

import (
	"time"

	"github.com/mustang-net/mustang/bench/pairs"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/lab"
)

var e = Article{Name: "E", Title: "Latency of a container against its host's", Full: 4 * time.Minute, Quick: 40 * time.Second, plan: planE, claims: claimsE()}

func planE(ask Ask) (run.Plan, error) {
	c := common(ask)
	o := options(ask.Quick)
	o.TailRate = 5000
	onWire := func(label, kind string, by lab.ServiceBy) pairs.OnWire {
		return pairs.OnWire{Common: c, Label: label, Kind: kind, By: by}
	}
	broken := onWire(macvlanWire, report.Macvlan, lab.NoServices)
	broken.Lab = "sefact"
	return run.Plan{Options: o, BuildTime: buildTime,
		Contestants: withLabs("se", pairOf(c, node), pairOf(c, report.AgainOf(node)), pairOf(c, kernelDirect, report.PodIP), pairOf(c, oursDirect, report.PodIP, report.ClusterIP),
			onWire(macvlanWire, report.Macvlan, lab.NoServices), onWire(macvlanOurs, report.Macvlan, lab.Mustang), onWire(ipvlanWire, ipvlan, lab.NoServices)),
		Scenarios: []string{"rr", "tail"},
		Facts:     []run.Fact{pairs.ServiceWorks(broken)},
		Settings:  report.Settings{Base: node, Modes: []string{report.Veth, report.Macvlan}},
	}, nil
}

func claimsE() []claim {
	host, rr := id(node), report.RRRate
	return []claim{
		ratioClaim{"a pod over veth has 12.5 % fewer requests/s than its host (the kernel's routing)", 2141. / 2446, podIP(kernelDirect), host, rr, .95, true},
		ratioClaim{"its latency is 14 % higher (median at 5,000 requests/s, from when each was due)", 2446. / 2141, podIP(kernelDirect), host, report.TailP50, 1.05, false},
		ratioClaim{"macvlan's latency is close to the host's", 1, podIP(macvlanWire), host, rr, .93, false},
		ratioClaim{"ipvlan's latency is close to the host's", 1, podIP(ipvlanWire), host, rr, .93, false},
		factClaim{"but Services by iptables stop working with macvlan", map[string]bool{pairs.ServiceWorks(pairs.OnWire{Kind: report.Macvlan}).Name: false}},
		ratioClaim{"ours: with mustang on macvlan, Services work there and cost nearly nothing", 0, clusterIP(macvlanOurs), podIP(macvlanOurs), rr, .95, false},
		ratioClaim{"ours: macvlan with mustang is close to the host, too", 0, podIP(macvlanOurs), host, rr, .9, false},
		ratioClaim{"ours: eBPF host routing takes most of veth's loss away", 0, podIP(oursDirect), podIP(kernelDirect), rr, 1.05, false},
	}
}
