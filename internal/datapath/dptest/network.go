// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// Network is a node with pods: it carries a packet from hook to hook as the
// kernel would between them.
type Network struct {
	*Datapath
	Pods map[uint32]Pod
	// entries: programs vouch for packets, and these are what is attached before each pod.
	entries map[uint32]*ebpf.Program
}

// Router is where packets of other hosts come from and go to.
var Router = [6]byte{2, 0xee, 0, 0, 0, 1}

// NewNetwork is a node with pods 1 to n.
func NewNetwork(t testing.TB, o Options, n int) *Network {
	t.Helper()
	net := &Network{Datapath: New(t, o)}
	net.addPods(t, n)
	return net
}

// Vouch gives the programs, which must be inside pods, a key for vouchers. From
// now on a packet comes to a pod by its entry program, with what the sender's left.
func (n *Network) Vouch(t testing.TB) {
	t.Helper()
	var key bpfgen.PodVoucherKey
	for i := range key.Words {
		key.Words[i] = [2]uint64{rand.Uint64(), rand.Uint64()}
	}
	check(t, n.MstVoucherV1.Put(uint32(0), key))
	check(t, n.MstProgramsV1.Put(uint32(bpfgen.ProgToPodInner), n.PodPrograms.ToPod))
	n.entries = map[uint32]*ebpf.Program{}
}

func (n *Network) addPods(t testing.TB, count int) {
	t.Helper()
	n.Pods = map[uint32]Pod{}
	for i := 1; i <= count; i++ {
		p := n.AddPod(t, i)
		n.Pods[p.ID] = p
	}
}

// loadToPodWire puts what judges other nodes' packets to pods into force.
func (n *Network) loadToPodWire(t testing.TB) {
	t.Helper()
	toPod := n.loadBeside(t, "to_pod from the wire", func() (*ebpf.CollectionSpec, error) { return toPodAlone(Options{FromWire: true}) })
	check(t, n.MstProgramsV1.Put(uint32(bpfgen.ProgToPodWire), toPod[bpfgen.PodProgToPod]))
}

// loadNetdev is the programs at a NIC to other nodes, with what they call in force.
func (n *Network) loadNetdev(t testing.TB) map[string]*ebpf.Program {
	t.Helper()
	programs := n.loadBeside(t, "netdev", bpfgen.LoadNetdev)
	check(t, n.MstNodeProgramsV1.Put(uint32(bpfgen.NodeProgNetdevIn), programs[bpfgen.NetdevProgNetdevIn]))
	return programs
}

// Reset empties the tables and adds pods 1 to n again.
func (n *Network) Reset(t testing.TB, pods int) {
	t.Helper()
	n.Clear(t)
	n.addPods(t, pods)
}

// Arrival is where a packet ended.
type Arrival struct {
	Pod     uint32 // 0: it left the node, or was dropped
	Frame   []byte // as it arrived, or as it was dropped
	Headers oracle.Headers
	Dropped string   // the reason's name
	Refused bool     // dropped, and Frame is the answer to the pod that sent it
	Direct  bool     // by redirect, past the kernel's stack
	Home    bool     // through the door, to the node's own socket
	Hooks   []Result // of each hook it went through
}

func (a Arrival) String() string {
	switch {
	case a.Dropped != "":
		return "dropped: " + a.Dropped
	case a.Pod == 0:
		return fmt.Sprintf("left the node as %v", a.Tuple())
	case a.Direct:
		return fmt.Sprintf("redirected to pod %d as %v", a.Pod, a.Tuple())
	}
	return fmt.Sprintf("through the kernel to pod %d as %v", a.Pod, a.Tuple())
}

// Tuple is both ends as the packet shows them at last.
func (a Arrival) Tuple() Tuple { return TupleOf(a.Headers) }

// TupleOf is both ends of a parsed packet.
func TupleOf(h oracle.Headers) Tuple {
	return Tuple{h.Proto, netip.AddrPortFrom(h.Src, h.Sport), netip.AddrPortFrom(h.Dst, h.Dport)}
}

// FromPod runs the hook where a pod's packets enter.
func (n *Network) FromPod(p Pod, frame []byte) (Result, error) {
	return n.Run(n.PodPrograms.FromPod, frame, Context{Endpoint: p.ID})
}

// ToPod runs the hook before a pod.
func (n *Network) ToPod(p Pod, frame []byte) (Result, error) {
	return n.Run(n.PodPrograms.ToPod, frame, Context{Endpoint: p.ID})
}

// Send lets pod p send a frame, and follows it.
func (n *Network) Send(p Pod, frame []byte) (Arrival, error) {
	r, err := n.FromPod(p, frame)
	if err != nil {
		return Arrival{}, err
	}
	a := arrived(r, 0)
	switch {
	case a.Dropped != "":
	case r.Verdict == Redirect && r.RedirectKind == bpfgen.RedirectPeer:
		for _, to := range n.Pods {
			if to.Ifindex == r.RedirectIfindex {
				a.Pod, a.Direct = to.ID, true
				return a, nil
			}
		}
		return a, fmt.Errorf("redirected to interface %d, which no pod has", r.RedirectIfindex)
	case r.Verdict == Redirect:
		a, err = n.arrive(p, r)
		a.Direct = true
		return a, err
	case r.Verdict == Next:
		if to, ok := n.owner(a.Headers.Dst); ok && !a.Headers.Control {
			return n.arrive(to, r)
		}
	}
	return a, nil
}

// Receive brings a frame from outside the node to pod p.
func (n *Network) Receive(p Pod, frame []byte) (Arrival, error) {
	return n.arrive(p, Result{Packet: frame})
}

func (n *Network) arrive(to Pod, before Result) (Arrival, error) {
	r, err := n.before(to, before)
	if err != nil {
		return Arrival{}, err
	}
	a := arrived(r, to.ID)
	if before.Verdict != 0 {
		a.Hooks = append([]Result{before}, a.Hooks...)
	}
	return a, nil
}

// before runs what is attached before a pod, on what the last hook let out.
func (n *Network) before(to Pod, last Result) (Result, error) {
	if n.entries == nil {
		return n.ToPod(to, last.Packet)
	}
	if n.entries[to.ID] == nil {
		p, err := n.entry(to.ID, bpfgen.ProgToPodInner)
		if err != nil {
			return Result{}, err
		}
		n.entries[to.ID] = p
	}
	return n.Run(n.entries[to.ID], last.Packet, Context{Brought: last.Left})
}

// entry loads the entry program of one pod's interface, as the loader makes it.
func (d *Datapath) entry(endpoint, program uint32) (*ebpf.Program, error) {
	spec, err := datapath.EntrySpec(endpoint, program, map[string]*ebpf.Map{
		"mst_programs_v1": d.MstProgramsV1, "mst_drops_v1": d.MstDropsV1, "mst_meta_v1": d.MstMetaV1,
		"mst_endpoint_counters_v1": d.MstEndpointCountersV1, "mst_voucher_v1": d.MstVoucherV1,
	})
	if err != nil {
		return nil, err
	}
	return ebpf.NewProgram(spec)
}

func arrived(r Result, pod uint32) Arrival {
	a := Arrival{Pod: pod, Frame: r.Packet, Hooks: []Result{r}}
	a.Headers, _ = oracle.Parse(r.Packet)
	if r.Reason != bpfgen.ReasonNone {
		a.Pod = 0
		a.Dropped = ReasonName(r.Reason)
		a.Refused = r.Verdict == Redirect
	}
	return a
}

func (n *Network) owner(a netip.Addr) (Pod, bool) {
	for _, p := range n.Pods {
		if a == p.IP4 || a == p.IP6 {
			return p, true
		}
	}
	return Pod{}, false
}

// External is host number n outside the node.
func External(n int, v6 bool) netip.Addr {
	if v6 {
		return netip.AddrFrom16([16]byte{0: 0x20, 1: 0x01, 2: 0x0d, 3: 0xb8, 15: byte(n)})
	}
	return netip.AddrFrom4([4]byte{198, 51, 100, byte(n)})
}

// VIP is address number n of the Services' range.
func VIP(n int, v6 bool) netip.Addr {
	if v6 {
		return netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x96, 15: byte(n)})
	}
	return netip.AddrFrom4([4]byte{10, 96, 0, byte(n)})
}
