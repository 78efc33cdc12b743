// SPDX-License-Identifier: Apache-2.0

package datapath

// Asking the programs: the same objects, loaded a second time, with copies of
// the tables that they write. Asking changes nothing.

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// Tables that a dry run has of its own, empty: what the programs write. All
// others are the node's; a test holds that each table is in one of the lists, once.
var scratchTables = []string{
	bpfgen.PodMapMstAffinityV1,
	bpfgen.PodMapMstAnswersV1,
	bpfgen.PodMapMstCtNewV1,
	bpfgen.PodMapMstPairsV1,
	bpfgen.PodMapMstCtV1,
	bpfgen.PodMapMstDropsV1,
	bpfgen.PodMapMstEndpointCountersV1,
	bpfgen.PodMapMstEventRatesV1,
	bpfgen.PodMapMstEventRoomV1,
	bpfgen.PodMapMstEventsV1,
	bpfgen.PodMapMstFactsV1,
	bpfgen.PodMapMstCreditV1,
	bpfgen.PodMapMstFastFrontV1,
	bpfgen.PodMapMstFastV1,
	bpfgen.PodMapMstFastGenerationsV1,
	bpfgen.PodMapMstFragsV1,
	bpfgen.PodMapMstJudgmentV1,
	bpfgen.EdgeMapMstNobodyV1,
	bpfgen.PodMapMstReadersV1,
	bpfgen.PodMapMstStoppedV1,
}

// sharedTables are those that no program writes, or none that is test-run.
var sharedTables = []string{
	bpfgen.PodMapMstBackendsV1,
	bpfgen.PodMapMstBackendsV1Now,
	bpfgen.PodMapMstChildrenV1,
	bpfgen.PodMapMstCtNearV1,
	bpfgen.PodMapMstEdgeV2,
	bpfgen.PodMapMstEndpointAddrsV1,
	bpfgen.NetdevMapMstEndpointBitsV1,
	bpfgen.PodMapMstEndpointsV1,
	bpfgen.EdgeMapMstFrontendPortsV1,
	bpfgen.EdgeMapMstGonePortsV1,
	bpfgen.PodMapMstIdentitiesV1,
	bpfgen.PodMapMstIdentitiesV1Now,
	bpfgen.PodMapMstInsideV1,
	bpfgen.PodMapMstMasqueradeV1,
	bpfgen.PodMapMstRoutersV1,
	bpfgen.PodMapMstMetaV1,
	bpfgen.PodMapMstNetnsV1,
	bpfgen.NetdevMapMstNodeProgramsV1,
	bpfgen.PodMapMstNodeV1,
	bpfgen.PodMapMstParentsV1,
	bpfgen.PodMapMstPeersV1,
	bpfgen.PodMapMstPeersV1Now,
	bpfgen.PodMapMstPoliciesV1,
	bpfgen.PodMapMstPortsV1,
	bpfgen.PodMapMstPortsV1Now,
	bpfgen.PodMapMstPrefixesV1,
	bpfgen.PodMapMstProgramsV1,
	bpfgen.PodMapMstRemoteNetsV1,
	bpfgen.PodMapMstRemotesV1,
	bpfgen.PodMapMstServicesV2,
	bpfgen.PodMapMstServicesV2Now,
	bpfgen.PodMapMstSlotsV1,
	bpfgen.PodMapMstSlotsV1Now,
	bpfgen.PodMapMstSockFlowsV1,
	bpfgen.PodMapMstSockPeersV1,
	bpfgen.PodMapMstSockSlotsV1,
	bpfgen.PodMapMstSourcesV1,
	bpfgen.PodMapMstTunnelPeersV1,
	bpfgen.PodMapMstUdpSlotsV1,
	bpfgen.PodMapMstVoucherV1,
	bpfgen.PodMapMstWearV1,
}

// choiceTables hold the choice of a backend: a dry run that chooses has these of
// its own, too.
var choiceTables = []string{
	bpfgen.PodMapMstServicesV2, bpfgen.PodMapMstServicesV2Now,
	bpfgen.PodMapMstSlotsV1, bpfgen.PodMapMstSlotsV1Now,
}

const scratchFlows = 1024 // entries of the flow tables: one packet needs a few

// Hook is one of the places where programs meet a packet.
type Hook int

// The hooks of a pod, and of the link that pods share.
const (
	HookFromPod Hook = iota
	HookToPod
	HookParent
)

// hookNames are the programs' names in their objects.
var hookNames = [...]string{HookFromPod: bpfgen.PodProgFromPod, HookToPod: bpfgen.PodProgToPod, HookParent: bpfgen.ParentProgParentEgress}

// DryRun is the programs, loaded for asking.
type DryRun struct {
	d       *Datapath
	scratch map[string]*ebpf.Map
	ring    *ebpf.Map
	reader  *ringbuf.Reader
	loaded  map[hookProgram]*ebpf.Program
}

// hookProgram is a program in one of the ways in which it is loaded.
type hookProgram struct {
	hook Hook
	variant
}

// DryRun makes ready for asking. One that chooses knows no Services but what
// Choose gives it.
func (d *Datapath) DryRun(chooses bool) (*DryRun, error) {
	r := &DryRun{d: d, scratch: make(map[string]*ebpf.Map), loaded: make(map[hookProgram]*ebpf.Program)}
	names := scratchTables
	if chooses {
		names = slices.Concat(names, choiceTables)
	}
	err := r.makeTables(names)
	if err == nil {
		err = r.listen()
	}
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (r *DryRun) makeTables(names []string) error {
	specs, err := tableSpecs()
	if err != nil {
		return err
	}
	for _, name := range names {
		spec := specs[name].Copy()
		spec.MaxEntries, spec.Contents = r.d.held(name).MaxEntries(), nil
		if spec.Type == ebpf.LRUHash || spec.Type == ebpf.Hash {
			spec.MaxEntries = min(spec.MaxEntries, scratchFlows)
		}
		if r.scratch[name], err = ebpf.NewMap(spec); err != nil {
			return fmt.Errorf("make a scratch copy of table %s: %w", name, err)
		}
	}
	for name, holder := range growing {
		if now := r.scratch[holder]; now != nil {
			if err := now.Put(uint32(0), r.scratch[name]); err != nil {
				return fmt.Errorf("put the scratch copy of table %s in force: %w", name, err)
			}
		}
	}
	// What is known of all flows decides whether some tables are looked at.
	facts := r.d.held(bpfgen.PodMapMstFactsV1)
	value, err := facts.LookupBytes(uint32(0))
	if err != nil {
		return fmt.Errorf("read table %s: %w", bpfgen.PodMapMstFactsV1, err)
	}
	return r.scratch[bpfgen.PodMapMstFactsV1].Put(uint32(0), value)
}

// Choose gives a frontend this one backend in a run that chooses. Its entry is
// the node's but for that.
func (r *DryRun) Choose(f state.Frontend, backend uint32) error {
	found, err := r.d.FindFrontend(f)
	if err != nil || !found.Known {
		return errors.Join(err, fmt.Errorf("the Service %s is gone", f))
	}
	service := found.Entry
	service.Backends = 1
	if err := r.scratch[bpfgen.PodMapMstServicesV2].Put(found.Key, service); err != nil {
		return fmt.Errorf("write the scratch table of Services: %w", err)
	}
	address := FrontendKey{Addr: FromAddr(f.AddrPort.Addr())}
	if marker, marked, err := r.d.Frontends.Get(address); err == nil && marked {
		if err := r.scratch[bpfgen.PodMapMstServicesV2].Put(address, marker); err != nil {
			return fmt.Errorf("write the scratch table of Services: %w", err)
		}
	}
	if err := r.scratch[bpfgen.PodMapMstSlotsV1].Put(SlotKey{Service: service.Id}, backend); err != nil {
		return fmt.Errorf("write the scratch table of slots: %w", err)
	}
	return nil
}

// listen makes the run its own only reader: what the programs tell of a packet
// is what they decided.
func (r *DryRun) listen() (err error) {
	if r.ring, err = ebpf.NewMap(&ebpf.MapSpec{Name: "mst_ring", Type: ebpf.RingBuf, MaxEntries: uint32(os.Getpagesize())}); err != nil {
		return fmt.Errorf("make a ring for the answer: %w", err)
	}
	if r.reader, err = ringbuf.NewReader(r.ring); err != nil {
		return fmt.Errorf("read the ring for the answer: %w", err)
	}
	err = r.scratch[bpfgen.PodMapMstEventsV1].Put(uint32(0), r.ring)
	for place := range uint32(2) {
		err = errors.Join(err, r.scratch[bpfgen.PodMapMstReadersV1].Put(place, Reader{Until: programSecond() + 1<<20}))
	}
	return err
}

// tables are the scratch copies and, for the rest, the node's own, with their
// sizes in spec.
func (r *DryRun) tables(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	out := r.d.replacements(spec)
	for name, m := range r.scratch {
		if s := spec.Maps[name]; s != nil {
			s.MaxEntries = m.MaxEntries()
			out[name] = m
		}
	}
	return out
}

// program loads a hook's program at its first use.
func (r *DryRun) program(hook Hook, ep state.Endpoint) (*ebpf.Program, error) {
	key := hookProgram{hook, variantOf(ep)}
	if p := r.loaded[key]; p != nil {
		return p, nil
	}
	parse := podSpec
	if hook == HookParent {
		parse = parentSpec
	}
	parsed, err := parse()
	if err != nil {
		return nil, err
	}
	spec := parsed.Copy()
	for name := range spec.Programs {
		if name != hookNames[hook] {
			delete(spec.Programs, name)
		}
	}
	if err := setConstants(spec, map[string]any{
		bpfgen.PodVarInPod: key.inPod, bpfgen.PodVarDeliverEgress: key.deliverEgress, bpfgen.PodVarDryRun: uint8(1),
	}); err != nil {
		return nil, err
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: r.tables(spec)})
	if err != nil {
		return nil, loadError("programs for asking", err)
	}
	defer coll.Close()
	r.loaded[key] = coll.DetachProgram(hookNames[hook])
	return r.loaded[key], nil
}

// Decision is what a program decided about a packet.
type Decision struct {
	Verdict         int // VerdictNext, VerdictDrop, VerdictRedirect
	Reason          uint32
	RedirectKind    uint32 // enum redirect_kind
	RedirectIfindex int
	Frame           []byte // as it goes on
	Event           *Event // what it told; nil: nothing
}

// Packet is a packet at a hook.
type Packet struct {
	Frame   []byte
	IfIndex int // of the interface that carries the hook, in the calling thread's namespace
	Arrived int // ifindex by which it came to the node; 0: the node's own
}

// Ask runs the program of a hook on a packet. ep is the hook's endpoint.
func (r *DryRun) Ask(hook Hook, ep state.Endpoint, p Packet) (Decision, error) {
	program, err := r.program(hook, ep)
	if err != nil {
		return Decision{}, err
	}
	in := SkBuff{Ifindex: uint32(p.IfIndex), IngressIfindex: uint32(p.Arrived)}
	in.Cb[bpfgen.CbEndpoint] = ep.ID
	var out SkBuff
	opts := ebpf.RunOptions{Data: p.Frame, DataOut: make([]byte, len(p.Frame)+256), Context: in, ContextOut: &out}
	ret, err := program.Run(&opts)
	if err != nil {
		return Decision{}, fmt.Errorf("ask the program at interface %d: %w", p.IfIndex, err)
	}
	d := Decision{
		Verdict: int(int32(ret)), Reason: out.Cb[bpfgen.CbReason], Frame: opts.DataOut,
		RedirectKind: out.Cb[bpfgen.CbRedirectKind], RedirectIfindex: int(out.Cb[bpfgen.CbRedirectIfindex]),
	}
	d.Event, err = r.told()
	return d, err
}

// told is the last event in the ring.
func (r *DryRun) told() (last *Event, err error) {
	r.reader.SetDeadline(time.Unix(0, 1))
	for {
		record, err := r.reader.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return last, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read the answer: %w", err)
		}
		var e Event
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&e)), unsafe.Sizeof(e)), record.RawSample)
		last = &e
	}
}

// Close lets go of the programs and the scratch tables.
func (r *DryRun) Close() error {
	var errs []error
	for _, p := range r.loaded {
		errs = append(errs, p.Close())
	}
	if r.reader != nil {
		errs = append(errs, r.reader.Close())
	}
	if r.ring != nil {
		errs = append(errs, r.ring.Close())
	}
	for _, m := range r.scratch {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}
