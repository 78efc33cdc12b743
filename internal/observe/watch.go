// SPDX-License-Identifier: Apache-2.0

package observe

// A stream of flows.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
)

// WatchOptions say what to stream. The zero value is everything from now on.
type WatchOptions struct {
	Filter Filter
	// Last tells so many of the packets that did not pass before anybody watched.
	Last int
	// Once ends after those, instead of waiting for what comes.
	Once bool
	// Sample tells one of so many of the flows that pass; 0 and 1: all.
	Sample uint32
	// Notify gets a sentence about what could not be told.
	Notify func(string)
}

// ErrReset is about a node that was reset while it was watched.
var ErrReset = errors.New("the node was reset: its tables are gone, and what is set up anew is another node; run the command again")

const checkEvery = time.Second

// Watch gives flows to tell, in the order in which they happened on each CPU,
// until ctx ends, which is success, or tell returns an error. It takes no lock
// and needs no agent; others may watch at the same time.
func (n *Node) Watch(ctx context.Context, o WatchOptions, tell func(Flow) error) error {
	d := newDescriber(n)
	var reader *datapath.EventReader
	if !o.Once {
		var err error
		if reader, err = n.dp.ReadEvents(o.Sample); err != nil {
			return err
		}
	}
	err := n.history(d, o, tell)
	if err == nil && reader != nil {
		err = n.follow(ctx, d, reader, o, tell)
	}
	if reader != nil {
		err = errors.Join(err, reader.Close())
	}
	return err
}

// history tells what was kept of the packets that did not pass.
func (n *Node) history(d *describer, o WatchOptions, tell func(Flow) error) error {
	if o.Last == 0 {
		return nil
	}
	kept, err := n.dp.Stopped()
	if err != nil {
		return err
	}
	var flows []Flow
	for i := len(kept) - 1; i >= 0 && len(flows) < o.Last; i-- {
		if f := d.flow(kept[i]); o.Filter.Match(f) {
			flows = append(flows, f)
		}
	}
	for i := len(flows) - 1; i >= 0; i-- {
		if err := tell(flows[i]); err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) follow(ctx context.Context, d *describer, reader *datapath.EventReader, o WatchOptions, tell func(Flow) error) error {
	missed := missedTeller{reader: reader, notify: o.Notify}
	for next := time.Now().Add(checkEvery); ; {
		e, err := reader.Next(ctx, next)
		if ctx.Err() != nil {
			return missed.tell()
		}
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		if err == nil {
			if f := d.flow(e); o.Filter.Match(f) {
				if err := tell(f); err != nil {
					return err
				}
			}
		}
		if time.Now().Before(next) {
			continue
		}
		if err := missed.tell(); err != nil {
			return err
		}
		if !n.dp.StillPinned() {
			return ErrReset
		}
		next = time.Now().Add(checkEvery)
	}
}

// missedTeller says what a reader was not told, when that grew.
type missedTeller struct {
	reader *datapath.EventReader
	notify func(string)
	told   datapath.EventCounts
	gap    time.Duration
}

func (m *missedTeller) tell() error {
	counts, gap, err := m.reader.Missed()
	if err != nil || m.notify == nil {
		return err
	}
	if n := counts.Limited - m.told.Limited; n > 0 {
		m.notify(fmt.Sprintf("%d events were held back: more came in a second than an endpoint or a CPU may tell; --sample N thins what passes", n))
	}
	if n := counts.Lost - m.told.Lost; n > 0 {
		m.notify(fmt.Sprintf("%d events were lost: they came faster than they were read; --sample N thins what passes", n))
	}
	if pause := gap - m.gap; pause > 0 {
		m.notify(fmt.Sprintf("nothing was told for about %s, while this process was stopped", pause.Round(time.Second)))
	}
	m.told, m.gap = counts, gap
	return nil
}
