// SPDX-License-Identifier: Apache-2.0

package samehost

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/lab"
)

// Options are what a run is asked for. Zero values are not defaults: start
// from Defaults or Quick.
type Options struct {
	Modes      []string
	ServicesBy []string
	Services   []int // numbers of Services; each is a contestant of its own
	Rounds     int
	Budget     time.Duration // instead of Rounds: as many as fit, with the building; 0 for none
	Duration   time.Duration // of a sample, which is the sum of its turns
	Turns      int           // of a sample; iperf3's have one
	Warmup     time.Duration // before the window of each turn
	Cores      string        // same, cross or both
	Seed       uint64
	IPv6       bool
	UDP        bool // also UDP request/response
	TailRate   int  // also requests at this rate, a second; 0 for none
	StreamBy   string
	MTU        int
	NoStream   bool     // where copying costs nothing a stream says nothing
	Calibrate  int      // pairs of loopbacks instead of pods: see Calibration
	Tune       []string // each makes mustang's contestants once more; parts joined by +

	// Resume is an interrupted run to go on with; the options that made it must be
	// its own: see Resumed. Nil for a new run.
	Resume *report.Document
	// Keep is given the document after each round; nil for nobody.
	Keep func(*report.Document) error

	// Conflists are files of CNI configuration lists, each a way of connecting pods;
	// the kernel's own Services go with it. CNIPath is where its plugins are.
	Conflists []string
	CNIPath   []string

	Extra    []Extra  // contestants beside the product of the above, where the kernel has their modes
	Firewall []Extra  // of which FirewallFact is to be found out; By "" for no eBPF
	Only     []string // scenarios to measure; nil for all

	Binary string   // mustang, for the labs
	Self   []string // command that runs the load program
}

// Calibration is a run that judges the bench itself: equal paths must come out as
// equal, and one that is slower by report.Planted as slower.
func Calibration() Options {
	o := Defaults()
	o.Modes, o.ServicesBy, o.StreamBy, o.Rounds, o.Calibrate = nil, nil, StreamOwn, 15, 7
	return o
}

// Known values of the options, in the order of the tables.
var (
	AllModes = allModes()
	// EveryMachine lists the modes that kernels without ipvlan and netkit have.
	EveryMachine = []string{report.Veth, report.Bridge, report.BridgeNFOff, report.Macvlan}
	AllBy        = []string{"iptables-nft", "iptables-legacy", "nft", "mustang-tc", "mustang-socket", "mustang"}
)

// allModes are the lab's, with a bridge that the firewall does not see.
func allModes() (out []string) {
	for _, m := range lab.Modes {
		out = append(out, string(m))
		if m == lab.Bridge {
			out = append(out, report.BridgeNFOff)
		}
	}
	return out
}

// Ways to make a stream.
const (
	StreamIperf3 = "iperf3"
	StreamOwn    = "own"
)

// Defaults is a full run: enough rounds for a claim, iperf3 streams as the
// article's. Where instructions are counted, little of it is enough.
func Defaults() Options {
	o := realDefaults()
	if emulation() == report.EmulatedInstructions {
		o.NoStream, o.StreamBy = true, StreamOwn
		o.Rounds, o.Duration, o.Turns, o.Warmup = 3, 60*time.Millisecond, 1, 30*time.Millisecond
	}
	return o
}

func realDefaults() Options {
	return Options{
		Modes: EveryMachine, ServicesBy: AllBy[:5], Services: []int{1},
		Rounds: 20, Duration: 300 * time.Millisecond, Turns: 20, Warmup: 2 * time.Millisecond,
		Cores: "same", Seed: 1, StreamBy: StreamIperf3, MTU: 1500, CNIPath: []string{"/opt/cni/bin", "/usr/lib/cni"},
	}
}

// Quick is a look, not a claim: under two minutes. Streams are the load
// program's, since iperf3 knows whole seconds only.
func Quick() Options {
	o := Defaults()
	o.ServicesBy = []string{"iptables-nft", "mustang-tc"}
	o.Rounds, o.StreamBy = 5, StreamOwn
	return o
}

func (o Options) validate() error {
	for _, m := range o.Modes {
		if !slices.Contains(AllModes, m) {
			return fmt.Errorf("mode %q is unknown: use some of %v", m, AllModes)
		}
	}
	for _, by := range o.ServicesBy {
		if !slices.Contains(AllBy, by) {
			return fmt.Errorf("services by %q is unknown: use some of %v", by, AllBy)
		}
	}
	for _, e := range o.Extra {
		if !slices.Contains(AllModes, e.Mode) || !slices.Contains(AllBy, e.By) || e.Services < 1 {
			return fmt.Errorf("contestant %+v is unknown", e)
		}
	}
	for _, n := range o.Services {
		if n < 1 || n > 1_000_000 {
			return fmt.Errorf("%d Services: use 1 to 1,000,000", n)
		}
	}
	if err := validateTunes(o.Tune); err != nil {
		return err
	}
	switch {
	case len(o.Services) == 0:
		return errors.New("--services: want at least one number")
	case o.Rounds < 1 && o.Budget == 0:
		return errors.New("--rounds: want at least 1")
	case o.Budget < 0:
		return errors.New("--budget: want a time, as 5m")
	case o.TailRate < 0 || o.TailRate > 1_000_000:
		return fmt.Errorf("--tails: %d requests a second: use 1 to 1,000,000", o.TailRate)
	case o.Duration < 50*time.Millisecond:
		return errors.New("--duration: want at least 50ms, CPU time is not exact below")
	case o.Turns < 1 || o.Duration/time.Duration(o.Turns) < 5*time.Millisecond:
		return fmt.Errorf("--turns: want 1 to %d, so that a turn of a sample of %s has 5ms", o.Duration/(5*time.Millisecond), o.Duration)
	case o.cores() == nil:
		return fmt.Errorf("--cores %q is unknown: use same, cross or both", o.Cores)
	case o.StreamBy != StreamIperf3 && o.StreamBy != StreamOwn:
		return fmt.Errorf("--stream-by %q is unknown: use iperf3 or own", o.StreamBy)
	}
	return nil
}

func (o Options) cores() []string {
	return map[string][]string{"same": {"same"}, "cross": {"cross"}, "both": {"same", "cross"}}[o.Cores]
}

func (o Options) scenarios() []string {
	s := []string{string(load.RR), string(load.CRR)}
	if !o.NoStream {
		s = append([]string{string(load.Stream)}, s...)
	}
	if o.UDP {
		s = append(s, string(load.UDPRR))
	}
	if o.TailRate > 0 {
		s = append(s, string(load.Tail))
	}
	if o.Only != nil {
		s = slices.DeleteFunc(s, func(name string) bool { return !slices.Contains(o.Only, name) })
	}
	return s
}

// turns is how many turns a sample of a scenario has.
func (o Options) turns(scenario string) int {
	if scenario == string(load.Stream) && o.StreamBy == StreamIperf3 {
		return 1
	}
	return o.Turns
}

// contestants lists everything to measure. Loopback is there twice: the second
// is the A/A control. A third has the pods' MTU, for streams alone.
func (o Options) contestants() ([]Contestant, error) {
	list := []Contestant{
		loopback{name: report.LoopbackNumber(0), v6: o.IPv6},
		loopback{name: report.LoopbackNumber(1), v6: o.IPv6},
	}
	if o.Calibrate > 0 {
		for i := 2; i < 2*o.Calibrate; i++ {
			list = append(list, loopback{name: report.LoopbackNumber(i), v6: o.IPv6})
		}
		return append(list, loopback{name: report.BaseSlow, v6: o.IPv6, slow: report.Planted}), nil
	}
	if !o.NoStream {
		list = append(list, loopback{name: report.BaseMTU, v6: o.IPv6, mtu: o.MTU, only: []string{string(load.Stream)}})
	}
	made := func(p pods) pods {
		p.labName = fmt.Sprintf("bn%d", len(list))
		p.mtu, p.binary, p.v6, p.udp = o.MTU, o.Binary, o.IPv6, o.UDP
		return p
	}
	add := func(p pods) { list = append(list, made(p)) }
	for _, mode := range o.Modes {
		if mode == report.BridgeNFOff || len(o.ServicesBy) == 0 {
			// The kernel's Services do not work without bridge-nf: replies
			// between two ports would not be translated back.
			add(pods{mode: mode, by: lab.NoServices})
			continue
		}
		for _, by := range o.ServicesBy {
			for _, n := range o.Services {
				p := pods{mode: mode, by: lab.ServiceBy(by), services: n, backend: backendVersion(by)}
				add(p)
				for _, p.tune = range o.Tune {
					if p.tunable() {
						add(p)
					}
				}
			}
		}
	}
	for _, p := range o.extras() {
		add(p)
	}
	for _, file := range o.Conflists {
		for _, p := range o.besideCNI() {
			c, err := readConflist(made(p), file, o.CNIPath)
			if err != nil {
				return nil, err
			}
			list = append(list, c)
		}
	}
	return list, nil
}

// besideCNI are the Services that go with foreign pods.
func (o Options) besideCNI() (out []pods) {
	for _, by := range o.ServicesBy {
		if !kernelServices(lab.ServiceBy(by)) {
			continue
		}
		for _, n := range o.Services {
			out = append(out, pods{by: lab.ServiceBy(by), services: n, backend: backendVersion(by)})
		}
	}
	if len(out) == 0 {
		out = []pods{{by: lab.NoServices}}
	}
	return out
}

// extras are contestants beside the product of modes, kinds and numbers.
func (o Options) extras() (out []pods) {
	for _, e := range o.Extra {
		out = append(out, pods{mode: e.Mode, by: lab.ServiceBy(e.By), services: e.Services, backend: backendVersion(e.By)})
	}
	return out
}

func (o Options) isExtra(c Contestant) bool {
	p, ok := c.(pods)
	return ok && slices.Contains(o.Extra, Extra{Mode: p.mode, By: string(p.by), Services: p.services})
}

// Extra is a contestant beside the product of modes, kinds and numbers.
type Extra = report.Extra

func (o Options) mostServices() int {
	most := slices.Max(o.Services)
	for _, e := range o.Extra {
		most = max(most, e.Services)
	}
	return most
}
