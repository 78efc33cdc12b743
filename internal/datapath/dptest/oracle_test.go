// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "seed of the oracle's worlds; 0: by the clock")
	worldFlag = flag.Int("world", -1, "play this world of the seed only")
)

const stepsPerWorld = 150

// TestTheOracleAgrees plays generated worlds through the programs and asks a
// plain model about each packet.
func TestTheOracleAgrees(t *testing.T) {
	want := 100_000
	if testing.Short() {
		want = 10_000
	}
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	nets := []*Network{NewNetwork(t, Options{}, 0), NewNetwork(t, Options{InPod: true}, 0), NewNetwork(t, Options{InPod: true}, 0)}
	nets[2].Vouch(t)
	cases := 0
	for world := 0; cases < want; world++ {
		if *worldFlag >= 0 {
			world = *worldFlag
		}
		net := nets[world%len(nets)]
		steps := randomSteps(rand.New(rand.NewPCG(seed, uint64(world))), stepsPerWorld)
		n, err := playSteps(t, net, steps)
		cases += n
		if err != nil {
			steps = minimise(t, net, steps)
			t.Fatalf("world %d: %v\nreplay with -seed=%d -world=%d; at its shortest:\n%s",
				world, err, seed, world, lastTrace(t, net, steps))
		}
		if *worldFlag >= 0 {
			break
		}
	}
	t.Logf("%d packets, seed %d", cases, seed)
}

// playSteps plays steps in a new world, up to the first disagreement.
func playSteps(t *testing.T, net *Network, steps []step) (cases int, err error) {
	p := newPlay(t, net)
	for _, s := range steps {
		if err := p.do(s); err != nil {
			return p.cases, err
		}
	}
	return p.cases, nil
}

// minimise takes out steps as long as some disagreement remains. The programs
// choose backends and ports at random, so each try has several chances.
func minimise(t *testing.T, net *Network, steps []step) []step {
	fails := func(steps []step) bool {
		for range 6 {
			if _, err := playSteps(t, net, steps); err != nil {
				return true
			}
		}
		return false
	}
	for size := len(steps) / 2; size > 0; size /= 2 {
		for at := 0; at+size <= len(steps); {
			shorter := append(append([]step{}, steps[:at]...), steps[at+size:]...)
			if fails(shorter) {
				steps = shorter
			} else {
				at += size
			}
		}
	}
	return steps
}

func lastTrace(t *testing.T, net *Network, steps []step) string {
	for range 50 {
		p := newPlay(t, net)
		for _, s := range steps {
			if err := p.do(s); err != nil {
				return fmt.Sprintf("%s\n%v", strings.Join(p.trace, "\n"), err)
			}
		}
	}
	return "(it did not happen again)"
}
