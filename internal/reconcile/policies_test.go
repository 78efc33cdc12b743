// SPDX-License-Identifier: Apache-2.0

package reconcile_test

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/policy/policygen"
	"github.com/mustang-net/mustang/internal/reconcile"
)

// memory is a table that calls look after each write of one entry, as a packet
// might come after any.
type memory[K, V comparable] struct {
	m    map[K]V
	look func()
	max  int
}

func (t *memory[K, V]) Put(keys []K, values []V) error {
	for i, k := range keys {
		if _, has := t.m[k]; !has && t.max > 0 && len(t.m) >= t.max {
			return &datapath.FullError{Table: "a test's", Max: uint32(t.max)}
		}
		t.m[k] = values[i]
		t.look()
	}
	return nil
}

func (t *memory[K, V]) Delete(keys []K) error {
	for _, k := range keys {
		delete(t.m, k)
		t.look()
	}
	return nil
}

func (t *memory[K, V]) All() (map[K]V, error) { return maps.Clone(t.m), nil }

func newMemory[K, V comparable](look func()) *memory[K, V] {
	return &memory[K, V]{map[K]V{}, look, 0}
}

// node is one node's tables, and what its programs would say.
type node struct {
	ports      *memory[datapath.PortKey, uint32]
	peers      *memory[datapath.PeerKey, datapath.PeerRules]
	identities *memory[datapath.Addr, datapath.Identity]
	prefixes   *memory[datapath.PrefixKey, uint64]
	policies   *memory[uint32, datapath.EndpointPolicy]
	endpoints  *memory[uint32, datapath.EndpointSlot]
	rec        reconcile.Policies
}

func newNode(look func()) *node {
	n := &node{newMemory[datapath.PortKey, uint32](look), newMemory[datapath.PeerKey, datapath.PeerRules](look),
		newMemory[datapath.Addr, datapath.Identity](look), newMemory[datapath.PrefixKey, uint64](look),
		newMemory[uint32, datapath.EndpointPolicy](look), newMemory[uint32, datapath.EndpointSlot](func() {}), reconcile.Policies{}}
	n.rec = reconcile.NewPolicies(reconcile.PolicyTables{Ports: n.ports, Peers: n.peers, Identities: n.identities,
		Prefixes: n.prefixes, Policies: n.policies, Endpoints: n.endpoints})
	for id := range uint32(policygen.Local) {
		n.endpoints.m[id+1] = datapath.EndpointSlot{Generation: id + 1}
	}
	return n
}

// ends are the verdicts of both ends.
func (n *node) ends(c policygen.Case) [2]bool {
	out := [2]bool{true, true}
	if c.From == c.To && c.From >= 0 {
		return out
	}
	if c.From >= 0 {
		p := n.policies.m[uint32(c.From+1)]
		out[0] = p.Egress == 0 || n.rule(p.Egress, p.EgressFlags, c.Dst, c)
	}
	if c.To >= 0 && !c.FromNode {
		p := n.policies.m[uint32(c.To+1)]
		out[1] = p.Ingress == 0 || n.rule(p.Ingress, p.IngressFlags, c.Src, c)
	}
	return out
}

func (n *node) rule(set uint64, flags uint16, peer netip.Addr, c policygen.Case) bool {
	who := n.identities.m[datapath.FromAddr(peer)]
	pod := who.Pod >= bpfgen.IdentityFirst
	if flags&bpfgen.SetPrefixes != 0 && who.Prefix == 0 {
		who.Prefix = n.longest(peer)
	}
	for _, x := range []struct {
		flag     uint16
		identity uint64
		asked    bool
	}{{bpfgen.SetAnybody, bpfgen.IdentityAnybody, true}, {bpfgen.SetAnyPod, bpfgen.IdentityAnyPod, pod},
		{bpfgen.SetPods, who.Pod, pod}, {bpfgen.SetPrefixes, who.Prefix, true}} {
		r, ok := n.peers.m[datapath.PeerKey{Set: set, Identity: x.identity}]
		if flags&x.flag == 0 || !x.asked || !ok {
			continue
		}
		if r.Rule != 0 || n.port(r, c) {
			return true
		}
	}
	return false
}

func (n *node) port(r datapath.PeerRules, c policygen.Case) bool {
	for length := range 17 {
		key := datapath.PortKey{Ports: r.Ports, Port: c.Port &^ (0xffff >> length), Proto: c.Number, Length: uint8(length)}
		if r.Lengths>>length&1 != 0 && n.ports.m[key] != 0 {
			return true
		}
	}
	return false
}

func (n *node) longest(a netip.Addr) uint64 {
	for bits := 128; bits >= 0; bits-- {
		as16 := netip.AddrFrom16(a.As16())
		masked := maskBits(as16, bits)
		key := datapath.PrefixKeyOf(netip.PrefixFrom(masked, 128))
		key.Length = uint32(bits)
		if id, ok := n.prefixes.m[key]; ok {
			return id
		}
	}
	return 0
}

func maskBits(a netip.Addr, bits int) netip.Addr {
	b := a.As16()
	for i := bits; i < 128; i++ {
		b[i/8] &^= 0x80 >> (i % 8)
	}
	return netip.AddrFrom16(b)
}

var limits = policy.Limits{Peers: 1 << 16, Ports: 1 << 16, Identities: 1 << 16, Prefixes: 1 << 16}

var seedFlag = flag.Uint64("seed", 0, "of the generated worlds; 0: another one each time")

// TestEveryInstantOfAPolicyChange looks at all flows after every single write:
// what passes an end must pass it in the old state or in the new one.
func TestEveryInstantOfAPolicyChange(t *testing.T) {
	for _, full := range []bool{false, true} {
		t.Run(fmt.Sprintf("tables are full=%v", full), func(t *testing.T) {
			worlds := 60
			if testing.Short() {
				worlds = 10
			}
			seed := *seedFlag
			if seed == 0 {
				seed = uint64(time.Now().UnixNano())
			}
			for i := range worlds {
				if err := playInstants(rand.New(rand.NewPCG(seed, uint64(i))), full); err != nil {
					t.Fatalf("seed %d, world %d: %v", seed, i, err)
				}
			}
		})
	}
}

func playInstants(rng *rand.Rand, full bool) error {
	var look func()
	n := newNode(func() { look() })
	look = func() {}
	w := policygen.NewWorld(rng, limits)
	for range 12 {
		w.Step()
	}
	if _, err := n.rec.Apply(w.Model.Plan()); err != nil {
		return err
	}
	for range 10 {
		cases := make([]policygen.Case, 60)
		old := make([][2]bool, len(cases))
		for i := range cases {
			cases[i] = w.Case()
			old[i] = n.ends(cases[i])
		}
		for range 1 + rng.IntN(6) { // as many as are told at once
			w.Step()
		}
		if full { // there is room for what is, and for nothing besides
			n.prefixes.max, n.peers.max = max(1, len(n.prefixes.m)), max(1, len(n.peers.m))
		}
		c := w.Model.Plan()
		after := w.Model.Tables()
		n.prefixes.max, n.peers.max = max(n.prefixes.max, len(after.Prefixes)), max(n.peers.max, len(after.Peers))
		if !full {
			n.prefixes.max, n.peers.max = 0, 0
		}
		var wrong error
		fresh := make([][2]bool, len(cases))
		for i, c := range cases {
			if fresh[i] = [2]bool{true, true}; here(w, c) {
				fresh[i] = w.Ends(c)
			}
		}
		look = func() {
			for i, c := range cases {
				for end, passes := range n.ends(c) {
					if wrong == nil && passes && !old[i][end] && !fresh[i][end] {
						wrong = fmt.Errorf("%+v passes its end %d in between, and neither before nor after\n%v", c, end, w.Trace[len(w.Trace)-3:])
					}
				}
			}
		}
		generations, err := n.rec.Apply(c)
		look = func() {}
		if err != nil {
			return err
		}
		if wrong != nil {
			return wrong
		}
		for i, c := range cases {
			if old[i] == [2]bool{true, true} && fresh[i] != old[i] && !judgedAgain(generations, c) {
				return fmt.Errorf("%+v is not allowed any more, and its flows are not judged again\n%v", c, w.Trace[len(w.Trace)-3:])
			}
		}
	}
	return nil
}

// here: the ends of a case are pods still, or never were.
func here(w *policygen.World, c policygen.Case) bool {
	for _, i := range []int{c.From, c.To} {
		if i >= 0 && w.Pod(i) == nil {
			return false
		}
	}
	return true
}

func judgedAgain(generations map[uint32]uint32, c policygen.Case) bool {
	_, from := generations[uint32(c.From+1)]
	_, to := generations[uint32(c.To+1)]
	return from || to
}

func TestNextGenerationNeverStays(t *testing.T) {
	g := uint32(7)
	seen := []uint32{g}
	for range 1000 {
		g = datapath.NextGeneration(g)
		if slices.Contains(seen[max(0, len(seen)-1):], g) || g == 0 {
			t.Fatal(g)
		}
		seen = append(seen, g)
	}
}
