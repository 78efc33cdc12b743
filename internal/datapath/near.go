// SPDX-License-Identifier: Apache-2.0

package datapath

// The flows between pods that lie at places of their own (bpf/lib/near.h).
// Programs take and leave room there at any time, so what is written here is a
// word of an entry, never the whole of it.

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

type (
	nearFlow  = bpfgen.PodNearFlow
	nearPlace = bpfgen.PodNearPlace
)

// nearFilled stands in the first place's second flow when the flows of older
// programs have been told to the places.
const nearFilled = 1

// withNear gives fn the node's places, where they lie.
func (d *Datapath) withNear(fn func([]nearPlace) error) error {
	return withMapped(d, bpfgen.PodMapMstCtNearV1, fn)
}

// eachNear calls fn for each living flow, with a copy as it was a moment ago.
func (d *Datapath) eachNear(fn func(n *nearFlow, was nearFlow)) error {
	return d.withNear(func(places []nearPlace) error {
		now := programSecond()
		for i := range places {
			for k := range places[i].Flows {
				n := &places[i].Flows[k]
				if expires := atomic.LoadUint32(&n.E.Expires); expires != 0 && int32(expires-now) >= 0 {
					fn(n, *n)
				}
			}
		}
		return nil
	})
}

// forgetNear is forget for flows that lie near.
func (d *Datapath) forgetNear(dep *Departures, late bool) (forgotten int, err error) {
	if !dep.Touches(state.TCP) {
		return 0, nil
	}
	now := programSecond()
	err = d.eachNear(func(n *nearFlow, was nearFlow) {
		switch dep.fateOf(&was.Key, &was.E) {
		case orphaned:
			atomic.CompareAndSwapUint32(&n.E.Expires, was.E.Expires, now-1)
		case ends:
			// Only the flow that was looked at: one that has come since has another expiry.
			if late && atomic.CompareAndSwapUint32(&n.E.Expires, was.E.Expires, now-1) {
				forgotten++
			}
		case leaves:
			if was.E.Opening != bpfgen.CTAnswered && was.E.Role == bpfgen.CTPreNAT {
				atomic.StoreUint32(&n.E.Backend, bpfgen.BackendLeft)
			}
		}
	})
	return forgotten, err
}

// nearPlaceOf is near_place() of bpf/lib/near.h.
func nearPlaceOf(k *ctKey) uint32 {
	word := func(a Addr) uint32 { return binary.NativeEndian.Uint32(a.Bytes[12:]) }
	mixed := (word(k.Lo) ^ word(k.Hi)) * 0x9e3779b1
	return (mixed>>16 ^ uint32(Port(k.LoPort^k.HiPort))) & (bpfgen.NearPlaces - 1)
}

// fillNear tells the places of the flows that older programs, which knew of no
// places, have entered elsewhere: those that near_elsewhere() is about. They
// count as if they had just been established.
func (d *Datapath) fillNear() error {
	return d.withNear(func(places []nearPlace) error {
		filled := &places[0].Flows[1].Filled
		if *filled == nearFilled {
			return nil
		}
		until := programSecond() + nearMemory
		for _, name := range ctTables {
			err := bindTable[ctKey, ctEntry](d, name).eachChunk(func(keys []ctKey, values []ctEntry) error {
				for i := range keys {
					k, e := &keys[i], &values[i]
					told := e.Role == bpfgen.CTPreNAT || e.Role == bpfgen.CTPostNAT && e.Responder.Generation != 0
					if k.Proto == uint8(state.TCP) && k.Scope == bpfgen.CTScopeFlow && e.Opener.Endpoint != 0 && told {
						atomic.StoreUint32(&places[nearPlaceOf(k)].Flows[0].Others, until)
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		*filled = nearFilled
		return nil
	})
}

// lookElsewhere makes programs look for flows in the tables for all, whatever
// their place was told, for as long as any of these may live: older programs,
// which told no places, or other kinds of flows only, may have entered them. To be
// called before those are replaced by this binary's.
func (d *Datapath) lookElsewhere() error {
	until := programSecond() + nearMemory
	return d.withNear(func(places []nearPlace) error {
		for i := range places {
			others := &places[i].Flows[1].Others
			for {
				told := atomic.LoadUint32(others)
				if int32(until-told) <= 0 || atomic.CompareAndSwapUint32(others, told, until) {
					break
				}
			}
		}
		return nil
	})
}

// shadowedOnce is what older programs write into facts.shadowed, for good.
const shadowedOnce = 1

// rememberShadows makes of what older programs have said of shadowed flows what
// this binary's read: until when there may be any. To be called before those are
// replaced, and again after, as they may have said it once more.
func (d *Datapath) rememberShadows() error {
	table, err := d.table(bpfgen.PodMapMstFactsV1)
	if err != nil {
		return err
	}
	var facts bpfgen.PodFacts
	if err := table.Lookup(uint32(0), &facts); err != nil {
		return fmt.Errorf("read table %s: %w", bpfgen.PodMapMstFactsV1, err)
	}
	if facts.Shadowed != shadowedOnce {
		return nil
	}
	facts.Shadowed = programSecond() + nearMemory
	if err := table.Put(uint32(0), facts); err != nil {
		return fmt.Errorf("write table %s: %w", bpfgen.PodMapMstFactsV1, err)
	}
	return nil
}

// nearMemory is how long flows of older programs are remembered, in the
// programs' seconds: an established flow lives no longer without a packet.
const nearMemory = 86400
