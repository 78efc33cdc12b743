// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"bytes"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/samehost"
	"github.com/mustang-net/mustang/bench/stats"
)

type way struct {
	mode, by string
	rate     float64
	seen     bool // by the host's firewall
}

func run(ways ...way) *report.Document {
	d := &report.Document{Settings: report.Settings{Cores: []string{"same"}, Seed: 1}, Facts: map[string]bool{},
		Subjects: []report.Subject{{ID: report.Base, Via: report.Loopback}}}
	sample := func(id string, rate float64) {
		for round := 1; round <= 15; round++ {
			d.Samples = append(d.Samples, runner.Sample{Case: runner.Case{Subject: id, Scenario: "rr", Cores: "same"}, Round: round, Rate: rate * float64(10+round%3), Count: 1})
		}
	}
	sample(report.Base, 1)
	for _, w := range ways {
		id := w.mode + " " + w.by
		d.Subjects = append(d.Subjects, report.Subject{ID: id, Contestant: id, Mode: w.mode, By: w.by, Via: report.ClusterIP, Services: 1})
		sample(id, w.rate)
		d.Facts[samehost.FirewallFact(w.mode, w.by)] = w.seen
	}
	return d
}

func TestAdvice(t *testing.T) {
	for name, c := range map[string]struct {
		ways     []way
		firewall bool
		want     string
	}{
		"the fastest":                             {[]way{{"veth", "mustang", .9, false}, {"macvlan", "mustang", .95, false}, {"veth", "nft", .7, true}}, false, "macvlan mustang"},
		"as fast: the stronger boundary":          {[]way{{"macvlan", "mustang", .9, false}, {"veth", "mustang", .9, false}}, false, "veth mustang"},
		"as fast: mustang before the kernel":      {[]way{{"veth", "nft", .9, true}, {"macvlan", "mustang", .9, false}}, false, "macvlan mustang"},
		"as fast: mustang by its packet programs": {[]way{{"veth", "nft", .9, true}, {"veth", "mustang-tc", .9, false}}, false, "veth mustang-tc"},
		"the firewall must see it":                {[]way{{"macvlan", "mustang", .95, false}, {"veth", "nft", .7, true}, {"bridge", "nft", .6, true}}, true, "veth nft"},
		"as fast: one that is not listed":         {[]way{{"ipvlan-l3", "mustang", .9, false}, {"macvlan", "mustang", .9, false}}, false, "macvlan mustang"},
		"nothing fits":                            {[]way{{"macvlan", "mustang", .95, false}}, true, ""},
	} {
		a := Of(run(c.ways...), Latency, c.firewall)
		got := ""
		if a.Advised != nil {
			got = a.Advised.Name
		}
		if got != c.want {
			t.Errorf("%s: advised %q, want %q", name, got, c.want)
		}
		if n := len(a.Others); got != "" && n != len(c.ways)-1 {
			t.Errorf("%s: %d others", name, n)
		}
		for _, o := range a.Others {
			if o.Why == "" {
				t.Errorf("%s: nothing speaks against %s", name, o.Name)
			}
		}
		var b bytes.Buffer
		a.Render(&b)
		if !strings.Contains(b.String(), "What would change the choice:") {
			t.Errorf("%s: the advice lacks what would change it:\n%s", name, b.String())
		}
	}
}

func TestUnknownNeedIsRefused(t *testing.T) {
	if _, err := Options("glory"); err == nil || !strings.Contains(err.Error(), "latency") {
		t.Errorf("error %v, want what there is", err)
	}
	for _, n := range Needs {
		if _, err := Options(n); err != nil {
			t.Error(err)
		}
	}
}

// Three ways of which each may be as fast as the next: the last is slower than the
// first, whatever stands between them.
func TestWhatIsSlowerThanTheFastestIsNotAdvised(t *testing.T) {
	d := run(way{"macvlan", "mustang", 1, false}, way{"bridge", "mustang", .97, false}, way{"veth", "mustang", .94, false})
	for i := range d.Samples { // what makes neighbours' intervals reach 1
		if s := &d.Samples[i]; s.Subject == "bridge mustang" {
			s.Rate *= 1 + .04*float64(s.Round%3-1)
		}
	}
	ratio := func(a, b string) stats.Estimate { return report.NewFigures(d).Ratio(a, b, report.RRRate, "same").Ratio }
	if near, far := ratio("bridge mustang", "macvlan mustang"), ratio("veth mustang", "macvlan mustang"); near.High < 1 || ratio("veth mustang", "bridge mustang").High < 1 || far.High >= 1 {
		t.Fatalf("the run is not that: %+v, %+v", near, far)
	}
	if a := Of(d, Latency, false); a.Advised.Name != "bridge mustang" {
		t.Errorf("advised %s", a.Advised.Name)
	}
}

// Two ways may differ in nothing but their number of Services.
func TestWaysOfOneModeAreToldApart(t *testing.T) {
	d := run(way{"veth", "mustang", 1, false}, way{"macvlan", "mustang", .9, false}, way{"other", "mustang", .5, false})
	for i := range d.Subjects {
		if s := &d.Subjects[i]; s.Mode == "other" {
			s.Mode, s.Services = "veth", 5000
		}
	}
	for _, c := range Of(d, Latency, false).Others {
		if want := map[string]float64{"macvlan mustang": .9, "other mustang": .5}[c.Name]; c.Against.Median < want-.01 || c.Against.Median > want+.01 {
			t.Errorf("%s: %+v of the advised one, want %v", c.Name, c.Against, want)
		}
	}
}
