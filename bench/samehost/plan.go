// SPDX-License-Identifier: Apache-2.0

package samehost

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/kubeproxy"
	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/lab"
)

// Options are what a run is asked for. Zero values are not defaults: start
// from Defaults or Quick.
type Options struct {
	run.Options
	Modes      []string
	ServicesBy []string
	Services   []int    // numbers of Services; each is a contestant of its own
	UDP        bool     // also UDP request/response
	NoStream   bool     // where copying costs nothing a stream says nothing
	Calibrate  int      // pairs of loopbacks instead of pods: see Calibration
	Tune       []string // each makes mustang's contestants once more; parts joined by +

	// Conflists are files of CNI configuration lists, each a way of connecting pods;
	// the kernel's own Services go with it. CNIPath is where its plugins are.
	Conflists []string
	CNIPath   []string

	Extra     []Extra  // contestants beside the product of the above, where the kernel has their modes
	Firewall  []Extra  // of which FirewallFact is to be found out; By "" for no eBPF
	Scenarios []string // instead of those that follow from the above
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
	AllBy        = []string{"iptables-nft", "iptables-legacy", "nft", "mustang-tc", "mustang-socket", "mustang", IPVS,
		string(kubeproxy.Iptables), string(kubeproxy.IptablesLegacy), string(kubeproxy.Nftables)}
)

// allModes are the lab's, with a bridge that the firewall does not see, and routing by
// a rule for each pod.
func allModes() (out []string) {
	for _, m := range lab.Modes {
		out = append(out, string(m))
		if m == lab.Bridge {
			out = append(out, report.BridgeNFOff)
		}
		if m == lab.Veth {
			out = append(out, report.PolicyRouting)
		}
	}
	return out
}

// Ways to make a stream.
const (
	StreamIperf3 = run.StreamIperf3
	StreamOwn    = run.StreamOwn
)

// Defaults is a full run: enough rounds for a claim, iperf3 streams as the
// article's. Where instructions are counted, little of it is enough.
func Defaults() Options {
	return Options{Options: run.Defaults(), NoStream: run.Emulation() == report.EmulatedInstructions,
		Modes: EveryMachine, ServicesBy: AllBy[:5], Services: []int{1}, CNIPath: []string{"/opt/cni/bin", "/usr/lib/cni"}}
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
		if !slices.Contains(AllModes, e.Mode) || !slices.Contains(append(AllBy, string(lab.NoServices)), e.By) || e.Services < 1 || e.Pods < 0 || e.Pods > maxPods {
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
	if len(o.Services) == 0 {
		return errors.New("--services: want at least one number")
	}
	if err := errors.Join(run.Once("--modes", o.Modes), run.Once("--services-by", o.ServicesBy), run.Once("--services", o.Services), run.Once("--tune", o.Tune)); err != nil {
		return err
	}
	return o.Options.Validate()
}

func (o Options) scenarios() []string {
	if o.Scenarios != nil {
		return o.Scenarios
	}
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
	return s
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
		p.mtu, p.binary, p.v6 = o.MTU, o.Binary, o.IPv6
		p.udp = slices.Contains(o.scenarios(), string(load.UDPRR))
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
				p := pods{mode: mode, by: lab.ServiceBy(by), services: n, backend: backend(lab.ServiceBy(by))}
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
		list = append(list, run.Optional{Contestant: made(p)})
	}
	files := map[string]string{}
	for _, file := range o.Conflists {
		for _, p := range o.besideCNI() {
			c, err := readConflist(made(p), file, o.CNIPath)
			if err != nil {
				return nil, err
			}
			if other := files[c.Name()]; other != "" {
				return nil, fmt.Errorf("--conflist: %s and %s are both called %q: give one of them another name", other, file, strings.TrimPrefix(c.mode, "cni "))
			}
			files[c.Name()] = file
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
			out = append(out, pods{by: lab.ServiceBy(by), services: n, backend: backend(lab.ServiceBy(by))})
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
		out = append(out, pods{mode: e.Mode, by: lab.ServiceBy(e.By), services: e.Services, pods: e.Pods, backend: backend(lab.ServiceBy(e.By))})
	}
	return out
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

// buildTime is how long a contestant may take to come up. The kernel's firewalls take
// milliseconds a Service when there are many; with kube-proxy the API server is filled
// before that, and the rules are read back: 20 minutes with 100,000.
func (o Options) buildTime() time.Duration {
	each := 6 * time.Millisecond
	if slices.ContainsFunc(o.ServicesBy, func(by string) bool { return kubeProxy(lab.ServiceBy(by)) }) {
		each = 11 * time.Millisecond
	}
	return 2*time.Minute + time.Duration(o.mostServices())*each
}

// Plan is what a run of these options does.
func (o Options) Plan() (run.Plan, error) {
	if err := o.validate(); err != nil {
		return run.Plan{}, err
	}
	list, err := o.contestants()
	if err != nil {
		return run.Plan{}, err
	}
	p := run.Plan{Options: o.Options, Contestants: list, Scenarios: o.scenarios(), Facts: o.facts(),
		BuildTime: o.buildTime(),
		Settings: report.Settings{Modes: o.Modes, ServicesBy: o.ServicesBy, Services: o.Services, Calibrate: o.Calibrate,
			Conflists: o.Conflists, Extra: o.Extra, UDP: o.UDP, Tunes: o.Tune}}
	return p, nil
}

// Run measures, as run.Run does.
func Run(ctx context.Context, o Options, log run.Log) (*report.Document, error) {
	p, err := o.Plan()
	if err != nil {
		return nil, err
	}
	return run.Run(ctx, p, log)
}

// Resumed returns the options that made a document, to go on with its run.
func Resumed(d *report.Document) Options {
	o, set := Defaults(), d.Settings
	o.Options = run.ResumedOptions(d)
	o.Modes, o.ServicesBy, o.Services, o.Tune = set.Modes, set.ServicesBy, set.Services, set.Tunes
	o.Calibrate, o.Conflists, o.Extra, o.UDP = set.Calibrate, set.Conflists, set.Extra, set.UDP
	return o
}
