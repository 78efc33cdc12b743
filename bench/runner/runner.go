// SPDX-License-Identifier: Apache-2.0

// Package runner interleaves several contestants so finely that a machine that
// changes its speed changes it for all alike: in each round the loads of one
// scenario are all up at once, and take short turns.
//
// It knows no network: what a load is, is given by an Opener.
package runner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/mustang-net/mustang/bench/load"
)

// Case is one thing to measure once a round.
type Case struct {
	Subject  string `json:"subject"`  // contestant and target
	Scenario string `json:"scenario"` // stream, rr, crr, udp-rr, tail
	Cores    string `json:"cores"`    // same or cross
}

func (c Case) String() string { return fmt.Sprintf("%s, %s, %s core", c.Subject, c.Scenario, c.Cores) }

// Turn is what one turn of a load measured.
type Turn struct {
	Rate float64 // as Sample.Rate
	Cost float64 // CPU s a transaction, or a byte of a stream; ksoftirqd's included
}

// Sample is the sum of a case's turns in one round, as it is written to the JSON
// file.
type Sample struct {
	Case
	Round   int       `json:"round"`    // from 1; 0 is the discarded warm-up round
	Order   int       `json:"position"` // in its round, by the start of its load, from 0
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
	All      int64         `json:"-"` // transactions, those out of the windows too
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
	// TurnRates and TurnCosts are Turn's, of each turn in its cycle.
	TurnRates []float64 `json:"turn_rates,omitempty"`
	TurnCosts []float64 `json:"turn_costs,omitempty"`
}

// Usable reports whether the sample carries a figure.
func (s Sample) Usable() bool { return s.Error == "" && s.Rate > 0 }

// Load is one case's server and client. They are up and sleep but for their turns.
type Load interface {
	// Turn loads the path once. It returns an error instead of hanging.
	Turn(context.Context) (Turn, error)
	// Finish ends both and returns the sum of the turns.
	Finish() (Sample, error)
	// Kill ends what still runs; after Finish nothing does.
	Kill()
}

// Opener starts loads.
type Opener interface {
	Open(context.Context, Case) (Load, error)
	// Watch returns a function that says which share of the CPUs of a case's
	// load others have used since Watch was called.
	Watch(Case) (foreign func() float64)
}

// Settings of a run.
type Settings struct {
	Rounds int
	Warmup bool // measure every case once before round 1 and discard it
	Seed   uint64
	// Turns is how many turns a sample of a scenario has; nil for one.
	Turns func(scenario string) int
	// Until bounds the run instead of Rounds, which then is 0: no round begins
	// that would end later, but for the first. Zero for none.
	Until time.Time
	// Done are the rounds of an earlier run that this one goes on from: the orders
	// of the rest are as if it had not been interrupted.
	Done int
	// Kept is told of the samples of each finished round; nil for nobody.
	Kept func(round int, samples []Sample) error
}

// Progress is told after each sample. total is what is known of it: with
// Settings.Until it is a guess.
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
func Run(ctx context.Context, cases []Case, set Settings, open Opener, p Progress) ([]Sample, error) {
	if set.Turns == nil {
		set.Turns = func(string) int { return 1 }
	}
	rng := rand.New(rand.NewPCG(set.Seed, 1))
	r := run{set: set, open: open, progress: p, failures: map[Case]int{}, blocks: blocksOf(cases, rng)}
	r.between = newOrder(len(r.blocks), rng)
	r.perRound = len(cases)
	kept := []Sample{} // not nil: in JSON it is a list, even when empty
	if set.Warmup {
		began := time.Now()
		if _, err := r.round(ctx, 0); err != nil {
			return kept, err
		}
		r.took = time.Since(began)
		r.reset() // every pair of rounds is a shuffle and its mirror
	}
	r.skip(set.Done)
	for round := set.Done + 1; r.more(round); round++ {
		began := time.Now()
		samples, err := r.round(ctx, round)
		if err != nil {
			return kept, err
		}
		r.took = time.Since(began)
		kept = append(kept, samples...)
		if set.Kept == nil {
			continue
		}
		if err := set.Kept(round, samples); err != nil {
			return kept, err
		}
	}
	return kept, nil
}

// more says whether a round is to begin.
func (r *run) more(round int) bool {
	if r.set.Until.IsZero() {
		return round <= r.set.Rounds
	}
	return round == r.set.Done+1 || !time.Now().Add(r.took).After(r.set.Until)
}

// rounds is how many the run will have in all, as far as is known while one of
// them is measured.
func (r *run) rounds(current int) int {
	if r.set.Until.IsZero() {
		return r.set.Rounds
	}
	if r.took == 0 {
		return max(1, current)
	}
	return max(1, current, current-1+int(time.Until(r.set.Until)/r.took))
}

// round measures all cases once.
func (r *run) round(ctx context.Context, round int) ([]Sample, error) {
	r.position = 0
	var samples []Sample
	for _, i := range r.between.next() {
		some, err := r.block(ctx, round, r.blocks[i])
		if err != nil {
			return nil, err
		}
		samples = append(samples, some...)
	}
	return samples, nil
}

func (r *run) reset() {
	r.between.reset()
	for _, b := range r.blocks {
		b.order.reset()
		b.start.reset()
	}
}

// skip passes over the orders of rounds.
func (r *run) skip(rounds int) {
	for range rounds {
		for _, i := range r.between.next() {
			r.blocks[i].start.next()
			for range r.set.Turns(r.blocks[i].cases[0].Scenario) {
				r.blocks[i].order.next()
			}
		}
	}
}

// order gives a new shuffle and then the same backwards, so that whatever
// drifts cancels over the two.
type order struct {
	rng    *rand.Rand
	list   []int
	mirror bool
}

func newOrder(n int, rng *rand.Rand) *order {
	o := &order{rng: rng, list: make([]int, n)}
	for i := range o.list {
		o.list[i] = i
	}
	return o
}

func (o *order) reset() { o.mirror = false }

// next returns the next order; it is valid until the next call.
func (o *order) next() []int {
	if o.mirror {
		slices.Reverse(o.list)
	} else {
		o.rng.Shuffle(len(o.list), func(i, j int) { o.list[i], o.list[j] = o.list[j], o.list[i] })
	}
	o.mirror = !o.mirror
	return o.list
}

// block is all cases of one scenario and core setting: those that are compared
// with each other take turns.
type block struct {
	cases []Case
	start *order // of the loads
	order *order // of the turns
}

func blocksOf(cases []Case, rng *rand.Rand) (list []*block) {
	type kind struct{ scenario, cores string }
	index := map[kind]*block{}
	for _, c := range cases {
		k := kind{c.Scenario, c.Cores}
		if index[k] == nil {
			index[k] = &block{}
			list = append(list, index[k])
		}
		index[k].cases = append(index[k].cases, c)
	}
	for _, b := range list {
		b.start, b.order = newOrder(len(b.cases), rng), newOrder(len(b.cases), rng)
	}
	return list
}

type run struct {
	set      Settings
	open     Opener
	progress Progress
	blocks   []*block
	between  *order // of blocks
	perRound int
	took     time.Duration // by the last round
	began    time.Time     // of the first sample
	done     int           // samples of this run
	position int           // of the next sample in its round
	failures map[Case]int
}

// entry is a case in a block's round.
type entry struct {
	s    Sample
	load Load // nil when it failed
}

// fail takes the case out of this round.
func (e *entry) fail(r *run, err error) {
	r.failures[e.s.Case]++
	e.s.Error = fmt.Sprintf("%s: %v", e.s.Case, err)
	if e.load != nil {
		e.load.Kill()
		e.load = nil
	}
}

// block measures all cases of a block once.
func (r *run) block(ctx context.Context, round int, b *block) ([]Sample, error) {
	entries := make([]entry, len(b.cases))
	defer func() {
		for _, e := range entries {
			if e.load != nil {
				e.load.Kill()
			}
		}
	}()
	if r.began.IsZero() {
		r.began = time.Now()
	}
	if err := r.start(ctx, round, b, entries); err != nil {
		return nil, err
	}
	foreign := r.open.Watch(b.cases[0])
	for range r.set.Turns(b.cases[0].Scenario) {
		for _, i := range b.order.next() {
			e := &entries[i]
			if e.load == nil {
				continue
			}
			t, err := e.load.Turn(ctx)
			if cause := context.Cause(ctx); cause != nil {
				return nil, cause // the turn was cut short
			}
			if err != nil {
				e.fail(r, err)
				continue
			}
			e.s.TurnRates = append(e.s.TurnRates, round6(t.Rate))
			e.s.TurnCosts = append(e.s.TurnCosts, round6(t.Cost))
		}
	}
	return r.finish(entries, foreign()), nil
}

func (r *run) start(ctx context.Context, round int, b *block, entries []entry) error {
	for at, i := range b.start.next() {
		c, e := b.cases[i], &entries[i]
		e.s = Sample{Case: c, Round: round, Order: r.position + at, Start: time.Now(), Load1: load1()}
		if r.failures[c] >= retireAfter {
			e.s.Error = fmt.Sprintf("%s: left out after %d failures", c, retireAfter)
			continue
		}
		var err error
		e.load, err = r.open.Open(ctx, c)
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		if err != nil {
			e.load = nil
			e.fail(r, err)
		}
	}
	r.position += len(entries)
	return nil
}

// finish ends the loads and tells of their samples.
func (r *run) finish(entries []entry, foreign float64) []Sample {
	samples := make([]Sample, len(entries))
	took, measured := time.Since(r.began), r.done+len(entries)
	for i := range entries {
		e := &entries[i]
		if e.load != nil {
			s, err := e.load.Finish()
			if err != nil {
				e.fail(r, err)
			} else {
				s.Case, s.Round, s.Order, s.Start, s.Load1 = e.s.Case, e.s.Round, e.s.Order, e.s.Start, e.s.Load1
				s.TurnRates, s.TurnCosts = e.s.TurnRates, e.s.TurnCosts
				s.Foreign, s.Noisy = foreign, foreign > NoisyShare
				e.s = s
			}
		}
		samples[i] = e.s
		r.report(e.s, took/time.Duration(measured))
	}
	return samples
}

// report tells of a sample; each takes as long as those so far did on average.
func (r *run) report(s Sample, each time.Duration) {
	r.done++
	rounds := r.rounds(s.Round) - r.set.Done
	if r.set.Warmup {
		rounds++
	}
	total := rounds * r.perRound
	r.progress.Sample(r.done, total, s.Round, s, max(0, each*time.Duration(total-r.done)))
}

// round6 keeps six digits, more than any clock here has: files stay small.
func round6(v float64) float64 {
	f, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'g', 6, 64), 64)
	return f
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
