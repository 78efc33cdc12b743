// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// tables is what the bindings in force come to.
type tables map[state.BindingKey]state.Binding

func (m tables) apply(c *Catalog, ch Change) {
	for _, b := range ch.Upserts {
		m[b.Key()] = b
	}
	for _, k := range ch.Removes {
		delete(m, k)
	}
	c.Commit(ch)
}

func (m tables) list() []state.Binding {
	var out []state.Binding
	for _, b := range m {
		out = append(out, b)
	}
	state.SortBindings(out)
	return out
}

// small is a Service with one ClusterIP.
func small(owner state.Owner, name, front string, backends ...string) state.Service {
	port := state.ServicePort{Protocol: state.TCP, Frontends: []state.ServiceFrontend{{AddrPort: netip.MustParseAddrPort(front)}}}
	for _, w := range backends {
		port.Backends = append(port.Backends, be(w))
	}
	return state.Service{ServiceID: state.ServiceID{Owner: owner, Name: name}, Ports: []state.ServicePort{port}}
}

func at(front string) state.Frontend {
	return state.Frontend{AddrPort: netip.MustParseAddrPort(front), Protocol: state.TCP}
}

func key(front string) state.BindingKey { return state.BindingKey{Frontend: at(front)} }

// outer is a Service with one external address.
func outer(name, front string, external state.TrafficPolicy, backends ...string) state.Service {
	s := small(state.OwnerKubernetes, name, front, backends...)
	s.Ports[0].Frontends[0].Kind, s.External = state.ExternalIP, external
	return s
}

func TestTheFirstOfTwoKeepsAFrontend(t *testing.T) {
	c, m := NewCatalog(Node{}, nil, nil), tables{}
	a, b := small(state.OwnerKubernetes, "a", "10.96.0.1:80", "1 ready"), small(state.OwnerKubernetes, "b", "10.96.0.1:80", "2 ready")
	m.apply(c, c.Plan([]state.Service{a, b}, nil))
	if got := m[key("10.96.0.1:80")]; got.Service.Name != "a" || len(m) != 1 {
		t.Fatal(m)
	}
	problems := c.Problems(state.OwnerKubernetes)
	conflict := (*ConflictError)(nil)
	if len(problems) != 1 || problems[0].Service.Name != "b" || !errors.As(problems[0], &conflict) || conflict.Holder.Name != "a" {
		t.Fatal(problems)
	}
	// The order of a later list changes nothing, nor does a change of the loser.
	m.apply(c, c.Plan([]state.Service{b, a}, nil))
	m.apply(c, c.Plan([]state.Service{b}, nil))
	if got := m[key("10.96.0.1:80")]; got.Service.Name != "a" {
		t.Fatal(got)
	}
	m.apply(c, c.Plan(nil, []state.ServiceID{a.ServiceID}))
	if got := m[key("10.96.0.1:80")]; got.Service.Name != "b" || numbers(got.Backends) != "2" || len(c.Problems(state.OwnerKubernetes)) != 0 {
		t.Fatal(got, c.Problems(state.OwnerKubernetes))
	}
}

// A frontend is held whole: who does not hold it does not get its clients outside either.
func TestClientsOutsideAreTheHoldersToo(t *testing.T) {
	const front = "192.0.2.1:80"
	outside := state.BindingKey{Frontend: at(front), Outside: true}
	c, m := NewCatalog(Node{}, nil, nil), tables{}
	is := func(when, holder, plain, out string) {
		t.Helper()
		if id, _ := c.Holder(at(front)); id.Name != holder {
			t.Errorf("%s: it is held by %s, want %s", when, id.Name, holder)
		}
		b, split := m[outside]
		if got := m[key(front)]; numbers(got.Backends) != plain || got.SplitOutside != split || numbers(b.Backends) != out {
			t.Errorf("%s: it leads to %v, clients outside to %v; want %q and %q", when, got, b, plain, out)
		}
	}
	set := func(s state.Service) { m.apply(c, c.Plan([]state.Service{s}, nil)) }
	set(outer("a", front, state.PolicyCluster, "1 ready local"))
	set(outer("b", front, state.PolicyLocal, "2 ready local"))
	is("b claims it with Local", "a", "1", "")
	set(outer("a", front, state.PolicyLocal, "1 ready local"))
	is("a becomes Local", "a", "1", "1")
	if p := c.Problems(state.OwnerKubernetes); len(p) != 1 || p[0].Service.Name != "b" {
		t.Errorf("problems %v, want b's alone", p)
	}
	set(outer("a", front, state.PolicyCluster, "1 ready local"))
	is("a becomes Cluster again", "a", "1", "")
	m.apply(c, c.Plan(nil, []state.ServiceID{{Owner: state.OwnerKubernetes, Name: "a"}}))
	is("a goes", "b", "2", "2")
	set(outer("c", front, state.PolicyCluster, "3 ready local"))
	m.apply(c, c.Plan(nil, []state.ServiceID{{Owner: state.OwnerKubernetes, Name: "b"}}))
	is("b goes, and c is Cluster", "c", "3", "")
}

// Tables in which an older process gave clients outside to another Service.
func TestAfterARestartClientsOutsideAreTheHolders(t *testing.T) {
	const front = "192.0.2.1:80"
	for name, owner := range map[string]state.Owner{"of the same owner": state.OwnerKubernetes, "of another": state.OwnerCNI} {
		mine, _ := Bind(outer("a", front, state.PolicyCluster, "1 ready local"), Node{})
		others, _ := Bind(outer("b", front, state.PolicyLocal, "2 ready local"), Node{})
		others[1].Owner = owner
		bound := []state.Binding{others[1], mine[0]}
		m := tables{mine[0].Key(): mine[0], others[1].Key(): others[1]}
		c := NewCatalog(Node{}, bound, nil)
		m.apply(c, c.Plan([]state.Service{outer("a", front, state.PolicyCluster, "1 ready local")}, nil))
		if holder, _ := c.Holder(at(front)); holder.Name != "a" || len(m) != 1 || numbers(m[key(front)].Backends) != "1" {
			t.Errorf("%s: %v holds it, in force is %v", name, holder, m)
		}
	}
}

// The API server gives a cluster IP to one Service; external addresses anybody may name, also
// such as will be given next.
func TestAClusterIPIsTheServicesThatHasIt(t *testing.T) {
	const front, other = "10.96.0.1:80", "192.0.2.1:80"
	greedy := outer("greedy", front, state.PolicyLocal, "6 ready local")
	greedy.Ports[0].Frontends = append(greedy.Ports[0].Frontends, state.ServiceFrontend{Kind: state.ExternalIP, AddrPort: netip.MustParseAddrPort(other)})
	owner, later := small(state.OwnerKubernetes, "owner", front, "1 ready"), outer("later", other, state.PolicyCluster, "2 ready")
	is := func(when string, m tables, c *Catalog) {
		t.Helper()
		if a, b := m[key(front)], m[key(other)]; len(m) != 3 || numbers(a.Backends) != "1" || a.SplitOutside || numbers(b.Backends) != "6" {
			t.Errorf("%s: in force is %v", when, m)
		}
		var told []string
		for _, p := range c.Problems(state.OwnerKubernetes) {
			told = append(told, p.Service.Name)
		}
		if !slices.Equal(told, []string{"greedy", "later"}) {
			t.Errorf("%s: the problems are %v", when, c.Problems(state.OwnerKubernetes))
		}
	}
	c, m := NewCatalog(Node{}, nil, nil), tables{}
	m.apply(c, c.Plan([]state.Service{greedy}, nil))
	m.apply(c, c.Plan([]state.Service{owner, later}, nil))
	is("it comes later", m, c)
	m.apply(c, c.Plan([]state.Service{greedy}, nil))
	is("the other changes", m, c)
	c = NewCatalog(Node{}, m.list(), nil)
	m.apply(c, c.Plan([]state.Service{greedy}, nil))
	if numbers(m[key(front)].Backends) != "1" {
		t.Errorf("after a restart, before it is known: in force is %v", m)
	}
	m.apply(c, c.Plan([]state.Service{owner, later}, nil))
	m.apply(c, c.Retain(state.OwnerKubernetes, []state.ServiceID{greedy.ServiceID, owner.ServiceID, later.ServiceID}))
	is("after a restart", m, c)
	m.apply(c, c.Plan(nil, []state.ServiceID{owner.ServiceID}))
	m.apply(c, c.Plan([]state.Service{greedy}, nil))
	if numbers(m[key(front)].Backends) != "6" || len(m) != 4 {
		t.Errorf("nobody has it: in force is %v", m)
	}
}

// After a restart, only the bindings and their owners are known.
func TestAfterARestartOnlyTheOwnersAreRemoved(t *testing.T) {
	first, m := NewCatalog(Node{}, nil, nil), tables{}
	m.apply(first, first.Plan([]state.Service{small(state.OwnerCLI, "tcp 10.96.0.1:80", "10.96.0.1:80", "1 ready"),
		small(state.OwnerKubernetes, "old", "10.96.0.2:80", "1 ready"), small(state.OwnerKubernetes, "gone", "10.96.0.3:80", "1 ready")}, nil))
	c := NewCatalog(Node{}, m.list(), nil)
	// A Service that keeps its frontend is never away, whatever it is called now; the
	// command line's is in nobody's way.
	list := []state.Service{small(state.OwnerKubernetes, "new", "10.96.0.2:80", "1 ready"), small(state.OwnerKubernetes, "thief", "10.96.0.1:80", "2 ready")}
	var names []state.ServiceID
	for _, s := range list { // each by itself, as when there are many
		ch := c.Plan([]state.Service{s}, nil)
		if len(ch.Removes) != 0 {
			t.Fatal(ch.Removes)
		}
		m.apply(c, ch)
		names = append(names, s.ServiceID)
	}
	if holder, _ := c.Holder(at("10.96.0.2:80")); holder != names[0] {
		t.Fatal(holder)
	}
	ch := c.Retain(state.OwnerKubernetes, names)
	if len(ch.Upserts) != 0 || len(ch.Removes) != 1 || ch.Removes[0] != key("10.96.0.3:80") {
		t.Fatal(ch)
	}
	m.apply(c, ch)
	if got := m[key("10.96.0.1:80")]; got.Owner != state.OwnerCLI || numbers(got.Backends) != "1" {
		t.Fatal(got)
	}
	if p := c.Problems(state.OwnerKubernetes); len(p) != 1 || !strings.Contains(p[0].Error(), "service thief: tcp 10.96.0.1:80 belongs to cli's Service") {
		t.Fatal(p)
	}
	if p := c.Problems(state.OwnerCLI); len(p) != 0 {
		t.Fatal(p)
	}
}

func TestRecordsNameWhatTheTablesHold(t *testing.T) {
	s := whole("web", "1 ready local", "2 ready")
	s.Owner, s.External = state.OwnerCLI, state.PolicyLocal
	first, m := NewCatalog(Node{}, nil, nil), tables{}
	m.apply(first, first.Plan([]state.Service{s}, nil))
	c := NewCatalog(Node{}, m.list(), []state.Service{s})
	if got, ok := c.Service(s.ServiceID); !ok || got.External != state.PolicyLocal {
		t.Fatal(got, ok)
	}
	ch := c.Plan(nil, []state.ServiceID{s.ServiceID})
	if len(ch.Removes) != len(m) {
		t.Fatalf("%d of %d bindings go with their Service", len(ch.Removes), len(m))
	}
	if err := c.Plan([]state.Service{small(state.OwnerCNI, "x", "10.96.0.1:80")}, nil).Refused(); err == nil {
		t.Fatal("a second claim is not refused")
	}
}

// A node that learns of its zone makes a catalog of what the tables hold, as
// after a restart.
func TestAnotherZoneIsAnotherChoice(t *testing.T) {
	m := tables{}
	web := small(state.OwnerKubernetes, "web", "10.96.0.1:80", "1 ready zone=a", "2 ready zone=b")
	for zone, want := range map[string]string{"a": "1", "b": "2"} {
		c := NewCatalog(Node{Zone: zone}, m.list(), nil)
		m.apply(c, c.Plan([]state.Service{web}, nil))
		if got := numbers(m[key("10.96.0.1:80")].Backends); got != want {
			t.Errorf("in zone %s: %s, want %s", zone, got, want)
		}
	}
}

// One that had a binding for clients outside beside the other, and has it no more.
func TestAfterARestartAFrontendIsReplacedWhole(t *testing.T) {
	s := whole("web", "1 ready local", "2 ready")
	s.Owner, s.External = state.OwnerKubernetes, state.PolicyLocal
	first, m := NewCatalog(Node{}, nil, nil), tables{}
	m.apply(first, first.Plan([]state.Service{s}, nil))
	before := len(m)
	s.External = state.PolicyCluster
	c := NewCatalog(Node{}, m.list(), nil)
	m.apply(c, c.Plan([]state.Service{s}, nil))
	if len(m) >= before {
		t.Fatalf("%d bindings were in force, %d are", before, len(m))
	}
	if ch := c.Retain(state.OwnerKubernetes, []state.ServiceID{s.ServiceID}); len(ch.Upserts)+len(ch.Removes) != 0 {
		t.Fatal(ch)
	}
	for k := range m {
		if holder, _ := c.Holder(k.Frontend); holder != s.ServiceID {
			t.Errorf("%v is held by %v", k, holder)
		}
	}
}

// Whatever the order of changes, each frontend that somebody claims has one
// holder, who claims it, and the tables say what the holder wants.
func TestCatalogOnGeneratedChanges(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		c, m := NewCatalog(Node{}, nil, nil), tables{}
		wanted := map[state.ServiceID]state.Service{}
		for range 20 {
			var upserts []state.Service
			var removes []state.ServiceID
			seen := map[state.ServiceID]bool{}
			for range 1 + r.IntN(3) {
				id := state.ServiceID{Owner: state.Owner(1 + r.IntN(2)), Name: fmt.Sprint(r.IntN(4))}
				if seen[id] {
					continue
				}
				seen[id] = true
				if r.IntN(3) == 0 {
					removes = append(removes, id)
					delete(wanted, id)
					continue
				}
				s := small(id.Owner, id.Name, fmt.Sprintf("10.96.0.%d:80", 1+r.IntN(3)), fmt.Sprintf("%d ready", 1+r.IntN(200)))
				if r.IntN(2) == 0 {
					s.Ports[0].Frontends = append(s.Ports[0].Frontends, state.ServiceFrontend{Kind: state.ExternalIP, AddrPort: netip.MustParseAddrPort(fmt.Sprintf("192.0.2.%d:80", 1+r.IntN(2)))})
					s.External = state.TrafficPolicy(r.IntN(2))
				}
				wanted[id] = s
				upserts = append(upserts, s)
			}
			m.apply(c, c.Plan(upserts, removes))
			check(t, c, m, wanted)
		}
	}
}

func check(t *testing.T, c *Catalog, m tables, wanted map[state.ServiceID]state.Service) {
	t.Helper()
	claims := map[state.Frontend]map[state.ServiceID][]state.Binding{}
	for id, s := range wanted {
		list, _ := Bind(s, Node{})
		for _, b := range list {
			if claims[b.Frontend] == nil {
				claims[b.Frontend] = map[state.ServiceID][]state.Binding{}
			}
			claims[b.Frontend][id] = append(claims[b.Frontend][id], b)
		}
	}
	inForce, lost := 0, 0
	for f, by := range claims {
		holder, _ := c.Holder(f)
		if by[holder] == nil {
			t.Fatalf("%v is held by %v, which does not claim it", f, holder)
		}
		for _, b := range by[holder] {
			if got := m[b.Key()]; got.Service != holder || got.SplitOutside != b.SplitOutside || !slices.Equal(got.Backends, b.Backends) {
				t.Fatalf("%v is %v, its holder wants %v", b.Key(), got, b)
			}
		}
		inForce += len(by[holder])
		lost += len(by) - 1
	}
	if inForce != len(m) {
		t.Fatalf("%d bindings are to be in force, %d are", inForce, len(m))
	}
	if got := len(c.Problems(state.OwnerCLI)) + len(c.Problems(state.OwnerCNI)); got != lost {
		t.Fatalf("%d problems for %d lost claims", got, lost)
	}
}

// A Service of the command line is known by its frontend; another one that wants it waits.
func TestAnotherServiceOfTheToolTakesNothing(t *testing.T) {
	const front = "10.96.0.1:80"
	c, m := NewCatalog(Node{}, nil, nil), tables{}
	plain := small(state.OwnerCLI, PlainID(state.OwnerCLI, at(front)).Name, front, "1 ready")
	m.apply(c, c.Plan([]state.Service{plain}, nil))
	other := small(state.OwnerCLI, "other", front, "2 ready")
	ch := c.Plan([]state.Service{other}, nil)
	if err := ch.Refused(); err == nil {
		t.Error("nobody is told")
	}
	m.apply(c, ch)
	if got := m[key(front)]; got.Service != plain.ServiceID || numbers(got.Backends) != "1" {
		t.Errorf("in force is %v", m)
	}
}

// The cluster IP's owner came first or last: who names it besides is told why, once; the
// tool's Services are no part of the API server's promise, and wait in line.
func TestWhoNamesAClusterIPIsToldOnce(t *testing.T) {
	const front = "10.96.0.1:80"
	owner, greedy := small(state.OwnerKubernetes, "owner", front, "1 ready"), outer("greedy", front, state.PolicyCluster, "2 ready")
	tool := outer("tool", front, state.PolicyCluster, "3 ready")
	tool.Owner = state.OwnerCLI
	for name, list := range map[string][]state.Service{
		"first": {owner, greedy, tool}, "last": {tool, greedy, owner}, "between": {greedy, owner, tool},
	} {
		c := NewCatalog(Node{}, nil, nil)
		ch := c.Plan(list, nil)
		text := ch.Refused().Error()
		if want := "service greedy: tcp 10.96.0.1:80 is the cluster IP of Service owner"; strings.Count(text, "service greedy: ") != 1 || !strings.Contains(text, want) {
			t.Errorf("%s: %s; want %s, and nothing more of greedy", name, text, want)
		}
		c.Commit(ch)
		if p := c.Problems(state.OwnerKubernetes); name != "last" && (len(p) != 1 || p[0].Service.Name != "greedy") {
			t.Errorf("%s: problems of Kubernetes's are %v, want greedy's one", name, p)
		}
		ch = c.Plan(nil, []state.ServiceID{owner.ServiceID, greedy.ServiceID})
		c.Commit(ch)
		if id, held := c.Holder(at(front)); !held || id != tool.ServiceID {
			t.Errorf("%s: both of Kubernetes's are gone, and %v holds it (%v)", name, id, held)
		}
	}
}

// What has been mended is told no more, and what is gone is known no more.
func TestAMendedServiceHasNoProblem(t *testing.T) {
	c, m := NewCatalog(Node{}, nil, nil), tables{}
	bad := outer("a", "224.0.0.1:80", state.PolicyCluster, "1 ready")
	m.apply(c, c.Plan([]state.Service{bad}, nil))
	if p := c.Problems(state.OwnerKubernetes); len(p) != 1 || !c.Has(bad.ServiceID) {
		t.Fatalf("problems %v", p)
	}
	m.apply(c, c.Plan([]state.Service{outer("a", "192.0.2.1:80", state.PolicyCluster, "1 ready")}, nil))
	if p := c.Problems(state.OwnerKubernetes); len(p) != 0 || len(m) != 1 {
		t.Errorf("it is mended, and its problems are %v", p)
	}
	m.apply(c, c.Plan([]state.Service{bad}, nil))
	m.apply(c, c.Plan(nil, []state.ServiceID{bad.ServiceID}))
	if p := c.Problems(state.OwnerKubernetes); len(p) != 0 || len(m) != 0 || c.Has(bad.ServiceID) {
		t.Errorf("it is gone, and its problems are %v, in force is %v", p, m)
	}
}

// Maps have no order; what people read has one.
func TestProblemsAreInOrder(t *testing.T) {
	var list []state.Service
	for _, name := range []string{"c", "a", "d", "b"} {
		s := outer(name, "224.0.0.1:80", state.PolicyCluster)
		s.Ports[0].Frontends = append(s.Ports[0].Frontends, state.ServiceFrontend{Kind: state.ExternalIP, AddrPort: netip.MustParseAddrPort("127.0.0.1:80")})
		list = append(list, s)
	}
	for range 5 {
		c := NewCatalog(Node{}, nil, nil)
		ch := c.Plan(list, nil)
		refused := strings.Split(ch.Refused().Error(), "\n")
		c.Commit(ch)
		var told []string
		for _, p := range c.Problems(state.OwnerKubernetes) {
			told = append(told, p.Error())
		}
		if len(told) != 8 || !slices.IsSorted(told) || !slices.Equal(told, refused) {
			t.Fatalf("told %q\nrefused %q", told, refused)
		}
	}
}
