// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/bench/runner"
)

// run is a run whose rounds scatter by half a percent.
func run(seed uint64, change map[string]float64) *Document {
	d := sampleDocument(15)
	rng := rand.New(rand.NewPCG(seed, 1))
	for i := range d.Samples {
		s := &d.Samples[i]
		f := 1 + 0.004*rng.NormFloat64()
		if c := change[s.Subject+" "+s.Scenario]; c > 0 {
			f *= c
		}
		s.Rate *= f
		s.CPU /= f
	}
	d.Compute()
	return d
}

func TestCompareFindsWhatChanged(t *testing.T) {
	const id = "veth mustang-tc, pod IP"
	old, now := run(1, nil), run(2, map[string]float64{id + " rr": 0.93, id + " crr": 1.08})
	old.Subjects = append(old.Subjects, Subject{ID: "gone"})
	now.Machine.Kernel = "6.99"
	c := Compare(old, now)
	for _, ch := range c.Changes {
		want := Same
		if ch.Subject == id {
			want = map[Metric]string{RRRate: Slower, CPUPerRR: Slower, CRRRate: Faster, CPUPerCRR: Faster, StreamRate: Same, CPUPerGB: Same}[ch.Metric]
		}
		if ch.Verdict != want {
			t.Errorf("%s %s: %s by %+v, want %s", ch.Subject, ch.Metric, ch.Verdict, ch.By, want)
		}
	}
	if c.Count(Slower) != 2 || c.Count(Faster) != 2 {
		t.Errorf("%d slower, %d faster, want 2 and 2", c.Count(Slower), c.Count(Faster))
	}
	var b bytes.Buffer
	c.Render(&b, false)
	for _, want := range []string{"DIFFERS: kernel: , then 6.99", "only in the old run: gone", "2 faster, 2 slower"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the comparison lacks %q:\n%s", want, b.String())
		}
	}
	few := Compare(sampleDocument(3), sampleDocument(3))
	if len(few.Changes) == 0 || few.Count(Unclear) != len(few.Changes) {
		t.Error("three rounds were enough for a verdict")
	}
}

// What is dead, or not measured any more, is no success.
func TestWhatIsGoneIsSaid(t *testing.T) {
	const dead, unbuilt = "veth mustang-tc, ClusterIP", "veth iptables-nft"
	old, now := run(1, nil), run(2, nil)
	now.Failures = map[string]string{dead: "no answer", unbuilt: "no nft here"}
	now.Subjects = slices.DeleteFunc(now.Subjects, func(s Subject) bool { return s.Contestant == unbuilt })
	now.Samples = slices.DeleteFunc(now.Samples, func(s runner.Sample) bool {
		return s.Subject == dead || strings.HasPrefix(s.Subject, unbuilt) || s.Scenario == "crr"
	})
	c := Compare(old, now)
	for _, ch := range c.Changes {
		failure := now.Failures[ch.Subject]
		if strings.HasPrefix(ch.Subject, unbuilt) {
			failure = now.Failures[unbuilt]
		}
		if want := failure != "" || ch.Metric.scenario() == "crr"; (ch.Verdict == Gone) != want || ch.Failure != failure {
			t.Errorf("%s %s: %s, %q", ch.Subject, ch.Metric, ch.Verdict, ch.Failure)
		}
	}
	if n := c.Count(Gone); n != 3*6+4*2 || len(c.OnlyOld) > 0 {
		t.Errorf("%d are gone; only in the old run: %v", n, c.OnlyOld)
	}
	var b bytes.Buffer
	c.Render(&b, false)
	if s := b.String(); !strings.Contains(s, "FAILED in the new run: "+dead+": no answer\n") || strings.Contains(s, "NaN") {
		t.Error(s)
	}
	if _, err := json.Marshal(c); err != nil {
		t.Error(err)
	}
}

func TestDifferencesThatMatterAreNamed(t *testing.T) {
	old, now := run(1, nil), run(1, nil)
	now.Machine.Emulated = EmulatedTime
	now.Settings.TailRate, now.Settings.CPUSource, now.Settings.MTU, now.Settings.Duration = 5000, "getrusage", 9000, 2
	got := strings.Join(differences(old, now), "\n")
	for _, want := range []string{"emulated: no, then time", "requests a second of tails: 0, then 5000", "CPU time from: , then getrusage", "MTU: 0, then 9000", "seconds of a sample: 1, then 2"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

func TestCSVHasAllFigures(t *testing.T) {
	d := run(1, nil)
	var b bytes.Buffer
	if err := d.WriteCSV(&b); err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(&b).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(rows[0], CSVHead) || len(rows) < 1+len(d.Figures)+len(d.Control) {
		t.Errorf("%d rows of %d figures and %d of the control", len(rows), len(d.Figures), len(d.Control))
	}
}
