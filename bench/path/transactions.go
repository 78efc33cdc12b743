// SPDX-License-Identifier: Apache-2.0

package path

// Instructions of a whole transaction: client, kernel, programs, server.

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/mustang-net/mustang/bench/cpu"
	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/samehost"
	"github.com/mustang-net/mustang/bench/stats"
)

// Transaction is what one request and its answer cost on one path.
type Transaction struct {
	Subject    string         `json:"subject"`
	Contestant string         `json:"contestant"`
	Mode       string         `json:"mode,omitempty"`
	By         string         `json:"services_by,omitempty"`
	Via        string         `json:"via"`
	Scenario   string         `json:"scenario"` // rr, crr
	Samples    []float64      `json:"samples"`  // in the document's unit
	Cost       stats.Estimate `json:"cost"`     // their median
	Over       string         `json:"over"`     // the subject that it is compared with
	// That one's cost ÷ this one's: the ratio of rates.
	Ratio float64 `json:"ratio"`
	// Programs is the part of BPF programs in it, from a sample apart.
	Programs []ProgramShare `json:"programs,omitempty"`
}

// name is the transaction's in a record's part of its contestant.
func (t Transaction) name() string { return t.Scenario + " by " + t.Via }

// settle is how long a closed environment has for its last work, which the
// kernel does in the background, on the only processor. Idle time is free here.
const settle = time.Second

// transactions measures one contestant after the other: nothing drifts where
// instructions are counted, and what is closed disturbs nobody. Loopback comes
// first, and again at the end: the A/A control. Then come pairs of nodes.
func (d *Document) transactions(ctx context.Context, o Options) error {
	group := cpu.NewGroup(cpu.Name(), []int{0})
	list := []run.Contestant{samehost.NewLoopback(report.Base)}
	for i, mode := range o.Modes {
		for _, by := range o.ServicesBy {
			if by == "mustang-socket" && i > 0 {
				continue // connect() is the same in every mode
			}
			list = append(list, samehost.NewPods("bnpath", mode, by, o.Binary))
		}
	}
	list = append(list, samehost.NewLoopback(report.BaseAgain))
	list = append(list, o.pairs()...)
	l := runner.Launcher{Self: o.Self, Group: group, Duration: o.Window, Warmup: o.Window / 2, CC: load.ProbeCC("cubic")}
	// What a machine does in its first seconds is not the first contestant's.
	if err := new(Document).contestant(ctx, o, l, list[0], group.Env("first")); err != nil {
		return errors.Join(err, group.Close())
	}
	for i, c := range list {
		o.say("transactions %d of %d: %s", i+1, len(list), c.Name())
		err := d.contestant(ctx, o, l, c, group.Env(fmt.Sprintf("e%d", i)))
		if cause := context.Cause(ctx); cause != nil {
			return errors.Join(cause, group.Close())
		}
		d.failed(c.Name(), err)
	}
	d.ratios()
	return group.Close()
}

func (d *Document) contestant(ctx context.Context, o Options, l runner.Launcher, c run.Contestant, cgroup string) (err error) {
	env, err := c.Up(ctx, cgroup)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, env.Close())
		time.Sleep(settle)
	}()
	for _, p := range env.Paths() {
		for _, scenario := range []load.Mode{load.RR, load.CRR} {
			if p.Subject.By == "mustang-socket" && (p.Subject.Via == report.PodIP || scenario == load.RR) {
				continue // the same path as to a pod with mustang-tc: only a connection meets the socket's programs
			}
			t := Transaction{Subject: p.Subject.ID, Contestant: p.Subject.Contestant, Mode: p.Subject.Mode, By: p.Subject.By, Via: p.Subject.Via, Scenario: string(scenario), Over: overOf(c)}
			if err := t.measure(ctx, o, l, p.Target); err != nil {
				return fmt.Errorf("%s %s: %w", t.Scenario, t.Subject, err)
			}
			d.Transactions = append(d.Transactions, t)
		}
	}
	return nil
}

func (t *Transaction) measure(ctx context.Context, o Options, l runner.Launcher, target runner.Target) error {
	for range o.Rounds {
		s, err := l.Sample(ctx, target, t.Scenario)
		if err != nil {
			return err
		}
		if s.PortWaits > 0 {
			return fmt.Errorf("the client waited %d times for a free source port", s.PortWaits)
		}
		t.Samples = append(t.Samples, o.cost(time.Duration(s.Seconds*1e9))/float64(s.Count))
	}
	t.Cost = stats.Of(t.Samples, 1)
	if t.By == "" || t.By == "none" {
		return nil
	}
	var err error
	l.Warmup = 0
	t.Programs, err = shares(o, func() (int64, error) {
		s, err := l.Sample(ctx, target, t.Scenario)
		return s.All, err
	})
	return err
}

// ratios divides the cost of what each is compared with by its own.
func (d *Document) ratios() {
	type key struct{ subject, scenario string }
	costs := map[key]float64{}
	for _, t := range d.Transactions {
		costs[key{t.Subject, t.Scenario}] = t.Cost.Median
	}
	for i := range d.Transactions {
		t := &d.Transactions[i]
		t.Ratio = costs[key{t.Over, t.Scenario}] / t.Cost.Median
	}
}
