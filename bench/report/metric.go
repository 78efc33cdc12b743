// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/runner"
)

// Metric is what a figure compares: a kind, and of loads with another size of messages
// or several connections what load.Scenario's name ends with, as stream:1440 or
// cpu_per_1000_rr*32.
type Metric string

// Kinds.
const (
	StreamRate Metric = "stream"
	RRRate     Metric = "rr"
	CRRRate    Metric = "crr"
	UDPRRRate  Metric = "udp-rr"
	ABShort    Metric = Metric(runner.ABShort)
	ABLong     Metric = Metric(runner.ABLong)
	CPUPerGB   Metric = "cpu_per_gb"       // CPU s per 10⁹ bytes of a stream
	CPUPerRR   Metric = "cpu_per_1000_rr"  // CPU s per 1000 transactions
	CPUPerCRR  Metric = "cpu_per_1000_crr" // CPU s per 1000 connections
	TailP50    Metric = "tail_p50"         // ns, of requests at a fixed rate, from when each was due
	TailP99    Metric = "tail_p99"
	TailP999   Metric = "tail_p999"
)

// kinds in the order of the tables' columns.
var kinds = []Metric{StreamRate, RRRate, CRRRate, UDPRRRate, ABShort, ABLong, CPUPerGB, CPUPerRR, CPUPerCRR, TailP50, TailP99, TailP999}

// split returns the kind, and what follows it.
func (m Metric) split() (kind Metric, of string) {
	if i := strings.IndexAny(string(m), ":*"); i >= 0 {
		return m[:i], string(m[i:])
	}
	return m, ""
}

// Of is the metric's kind for other loads: of is what Scenario's name ends with.
func (m Metric) Of(of string) Metric { return m + Metric(of) }

func (m Metric) kind() Metric { k, _ := m.split(); return k }

// Lower reports whether less is better.
func (m Metric) Lower() bool {
	k := m.kind()
	return k == CPUPerGB || k == CPUPerRR || k == CPUPerCRR || k.Tail()
}

// Tail reports whether the metric is a latency of the tail scenario.
func (m Metric) Tail() bool { return m == TailP50 || m == TailP99 || m == TailP999 }

func (m Metric) scenario() string {
	kind, of := m.split()
	switch kind {
	case CPUPerGB:
		kind = StreamRate
	case CPUPerRR:
		kind = RRRate
	case CPUPerCRR:
		kind = CRRRate
	case TailP50, TailP99, TailP999:
		kind = Metric(load.Tail)
	}
	return string(kind) + of
}

// of returns the metric's value in a sample, NaN for none.
func (m Metric) of(s runner.Sample) float64 {
	if !s.Usable() {
		return math.NaN()
	}
	used := s.CPU + s.Softirqd
	switch m.kind() {
	case CPUPerGB:
		return used / (float64(s.Bytes) / 1e9)
	case CPUPerRR, CPUPerCRR:
		return used / (float64(s.Count) / 1e3)
	}
	if m.Tail() {
		return m.latency(s.Latency)
	}
	return s.Rate
}

func (m Metric) latency(l *load.Latency) float64 {
	switch {
	case l == nil:
		return math.NaN()
	case m == TailP50:
		return float64(l.P50)
	case m == TailP99:
		return float64(l.P99)
	}
	return float64(l.P999)
}

// turns are the metric's values in the sample's turns.
func (m Metric) turns(s runner.Sample) []float64 {
	if !s.Usable() || m.Tail() { // quantiles are of all turns
		return nil
	}
	if m.Lower() {
		return s.TurnCosts
	}
	return s.TurnRates
}

// Metrics are what the run measured, in the order of the tables' columns.
func (d *Document) Metrics() (out []Metric) {
	var names []string // of scenarios, as they came
	for _, s := range d.Samples {
		if !slices.Contains(names, s.Scenario) {
			names = append(names, s.Scenario)
		}
	}
	slices.SortStableFunc(names, func(a, b string) int { return sizeOf(a) - sizeOf(b) })
	for _, kind := range kinds {
		for _, name := range names {
			_, of := Metric(name).split()
			if m := kind.Of(of); m.scenario() == name {
				out = append(out, m)
			}
		}
	}
	return out
}

// sizeOf orders scenarios: by size, then by the number of connections.
func sizeOf(scenario string) int {
	s, err := load.ParseScenario(scenario)
	if err != nil {
		return 0
	}
	return s.Size*load.MaxFlows + s.Flows
}

// sized says whether the metric is of one size of messages among several.
func (m Metric) sized() bool { _, of := m.split(); return strings.HasPrefix(of, ":") }

var kindHeads = map[Metric]string{
	StreamRate: "stream", RRRate: "RR", CRRRate: "CRR", UDPRRRate: "UDP RR", ABShort: "ab short", ABLong: "ab long",
	TailP50: "tail p50", TailP99: "tail p99", TailP999: "tail p99.9",
	CPUPerGB: "CPU s/GB", CPUPerRR: "CPU/1000 RR", CPUPerCRR: "CPU/1000 CRR",
}

// head is the metric's name for people.
func head(m Metric) string {
	kind, _ := m.split()
	name := kindHeads[kind]
	s, err := load.ParseScenario(m.scenario())
	if err != nil {
		return name
	}
	if s.Size > 0 {
		name += fmt.Sprintf(" %d B", s.Size)
	}
	if s.Flows > 1 {
		name += fmt.Sprintf(" ×%d", s.Flows)
	}
	return name
}

// scaled are what a CPU metric is at a fixed rate, as the articles give it.
var scaled = map[Metric]struct {
	of string
	by float64 // of the metric
}{
	CPUPerGB:  {"CPUs at 10 Gbit/s", 1.25},
	CPUPerRR:  {"CPUs at 100,000 requests/s", 100},
	CPUPerCRR: {"CPUs at 100,000 connections/s", 100},
}
