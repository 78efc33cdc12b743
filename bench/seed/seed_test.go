// SPDX-License-Identifier: Apache-2.0

package seed

import (
	"bytes"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/samehost"
)

func claimsOf(d *report.Document) []report.Claim {
	a.Judge(d)
	return d.Claims
}

// article is a run with exactly the article's figures.
func article() *report.Document {
	d := &report.Document{Schema: report.Schema, Complete: true, Failures: map[string]string{},
		Settings: report.Settings{Rounds: 15, Cores: []string{"same"}, Seed: 1},
		Facts:    map[string]bool{samehost.FirewallFact("veth", ""): true, samehost.FirewallFact("macvlan", ""): false}}
	add := func(mode, by string, services int, via, position string, rate float64) {
		s := report.Subject{ID: strings.Join([]string{mode, by, via, position}, " "), Contestant: mode + " " + by, Mode: mode, By: by, Services: services, Via: via, Position: position}
		d.Subjects = append(d.Subjects, s)
		for round := 1; round <= 15; round++ {
			for _, scenario := range []string{"stream", "crr"} {
				d.Samples = append(d.Samples, runner.Sample{Case: runner.Case{Subject: s.ID, Scenario: scenario, Cores: "same"},
					Round: round, Rate: rate * float64(round), Count: 1, Bytes: 1, Seconds: 1, CPU: 1})
			}
		}
	}
	for _, r := range []struct {
		mode, by string
		pod, vip float64
	}{{"veth", iptables, 66.8, 66.0}, {"bridge", iptables, 65.6, 61.5}, {"macvlan", iptables, 83.6, 61.9}, {"ipvlan", iptables, 83.6, 62.3},
		{"ipvlan", ebpf, 83.6, 78.8}, {"macvlan", ebpf, 83.6, 78.8}, {"veth", ebpf, 74.4, 74.4}} {
		add(r.mode, r.by, 1, report.PodIP, "", r.pod)
		add(r.mode, r.by, 1, report.ClusterIP, "", r.vip)
		if r.by == iptables {
			add(r.mode, r.by, many, report.ClusterIP, report.Middle, r.vip/2)
		}
	}
	add("bridge-nf-off", "none", 0, report.PodIP, "", 77.1)
	return d
}

func TestArticlesOwnFiguresConfirmIt(t *testing.T) {
	for _, c := range claimsOf(article()) {
		if c.Verdict != report.Confirmed {
			t.Errorf("%s: %s (%s), %+v", c.Text, c.Verdict, c.Why, c.Ratio)
		}
	}
}

func TestVerdictsSayWhy(t *testing.T) {
	d := article()
	d.Failures["ipvlan iptables-nft"] = "mustang pod add client --mode=ipvlan: exit status 2: mustang: mode ipvlan: this kernel has no ipvlan (unsupported operation)\nmore"
	d.Failures["ipvlan mustang-tc"] = "add pod: this kernel has no ipvlan"
	var left []report.Subject
	for _, s := range d.Subjects {
		if s.Mode != "ipvlan" {
			left = append(left, s)
		}
	}
	d.Subjects = left
	for i, s := range d.Samples {
		if strings.HasPrefix(s.Subject, "veth mustang-tc pod-ip") {
			d.Samples[i].Rate *= 0.5
		}
	}
	d.Facts[samehost.FirewallFact("macvlan", "")] = true
	want := map[string]string{"veth + eBPF carries": report.NotConfirmed, "ipvlan + eBPF": report.NotTestable, "ipvlan by pod IP": report.NotTestable,
		"without eBPF": report.NotConfirmed, "macvlan is the fastest": report.Confirmed}
	claims := claimsOf(d)
	for _, c := range claims {
		for prefix, verdict := range want {
			if strings.HasPrefix(c.Text, prefix) && c.Verdict != verdict {
				t.Errorf("%s: %s, want %s", c.Text, c.Verdict, verdict)
			}
		}
		if (c.Verdict == report.NotTestable || c.Verdict == report.ClaimUnclear) && (c.Why == "" || strings.Contains(c.Why, "\n")) {
			t.Errorf("%s: %s without one sentence why: %q", c.Text, c.Verdict, c.Why)
		}
	}
	var b bytes.Buffer
	report.RenderClaims(&b, "A", claims)
	if !strings.Contains(b.String(), "not testable here: mode ipvlan: this kernel has no ipvlan\n") || !strings.Contains(b.String(), "not testable here") {
		t.Errorf("the report lacks the reason:\n%s", b.String())
	}
	d.Samples = d.Samples[:0]
	for _, c := range claimsOf(d) {
		if c.Verdict == report.Confirmed && c.Limit > 0 {
			t.Errorf("%s is confirmed without samples", c.Text)
		}
	}
}
