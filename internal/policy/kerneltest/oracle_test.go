// SPDX-License-Identifier: Apache-2.0

// Package kerneltest holds the programs to the oracle: the same worlds, the
// same packets, and what the kernel does with them by BPF_PROG_TEST_RUN.
package kerneltest

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest"
	packets "github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/policy/policygen"
	"github.com/mustang-net/mustang/internal/reconcile"
)

var (
	casesFlag = flag.Int("cases", 1_000_000, "how many packets are compared in a full run")
	seedFlag  = flag.Uint64("seed", 0, "seed of the worlds; 0: by the clock")
	worldFlag = flag.Int("world", -1, "play this world of the seed only")
)

const (
	rounds  = 10  // of changes in a world
	fresh   = 120 // first packets after each
	revisit = 40  // flows that are kept, to be asked again after the next change
)

var limits = policy.Limits{Identities: 4096, Prefixes: 4096, Peers: 16384, Ports: 16384}

// TestTheKernelAgreesWithTheOracle plays generated worlds: after each change
// it sends first packets, their answers, and packets of flows from before.
func TestTheKernelAgreesWithTheOracle(t *testing.T) {
	want := *casesFlag
	if testing.Short() {
		want = 20_000
	}
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	nets := []*dptest.Network{dptest.NewNetwork(t, dptest.Options{}, 0), dptest.NewNetwork(t, dptest.Options{InPod: true}, 0)}
	for _, n := range nets {
		// The router's link address is the host's own child, as a shim's is.
		check(t, n.MstChildrenV1.Put(datapath.ChildOf(int(dptest.NewPod(1).Parent), dptest.Router[:]), uint32(0)))
	}
	var sum counts
	for world := 0; sum.cases < want; world++ {
		if *worldFlag >= 0 {
			world = *worldFlag
		}
		p := newPlay(t, nets[world%2], rand.New(rand.NewPCG(seed, uint64(world))))
		if err := p.run(); err != nil {
			t.Fatalf("%v\nreplay with -seed=%d -world=%d:\n%s", err, seed, world, strings.Join(p.world.Trace, "\n"))
		}
		sum.add(p.counts)
		if *worldFlag >= 0 {
			break
		}
	}
	t.Logf("%d packets: %d first ones allowed, %d denied; %d of flows from before pass on, %d are cut; seed %d",
		sum.cases, sum.allowed, sum.denied, sum.kept, sum.cut, seed)
	if *worldFlag < 0 && (sum.allowed < sum.cases/50 || sum.denied < sum.cases/50 || sum.kept < sum.cases/100 || sum.cut < sum.cases/1000) {
		t.Error("the generator is one-sided")
	}
}

type counts struct{ cases, allowed, denied, kept, cut int }

func (c *counts) add(d counts) {
	c.cases += d.cases
	c.allowed += d.allowed
	c.denied += d.denied
	c.kept += d.kept
	c.cut += d.cut
}

// play is one world in one set of tables.
type play struct {
	counts
	t     *testing.T
	net   *dptest.Network
	rng   *rand.Rand
	world *policygen.World
	rec   reconcile.Policies
	flows []flow
	sport uint16
}

// flow is one that was allowed.
type flow struct {
	policygen.Case
	sport uint16
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func tablesOf(t testing.TB, d *dptest.Datapath) reconcile.PolicyTables {
	return reconcile.PolicyTables{
		Ports:      datapath.NewTable[datapath.PortKey, uint32]("ports", d.MstPortsV1),
		Peers:      datapath.NewTable[datapath.PeerKey, datapath.PeerRules]("peers", d.MstPeersV1),
		Identities: datapath.NewTable[datapath.Addr, datapath.Identity]("identities", d.MstIdentitiesV1),
		Prefixes:   datapath.NewTable[datapath.PrefixKey, uint64]("prefixes", d.MstPrefixesV1),
		Policies:   datapath.NewTable[uint32, datapath.EndpointPolicy]("policies", d.MstPoliciesV1),
		Endpoints: endpointTable{datapath.NewTable[uint32, datapath.EndpointSlot]("endpoints", d.MstEndpointsV1),
			func() { d.VoidFlows(t) }},
	}
}

// endpointTable voids what is kept of flows with each change, as [datapath.EndpointTable] does.
type endpointTable struct {
	*datapath.Table[uint32, datapath.EndpointSlot]
	void func()
}

func (t endpointTable) Put(ids []uint32, slots []datapath.EndpointSlot) error {
	defer t.void()
	return t.Table.Put(ids, slots)
}

func newPlay(t *testing.T, net *dptest.Network, rng *rand.Rand) *play {
	p := &play{t: t, net: net, rng: rng, world: policygen.NewWorld(rng, limits)}
	p.rec = reconcile.NewPolicies(tablesOf(t, net.Datapath))
	for id, pod := range net.Pods {
		net.RemovePod(t, pod)
		delete(net.Pods, id)
	}
	net.ClearFlows(t)
	return p
}

func (p *play) run() error {
	for range rounds {
		for range 1 + p.rng.IntN(3) {
			p.world.Step()
		}
		p.apply()
		if err := p.revisit(); err != nil {
			return err
		}
		for range fresh {
			if err := p.first(); err != nil {
				return err
			}
		}
		if p.rng.IntN(4) == 0 { // else tables grow for ever
			p.net.ClearFlows(p.t)
			p.flows = nil
		}
	}
	return nil
}

// apply brings the tables up to date: policy before a new endpoint is in
// force, and after an old one is gone.
func (p *play) apply() {
	for i := range policygen.Local {
		pod := dptest.NewPod(i + 1)
		if _, there := p.net.Pods[pod.ID]; there && p.world.Pod(i) == nil {
			p.net.RemovePod(p.t, pod)
			delete(p.net.Pods, pod.ID)
		}
	}
	_, err := p.rec.Apply(p.world.Model.Plan())
	check(p.t, err)
	for i := range policygen.Local {
		pod := dptest.NewPod(i + 1)
		if _, there := p.net.Pods[pod.ID]; !there && p.world.Pod(i) != nil {
			p.net.SetPod(p.t, pod)
			p.net.Pods[pod.ID] = pod
		}
	}
}

// frame is a packet of a flow.
func (p *play) frame(c policygen.Case, sport uint16, reply bool, flags uint8) []byte {
	from, src, dst, sp, dp := c.From, c.Src, c.Dst, sport, c.Port
	if reply {
		from, src, dst, sp, dp = c.To, c.Dst, c.Src, c.Port, sport
		if c.Protocol == "" {
			sp = sport
		}
	}
	b := dptest.Eth(dptest.Router, p.net.Pods[uint32(c.To+1)].MAC)
	if from >= 0 {
		pod := p.net.Pods[uint32(from+1)]
		b = dptest.Eth(pod.MAC, pod.NodeMAC)
	} else if reply {
		b = dptest.Eth(dptest.Router, p.net.Pods[uint32(c.From+1)].MAC)
	}
	return b.IP(src, dst).L4(c.Number, sp, dp, flags).Frame()
}

// send carries a frame from an end; cameIn says where the host got one from outside.
func (p *play) send(from, to int, frame []byte, cameIn uint32, bypass bool) (string, error) {
	if from >= 0 && !bypass {
		a, err := p.net.Send(p.net.Pods[uint32(from+1)], frame)
		return a.Dropped, err
	}
	r, err := p.net.Run(p.net.PodPrograms.ToPod, frame, dptest.Context{Endpoint: uint32(to + 1), CameIn: cameIn})
	if err != nil || r.Verdict != dptest.Drop {
		return "", err
	}
	return dptest.ReasonName(r.Reason), nil
}

const spoofed = 5 // an interface that is not the host itself

// first sends the first packet of a new flow, and its answer.
func (p *play) first() error {
	c := p.world.Case()
	p.sport++
	if p.sport < 1024 {
		p.sport = 1024
		p.net.ClearFlows(p.t)
		p.flows = nil
	}
	// A packet may reach a pod past its sender's hook: the destination's holds by itself.
	bypass := c.From >= 0 && c.To >= 0 && c.From != c.To && p.rng.IntN(4) == 0
	var cameIn uint32
	if !p.net.InPod && !c.FromNode || !p.net.InPod && p.rng.IntN(4) == 0 {
		cameIn, c.FromNode = spoofed, false
	}
	want := reason(p.world.Verdict(c))
	f := flow{Case: c, sport: p.sport}
	got, err := p.send(c.From, c.To, p.frame(c, f.sport, false, packets.SYN), cameIn, bypass)
	p.cases++
	if err != nil || got != want {
		return fmt.Errorf("first packet %+v (past the sender's hook %v, came in %d): %q %v, the oracle says %q", c, bypass, cameIn, got, err, want)
	}
	if want != "" {
		p.denied++
		return p.noEntry(f)
	}
	p.allowed++
	if err := p.answer(f, ""); err != nil {
		return err
	}
	if len(p.flows) < revisit*rounds && p.rng.IntN(3) == 0 {
		p.flows = append(p.flows, f)
	}
	return nil
}

// answer sends a reply, which passes whatever the rules say of its own direction.
func (p *play) answer(f flow, want string) error {
	if f.From == f.To && f.From >= 0 {
		return nil
	}
	got, err := p.send(f.To, f.From, p.frame(f.Case, f.sport, true, packets.ACK|packets.SYN), spoofed, false)
	p.cases++
	if err != nil || got != want {
		return fmt.Errorf("answer in flow %+v: %q %v, want %q", f.Case, got, err, want)
	}
	return nil
}

func (p *play) tuple(f flow) dptest.Tuple {
	port := f.Port
	if f.Protocol == "" { // an echo's identifier serves as both
		port = f.sport
	}
	return dptest.Tuple{Proto: f.Number, Src: netip.AddrPortFrom(f.Src, f.sport), Dst: netip.AddrPortFrom(f.Dst, port)}
}

// noEntry: what was denied leaves nothing that could let a packet through.
func (p *play) noEntry(f flow) error {
	if e := p.net.Flow(p.t, p.tuple(f), bpfgen.CTScopeFlow); e != nil {
		return fmt.Errorf("the denied flow %+v has an entry: %+v", f.Case, e)
	}
	return nil
}

// revisit asks again about flows that were allowed before the change: both of
// their directions, by what the oracle says of their first one now.
func (p *play) revisit() error {
	var living []flow
	for _, f := range p.flows {
		if !p.same(f.From, f.Src) || !p.same(f.To, f.Dst) {
			continue // another end than it began with
		}
		want := reason(p.world.Verdict(f.Case))
		turns := []bool{false, true}
		if p.rng.IntN(2) == 0 {
			turns = []bool{true, false}
		}
		for _, reply := range turns {
			if reply {
				if err := p.answer(f, want); err != nil {
					return fmt.Errorf("after a change: %w", err)
				}
				continue
			}
			got, err := p.send(f.From, f.To, p.frame(f.Case, f.sport, false, packets.ACK), spoofed, false)
			p.cases++
			if err != nil || got != want {
				return fmt.Errorf("after a change: packet in flow %+v: %q %v, the oracle says %q", f.Case, got, err, want)
			}
		}
		if want == "" {
			p.kept++
		} else {
			p.cut++
		}
		living = append(living, f)
	}
	p.flows = living
	return nil
}

// same: the address is still the pod's, or still of nobody on this node.
func (p *play) same(pod int, a netip.Addr) bool {
	if pod >= 0 {
		return p.world.Pod(pod) != nil
	}
	for i := range policygen.Local {
		if p.world.Pod(i) != nil && (a == policygen.Addr(i, false) || a == policygen.Addr(i, true)) {
			return false
		}
	}
	return true
}

func reason(verdict string) string {
	if verdict == "" {
		return ""
	}
	return "policy_" + verdict
}
