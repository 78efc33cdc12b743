// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"slices"

	"github.com/mustang-net/mustang/bench/stats"
)

// Bar is one of the limits that mustang is held to, with what this run says about it.
type Bar struct {
	Name        string         `json:"name"`
	Subject     string         `json:"subject,omitempty"`
	Over        string         `json:"over,omitempty"`
	Bar         float64        `json:"bar"`
	Goal        float64        `json:"goal"`
	AtMost      bool           `json:"at_most,omitempty"` // a limit not to exceed
	Ratio       stats.Estimate `json:"ratio"`
	Verdict     stats.Verdict  `json:"verdict"`
	GoalVerdict stats.Verdict  `json:"goal_verdict"`
	Why         string         `json:"why,omitempty"` // why it is not shown
}

// tested are the ways mustang serves, the shipped one first: pod-IP bars are
// taken from the first that the run has.
var tested = []string{"mustang", "mustang-tc", "mustang-socket"}

// evaluator collects bars.
type evaluator struct {
	d    *Document
	f    *Figures
	bars []Bar
}

// evaluate judges all bars for one host and for Services. Bars
// rest on samples of one core: across two, the wake-up hides the datapath.
func evaluate(d *Document, f *Figures) []Bar {
	e := &evaluator{d: d, f: f}
	e.overLoopback()
	e.tuned()
	e.clusterOverPod()
	e.manyServices()
	e.againstKernel()
	return e.bars
}

// add judges one bar; ok is false when the run lacks a contestant for it.
func (e *evaluator) add(name string, a, b Subject, ok bool, m Metric, bar, goal float64) {
	out := Bar{Name: name, Bar: bar, Goal: goal, AtMost: m.Lower(), Verdict: stats.NotShown, GoalVerdict: stats.NotShown}
	switch {
	case !ok:
		out.Why = whyAbsent
	case !slices.Contains(e.d.Settings.Cores, "same"):
		out.Why = "needs samples of one core"
	default:
		fig := e.f.Ratio(a.ID, b.ID, m, "same")
		out.Subject, out.Over, out.Ratio = a.ID, b.ID, fig.Ratio
		judge := stats.AtLeast
		if m.Lower() {
			judge = stats.AtMost
		}
		out.Verdict, out.GoalVerdict = judge(fig.Ratio, bar), judge(fig.Ratio, goal)
		out.Why = whyNot(out.Verdict, fig.Ratio)
	}
	e.bars = append(e.bars, out)
}

const whyAbsent = "no such contestant in this run"

func whyNot(v stats.Verdict, r stats.Estimate) string {
	switch {
	case v != stats.NotShown:
		return ""
	case r.N == 0:
		return "not measured"
	case r.N < stats.MinRounds:
		return fmt.Sprintf("%d rounds, a claim needs %d", r.N, stats.MinRounds)
	}
	return "the interval straddles the bar"
}

func (e *evaluator) overLoopback() {
	base, mtu := Subject{ID: Base}, Subject{ID: BaseMTU}
	for _, mode := range []struct {
		name   string
		rr     float64
		rrGoal float64
	}{{Veth, 0.90, 0.97}, {Macvlan, 0.94, 0.97}} {
		s, ok := e.d.find(mode.name, tested, 0, PodIP)
		e.add(mode.name+" RR ÷ loopback", s, base, ok, RRRate, mode.rr, mode.rrGoal)
		e.add(mode.name+" CRR ÷ loopback", s, base, ok, CRRRate, 0.88, 0.95)
		e.add(mode.name+" stream ÷ loopback at the same MTU", s, mtu, ok, StreamRate, 0.85, 1.38)
		e.add(mode.name+" CPU per GB ÷ loopback", s, base, ok, CPUPerGB, 1.2, 1.06)
	}
}

// tuned are streams of pods that send more at once, over plain loopback: its MTU
// of 65,536 is what a local MTU comes up to, and what BIG TCP beats.
func (e *evaluator) tuned() {
	for _, t := range []struct {
		tune, with string
		bar        float64
	}{{LocalMTU, "with local MTU", 1.0}, {BigTCP, "with BIG TCP", 1.2}} {
		for _, mode := range []string{Veth, Bridge} {
			s, ok := e.d.findTuned(t.tune, mode, tested, 0, PodIP)
			e.add(fmt.Sprintf("%s stream %s ÷ loopback", mode, t.with), s, Subject{ID: Base}, ok, StreamRate, t.bar, 1.38)
		}
	}
}

func (e *evaluator) clusterOverPod() {
	for _, way := range []struct {
		by  string
		bar float64
	}{{"mustang-socket", 0.99}, {"mustang-tc", 0.95}} {
		for _, mode := range []string{Veth, Bridge, Macvlan} {
			svc, ok := e.d.find(mode, []string{way.by}, 0, ClusterIP)
			pod, okPod := e.d.sibling(svc, PodIP)
			for _, m := range []Metric{RRRate, CRRRate, StreamRate} {
				e.add(fmt.Sprintf("%s %s %s: ClusterIP ÷ pod IP", mode, way.by, m), svc, pod, ok && okPod, m, way.bar, 0.99)
			}
		}
	}
}

// manyServices compares the largest number of Services in the run, if that is
// 100,000, with one.
func (e *evaluator) manyServices() {
	many, ok := e.d.find(Veth, tested, 100000, ClusterIP)
	one, okOne := e.d.find(Veth, []string{many.By}, 1, ClusterIP)
	for _, m := range []Metric{RRRate, CRRRate} {
		e.add(fmt.Sprintf("veth %s: 100,000 Services ÷ 1", m), many, one, ok && okOne, m, 0.97, 0.98)
	}
}

// againstKernel compares with the kernel's own Services, and with the real kube-proxy where
// the run has it: there every way that mustang serves is judged, not only the shipped one.
// Where rules are scanned, the bar is of the middle one, as it was measured when it was set; the last
// one, which the article's figure fits, is shown beside it.
func (e *evaluator) againstKernel() {
	for _, c := range []struct {
		by, position string
		n            int
		bar, goal    float64
	}{{"iptables-nft", "", 1, 1.25, 1.4}, {"iptables-nft", Middle, 5000, 2.4, 2.7}, {"iptables-nft", Last, 5000, 2.4, 2.7},
		{"nft", "", 1, 1.2, 1.3}, {"nft", "", 5000, 1.2, 1.3}} {
		e.crrOver(c.by, c.position, c.n, tested, "", c.bar, c.goal)
	}
	for _, theirs := range e.d.Subjects {
		bar, goal := kubeProxyBar(theirs)
		for _, by := range tested {
			if _, ok := e.d.find(Veth, []string{by}, theirs.Services, ClusterIP); ok && bar > 0 {
				e.crrOver(theirs.By, theirs.Position, theirs.Services, []string{by}, by+" ", bar, goal)
			}
		}
	}
}

// kubeProxyBar is the bar over a contestant if that is the real kube-proxy, else 0.
func kubeProxyBar(s Subject) (bar, goal float64) {
	switch {
	case s.Mode != Veth || s.Via != ClusterIP:
	case s.By == "kube-proxy-nftables":
		return 1.2, 1.3
	case s.By == "kube-proxy-iptables" && s.Services == 1:
		return 1.25, 1.4
	case s.By == "kube-proxy-iptables" && s.Services == 5000:
		return 2.4, 2.7
	}
	return 0, 0
}

// crrOver judges short connections by ClusterIP, by the first of ours that the run has, over
// those of another way with as many Services.
func (e *evaluator) crrOver(theirBy, position string, services int, ours []string, label string, bar, goal float64) {
	our, ok := e.d.find(Veth, ours, services, ClusterIP)
	their, okTheirs := e.d.findAt(position, Veth, theirBy, services)
	name := fmt.Sprintf("veth %sCRR by ClusterIP ÷ %s, Services: %d", label, theirBy, services)
	if position != "" {
		name += ", " + position + " rule"
	}
	e.add(name, our, their, ok && okTheirs, CRRRate, bar, goal)
}
