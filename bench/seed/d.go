// SPDX-License-Identifier: Apache-2.0

package seed

// Article D: a service network and network policy in eBPF, by nginx and ab: many Services,
// many policies, many pods, over TCP, and Services also over UDP.

import (
	"fmt"
	"slices"
	"time"

	"github.com/mustang-net/mustang/bench/policy"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/samehost"
)

var d = Article{Name: "D", Title: "Services and policies in eBPF, by nginx and ab", Full: 8 * time.Minute, Quick: 115 * time.Second, plan: planD, claims: claimsD()}

// Numbers of the article. fewPods is none besides the two that talk and a third.
const (
	fewPods    = 3
	manyPods   = 156
	onePolicy  = 1
	policyPods = 120
	ipvs       = "ipvs"
)

// short and long are the article's connections.
const (
	short = runner.ABShort
	long  = runner.ABLong
	udp   = "udp-rr"
)

func planD(ask Ask) (run.Plan, error) {
	// The load program takes the place of tools that are missing.
	o := samehost.Defaults()
	o.Options = options(ask.Quick)
	o.Binary, o.Self = ask.Binary, ask.Self
	o.Modes, o.ServicesBy, o.Services = nil, nil, []int{1}
	o.Scenarios = []string{short, long, udp}
	if runner.ABTools() != nil {
		o.Scenarios = []string{"crr", "rr", udp}
	}
	numbers := []int{1, 1000, 5000}
	if ask.Quick {
		numbers = []int{1, 5000}
	}
	for _, n := range numbers {
		for _, by := range []string{ebpf, iptables, ipvs} {
			if by == ipvs && n != 1 && ask.Quick {
				continue
			}
			o.Extra = append(o.Extra, samehost.Extra{Mode: report.Veth, By: by, Services: n})
		}
	}
	for _, n := range []int{fewPods, manyPods} {
		o.Extra = append(o.Extra, samehost.Extra{Mode: report.Veth, By: ebpf, Services: 1, Pods: n}, samehost.Extra{Mode: report.PolicyRouting, By: "none", Services: 1, Pods: n})
	}
	o.Extra = append(o.Extra, samehost.Extra{Mode: ipvlan, By: ebpf, Services: 1}, samehost.Extra{Mode: ipvlan, By: "none", Services: 1})
	p, err := o.Plan()
	if err != nil {
		return p, err
	}
	p.Contestants = slices.DeleteFunc(p.Contestants, func(c run.Contestant) bool { return c.Name() == report.BaseMTU })
	for i, c := range p.Contestants {
		p.Contestants[i] = lessOf(c, o.Scenarios)
	}
	for i, n := range []int{onePolicy, policyPods} {
		for _, nft := range []bool{false, true} {
			c := policy.PerPod(fmt.Sprintf("sp%d%t", i, nft)[:4], nft, n, ask.Binary)
			p.Contestants = append(p.Contestants, run.Some{Contestant: c, Loads: func(report.Subject) ([]string, bool) { return o.Scenarios[:2], false }})
		}
	}
	p.BuildTime = 3 * time.Minute
	return p, nil
}

// lessOf leaves out what no claim needs: UDP but for Services, pod IPs of many Services,
// Services of many pods.
func lessOf(c run.Contestant, scenarios []string) run.Contestant {
	return onlyLoads(c, func(s report.Subject) ([]string, bool) {
		switch {
		case s.Via == report.Loopback:
			return nil, true
		case s.Via == report.PodIP && s.Services > 1, s.Via == report.ClusterIP && s.Pods > 0:
			return nil, false
		case s.Via == report.PodIP:
			return scenarios[:2], false
		}
		return nil, true
	})
}

// byTool is a claim about ab's connections; where ab is missing, about the load program's.
type byTool struct{ ratioClaim }

func (b byTool) judge(d *report.Document, f *report.Figures) report.Claim {
	if !slices.Contains(d.Metrics(), report.ABShort) {
		b.metric = map[report.Metric]report.Metric{report.ABShort: report.CRRRate, report.ABLong: report.RRRate}[b.metric]
		b.text += " (by the load program: ab or nginx was missing)"
	}
	return b.ratioClaim.judge(d, f)
}

func claimsD() (out []claim) {
	pod := func(mode, by string, pods int) path {
		p := path{mode: mode, by: by, services: 1, via: report.PodIP, pods: pods}
		if by == "none" {
			p.services = 0
		}
		return p
	}
	vip := func(by string, n int, position string) path {
		return path{mode: report.Veth, by: by, services: n, via: report.ClusterIP, position: position}
	}
	add := func(text string, article float64, of, to subject, m report.Metric, limit float64, atMost bool) {
		out = append(out, byTool{ratioClaim{text, article, of, to, m, limit, atMost}})
	}
	ours, routing := pod(report.Veth, ebpf, fewPods), pod(report.PolicyRouting, "none", fewPods)
	add("pod network: eBPF is 11 % above policy routing (short connections)", 1.11, ours, routing, report.ABShort, 1.05, false)
	add("pod network: eBPF is 2 % below ipvlan (short connections)", .98, pod(ipvlan, ebpf, 0), pod(ipvlan, "none", 0), report.ABShort, .95, false)
	add("156 pods on the node: eBPF loses 13 % (short connections; here it may lose less)", .87, pod(report.Veth, ebpf, manyPods), ours, report.ABShort, .85, false)
	add("156 pods on the node: policy routing loses 23 % (short connections)", .77, pod(report.PolicyRouting, "none", manyPods), routing, report.ABShort, .9, true)
	for _, c := range []struct {
		name, by    string
		short, long float64
	}{{"kube-proxy's iptables", iptables, 1.32, 1.19}, {"kube-proxy's IPVS", ipvs, 1.6, 1.5}} {
		add("one Service: against "+c.name+", short connections", c.short, vip(ebpf, 1, ""), vip(c.by, 1, ""), report.ABShort, 1.1, false)
		add("one Service: against "+c.name+", long connections", c.long, vip(ebpf, 1, ""), vip(c.by, 1, ""), report.ABLong, 1.05, false)
	}
	add("1 to 5,000 Services: eBPF loses 3 %, short connections", .97, vip(ebpf, many, ""), vip(ebpf, 1, ""), report.ABShort, .93, false)
	add("1 to 5,000 Services: eBPF loses 3 %, long connections", .97, vip(ebpf, many, ""), vip(ebpf, 1, ""), report.ABLong, .93, false)
	add("1 to 5,000 Services: iptables loses 60 %, short connections (last rule)", .4, vip(iptables, many, report.Last), vip(iptables, 1, ""), report.ABShort, .7, true)
	add("1 to 5,000 Services: iptables loses 6 %, long connections (last rule)", .94, vip(iptables, many, report.Last), vip(iptables, 1, ""), report.ABLong, .85, false)
	out = append(out,
		ratioClaim{"UDP (ours; the article has TCP): 1 to 5,000 Services cost eBPF nothing", 0, vip(ebpf, many, ""), vip(ebpf, 1, ""), report.UDPRRRate, .95, false},
		ratioClaim{"UDP (ours): one Service, against kube-proxy's iptables", 0, vip(ebpf, 1, ""), vip(iptables, 1, ""), report.UDPRRRate, 1.05, false})
	for _, n := range []struct {
		pods        int
		short, long float64
	}{{onePolicy, 1.32, 1.16}, {policyPods, 1.19, 1.24}} {
		of := func(by string) id { return id(policy.Name(by, n.pods)) }
		what := count(n.pods, "pod") + " with a policy each: against routing with a firewall's policies, "
		add(what+"short connections", n.short, of("mustang"), of("nft"), report.ABShort, 1.05, false)
		add(what+"long connections", n.long, of("mustang"), of("nft"), report.ABLong, 1.05, false)
	}
	return out
}
