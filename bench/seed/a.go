// SPDX-License-Identifier: Apache-2.0

package seed

// Article A: pods on one host, six ways to connect them, by pod IP and ClusterIP.

import (
	"fmt"
	"time"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/samehost"
)

// Names of what the kernel and mustang do, in the run.
const (
	iptables = "iptables-nft"
	ebpf     = "mustang-tc"
	ipvlan   = "ipvlan"
	many     = 5000
)

var a = Article{Name: "A", Title: "Pods on one host, six ways to connect them", Full: 9 * time.Minute, Quick: 95 * time.Second, plan: planA, claims: claimsA()}

func planA(ask Ask) (run.Plan, error) {
	o := samehost.Defaults()
	if ask.Quick {
		o.Options = options(true)
	}
	o.StreamBy = run.StreamOwn // the article's tool, iperf3, cannot take short turns: its intervals are four times as wide
	o.Binary, o.Self = ask.Binary, ask.Self
	o.Modes = append([]string{}, samehost.EveryMachine...)
	o.ServicesBy, o.Services = []string{iptables, ebpf}, []int{1}
	o.Extra = append(o.Extra, samehost.Extra{Mode: ipvlan, By: iptables, Services: 1}, samehost.Extra{Mode: ipvlan, By: ebpf, Services: 1})
	for _, mode := range []string{report.Veth, report.Bridge, report.Macvlan} {
		o.Extra = append(o.Extra, samehost.Extra{Mode: mode, By: iptables, Services: many})
	}
	o.Firewall = []samehost.Extra{{Mode: report.Veth}, {Mode: report.Macvlan}}
	p, err := o.Plan()
	for i, c := range p.Contestants {
		p.Contestants[i] = onlyLoads(c, func(s report.Subject) ([]string, bool) {
			if s.Services < many {
				return nil, true
			}
			if s.Via == report.ClusterIP {
				return []string{"crr"}, false // what so many rules slow
			}
			return nil, false
		})
	}
	return p, err
}

func claimsA() []claim {
	pod := func(mode, by string) path { return path{mode: mode, by: by, services: 1, via: report.PodIP} }
	vip := func(mode, by string) path { return path{mode: mode, by: by, services: 1, via: report.ClusterIP} }
	plain := path{mode: report.BridgeNFOff, by: "none", via: report.PodIP}
	stream := report.StreamRate
	claims := []claim{
		ratioClaim{"veth + eBPF carries about 11 % more than plain veth", 74.4 / 66.8, pod(report.Veth, ebpf), pod(report.Veth, iptables), stream, 1.08, false},
		ratioClaim{"veth + eBPF: a ClusterIP costs nothing", 74.4 / 74.4, vip(report.Veth, ebpf), pod(report.Veth, ebpf), stream, 0.97, false},
		ratioClaim{"ipvlan + eBPF: a ClusterIP costs a few percent", 78.8 / 83.6, vip(ipvlan, ebpf), pod(ipvlan, ebpf), stream, 0.92, false},
		ratioClaim{"macvlan + eBPF (ours; the article has ipvlan): a ClusterIP costs a few percent", 78.8 / 83.6, vip(report.Macvlan, ebpf), pod(report.Macvlan, ebpf), stream, 0.92, false},
		ratioClaim{"macvlan is the fastest by pod IP: a quarter above veth", 83.6 / 66.8, pod(report.Macvlan, iptables), pod(report.Veth, iptables), stream, 1.1, false},
		ratioClaim{"ipvlan by pod IP is as fast as macvlan", 83.6 / 83.6, pod(ipvlan, iptables), pod(report.Macvlan, iptables), stream, 0.95, false},
		ratioClaim{"macvlan by ClusterIP loses a quarter through the host's stack", 61.9 / 83.6, vip(report.Macvlan, iptables), pod(report.Macvlan, iptables), stream, 0.85, true},
		ratioClaim{"ipvlan by ClusterIP loses a quarter through the host's stack", 62.3 / 83.6, vip(ipvlan, iptables), pod(ipvlan, iptables), stream, 0.85, true},
		ratioClaim{"veth with iptables: a ClusterIP costs about 1 %", 66.0 / 66.8, vip(report.Veth, iptables), pod(report.Veth, iptables), stream, 0.95, false},
		ratioClaim{"bridge with iptables: a ClusterIP costs about 6 %", 61.5 / 65.6, vip(report.Bridge, iptables), pod(report.Bridge, iptables), stream, 0.98, true},
		ratioClaim{"a bridge is faster by 17 % when the firewall does not see it", 77.1 / 65.6, plain, pod(report.Bridge, iptables), stream, 1.1, false},
	}
	for _, mode := range []string{report.Veth, report.Bridge, report.Macvlan} {
		of := path{mode: mode, by: iptables, services: many, via: report.ClusterIP, position: report.Middle}
		claims = append(claims, ratioClaim{fmt.Sprintf("iptables: thousands of Services slow %s (new connections, %d ÷ 1, middle rule)", mode, many),
			0, of, vip(mode, iptables), report.CRRRate, 0.9, true})
	}
	return append(claims, factClaim{"without eBPF, traffic of macvlan pods of one host escapes the host's firewall, of veth it does not",
		map[string]bool{samehost.FirewallFact(report.Macvlan, ""): false, samehost.FirewallFact(report.Veth, ""): true}})
}
