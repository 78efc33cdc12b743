// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/csv"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
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
