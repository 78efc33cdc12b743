// SPDX-License-Identifier: Apache-2.0

package seed

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

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

// A sample that was lost takes nothing from a claim that has its rounds; a claim without any says why.
func TestALostSampleLeavesTheOthers(t *testing.T) {
	d := article()
	const of = "veth mustang-tc pod-ip "
	lost := runner.Case{Subject: of, Scenario: "crr", Cores: "same"}
	d.Failures[of] = lost.String() + ": no end by its deadline"
	d.Samples = append(d.Samples, runner.Sample{Case: lost, Round: 16, Error: d.Failures[of]})
	for _, c := range claimsOf(d) {
		if c.Verdict != report.Confirmed {
			t.Errorf("%s: %s (%s)", c.Text, c.Verdict, c.Why)
		}
	}
	d.Samples = slices.DeleteFunc(d.Samples, func(s runner.Sample) bool { return s.Subject == of })
	for _, c := range claimsOf(d) {
		if strings.HasPrefix(c.Text, "veth + eBPF carries") && (c.Verdict != report.NotTestable || c.Why != d.Failures[of]) {
			t.Errorf("%s: %s (%s)", c.Text, c.Verdict, c.Why)
		}
	}
}

func TestAllArticlesFitTheirTimes(t *testing.T) {
	var full, quick time.Duration
	for _, a := range Articles {
		full, quick = full+a.Full, quick+a.Quick
	}
	if full > time.Hour || quick > 8*time.Minute {
		t.Errorf("all articles take %v, quick ones %v", full, quick)
	}
}

// What a claim is about must be in the run, or there is no verdict on any machine.
func TestClaimsAreAboutContestantsOfTheirRun(t *testing.T) {
	for _, a := range Articles {
		for _, quick := range []bool{false, true} {
			p, err := a.Plan(Ask{Quick: quick, Binary: "mustang"})
			if err != nil {
				t.Fatalf("%s: %v", a.Name, err)
			}
			var names []string
			for _, c := range p.Contestants {
				if slices.Contains(names, c.Name()) {
					t.Errorf("%s: two contestants are called %s", a.Name, c.Name())
				}
				names = append(names, c.Name())
			}
			if base := cmp.Or(p.Settings.Base, report.Base); !slices.Contains(names, base) || !slices.Contains(names, report.AgainOf(base)) {
				t.Errorf("%s: the base or its control is missing: %v", a.Name, names)
			}
			for _, s := range subjectsOf(a.claims) {
				is := func(name string) bool { return s == name || strings.HasPrefix(s, name+", ") }
				if !slices.ContainsFunc(names, is) {
					t.Errorf("%s, quick %t: nobody is %q", a.Name, quick, s)
				}
			}
		}
	}
}

// contestant is the name of who is measured on a path.
func (p path) contestant() string {
	name := p.mode
	if p.by != "none" {
		name += " " + p.by
	}
	if p.pods > 0 {
		name += fmt.Sprintf(" (%d pods)", p.pods)
	}
	if p.services > 1 {
		name += fmt.Sprintf(" (%d Services)", p.services)
	}
	return name
}

// subjectsOf are those that claims name; of what is selected by what it is, its contestant.
func subjectsOf(claims []claim) (out []string) {
	add := func(list ...subject) {
		for _, s := range list {
			switch s := s.(type) {
			case id:
				out = append(out, string(s))
			case path:
				out = append(out, s.contestant())
			}
		}
	}
	for _, c := range claims {
		switch c := c.(type) {
		case ratioClaim:
			add(c.of, c.to)
		case byTool:
			add(c.of, c.to)
		case oneCPU:
			add(c.of, c.to)
		case profileClaim:
			add(c.of, c.to)
		}
	}
	return out
}

func TestClaimsByProfilesSayWhatIsMissing(t *testing.T) {
	b, err := Find("B")
	if err != nil {
		t.Fatal(err)
	}
	of, to := string(podIP(kernelProxy)), string(podIP(oursDirect))
	queued := func(of10 int) *report.Frame {
		f := &report.Frame{Name: "all"}
		if of10 == 1 { // at its deepest, it is one sample as well
			f.Add([]string{"veth_xmit", "__netif_rx", "netif_rx_internal", "enqueue_to_backlog"}, of10)
		} else {
			f.Add([]string{"veth_xmit", "__netif_rx"}, of10)
		}
		f.Add([]string{"tcp_sendmsg"}, 10-of10)
		return f
	}
	for want, profiles := range map[string][]report.Profile{
		report.Confirmed:    {{Subject: of, Scenario: "rr", Work: 10, Busy: 2, Stack: queued(2)}, {Subject: to, Scenario: "rr", Work: 10, Busy: 2, Stack: queued(1)}},
		report.NotConfirmed: {{Subject: of, Scenario: "rr", Work: 10, Busy: 2, Stack: queued(1)}, {Subject: to, Scenario: "rr", Work: 10, Busy: 2, Stack: queued(1)}},
		report.NotTestable:  {{Subject: of, Scenario: "rr", Work: 10, Busy: 1}, {Subject: to, Scenario: "rr", Work: 10, Busy: 1}},
	} {
		d := &report.Document{Subjects: []report.Subject{{ID: of}, {ID: to}}, Profiles: profiles}
		b.Judge(d)
		i := slices.IndexFunc(d.Claims, func(c report.Claim) bool { return strings.Contains(c.Text, "flame graph") })
		if got := d.Claims[i]; got.Verdict != want || got.Why == "" {
			t.Errorf("%s (%s), want %s", got.Verdict, got.Why, want)
		}
	}
}

// A run is judged by what its own machine lacked, not by what that of its reader does.
func TestWhatTheRunLackedIsSaid(t *testing.T) {
	b, err := Find("B")
	if err != nil {
		t.Fatal(err)
	}
	d := &report.Document{Failures: map[string]string{wireGuard: "no wg: install the package wireguard-tools (unsupported operation)", ipsec: "try IPsec: not today"}}
	b.Judge(d)
	for _, c := range d.Claims {
		if strings.Contains(c.Text, ipsec) && (!strings.Contains(c.Why, "no wg: install the package wireguard-tools") || !strings.Contains(c.Why, "; ") || !strings.Contains(c.Why, "try IPsec: not today")) {
			t.Errorf("%s: %s", c.Text, c.Why)
		}
	}
}

// A part of an article has its base, and judges what it can.
func TestOnlySomeContestants(t *testing.T) {
	b, err := Find("B")
	if err != nil {
		t.Fatal(err)
	}
	p, err := b.Plan(Ask{Only: []string{wireGuard, ipsec}, Binary: "mustang"})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, c := range p.Contestants {
		names = append(names, c.Name())
	}
	if want := []string{node, report.AgainOf(node), wireGuard, ipsec}; !slices.Equal(names, want) {
		t.Errorf("%v, want %v", names, want)
	}
	d := &report.Document{Settings: p.Settings, Subjects: []report.Subject{{ID: string(podIP(wireGuard))}, {ID: string(podIP(ipsec))}}}
	b.Judge(d)
	if len(d.Claims) != 3 {
		t.Errorf("%d claims, want the three on encryption: %+v", len(d.Claims), d.Claims)
	}
	if _, err := b.Plan(Ask{Only: []string{"pigeon"}, Binary: "mustang"}); err == nil || !strings.Contains(err.Error(), "pigeon") {
		t.Errorf("nobody was asked for: %v", err)
	}
}
