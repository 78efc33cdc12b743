// SPDX-License-Identifier: Apache-2.0

// Package runner interleaves samples of several contestants in rounds, so that
// a machine that changes its speed during a run changes it for all alike.
//
// It knows no network: what a sample is, is given by a Measure function.
package runner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/mustang-net/mustang/bench/load"
)

// Case is one thing to measure once a round.
type Case struct {
	Subject  string `json:"subject"`  // contestant and target
	Scenario string `json:"scenario"` // stream, rr, crr, udp-rr
	Cores    string `json:"cores"`    // same or cross
}

func (c Case) String() string { return fmt.Sprintf("%s, %s, %s core", c.Subject, c.Scenario, c.Cores) }

// Sample is one measurement, as it is written to the JSON file.
type Sample struct {
	Case
	Round   int       `json:"round"`    // from 1; 0 is the discarded warm-up round
	Order   int       `json:"position"` // in its round, from 0
	Start   time.Time `json:"start"`
	Error   string    `json:"error,omitempty"`
	Rate    float64   `json:"rate"`  // bits/s of a stream, else transactions/s
	Count   int64     `json:"count"` // transactions
	Bytes   int64     `json:"bytes"` // payload at the receiver
	Seconds float64   `json:"seconds"`
	// CPU time of client and server (their control group) and of ksoftirqd on
	// their CPUs, within the window; for iperf3, of its whole run.
	CPU      float64       `json:"cpu_seconds"`
	Softirqd float64       `json:"softirqd_seconds"`
	CC       string        `json:"cc,omitempty"`
	Latency  *load.Latency `json:"latency_ns,omitempty"`
	// PortWaits and Lost are load.Result's; Retransmits is iperf3's.
	PortWaits   int64 `json:"port_waits,omitempty"`
	Lost        int64 `json:"lost,omitempty"`
	Retransmits int64 `json:"retransmits,omitempty"`
	// Foreign is the share of the load's CPUs that others used meanwhile.
	Foreign float64 `json:"foreign"`
	Load1   float64 `json:"load1"` // the machine's 1-minute load average
	Noisy   bool    `json:"noisy,omitempty"`
}

// Usable reports whether the sample carries a figure.
func (s Sample) Usable() bool { return s.Error == "" && s.Rate > 0 }

// Measure takes one sample. It fills everything but Case, Round and Order, and
// returns an error instead of hanging.
type Measure func(context.Context, Case) (Sample, error)

// Settings of a run.
type Settings struct {
	Rounds int
	Warmup bool // measure every case once before round 1 and discard it
	Seed   uint64
}

// Progress is told after each sample.
type Progress interface {
	Sample(done, total, round int, s Sample, left time.Duration)
}

// retireAfter is how many failures take a case out of the run: a dead
// datapath costs a deadline each time, and one failure may be chance.
const retireAfter = 2

// Run measures all cases in every round and returns the samples of all
// finished rounds. When ctx ends it returns them with ctx's cause: a round
// that was cut short is not kept, since its ratios would lack their halves.
//
// Failures of single cases do not end a run; they are in the samples.
func Run(ctx context.Context, cases []Case, set Settings, measure Measure, p Progress) ([]Sample, error) {
	r := run{set: set, measure: measure, progress: p, began: time.Now(), failures: map[Case]int{}}
	first := 1
	if set.Warmup {
		first = 0
	}
	r.total = len(cases) * (set.Rounds - first + 1)
	rng := rand.New(rand.NewPCG(set.Seed, 1))
	kept := []Sample{} // not nil: in JSON it is a list, even when empty
	var order []Case
	for round := first; round <= set.Rounds; round++ {
		order = nextOrder(cases, order, round, rng)
		samples, err := r.round(ctx, round, order)
		if err != nil {
			return kept, err
		}
		if round > 0 {
			kept = append(kept, samples...)
		}
	}
	return kept, nil
}

// nextOrder returns the order of a round: a new shuffle for odd rounds, the
// same backwards for even ones, so that whatever drifts within a round cancels
// over two. Cases are shuffled inside blocks of one scenario and core setting:
// those that are compared with each other stay close in time.
func nextOrder(cases, previous []Case, round int, rng *rand.Rand) []Case {
	if round > 0 && round%2 == 0 && previous != nil {
		reversed := slices.Clone(previous)
		slices.Reverse(reversed)
		return reversed
	}
	type block struct{ scenario, cores string }
	blocks := map[block][]Case{}
	var keys []block
	for _, c := range cases {
		k := block{c.Scenario, c.Cores}
		if blocks[k] == nil {
			keys = append(keys, k)
		}
		blocks[k] = append(blocks[k], c)
	}
	rng.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	var order []Case
	for _, k := range keys {
		b := blocks[k]
		rng.Shuffle(len(b), func(i, j int) { b[i], b[j] = b[j], b[i] })
		order = append(order, b...)
	}
	return order
}

type run struct {
	set      Settings
	measure  Measure
	progress Progress
	began    time.Time
	done     int
	total    int
	failures map[Case]int
}

func (r *run) round(ctx context.Context, round int, order []Case) ([]Sample, error) {
	var samples []Sample
	for i, c := range order {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		s := Sample{Error: fmt.Sprintf("%s: left out after %d failures", c, retireAfter)}
		if r.failures[c] < retireAfter {
			var err error
			s, err = r.measure(ctx, c)
			if cause := context.Cause(ctx); cause != nil {
				return nil, cause // the sample was cut short
			}
			if err != nil {
				r.failures[c]++
				s.Error = fmt.Sprintf("%s: %v", c, err)
			}
		}
		s.Case, s.Round, s.Order = c, round, i
		samples = append(samples, s)
		r.done++
		left := time.Duration(float64(time.Since(r.began)) / float64(r.done) * float64(r.total-r.done))
		r.progress.Sample(r.done, r.total, round, s, left)
	}
	return samples, nil
}

// Failed returns the first error of each case that failed.
func Failed(samples []Sample) error {
	seen := map[Case]bool{}
	var errs []error
	for _, s := range samples {
		if s.Error != "" && !seen[s.Case] {
			seen[s.Case] = true
			errs = append(errs, errors.New(s.Error))
		}
	}
	return errors.Join(errs...)
}
