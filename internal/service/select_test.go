// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/state"
)

// be makes a backend from words: its number, then conditions and hints.
func be(words string) state.ServiceBackend {
	fields := strings.Fields(words)
	n := fields[0]
	text := "10.0.0." + n + ":80"
	if rest, ok := strings.CutPrefix(n, "six"); ok {
		text = "[fd00::" + rest + "]:80"
	}
	b := state.ServiceBackend{AddrPort: netip.MustParseAddrPort(text)}
	for _, w := range fields[1:] {
		switch {
		case w == "ready":
			b.Ready, b.Serving = true, true
		case w == "serving":
			b.Serving = true
		case w == "terminating":
			b.Terminating = true
		case w == "local":
			b.Local = true
		case strings.HasPrefix(w, "zone="):
			b.ForZones = append(b.ForZones, w[5:])
		case strings.HasPrefix(w, "node="):
			b.ForNodes = append(b.ForNodes, w[5:])
		}
	}
	return b
}

func numbers(list []netip.AddrPort) string {
	var out []string
	for _, a := range list {
		text := a.Addr().String()
		out = append(out, text[strings.LastIndexAny(text, ".:")+1:])
	}
	return strings.Join(out, " ")
}

func TestSelect(t *testing.T) {
	for name, tc := range map[string]struct {
		backends       []string
		cluster, local string
		any            bool
	}{
		"no endpoints at all": {},
		// EndpointConditions: "ready ... A nil value should be interpreted as true"; only ready ones get traffic.
		"ready ones only":                      {[]string{"1 ready", "2", "3 serving"}, "1", "", true},
		"not ready and not terminating is out": {[]string{"1 serving", "2"}, "", "", false},
		// KEP-1669: terminating ones are used when none is ready.
		"terminating is out while one is ready":     {[]string{"1 ready", "2 serving terminating local"}, "1", "2", true},
		"terminating is used when none is ready":    {[]string{"1", "2 serving terminating"}, "2", "", true},
		"terminating that serves no more is out":    {[]string{"1 terminating", "2 terminating local"}, "", "", false},
		"local: its own terminating when none here": {[]string{"1 ready", "2 serving terminating local", "3 serving terminating"}, "1", "2", true},
		"local: ready here before terminating here": {[]string{"1 ready local", "2 serving terminating local"}, "1", "1", true},
		"all terminating, one here":                 {[]string{"1 serving terminating local", "2 serving terminating"}, "1 2", "1", true},
		// Service API: internalTrafficPolicy Local "dropping packets if there are no local endpoints".
		"none here": {[]string{"1 ready", "2 ready"}, "1 2", "", true},
		// KEP-2433: hints count when every ready endpoint has them and one is for this zone.
		"zone hints":                             {[]string{"1 ready zone=a", "2 ready zone=b", "3 ready zone=a zone=b"}, "1 3", "", true},
		"one without hints voids them":           {[]string{"1 ready zone=a", "2 ready"}, "1 2", "", true},
		"none for this zone voids them":          {[]string{"1 ready zone=b", "2 ready zone=c"}, "1 2", "", true},
		"hints of those not ready do not matter": {[]string{"1 ready zone=a", "2 ready zone=b", "3", "4 serving terminating"}, "1", "", true},
		"the fallback does not look at hints":    {[]string{"1 serving terminating zone=b", "2 serving terminating zone=a"}, "1 2", "", true},
		"local does not look at hints":           {[]string{"1 ready local zone=b", "2 ready zone=a"}, "2", "1", true},
		// KEP-3015: hints for nodes come before those for zones.
		"node hints":                       {[]string{"1 ready node=n1 zone=a", "2 ready node=n2 zone=a"}, "1", "", true},
		"no node hint for this one: zones": {[]string{"1 ready node=n3 zone=b", "2 ready node=n2 zone=a"}, "2", "", true},
		"one without a node hint: zones":   {[]string{"1 ready node=n1 zone=b", "2 ready zone=a"}, "2", "", true},
		// EndpointSlice: "an endpoint may temporarily appear in more than one slice".
		"twice, the better condition counts":      {[]string{"1", "1 ready", "1 serving terminating"}, "1", "", true},
		"twice, the better one came first":        {[]string{"1 ready", "1", "2 ready", "2 serving terminating"}, "1 2", "", true},
		"twice, terminating before neither":       {[]string{"1 serving terminating", "1", "2", "2 serving terminating"}, "1 2", "", true},
		"twice, serving is not terminating":       {[]string{"1 serving terminating", "1 serving", "2 serving terminating", "2 terminating"}, "1 2", "", true},
		"twice in the same condition":             {[]string{"1 ready", "1 ready"}, "1", "", true},
		"the other family is not this frontend's": {[]string{"1 ready", "six7 ready"}, "1", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			var list []state.ServiceBackend
			for _, w := range tc.backends {
				list = append(list, be(w))
			}
			s := Select(list, false, Node{Name: "n1", Zone: "a"})
			if numbers(s.Cluster) != tc.cluster || numbers(s.Local) != tc.local || s.Any != tc.any {
				t.Errorf("cluster %q local %q any %v; want %q %q %v", numbers(s.Cluster), numbers(s.Local), s.Any, tc.cluster, tc.local, tc.any)
			}
		})
	}
}

func TestHintsMeanNothingToANodeWithoutZone(t *testing.T) {
	s := Select([]state.ServiceBackend{be("1 ready zone=a"), be("2 ready zone=")}, false, Node{Name: "n1"})
	if numbers(s.Cluster) != "1 2" {
		t.Error(numbers(s.Cluster))
	}
}

// whole is a Service with every kind of frontend, of both families.
func whole(name string, backends ...string) state.Service {
	port := state.ServicePort{Name: "http", Protocol: state.TCP, Frontends: []state.ServiceFrontend{
		{Kind: state.ClusterIP, AddrPort: netip.MustParseAddrPort("10.96.0.1:80")},
		{Kind: state.ClusterIP, AddrPort: netip.MustParseAddrPort("[fd96::1]:80")},
		{Kind: state.NodePort, AddrPort: netip.MustParseAddrPort("0.0.0.0:30080")},
		{Kind: state.ExternalIP, AddrPort: netip.MustParseAddrPort("192.0.2.1:80")},
		{Kind: state.LoadBalancer, AddrPort: netip.MustParseAddrPort("192.0.2.2:80")},
	}}
	for _, w := range backends {
		port.Backends = append(port.Backends, be(w))
	}
	return state.Service{ServiceID: state.ServiceID{Owner: state.OwnerKubernetes, Namespace: "default", Name: name}, Ports: []state.ServicePort{port}}
}

func describe(list []state.Binding) []string {
	var out []string
	for _, b := range list {
		text := fmt.Sprintf("%v %v:", b.Kind, b.Frontend.AddrPort)
		for _, w := range []struct {
			is   bool
			word string
		}{{b.Outside, " outside"}, {b.SplitOutside, " split"}, {b.KeepSource, " keeps"}, {b.Drop, " drops"}, {len(b.SourceRanges) > 0, " ranges"}} {
			if w.is {
				text += w.word
			}
		}
		out = append(out, text+" ["+numbers(b.Backends)+"]")
	}
	return out
}

func TestBindByPolicy(t *testing.T) {
	for name, tc := range map[string]struct {
		edit     func(s *state.Service)
		backends []string
		want     []string
	}{
		"policy Cluster": {func(*state.Service) {}, []string{"1 ready local", "2 ready", "six3 ready"}, []string{
			"ClusterIP 10.96.0.1:80: [1 2]", "ClusterIP [fd96::1]:80: [3]", "NodePort 0.0.0.0:30080: [1 2]",
			"ExternalIP 192.0.2.1:80: [1 2]", "LoadBalancer 192.0.2.2:80: [1 2]"}},
		// internalTrafficPolicy is about the cluster's own address alone.
		"internal Local": {func(s *state.Service) { s.Internal = state.PolicyLocal }, []string{"1 ready local", "2 ready", "six3 ready"}, []string{
			"ClusterIP 10.96.0.1:80: [1]", "ClusterIP [fd96::1]:80: drops []", "NodePort 0.0.0.0:30080: [1 2]",
			"ExternalIP 192.0.2.1:80: [1 2]", "LoadBalancer 192.0.2.2:80: [1 2]"}},
		// externalTrafficPolicy Local binds clients from outside; those here use the external addresses as if it were Cluster.
		"external Local": {func(s *state.Service) { s.External = state.PolicyLocal }, []string{"1 ready local", "2 ready"}, []string{
			"ClusterIP 10.96.0.1:80: [1 2]", "ClusterIP [fd96::1]:80: []",
			"NodePort 0.0.0.0:30080: split [1 2]", "NodePort 0.0.0.0:30080: outside keeps [1]",
			"ExternalIP 192.0.2.1:80: split [1 2]", "ExternalIP 192.0.2.1:80: outside keeps [1]",
			"LoadBalancer 192.0.2.2:80: split [1 2]", "LoadBalancer 192.0.2.2:80: outside keeps [1]"}},
		"external Local, none here": {func(s *state.Service) {
			s.External = state.PolicyLocal
			s.Ports[0].Frontends = s.Ports[0].Frontends[2:3]
		}, []string{"2 ready"}, []string{
			"NodePort 0.0.0.0:30080: split [2]", "NodePort 0.0.0.0:30080: outside keeps drops []"}},
		// Without any endpoint there is nothing to wait for: it refuses.
		"Local, no endpoint anywhere": {func(s *state.Service) {
			s.External, s.Internal = state.PolicyLocal, state.PolicyLocal
			s.Ports[0].Frontends = append(s.Ports[0].Frontends[:1], s.Ports[0].Frontends[2])
		}, nil, []string{
			"ClusterIP 10.96.0.1:80: []", "NodePort 0.0.0.0:30080: split []", "NodePort 0.0.0.0:30080: outside keeps []"}},
		// loadBalancerSourceRanges are about the load balancer's address alone.
		"source ranges": {func(s *state.Service) {
			s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
			s.Ports[0].Frontends = s.Ports[0].Frontends[3:]
		}, []string{"1 ready"}, []string{"ExternalIP 192.0.2.1:80: [1]", "LoadBalancer 192.0.2.2:80: ranges [1]"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := whole("web", tc.backends...)
			tc.edit(&s)
			list, errs := Bind(s, Node{})
			if len(errs) > 0 {
				t.Fatal(errs)
			}
			if got := describe(list); !slices.Equal(got, tc.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tc.want, "\n"))
			}
		})
	}
}

// What is wrong with one part leaves the rest in force, and is named.
func TestBindNamesWhatItLeavesOut(t *testing.T) {
	s := whole("web", "1 ready")
	s.Ports[0].Backends = append(s.Ports[0].Backends, state.ServiceBackend{AddrPort: netip.MustParseAddrPort("127.0.0.1:80"), Ready: true})
	s.Ports[0].Frontends = append(s.Ports[0].Frontends, state.ServiceFrontend{Kind: state.ExternalIP, AddrPort: netip.MustParseAddrPort("224.0.0.1:80")},
		state.ServiceFrontend{Kind: state.NodePort, AddrPort: netip.MustParseAddrPort("10.0.0.1:80")})
	s.Ports[0].Frontends = append(s.Ports[0].Frontends, state.ServiceFrontend{Kind: state.ExternalIP, AddrPort: netip.MustParseAddrPort("127.0.0.9:80")})
	s.Ports = append(s.Ports, state.ServicePort{Name: "odd", Protocol: 1, Frontends: s.Ports[0].Frontends[:1]})
	s.Affinity = 48 * time.Hour
	list, errs := Bind(s, Node{})
	if len(list) != 5 || numbers(list[0].Backends) != "1" || list[0].Affinity != 24*time.Hour {
		t.Errorf("%v", describe(list))
	}
	text := fmt.Sprint(errs)
	for _, word := range []string{"127.0.0.1:80", "127.0.0.9:80", "224.0.0.1:80", "10.0.0.1", `"odd"`, "48h"} {
		if !strings.Contains(text, word) {
			t.Errorf("%s does not say %s", text, word)
		}
	}
}

// The most that is allowed is allowed.
func TestBindAtItsLimits(t *testing.T) {
	s := whole("web")
	s.Affinity = MaxAffinity
	for i := range MaxBackends {
		a := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		s.Ports[0].Backends = append(s.Ports[0].Backends, state.ServiceBackend{AddrPort: netip.AddrPortFrom(a, 80), Ready: true})
	}
	list, errs := Bind(s, Node{})
	if len(errs) > 0 || len(list) != 5 || len(list[0].Backends) != MaxBackends {
		t.Fatalf("%d bindings, %v", len(list), errs)
	}
	s.Ports[0].Backends = append(s.Ports[0].Backends, be("1 ready"))
	if list, errs := Bind(s, Node{}); len(list) != 5 || len(list[0].Backends) != MaxBackends || len(errs) != 1 {
		t.Errorf("one backend more: %d bindings, %v", len(list), errs)
	}
	for i := range s.Ports[0].Backends { // half of them of the other family: no frontend has too many
		if i%2 == 0 {
			s.Ports[0].Backends[i].AddrPort = netip.AddrPortFrom(netip.AddrFrom16([16]byte{0xfd, 14: byte(i >> 8), 15: byte(i)}), 80)
		}
	}
	if list, errs := Bind(s, Node{}); len(list) != 5 || len(list[0].Backends) != MaxBackends/2+1 || len(errs) != 0 {
		t.Errorf("of both families: %d bindings, %v", len(list), errs)
	}
}

// All frontends of a port share affinity, and no two ports do.
func TestGroups(t *testing.T) {
	s := whole("web", "1 ready")
	s.Ports = append(s.Ports, state.ServicePort{Name: "dns", Protocol: state.UDP, Frontends: s.Ports[0].Frontends})
	// Where one name ends and the next begins counts.
	one := groupOf(state.ServiceID{Namespace: "a", Name: "bc"}, s.Ports[0])
	if two := groupOf(state.ServiceID{Namespace: "ab", Name: "c"}, s.Ports[0]); one == two {
		t.Error("a/bc and ab/c are one group")
	}
	// Nor does a name that has been searched for share another's: these two did by FNV-1a, and with it source ranges.
	prod, evil := state.ServiceID{Namespace: "prod", Name: "db"}, state.ServiceID{Namespace: "evil", Name: "aesi1jmpfrsepf7mvw224cxif2e12nfjzjfrwaex6gayonddg"}
	if pg := (state.ServicePort{Name: "pg", Protocol: state.TCP}); groupOf(prod, pg) == groupOf(evil, pg) {
		t.Error("prod/db and evil's are one group")
	}
	list, _ := Bind(s, Node{})
	other, _ := Bind(whole("web2", "1 ready"), Node{})
	if list[0].Group != list[4].Group || list[0].Group == list[5].Group || list[0].Group == other[0].Group {
		t.Error("groups", list[0].Group, list[4].Group, list[5].Group, other[0].Group)
	}
}

func TestMaglevIsEvenAndMovesLittle(t *testing.T) {
	var backends []netip.AddrPort
	for i := range 10 {
		backends = append(backends, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 80))
	}
	table := Maglev(backends)
	share := make([]int, len(backends))
	for _, i := range table {
		share[i]++
	}
	for i, n := range share {
		if n < len(table)/10-len(table)/50 || n > len(table)/10+len(table)/50 {
			t.Errorf("backend %d has %d of %d slots", i, n, len(table))
		}
	}
	shuffled := slices.Clone(backends)
	slices.Reverse(shuffled)
	for slot, i := range Maglev(shuffled) {
		if shuffled[i] != backends[table[slot]] {
			t.Fatal("another order of backends gives another table")
		}
	}
	moved, gone := 0, backends[3]
	less := slices.Delete(slices.Clone(backends), 3, 4)
	for slot, i := range Maglev(less) {
		if was := backends[table[slot]]; was != gone && was != less[i] {
			moved++
		}
	}
	if moved > len(table)/20 {
		t.Errorf("%d of %d slots of others moved", moved, len(table))
	}
	if len(Maglev(nil)) != 0 || len(Maglev(backends[:1])) != 1021 || MaglevSize(60000) != 65521 {
		t.Error("sizes")
	}
}

// Nodes of two versions choose alike only while the table is what it was: the algorithm's
// promise is the same backend on every node.
func TestMaglevIsTheSameInEveryVersion(t *testing.T) {
	var backends []netip.AddrPort
	for _, text := range []string{"10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:8080", "[fd00::1]:80"} {
		backends = append(backends, netip.MustParseAddrPort(text))
	}
	h := fnv.New64a()
	for _, i := range Maglev(backends) {
		fmt.Fprint(h, i)
	}
	if got, want := h.Sum64(), uint64(0x9dc11de30ba5fed5); got != want {
		t.Errorf("the table's hash is %#x, and was %#x: nodes of both versions in a cluster would lead one flow to two backends", got, want)
	}
}
