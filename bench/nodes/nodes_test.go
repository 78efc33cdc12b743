// SPDX-License-Identifier: Apache-2.0

package nodes

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/bench/runner"
)

// made is a report in which a path has always the same share of the base's rate.
func made(shares map[string]float64, rounds int) *Report {
	r := &Report{Options: Defaults()}
	for path, share := range shares {
		r.Paths = append(r.Paths, path)
		for round := 1; round <= rounds; round++ {
			speed := 1000 * float64(round) // a machine that changes its speed
			for _, f := range r.Options.figures() {
				r.Samples = append(r.Samples, runner.Sample{Case: runner.Case{Subject: path, Scenario: f.scenario}, Round: round, Rate: share * speed, CPU: 1, Bytes: 1e9})
			}
		}
	}
	slices.Sort(r.Paths)
	return r
}

func TestBarsAreJudgedByRatiosWithinRounds(t *testing.T) {
	shares := map[string]float64{Base: 1, BaseAgain: 1, "mustang direct, pod IP": 0.87, "mustang VXLAN, pod IP": 0.7}
	var out bytes.Buffer
	made(shares, 15).Render(&out)
	for _, want := range []string{
		"mustang direct, pod IP ÷ bare namespaces, RR 0.86 0.93 0.870 0.870–0.870 PASS",
		"mustang direct, pod IP ÷ bare namespaces, stream 0.90 0.97 0.870 0.870–0.870 FAIL",
		"mustang VXLAN, pod IP ÷ mustang direct, pod IP, stream 0.80 0.95 0.805 0.805–0.805 PASS",
	} {
		if !strings.Contains(strings.Join(strings.Fields(out.String()), " "), want) {
			t.Errorf("no line %q in\n%s", want, out.String())
		}
	}
	out.Reset()
	made(shares, 3).Render(&out)
	if strings.Contains(out.String(), "PASS") {
		t.Errorf("three rounds pass a bar:\n%s", out.String())
	}
}

// Bars are for the kernel's own bundles: a run with larger ones says so, and judges none.
func TestLargerBundlesAreSaidAndNotJudged(t *testing.T) {
	r := made(map[string]float64{Base: 1, BaseAgain: 1, "mustang direct, pod IP": 0.97}, 15)
	r.Options.BigTCP = 196608
	var out bytes.Buffer
	r.Render(&out)
	if s := out.String(); !strings.Contains(s, "MTU 1500, bundles of 196608 bytes on the wire and in pods;") || strings.Contains(s, "PASS") {
		t.Error(s)
	}
}

// Bars are for one core: across two, the wake-up between them is in each figure.
func TestAcrossCoresNoBarIsJudged(t *testing.T) {
	r := made(map[string]float64{Base: 1, BaseAgain: 1, "mustang direct, pod IP": 0.97}, 15)
	r.Options.Cores = "cross"
	var out bytes.Buffer
	r.Render(&out)
	if s := out.String(); !strings.Contains(s, "\nBars are for client and server on the same core,") || strings.Contains(s, "PASS") {
		t.Error(s)
	}
}

func TestAControlThatFailsIsSaid(t *testing.T) {
	var out bytes.Buffer
	made(map[string]float64{Base: 1, BaseAgain: 0.9}, 15).Render(&out)
	if n := strings.Count(out.String(), "CONTROL FAILS"); n != 3 || !strings.Contains(out.String(), "\nstream: A/A CONTROL FAILS") {
		t.Errorf("it is said %d times, not of stream, RR and CRR:\n%s", n, out.String())
	}
	out.Reset()
	made(map[string]float64{Base: 1, BaseAgain: 0.9}, 3).Render(&out)
	if s := out.String(); strings.Contains(s, "CONTROL FAILS") || !strings.Contains(s, "\nRR: A/A control: not judged, 3 rounds") {
		t.Errorf("three rounds are too few to judge it:\n%s", s)
	}
}

// Each bar names paths that a run has.
func TestBarsNameContestants(t *testing.T) {
	var names []string
	for _, c := range contestants() {
		names = append(names, c.name, c.name+", pod IP", c.name+", ClusterIP", "node to node, beside "+c.name,
			"loopback, bare", "loopback, beside "+c.name, c.name+fromOutside+"its pod", c.name+fromOutside+"other node", c.name+toOutside)
	}
	for _, b := range bars {
		if !slices.Contains(names, b.path) || !slices.Contains(names, b.over) {
			t.Errorf("bar %+v names a path that no run has", b)
		}
	}
}

func TestASweepHasAColumnForEachSize(t *testing.T) {
	o := Defaults()
	o.Sizes, o.Flows = []int{64, 65536}, 4
	var names []string
	for _, f := range o.figures() {
		names = append(names, f.name+"="+f.scenario)
	}
	want := "stream 64 B × 4=stream:64*4, stream 65536 B × 4=stream:65536*4, RR 64 B × 4=rr:64*4, RR 65536 B × 4=rr:65536*4"
	if got := strings.Join(names, ", "); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	for _, bad := range []Options{{Sizes: []int{0}}, {Sizes: []int{1 << 30}}, {Flows: -1}, {Flows: 1 << 20}} {
		if _, err := bad.loads(); err == nil {
			t.Errorf("sizes %d, flows %d: no error", bad.Sizes, bad.Flows)
		}
	}
}
