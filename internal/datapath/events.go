// SPDX-License-Identifier: Apache-2.0

package datapath

// Events: what the programs tell whoever watches, each reader by a ring of its
// own, and the last packets that did not pass.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Event is one record, as bpf/types.h describes it.
type Event = bpfgen.PodEvent

// Reader is a reader's place in the table of readers.
type Reader = bpfgen.PodReader

const (
	ringBytes = 2 << 20 // 14,000 events
	// A reader that does not renew its place for so long counts as gone. The
	// programs count seconds of 2^30 ns.
	eventLease = 10
	renewEvery = 2 * time.Second
)

// ErrTooManyReaders is about a node whose places for readers are all taken.
var ErrTooManyReaders = fmt.Errorf("%d others watch this node's events already, and it has no place for more; end one of them (a killed one's place is free after %d s)", bpfgen.EventReaders, eventLease)

// Monotonic is the clock of events.
func Monotonic() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// leaseEnd is a lease that begins now, in the programs' seconds.
func leaseEnd() uint32 { return programSecond() + eventLease }

func programSecond() uint32 { return uint32(uint64(Monotonic()) >> bpfgen.SecondShift) }

// over says whether a lease has ended.
func over(until uint32) bool { return int32(until-programSecond()) <= 0 }

// EventReader reads a node's events as they happen. Others may read at the
// same time: each has all of them.
type EventReader struct {
	d      *Datapath
	slot   uint32
	sample uint32
	ring   *ebpf.Map
	reader *ringbuf.Reader
	record ringbuf.Record

	mu    sync.Mutex  // of what the renewing goroutine writes, slot too
	since EventCounts // less what was missed before another place was claimed
	gap   time.Duration
	err   error

	stop chan struct{}
	done sync.WaitGroup
}

// EventCounts is what was told, and what could not be.
type EventCounts struct {
	Told    uint64 `json:"told"`    // by all readers' rings
	Limited uint64 `json:"limited"` // held back by the limits of an endpoint or a CPU
	Lost    uint64 `json:"lost"`    // a ring was full
}

// ReadEvents makes the caller a reader. Of the flows that pass, one of so many
// as sample says is told; 0 and 1: all. It leaves its place with Close, or when
// it is killed, some seconds later.
func (d *Datapath) ReadEvents(sample uint32) (*EventReader, error) {
	ring, err := ebpf.NewMap(&ebpf.MapSpec{Name: "mst_ring", Type: ebpf.RingBuf, MaxEntries: ringBytes})
	if err != nil {
		return nil, fmt.Errorf("make a ring for events: %w", err)
	}
	r := &EventReader{d: d, ring: ring, sample: sample, stop: make(chan struct{})}
	if r.reader, err = ringbuf.NewReader(ring); err == nil {
		err = r.claim(EventCounts{})
	}
	if err != nil {
		if r.reader != nil {
			r.reader.Close()
		}
		return nil, errors.Join(err, ring.Close())
	}
	r.done.Add(1)
	go r.renew()
	return r, nil
}

// readersLocked runs fn while no other reader comes or goes. The scope's own
// lock is the engine's, which an agent holds for as long as it runs.
func (d *Datapath) readersLocked(fn func() error) error {
	f, err := os.Open(filepath.Join(d.dir, mapsDir))
	if err != nil {
		return fmt.Errorf("open the directory of tables: %w", err)
	}
	defer f.Close() // and with it the lock
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			return fn()
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock the places of readers: %w", err)
		}
	}
}

// claim takes a free place, or the place of one that is gone; missed goes on there.
func (r *EventReader) claim(missed EventCounts) error {
	return r.d.readersLocked(func() error {
		for slot := range uint32(bpfgen.EventReaders) {
			place, _, err := r.d.Readers.Get(slot + 1)
			if err != nil {
				return err
			}
			if place.Until != 0 && !over(place.Until) {
				continue
			}
			if err := r.d.held(bpfgen.PodMapMstEventsV1).Put(slot, r.ring); err != nil {
				return fmt.Errorf("enter a ring for events: %w", err)
			}
			now, err := r.d.eventCounts(slot)
			if err != nil {
				return err
			}
			r.mu.Lock()
			r.slot, r.since = slot, now.less(missed)
			r.mu.Unlock()
			return r.extend()
		}
		return ErrTooManyReaders
	})
}

// extend writes the reader's lease: its own place, and the one that says that
// anybody reads at all.
func (r *EventReader) extend() error {
	until := leaseEnd()
	return r.d.Readers.Put([]uint32{r.slot + 1, 0}, []Reader{{Until: until, Sample: r.sample}, {Until: until}})
}

// renew extends the lease until Close. A process that was stopped for longer
// than its lease lasts has missed events, and perhaps its place.
func (r *EventReader) renew() {
	defer r.done.Done()
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for last := time.Now(); ; {
		select {
		case <-r.stop:
			return
		case <-tick.C:
		}
		err := r.renewOnce(time.Since(last))
		last = time.Now()
		if err != nil {
			r.mu.Lock()
			r.err = err
			r.mu.Unlock()
			r.reader.Close() // wakes Next
			return
		}
	}
}

func (r *EventReader) renewOnce(pause time.Duration) error {
	if pause < eventLease*time.Second {
		return r.extend()
	}
	r.mu.Lock()
	r.gap += pause - eventLease*time.Second
	r.mu.Unlock()
	mine, err := r.mine()
	if err != nil {
		return err
	}
	if mine {
		return r.extend()
	}
	missed, _, err := r.Missed()
	if err != nil {
		return err
	}
	return r.claim(missed)
}

// mine says whether the reader's ring is still at its place.
func (r *EventReader) mine() (bool, error) {
	info, err := r.ring.Info()
	if err != nil {
		return false, fmt.Errorf("describe the ring: %w", err)
	}
	id, _ := info.ID()
	var there ebpf.MapID
	err = r.d.held(bpfgen.PodMapMstEventsV1).Lookup(r.slot, &there)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	return err == nil && there == id, err
}

// Next waits for an event. It returns os.ErrDeadlineExceeded at the deadline,
// unless that is zero, and ctx's error when ctx ends.
func (r *EventReader) Next(ctx context.Context, deadline time.Time) (Event, error) {
	var e Event
	r.reader.SetDeadline(deadline)
	unwatch := context.AfterFunc(ctx, func() { r.reader.Flush() })
	err := r.reader.ReadInto(&r.record)
	unwatch()
	if ctx.Err() != nil {
		return e, ctx.Err()
	}
	if err != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		return e, cmp.Or(r.err, err)
	}
	if n := copy(unsafe.Slice((*byte)(unsafe.Pointer(&e)), unsafe.Sizeof(e)), r.record.RawSample); n < int(unsafe.Sizeof(e)) {
		return e, fmt.Errorf("an event has %d bytes, not %d; the node's programs are another build's", n, unsafe.Sizeof(e))
	}
	return e, nil
}

// Missed is what this reader was not told since it began: what the limits held
// back and what did not fit into its ring, and for how long it did not read.
func (r *EventReader) Missed() (EventCounts, time.Duration, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, err := r.d.eventCounts(r.slot)
	return now.less(r.since), r.gap, err
}

func (c EventCounts) less(o EventCounts) EventCounts {
	return EventCounts{c.Told - o.Told, c.Limited - o.Limited, c.Lost - o.Lost}
}

// Close gives the reader's place back.
func (r *EventReader) Close() error {
	close(r.stop)
	r.done.Wait()
	err := r.d.readersLocked(func() error {
		if mine, err := r.mine(); err != nil || !mine {
			return err
		}
		places, err := r.d.Readers.All()
		if err != nil {
			return err
		}
		var latest Reader
		for place, other := range places {
			if place > 0 && place != r.slot+1 && !over(other.Until) && int32(other.Until-latest.Until) > 0 {
				latest.Until = other.Until
			}
		}
		return errors.Join(r.d.Readers.Put([]uint32{r.slot + 1, 0}, []Reader{{}, latest}),
			r.d.held(bpfgen.PodMapMstEventsV1).Delete(r.slot))
	})
	closed := r.reader.Close()
	if errors.Is(closed, os.ErrClosed) {
		closed = nil
	}
	return errors.Join(err, closed, r.ring.Close())
}

// eventCounts sums one reader's counts over the CPUs.
func (d *Datapath) eventCounts(slot uint32) (EventCounts, error) {
	var c EventCounts
	rooms, err := d.EventRooms.Get(0)
	for _, room := range rooms {
		c.Told += room.Counts.Told
		c.Limited += room.Counts.Limited
		c.Lost += room.Counts.Lost[slot]
	}
	return c, err
}

// EventTotals are the counts of all readers that ever were.
func (d *Datapath) EventTotals() (EventCounts, error) {
	var c EventCounts
	rooms, err := d.EventRooms.Get(0)
	for _, room := range rooms {
		c.Told += room.Counts.Told
		c.Limited += room.Counts.Limited
		for _, n := range room.Counts.Lost {
			c.Lost += n
		}
	}
	return c, err
}

// Stopped are the last packets that did not pass, the newest last: some of each
// CPU, whether or not anybody watched.
func (d *Datapath) Stopped() ([]Event, error) {
	var out []Event
	for slot := range d.stopped.Len() {
		cpus, err := d.stopped.Get(slot)
		if err != nil {
			return nil, err
		}
		for _, e := range cpus {
			if e.Time != 0 {
				out = append(out, e)
			}
		}
	}
	slices.SortFunc(out, func(a, b Event) int { return cmp.Compare(a.Time, b.Time) })
	return out, nil
}
