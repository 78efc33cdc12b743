// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/policy/policygen"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the worlds; 0: by the clock")

var plenty = policy.Limits{Peers: 1 << 20, Ports: 1 << 20, Identities: 1 << 20, Prefixes: 1 << 20}

// tables are a node's as the programs read them.
type tables struct{ policy.Tables }

func newTables() tables {
	return tables{policy.Tables{Ports: map[policy.PortKey]uint32{}, Peers: map[policy.PeerKey]policy.PeerRules{},
		Identities: map[netip.Addr]policy.Identity{}, Prefixes: map[netip.Prefix]uint64{}, Endpoints: map[uint32]policy.Isolation{}}}
}

func (t *tables) apply(c policy.Change) {
	if c.Full {
		*t = newTables()
	}
	put(t.Ports, c.Put.Ports, c.Gone.Ports)
	put(t.Peers, c.Put.Peers, c.Gone.Peers)
	put(t.Identities, c.Put.Identities, c.Gone.Identities)
	put(t.Identities, c.Late, nil)
	put(t.Prefixes, c.Put.Prefixes, c.Gone.Prefixes)
	put(t.Endpoints, c.Put.Endpoints, c.Gone.Endpoints)
}

func put[K comparable, V any](to, from map[K]V, gone []K) {
	for k, v := range from {
		to[k] = v
	}
	for _, k := range gone {
		delete(to, k)
	}
}

// verdict does what bpf/lib/policy.h does.
func (t *tables) verdict(c policygen.Case) string {
	if c.From == c.To && c.From >= 0 {
		return ""
	}
	if c.From >= 0 {
		e := t.Endpoints[uint32(c.From+1)]
		if e.Egress != 0 && t.rule(e.Egress, e.EgressFlags, c.Dst, c) == 0 {
			return "egress"
		}
	}
	if c.To >= 0 && !c.FromNode {
		e := t.Endpoints[uint32(c.To+1)]
		if e.Ingress != 0 && t.rule(e.Ingress, e.IngressFlags, c.Src, c) == 0 {
			return "ingress"
		}
	}
	return ""
}

const (
	anybody = 1 << iota
	anyPod
	pods
	prefixes
)

func (t *tables) rule(set uint64, flags uint16, peer netip.Addr, c policygen.Case) uint32 {
	who := t.Identities[peer]
	isPod := who.Pod > policy.Node
	var ids []uint64
	if flags&anybody != 0 {
		ids = append(ids, policy.Anybody)
	}
	if flags&anyPod != 0 && isPod {
		ids = append(ids, policy.AnyPod)
	}
	if flags&pods != 0 && isPod {
		ids = append(ids, who.Pod)
	}
	if flags&prefixes != 0 {
		if who.Prefix == 0 {
			who.Prefix = t.longest(peer)
		}
		ids = append(ids, who.Prefix)
	}
	for _, id := range ids {
		p, ok := t.Peers[policy.PeerKey{Set: set, Identity: id}]
		if ok && p.Rule != 0 {
			return p.Rule
		}
		for length := 16; length >= 0 && ok; length-- {
			if p.Lengths>>length&1 == 0 {
				continue
			}
			key := policy.PortKey{Ports: p.Ports, Port: c.Port &^ (0xffff >> length), Protocol: c.Number, Length: uint8(length)}
			if rule := t.Ports[key]; rule != 0 {
				return rule
			}
		}
	}
	return 0
}

// longest is the value of the longest prefix as one trie for both families has it.
func (t *tables) longest(a netip.Addr) uint64 {
	bits, id := -1, uint64(0)
	as16 := netip.AddrFrom16(a.As16())
	for p, value := range t.Prefixes {
		n := p.Bits()
		if p.Addr().Is4() {
			n += 96
		}
		wide := netip.PrefixFrom(netip.AddrFrom16(p.Addr().As16()), n)
		if n > bits && contains(wide, as16) {
			bits, id = n, value
		}
	}
	return id
}

// contains compares bits, whatever family they stand for.
func contains(p netip.Prefix, a netip.Addr) bool {
	x, y := p.Addr().As16(), a.As16()
	for i := range p.Bits() {
		if (x[i/8]^y[i/8])>>(7-i%8)&1 != 0 {
			return false
		}
	}
	return true
}

func TestTheModelAgreesWithTheOracle(t *testing.T) { playWorlds(t, 3000, func(*policy.Model) {}) }

// TestTheModelAgreesWhereNumbersCollide: the same where each number is searched for.
func TestTheModelAgreesWhereNumbersCollide(t *testing.T) { playWorlds(t, 600, (*policy.Model).Collide) }

func playWorlds(t *testing.T, worlds int, begin func(*policy.Model)) {
	if testing.Short() {
		worlds /= 20
	}
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	allowed, denied := 0, 0
	for n := range worlds {
		w := policygen.NewWorld(rand.New(rand.NewPCG(seed, uint64(n))), plenty)
		begin(w.Model)
		tab := newTables()
		for range 12 {
			for range 1 + n%3 {
				w.Step()
			}
			tab.apply(w.Model.Plan())
			for range 40 {
				c := w.Case()
				want := w.Verdict(c)
				if got := tab.verdict(c); got != want {
					t.Fatalf("seed %d, world %d: %+v: %q, the oracle says %q\n%s", seed, n, c, got, want, strings.Join(w.Trace, "\n"))
				}
				if want == "" {
					allowed++
				} else {
					denied++
				}
			}
		}
		if d := tab.differs(w.Model.Tables()); d != "" {
			t.Fatalf("seed %d, world %d: changes did not add up: %s\n%s", seed, n, d, strings.Join(w.Trace, "\n"))
		}
	}
	t.Logf("%d flows allowed, %d denied; seed %d", allowed, denied, seed)
	if allowed < denied/20 || denied < allowed/20 {
		t.Error("the generator is one-sided")
	}
}

func (t *tables) differs(want policy.Tables) string {
	for name, n := range map[string][2]int{"ports": {len(t.Ports), len(want.Ports)}, "peers": {len(t.Peers), len(want.Peers)},
		"identities": {len(t.Identities), len(want.Identities)}, "prefixes": {len(t.Prefixes), len(want.Prefixes)}} {
		if n[0] != n[1] {
			return fmt.Sprintf("%s: %d entries, want %d", name, n[0], n[1])
		}
	}
	return ""
}
