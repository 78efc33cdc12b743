// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// nearWorld is a table of places, and those of all flows, without a node around them.
func nearWorld(t *testing.T) *Datapath {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making tables needs root")
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(rlimit.RemoveMemlock())
	specs, err := tableSpecs()
	check(err)
	d := &Datapath{maps: make(map[string]*ebpf.Map)}
	for _, name := range append([]string{bpfgen.PodMapMstCtNearV1, bpfgen.PodMapMstMetaV1}, ctTables...) {
		m, err := ebpf.NewMap(specs[name])
		check(err)
		t.Cleanup(func() { m.Close() })
		d.maps[name] = m
	}
	d.bind()
	return d
}

var (
	nearClient  = netip.MustParseAddrPort("10.0.0.1:40000")
	nearFront   = netip.MustParseAddrPort("10.96.0.1:80")
	nearBackend = netip.MustParseAddrPort("10.0.0.2:8080")
)

// halves are the client's and the backend's half of a flow by nearFront.
func halves(opening uint8) (keys []ctKey, entries []ctEntry) {
	for _, h := range []struct {
		dst, other netip.AddrPort
		role       uint8
	}{{nearFront, nearBackend, bpfgen.CTPreNAT}, {nearBackend, nearFront, bpfgen.CTPostNAT}} {
		e := ctEntry{Expires: programSecond() + 60, Role: h.role, Backend: 7, Opening: opening, Near: 1}
		e.Opener.Endpoint, e.Responder.Endpoint = 1, 2
		e.Opener.Generation, e.Responder.Generation = 11, 12
		c, dst, o := endOf(nearClient), endOf(h.dst), endOf(h.other)
		e.Other.Src, e.Other.Sport, e.Other.Dst, e.Other.Dport = c.addr, c.port, o.addr, o.port
		keys = append(keys, ctKey{Lo: c.addr, LoPort: c.port, Hi: dst.addr, HiPort: dst.port, Proto: uint8(state.TCP)})
		entries = append(entries, e)
	}
	return keys, entries
}

func (d *Datapath) enterNear(t *testing.T, opening uint8) {
	t.Helper()
	keys, entries := halves(opening)
	err := d.withNear(func(places []nearPlace) error {
		for i := range keys {
			n := &places[nearPlaceOf(&keys[i])].Flows[1]
			n.Key, n.E = keys[i], entries[i]
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// living counts near entries by role, and says whether a client's half picks another backend.
func (d *Datapath) living(t *testing.T) (byRole map[uint8]int, left bool) {
	t.Helper()
	byRole = make(map[uint8]int)
	err := d.eachNear(func(_ *nearFlow, was nearFlow) {
		byRole[was.E.Role]++
		left = left || was.E.Backend == bpfgen.BackendLeft
	})
	if err != nil {
		t.Fatal(err)
	}
	return byRole, left
}

func nearService() state.Frontend {
	return state.Frontend{AddrPort: nearFront, Protocol: state.TCP}
}

func TestNearFlowsOfABackendThatIsGoneEndLate(t *testing.T) {
	d := nearWorld(t)
	d.enterNear(t, bpfgen.CTAnswered)
	var dep Departures
	dep.Gone(state.Backend{AddrPort: nearBackend, Protocol: state.TCP})
	clients, err := d.Clients(&dep)
	if err != nil || !clients[Connection{nearClient, nearFront}] {
		t.Errorf("clients %v, %v: want the one of the flow", clients, err)
	}
	before, _ := d.GetMeta()
	// Early, the client's reset must still find its way.
	if n, err := d.ForgetFlows(&dep, false); n != 0 || err != nil {
		t.Errorf("early: %d forgotten, %v", n, err)
	}
	if byRole, _ := d.living(t); len(byRole) != 2 {
		t.Errorf("early: %v are left, want both halves", byRole)
	}
	if n, err := d.ForgetFlows(&dep, true); n != 2 || err != nil {
		t.Errorf("late: %d forgotten, %v", n, err)
	}
	if byRole, _ := d.living(t); len(byRole) != 0 {
		t.Errorf("late: %v are left", byRole)
	}
	if after, _ := d.GetMeta(); after.NextGeneration == before.NextGeneration {
		t.Error("what the programs keep of the flows still holds")
	}
}

func TestNearFlowsOfABackendThatLeft(t *testing.T) {
	for name, c := range map[string]struct {
		opening uint8
		left    bool
	}{"half-open": {bpfgen.CTOpeningInPlace, true}, "established": {bpfgen.CTAnswered, false}} {
		t.Run(name, func(t *testing.T) {
			d := nearWorld(t)
			d.enterNear(t, c.opening)
			var dep Departures
			dep.Left(nearService(), nearBackend, false)
			if _, err := d.ForgetFlows(&dep, true); err != nil {
				t.Fatal(err)
			}
			byRole, left := d.living(t)
			if len(byRole) != 2 || left != c.left {
				t.Errorf("%v are left, picks another backend: %v, want both halves and %v", byRole, left, c.left)
			}
		})
	}
}

// Programs that knew of no places entered flows elsewhere; a SYN that is entered at once must know.
func TestAnUpgradeTellsThePlacesOfOlderFlows(t *testing.T) {
	for where, responder := range map[string]uint32{"this node": 2, "another node": 0} {
		t.Run(where, func(t *testing.T) { olderFlows(t, responder) })
	}
}

func olderFlows(t *testing.T, responder uint32) {
	d := nearWorld(t)
	keys, entries := halves(bpfgen.CTAnswered)
	for i := range keys {
		entries[i].Near, entries[i].Responder.Endpoint = 0, responder
		if err := d.maps[bpfgen.PodMapMstCtV1].Put(keys[i], entries[i]); err != nil {
			t.Fatal(err)
		}
	}
	marked := func() (n int) {
		err := d.withNear(func(places []nearPlace) error {
			for i := range places {
				if places[i].Flows[0].Others != 0 {
					n++
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if err := d.fillNear(); err != nil {
		t.Fatal(err)
	}
	if n := marked(); n != 2 {
		t.Errorf("%d places were told, want those of both halves", n)
	}
	// Once: from then on the programs themselves tell.
	keys[0].HiPort++
	if err := d.maps[bpfgen.PodMapMstCtV1].Put(keys[0], entries[0]); err != nil {
		t.Fatal(err)
	}
	if err := d.fillNear(); err != nil || marked() != 2 {
		t.Errorf("told again: %d places, %v", marked(), err)
	}
}

// Programs of another build may have entered flows without telling their places: each is looked for everywhere. Where
// no programs have been yet, there are none.
func TestFlowsOfAnotherBuildAreLookedForEverywhere(t *testing.T) {
	d := tables(t)
	told := func() (n int) {
		err := d.withNear(func(places []nearPlace) error {
			for i := range places {
				if int32(places[i].Flows[1].Others-programSecond()) > nearMemory-10 {
					n++
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, x := range []struct {
		build [32]byte
		want  int
	}{{[32]byte{}, 0}, {Build(), 0}, {[32]byte{1}, bpfgen.NearPlaces}} {
		meta, err := d.GetMeta()
		if err != nil {
			t.Fatal(err)
		}
		meta.Build = x.build
		if err := d.PutMeta(meta); err != nil {
			t.Fatal(err)
		}
		if err := d.EnsurePrograms(state.Endpoint{}); err != nil {
			t.Fatal(err)
		}
		if got := told(); got != x.want {
			t.Errorf("after build %x: %d places are told, want %d", x.build[:2], got, x.want)
		}
	}
}

// Older programs said for good that some flow was shadowed; what they entered lives on under this binary's.
func TestShadowsOfOlderProgramsAreRemembered(t *testing.T) {
	for said, remembered := range map[uint32]bool{0: false, shadowedOnce: true} {
		d := tables(t)
		if err := d.maps[bpfgen.PodMapMstFactsV1].Put(uint32(0), bpfgen.PodFacts{Shadowed: said, EdgeTurn: bpfgen.EdgeTurnOut}); err != nil {
			t.Fatal(err)
		}
		if err := d.PutMeta(Meta{Build: [32]byte{1}}); err != nil {
			t.Fatal(err)
		}
		if err := d.EnsurePrograms(state.Endpoint{}); err != nil {
			t.Fatal(err)
		}
		var facts bpfgen.PodFacts
		if err := d.maps[bpfgen.PodMapMstFactsV1].Lookup(uint32(0), &facts); err != nil {
			t.Fatal(err)
		}
		if left := int32(facts.Shadowed - programSecond()); facts.EdgeTurn != bpfgen.EdgeTurnOut || remembered != (left > nearMemory-10) {
			t.Errorf("said %d: %+v, for %d s more", said, facts, left)
		}
	}
}

// However fast they change, no generation comes again.
func TestNoGenerationComesAgain(t *testing.T) {
	seen := map[uint32]bool{}
	for g := uint32(7); len(seen) < 100_000; g = NextGeneration(g) {
		if seen[g] {
			t.Fatalf("%#x comes again after %d others", g, len(seen))
		}
		seen[g] = true
	}
}
