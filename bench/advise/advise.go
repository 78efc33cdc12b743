// SPDX-License-Identifier: Apache-2.0

// Package advise recommends a way of connecting pods for a stated need, from what
// a run on this very node measured.
package advise

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/samehost"
	"github.com/mustang-net/mustang/bench/stats"
)

// Need is what pods are to be good at.
type Need string

const (
	Latency     Need = "latency"     // requests on open connections
	Throughput  Need = "throughput"  // streams
	Connections Need = "connections" // a connection for each request
)

// Needs lists them.
var Needs = []Need{Latency, Throughput, Connections}

func (n Need) metric() report.Metric {
	return map[Need]report.Metric{Latency: report.RRRate, Throughput: report.StreamRate, Connections: report.CRRRate}[n]
}

// preference is the order among ways that are as fast: the stronger boundary, then
// the simpler. docs/boundary.md has the reasons.
var preference = []string{report.Veth, "netkit", report.Bridge, report.Macvlan, "ipvlan"}

// Options is the run that advice rests on.
func Options(n Need) (samehost.Options, error) {
	if !slices.Contains(Needs, n) {
		return samehost.Options{}, fmt.Errorf("--need %q: use one of %v", n, Needs)
	}
	o := samehost.Defaults()
	o.Modes, o.ServicesBy, o.Services = []string{report.Veth, report.Bridge, report.Macvlan}, []string{"mustang", "nft"}, []int{1}
	for _, mode := range []string{"netkit", "ipvlan"} {
		o.Extra = append(o.Extra, samehost.Extra{Mode: mode, By: "mustang", Services: 1})
	}
	for _, mode := range preference {
		o.Firewall = append(o.Firewall, samehost.Extra{Mode: mode, By: "mustang"}, samehost.Extra{Mode: mode, By: "nft"})
	}
	o.StreamBy, o.Scenarios = samehost.StreamOwn, []string{string(n.metric())}
	return o, nil
}

// Choice is one way, reached by ClusterIP.
type Choice struct {
	subject string         // its ID in the run
	Name    string         `json:"name"`
	Mode    string         `json:"mode"`
	By      string         `json:"services_by"`
	Ratio   stats.Estimate `json:"ratio"`           // to loopback
	Against stats.Estimate `json:"against_advised"` // ÷ the advised one; zero for that one
	// Firewall says whether the node's FORWARD chain stops its traffic; nil when
	// that was not found out.
	Firewall *bool  `json:"host_firewall,omitempty"`
	Why      string `json:"why"` // it is advised, or not
}

// Advice is what a run says about a need.
type Advice struct {
	Need         Need     `json:"need"`
	HostFirewall bool     `json:"host_firewall"` // it must see traffic between pods
	Advised      *Choice  `json:"advised"`       // nil when nothing fits
	Others       []Choice `json:"others"`        // the best first
}

// Of gives advice by a run.
func Of(d *report.Document, need Need, hostFirewall bool) Advice {
	a := Advice{Need: need, HostFirewall: hostFirewall, Others: []Choice{}}
	f := report.NewFigures(d)
	all := choices(d, f, need)
	fastest, best := -1, -1
	for i, c := range all {
		if hostFirewall && (c.Firewall == nil || !*c.Firewall) {
			continue
		}
		if fastest < 0 {
			fastest, best = i, i // of those that fit
			continue
		}
		// One that may be as fast as that, and stands before in preference, is better.
		against := f.Ratio(c.subject, all[fastest].subject, need.metric(), "same").Ratio
		if against.High >= 1 && rank(c) < rank(all[best]) {
			best = i
		}
	}
	for i, c := range all {
		if i == best {
			c.Why = "the fastest that fits, or as fast as that and the stronger boundary"
			a.Advised = &c
			continue
		}
		c.Why = "slower"
		if best >= 0 {
			c.Against = f.Ratio(c.subject, all[best].subject, need.metric(), "same").Ratio
			switch {
			case hostFirewall && (c.Firewall == nil || !*c.Firewall):
				c.Why = "the host's firewall does not see it"
			case c.Against.High >= 1:
				c.Why = "as fast as the advised one, as far as this run can tell"
			}
		} else {
			c.Why = "the host's firewall does not see it"
		}
		a.Others = append(a.Others, c)
	}
	return a
}

// rank is a way's place among those that are as fast; modes that are not listed come last.
func rank(c Choice) int {
	at := slices.Index(preference, c.Mode)
	if at < 0 {
		at = 2 * len(preference)
	}
	if !report.IsMustang(c.By) {
		at += len(preference) // Services by the kernel come after
	}
	return at
}

// choices are the ways that the run measured, the fastest first.
func choices(d *report.Document, f *report.Figures, need Need) (out []Choice) {
	for _, s := range d.Subjects {
		e := f.Ratio(s.ID, report.Base, need.metric(), "same").Ratio
		if s.Via != report.ClusterIP || e.N == 0 {
			continue
		}
		c := Choice{subject: s.ID, Name: s.Contestant, Mode: s.Mode, By: s.By, Ratio: e}
		if stops, ok := d.Facts[samehost.FirewallFact(s.Mode, s.By)]; ok {
			c.Firewall = &stops
		}
		out = append(out, c)
	}
	slices.SortStableFunc(out, func(a, b Choice) int { return cmp.Compare(b.Ratio.Median, a.Ratio.Median) })
	return out
}

// Render prints the advice.
func (a Advice) Render(w io.Writer) {
	print := func(c Choice) string {
		return fmt.Sprintf("%.2f [%.2f %.2f] of loopback", c.Ratio.Median, c.Ratio.Low, c.Ratio.High)
	}
	condition := ""
	if a.HostFirewall {
		condition = ", and the host's firewall must see traffic between pods"
	}
	fmt.Fprintf(w, "\nYou need %s%s.\n", a.Need, condition)
	if a.Advised == nil {
		fmt.Fprintln(w, "Nothing that this node offers fits.")
	} else {
		fmt.Fprintf(w, "Use %s: %s by ClusterIP.\n", a.Advised.Name, print(*a.Advised))
	}
	if a.Advised != nil && a.Advised.Ratio.N < stats.MinControl {
		fmt.Fprintf(w, "THIN: %d rounds are too few for any interval; give it more --budget.\n", a.Advised.Ratio.N)
	}
	if len(a.Others) > 0 {
		fmt.Fprintln(w, "\nThe others, and what speaks against them:")
	}
	for _, c := range a.Others {
		against := ""
		if c.Against.N > 0 {
			against = fmt.Sprintf(", %.2f [%.2f %.2f] of the advised one", c.Against.Median, c.Against.Low, c.Against.High)
		}
		fmt.Fprintf(w, "  %s: %s%s: %s\n", c.Name, print(c), against, c.Why)
	}
	fmt.Fprintln(w, "\nWhat would change the choice:")
	for _, line := range a.changes() {
		fmt.Fprintln(w, " ", line)
	}
}

// changes says under which other conditions another way were advised.
func (a Advice) changes() (out []string) {
	if a.HostFirewall {
		for _, c := range a.Others {
			if c.Against.N > 0 && c.Against.Low > 1 {
				out = append(out, fmt.Sprintf("without the host's firewall, %s were faster: %.2f times", c.Name, c.Against.Median))
			}
		}
		if a.Advised == nil {
			out = append(out, "without the host's firewall, any of them would do; NetworkPolicy is enforced in all of mustang's")
		}
	} else if a.Advised != nil && (a.Advised.Firewall == nil || !*a.Advised.Firewall) {
		out = append(out, "rules in the host's FORWARD chain that traffic between pods must meet: --host-firewall")
	}
	for _, n := range Needs {
		if n != a.Need {
			out = append(out, fmt.Sprintf("another need: --need %s", n))
		}
	}
	return append(out, "another kernel: one with netkit or ipvlan offers more", "untrusted pods with CAP_NET_RAW: macvlan and ipvlan are the weaker boundary (docs/boundary.md)")
}
