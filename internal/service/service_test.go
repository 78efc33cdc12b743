// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func spec(service, protocol string, backends []string) Spec {
	return Spec{Service: service, Protocol: protocol, Backends: backends}
}

func TestInvalidInputNamesFieldAndMend(t *testing.T) {
	ok := []string{"192.168.10.10:5201"}
	for name, tc := range map[string]struct {
		spec Spec
		want []string
	}{
		"no port":            {spec("10.96.0.100", "tcp", ok), []string{"service", "ADDRESS:PORT"}},
		"port zero":          {spec("10.96.0.100:0", "tcp", ok), []string{"service", "1 to 65535"}},
		"port too large":     {spec("10.96.0.100:65536", "tcp", ok), []string{"service", "1 to 65535"}},
		"a name":             {spec("web:80", "tcp", ok), []string{"service", "give the address itself"}},
		"empty":              {spec("", "tcp", ok), []string{"service", "ADDRESS:PORT"}},
		"zone":               {spec("[fe80::1%eth0]:80", "tcp", nil), []string{"service", "without %eth0"}},
		"no brackets":        {spec("fd00::1:80", "tcp", nil), []string{"service", "brackets"}},
		"brackets on IPv4":   {spec("[10.0.0.1]:80", "tcp", nil), []string{"service", "brackets"}},
		"unspecified":        {spec("0.0.0.0:80", "tcp", ok), []string{"service", "choose an unused unicast"}},
		"multicast":          {spec("224.0.0.1:80", "tcp", ok), []string{"service", "choose an unused unicast"}},
		"broadcast":          {spec("255.255.255.255:80", "tcp", ok), []string{"service", "choose an unused unicast"}},
		"loopback":           {spec("127.0.0.1:80", "tcp", ok), []string{"service", "choose an unused unicast"}},
		"protocol":           {spec("10.96.0.100:80", "icmp", ok), []string{"protocol", "none of tcp, udp, sctp"}},
		"family":             {spec("10.96.0.100:80", "tcp", []string{"[fd00::1]:80"}), []string{"backend", "10.96.0.100:80", "family"}},
		"duplicate backend":  {spec("10.96.0.100:80", "tcp", []string{ok[0], ok[0]}), []string{"backend", "twice", "once"}},
		"backend port zero":  {spec("10.96.0.100:80", "tcp", []string{"10.0.0.1:0"}), []string{"backend", "1 to 65535"}},
		"backend is itself":  {spec("10.96.0.100:80", "tcp", []string{"10.96.0.100:80"}), []string{"backend", "itself"}},
		"backend multicast":  {spec("10.96.0.100:80", "tcp", []string{"224.0.0.1:80"}), []string{"backend", "unicast"}},
		"several at once":    {spec("0.0.0.0:80", "x", []string{"10.0.0.1"}), []string{"protocol", "unspecified", "backend"}},
		"too many backends":  {spec("10.96.0.100:80", "tcp", make([]string, MaxBackends+1)), []string{"at most 65535"}},
		"mapped and v4 dup":  {spec("10.96.0.100:80", "tcp", []string{"10.0.0.1:80", "[::ffff:10.0.0.1]:80"}), []string{"twice"}},
		"negative port":      {spec("10.96.0.100:-1", "tcp", ok), []string{"1 to 65535"}},
		"link-local service": {spec("[fe80::1]:80", "tcp", nil), []string{"link-local"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse(tc.spec)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
			if inv := (*InvalidError)(nil); !errors.As(err, &inv) {
				t.Errorf("%v is not an InvalidError", err)
			}
		})
	}
}

func TestParseBothProtocolsWhenNoneIsGiven(t *testing.T) {
	got, err := Parse(Spec{Service: "[fd00::1]:80", Backends: []string{"[fd00::2]:8080"}})
	if err != nil || len(got) != 2 || got[0].Name != "tcp [fd00::1]:80" || got[1].Name != "udp [fd00::1]:80" {
		t.Fatalf("%v, %v", got, err)
	}
}

func TestParseAllRefusesAFrontendGivenTwice(t *testing.T) {
	_, err := ParseAll([]Spec{{Service: "10.0.0.1:80"}, {Service: "10.0.0.1:80", Protocol: "udp"}})
	if err == nil || !strings.Contains(err.Error(), "entry 2") {
		t.Fatal(err)
	}
}

func TestEachMistakeNamesItsEntry(t *testing.T) {
	_, err := ParseAll([]Spec{{Service: "10.0.0.1:80"}, {Service: "10.0.0.2:80", Backends: []string{"x", "y"}}})
	if err == nil || strings.Count(err.Error(), "entry 2: ") != 2 || strings.Count(err.Error(), "\n") != 1 {
		t.Fatal(err)
	}
}

// Applying a plan write by write gives the wanted set, and never shows a
// backend that neither the old nor the new set has.
func TestPlanSlotsOnGeneratedSets(t *testing.T) {
	for range 20000 {
		old := rand.Perm(8)[:rand.IntN(8)]
		want := rand.Perm(8)[:rand.IntN(8)]
		o, w := ids(old), ids(want)
		p := PlanInPlace(o, w)
		if p.Fresh {
			t.Fatalf("%v -> %v: %+v", o, w, p)
		}
		if rand.IntN(2) == 0 {
			p = PlanSlots(o, w)
		}
		got, sorted := slices.Sorted(slices.Values(p.Slots)), slices.Sorted(slices.Values(w))
		if !slices.Equal(got, sorted) {
			t.Fatalf("%v -> %v: %+v", o, w, p)
		}
		if p.Fresh {
			continue
		}
		slots := map[uint32]uint32{}
		for i, id := range o {
			slots[uint32(i)] = id
		}
		for _, sw := range p.Writes {
			slots[sw.Slot] = sw.Backend
		}
		for i, id := range p.Slots {
			if slots[uint32(i)] != id {
				t.Fatalf("%v -> %v: %+v gives %v", o, w, p, slots)
			}
		}
		for _, s := range p.Tail {
			delete(slots, s)
		}
		if len(slots) != len(w) {
			t.Fatalf("%v -> %v: %+v leaves %v", o, w, p, slots)
		}
	}
}

func ids(perm []int) []uint32 {
	out := make([]uint32, len(perm))
	for i, v := range perm {
		out[i] = uint32(v) + 1
	}
	return out
}

func FuzzParseAddrPort(f *testing.F) {
	for _, s := range []string{"10.0.0.1:80", "[fd00::1]:80", "[::ffff:1.2.3.4]:1", ":", "[]:", "%:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := ParseAddrPort("service", s)
		if err == nil && (!a.IsValid() || a.Port() == 0 || a.Addr().Is4In6()) {
			t.Fatalf("%q gave %v", s, a)
		}
	})
}
