// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

func pools(t *testing.T, list ...Pool) []Pool {
	t.Helper()
	if err := Normalize(list); err != nil {
		t.Fatal(err)
	}
	return list
}

func subnet(s string) Pool { return Pool{Subnet: netip.MustParsePrefix(s)} }

func allocate(t *testing.T, s Store, owner string, p []Pool, want ...string) string {
	t.Helper()
	var addrs []netip.Addr
	for _, w := range want {
		addrs = append(addrs, netip.MustParseAddr(w))
	}
	list, err := s.Allocate(owner, p, addrs, nil)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, a := range list {
		out = append(out, a.Prefix.String()+" via "+a.Gateway.String())
	}
	return strings.Join(out, ", ")
}

func TestDualStackStartsBehindTheGateway(t *testing.T) {
	s := At(filepath.Join(t.TempDir(), "ipam"))
	p := pools(t, subnet("10.1.0.0/24"), subnet("fd00::/64"))
	want := "10.1.0.2/24 via 10.1.0.1, fd00::2/64 via fd00::1"
	if got := allocate(t, s, "a", p); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestFreedAddressRestsUntilThePoolCameAround(t *testing.T) {
	s := At(t.TempDir())
	p := pools(t, subnet("10.1.0.0/29")) // .2 to .6
	var got []string
	for i := range 6 {
		got = append(got, strings.Fields(allocate(t, s, fmt.Sprint(i), p))[0])
		if err := s.Release(fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	want := "10.1.0.2/29 10.1.0.3/29 10.1.0.4/29 10.1.0.5/29 10.1.0.6/29 10.1.0.2/29"
	if strings.Join(got, " ") != want {
		t.Errorf("got %v, want %s", got, want)
	}
}

func TestExhaustionNamesThePoolAndTakesNothing(t *testing.T) {
	s := At(t.TempDir())
	p := pools(t, subnet("10.1.0.0/24"), subnet("fd00::/127"))
	allocate(t, s, "a", p)
	if err := s.Room(p); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "fd00::/127") {
		t.Errorf("Room: %v", err)
	}
	if _, err := s.Allocate("b", p, nil, nil); !errors.Is(err, ErrExhausted) {
		t.Errorf("got %v", err)
	}
	if owners, _ := s.Owners(); len(owners) != 2 {
		t.Errorf("allocations after a failure: %v", owners)
	}
}

// An exclusion may be larger than any search, and lie where the search begins.
func TestALargeExclusionIsPassedAtOnce(t *testing.T) {
	for _, c := range []struct{ subnet, except, want string }{
		{"fd00:1::/64", "fd00:1::/96", "fd00:1::1:0:0"},
		{"10.0.0.0/8", "10.0.0.0/11", "10.32.0.0"},
		{"10.0.0.0/8", "10.16.0.0/12 10.0.0.0/11", "10.32.0.0"},
	} {
		s, p := At(t.TempDir()), pools(t, Pool{Subnet: netip.MustParsePrefix(c.subnet), Exclude: strings.Fields(c.except)})
		if err := s.Room(p); err != nil {
			t.Errorf("%s without %s: Room: %v", c.subnet, c.except, err)
		}
		list, err := s.Allocate("a", p, nil, nil)
		if err != nil || list[0].Prefix.Addr().String() != c.want {
			t.Errorf("%s without %s: got %v, %v, want %s", c.subnet, c.except, list, err, c.want)
		}
	}
}

func TestAPoolWithExclusionsIsGivenToItsLastAddress(t *testing.T) {
	for _, c := range []struct{ subnet, except, want string }{
		{"10.1.0.0/29", "10.1.0.4/30", "10.1.0.2 10.1.0.3"},
		{"10.1.0.0/29", "10.1.0.2 10.1.0.5", "10.1.0.3 10.1.0.4 10.1.0.6"},
		{"255.255.255.248/29", "255.255.255.252/30", "255.255.255.250 255.255.255.251"},
		{"10.1.0.0/24", "10.1.0.0/25 10.1.0.128/25", ""},
	} {
		s, p := At(t.TempDir()), pools(t, Pool{Subnet: netip.MustParsePrefix(c.subnet), Exclude: strings.Fields(c.except)})
		if err := s.Room(p); (err == nil) != (c.want != "") {
			t.Errorf("%s without %s: Room: %v", c.subnet, c.except, err)
		}
		for range 2 { // what is freed is given again, from the start
			var got []string
			list, err := s.Allocate("a", p, nil, nil)
			for ; err == nil; list, err = s.Allocate("a", p, nil, nil) {
				got = append(got, list[0].Prefix.Addr().String())
			}
			if !errors.Is(err, ErrExhausted) || strings.Join(got, " ") != c.want {
				t.Errorf("%s without %s: got %v, then %v, want %s", c.subnet, c.except, got, err, c.want)
			}
			if err := s.Release("a"); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestNamedAddresses(t *testing.T) {
	s := At(t.TempDir())
	p := pools(t, Pool{Subnet: netip.MustParsePrefix("10.1.0.0/24"), Exclude: []string{"10.1.0.64/26"}})
	if got := allocate(t, s, "a", p, "10.1.0.9"); got != "10.1.0.9/24 via 10.1.0.1" {
		t.Error(got)
	}
	for addr, part := range map[string]string{"10.1.0.9": "taken by a", "10.1.0.1": "gateway", "10.1.0.70": "excluded", "10.1.0.0": "outside", "10.1.0.255": "outside", "10.2.0.1": "none of the pools"} {
		_, err := s.Allocate("b", p, []netip.Addr{netip.MustParseAddr(addr)}, nil)
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s: got %v, want something with %q", addr, err, part)
		}
	}
}

// Who asks for one family's address has the other's all the same.
func TestNamedAddressOfOneFamilyAndTheNextFreeOfTheOther(t *testing.T) {
	s := At(t.TempDir())
	p := pools(t, subnet("10.1.0.0/24"), subnet("fd00::/64"))
	for want, got := range map[string]string{
		"10.1.0.9": "10.1.0.9/24 via 10.1.0.1, fd00::2/64 via fd00::1",
		"fd00::9":  "fd00::9/64 via fd00::1, 10.1.0.2/24 via 10.1.0.1",
	} {
		if a := allocate(t, s, want, p, want); a != got {
			t.Errorf("%s: %s, want %s", want, a, got)
		}
	}
}

func TestDamagedCursorStartsAnew(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("nonsense", filepath.Join(dir, "last-10.1.0.0_24")); err != nil {
		t.Fatal(err)
	}
	if got := allocate(t, At(dir), "a", pools(t, subnet("10.1.0.0/24"))); !strings.HasPrefix(got, "10.1.0.2/") {
		t.Error(got)
	}
}

func TestManyAtOnceGetDifferentAddresses(t *testing.T) {
	s := At(t.TempDir())
	p := pools(t, subnet("10.1.0.0/24"))
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			if _, err := s.Allocate(fmt.Sprint(i), p, nil, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if owners, _ := s.Owners(); len(owners) != 100 {
		t.Errorf("%d addresses for 100 owners", len(owners))
	}
}

func TestBadPoolsFailByName(t *testing.T) {
	for text, list := range map[string][]Pool{
		"is not a network": {subnet("10.1.0.1/24")},
		"overlap":          {subnet("10.1.0.0/16"), subnet("10.1.2.0/24")},
		"gateway":          {{Subnet: netip.MustParsePrefix("10.1.0.0/24"), Gateway: netip.MustParseAddr("10.2.0.1")}},
		"before start":     {{Subnet: netip.MustParsePrefix("10.1.0.0/24"), Start: netip.MustParseAddr("10.1.0.9"), End: netip.MustParseAddr("10.1.0.8")}},
		"pools is empty":   {},
	} {
		if err := Normalize(list); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("got %v, want something with %q", err, text)
		}
	}
}

// What cannot be read is told by its own text, and what is not read by its name.
func TestAPoolIsItsSubnetOrAnObject(t *testing.T) {
	for text, want := range map[string]string{
		`"10.1.0.0/24"`: "10.1.0.0/24 []",
		`{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.9", "Gateway": "10.1.0.8"}`: "10.1.0.0/24 [Gateway rangeStart]",
		`"10.1.0.0"`: `pool "10.1.0.0" is not a network: write one such as 10.1.0.0/24 or fd00::/64`,
		`7`:          "pool 7 is neither a network in quotes nor an object with subnet",
		`{"subnet": "10.1.0.0/24", "start": "ten"}`: `start of a pool: ParseAddr("ten"): unable to parse IP`,
	} {
		var p Pool
		got := ""
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			got = err.Error()
		} else {
			got = fmt.Sprint(p.Subnet, p.Unknown())
		}
		if got != want {
			t.Errorf("%s: got %s, want %s", text, got, want)
		}
	}
}

// Who can open the directory can lock it, and hold up for good who asks for that lock.
func TestOnlyItsOwnerCanLockTheDirectory(t *testing.T) {
	s := At(filepath.Join(t.TempDir(), "ipam"))
	p := pools(t, subnet("10.1.0.0/24"))
	for i, earlier := range []bool{false, true} {
		if earlier {
			if err := os.Chmod(s.dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		allocate(t, s, fmt.Sprint(i), p)
		if info, err := os.Stat(s.dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("made by an earlier version: %t: %v, %v", earlier, info.Mode(), err)
		}
	}
}

// On a full disk an address may be taken, and its pool's place in the order not be kept.
func TestAFailedAllocationLeavesNothing(t *testing.T) {
	s := At(filepath.Join(t.TempDir(), "ipam"))
	p := pools(t, subnet("10.1.0.0/24"), subnet("fd00::/64"))
	if err := os.MkdirAll(filepath.Join(s.dir, cursorPrefix+"fd00::_64-new", "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if list, err := s.Allocate("a", p, nil, nil); err == nil {
		t.Fatalf("allocated %v", list)
	}
	if all, err := s.Owners(); err != nil || len(all) > 0 {
		t.Errorf("left: %v, %v", all, err)
	}
}

// IPv4 has a broadcast address at its end, IPv6 none.
func TestAPoolIsGivenToItsLastAddress(t *testing.T) {
	for text, want := range map[string]string{"10.1.0.0/29": "10.1.0.6", "fd00::/126": "fd00::3", "10.1.0.0/31": "10.1.0.1", "fd00::/127": "fd00::1"} {
		p := pools(t, subnet(text))
		if p[0].End.String() != want || !p[0].Whole() {
			t.Errorf("%s ends at %s, want %s (whole: %t)", text, p[0].End, want, p[0].Whole())
		}
	}
}

// What is freed is told, and places in the order of a pool are nobody's addresses.
func TestWhatIsFreedIsTold(t *testing.T) {
	s := At(t.TempDir())
	p := pools(t, subnet("10.1.0.0/24"), subnet("fd00::/64"))
	for _, owner := range []string{"a", "b", "c"} {
		allocate(t, s, owner, p)
	}
	freed, err := s.ReleaseWhere(func(owner string) bool { return owner != "b" })
	slices.SortFunc(freed, netip.Addr.Compare)
	if got := fmt.Sprint(freed); err != nil || got != "[10.1.0.2 10.1.0.4 fd00::2 fd00::4]" {
		t.Errorf("freed %s, %v", got, err)
	}
	left, err := s.Owners()
	if want := (map[netip.Addr]string{netip.MustParseAddr("10.1.0.3"): "b", netip.MustParseAddr("fd00::3"): "b"}); err != nil || !maps.Equal(left, want) {
		t.Errorf("left %v, %v; want %v", left, err, want)
	}
}

// Two calls for one container that come at once free its address twice, and another may have it in between.
func TestAnAddressThatAnotherHasByNowIsNotReleased(t *testing.T) {
	s := At(t.TempDir())
	p := pools(t, subnet("10.1.0.0/24"))
	allocate(t, s, "a", p, "10.1.0.9")
	done := make(chan error, 1)
	_, err := s.ReleaseWhere(func(owner string) bool {
		go func() {
			err := s.Release("a")
			_, taken := s.Allocate("b", p, []netip.Addr{netip.MustParseAddr("10.1.0.9")}, nil)
			done <- errors.Join(err, taken)
		}()
		select {
		case err := <-done:
			done <- err
		case <-time.After(100 * time.Millisecond): // they wait for this one's end
		}
		return owner == "a"
	})
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	if owner := s.Owner(netip.MustParseAddr("10.1.0.9")); owner != "b" {
		t.Errorf("the address is of %q, want b, who has got it", owner)
	}
}

// DEL where there was never an ADD leaves nothing.
func TestReleaseMakesNothing(t *testing.T) {
	s := At(filepath.Join(t.TempDir(), "ipam"))
	if err := s.Release("a"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(s.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a directory was made: %v", err)
	}
}

func areThey(owner string) bool { return owner == "them" || owner == "elsewhere" }

// A pool that has given nothing yet looks at who has addresses of it; once, until it is told to look again.
func TestWhatOthersHaveIsReserved(t *testing.T) {
	s := At(filepath.Join(t.TempDir(), "ipam"))
	p := pools(t, subnet("10.1.0.0/29"), subnet("fd00::/64"))
	asked := 0
	addr := netip.MustParseAddr
	have := map[netip.Addr]string{addr("10.1.0.2"): "them", addr("fd00::2"): "them", addr("10.2.0.2"): "elsewhere"}
	others := func() (map[netip.Addr]string, error) { asked++; return have, nil }
	given := func(owner string, p []Pool, times int, want ...string) {
		t.Helper()
		list, err := s.Allocate(owner, p, nil, others)
		var got []string
		for _, a := range list {
			got = append(got, a.Prefix.Addr().String())
		}
		if err != nil || !slices.Equal(got, want) || asked != times {
			t.Errorf("given %q, %v, and others were asked %d times; want %q, %d", got, err, asked, want, times)
		}
	}
	given("a", p, 1, "10.1.0.3", "fd00::3")
	given("b", p, 1, "10.1.0.4", "fd00::4")
	have[addr("10.1.0.3")], have[addr("10.1.0.5")] = "them", "them"
	delete(have, addr("10.1.0.2"))
	if err := s.LookAgain(areThey); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Owners(); err != nil || len(got) != 4 {
		t.Errorf("until others are asked again, given are %v, %v", got, err)
	}
	given("c", p, 2, "10.1.0.6", "fd00::5")
	if was, has := s.Owner(addr("10.1.0.2")), s.Owner(addr("10.1.0.3")); was != "" || has != "a" {
		t.Errorf("10.1.0.2, which is nobody's any more, is of %q; 10.1.0.3, which a has got, of %q", was, has)
	}
	if s.Owner(addr("fd00::2")) != "them" {
		t.Error("fd00::2 is theirs no more")
	}
	given("d", append(p, pools(t, subnet("10.2.0.0/29"))...), 3, "10.1.0.2", "fd00::6") // a new pool beside them
	if owner := s.Owner(addr("10.2.0.2")); owner != "elsewhere" {
		t.Errorf("10.2.0.2 is of %q", owner)
	}
	failed := errors.New("nobody can tell")
	if _, err := s.Allocate("e", pools(t, subnet("10.3.0.0/29")), nil, func() (map[netip.Addr]string, error) { return nil, failed }); !errors.Is(err, failed) {
		t.Errorf("nobody could tell: %v", err)
	}
}

// Whenever somebody has it looked again, nobody gets what others have.
func TestNobodyGetsWhatOthersHaveWhileItIsLookedAgain(t *testing.T) {
	s := At(filepath.Join(t.TempDir(), "ipam"))
	p := pools(t, subnet("10.1.0.0/29"))
	theirs := netip.MustParseAddr("10.1.0.4")
	others := func() (map[netip.Addr]string, error) { return map[netip.Addr]string{theirs: "them"}, nil }
	stop, done := make(chan struct{}), make(chan error)
	go func() {
		var err error
		for err == nil {
			select {
			case <-stop:
				done <- nil
				return
			default:
				err = s.LookAgain(areThey)
			}
		}
		done <- err
	}()
	for range 500 {
		list, err := s.Allocate("a", p, nil, others)
		if err == nil && list[0].Prefix.Addr() == theirs {
			t.Error("it was given")
			break
		}
		if err = errors.Join(err, s.Release("a")); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	if err := <-done; err != nil {
		t.Error(err)
	}
}
