// SPDX-License-Identifier: Apache-2.0

package k8s

// From API objects to desired Services. Translate is pure; Translator knows
// which slices belong to which Service.

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/internal/state"
)

// Translate says what a Service with its slices wants of a node. ok is false
// when it wants nothing of us.
func Translate(key Key, s *Service, slices []*Slice, node string) (_ state.Service, ok bool) {
	if s == nil || s.Skipped != "" {
		return state.Service{}, false
	}
	out := state.Service{
		ServiceID: state.ServiceID{Owner: state.OwnerKubernetes, Namespace: key.Namespace, Name: key.Name},
		Affinity:  s.Affinity, External: s.External, Internal: s.Internal, SourceRanges: s.SourceRanges,
		HealthCheckNodePort: s.HealthCheckNodePort, TrafficDistribution: s.Distribution,
	}
	for _, port := range s.Ports {
		out.Ports = append(out.Ports, state.ServicePort{
			Name: port.Name, Protocol: port.Protocol, Frontends: s.frontends(port), Backends: backends(port, slices, node),
		})
	}
	return out, true
}

// frontends are all ways to reach a port. A node port is on every address that
// the node has for node ports, in the families of the Service.
func (s *Service) frontends(p Port) []state.ServiceFrontend {
	var out []state.ServiceFrontend
	add := func(kind state.FrontendKind, addrs []netip.Addr, port uint16) {
		for _, a := range addrs {
			out = append(out, state.ServiceFrontend{Kind: kind, AddrPort: netip.AddrPortFrom(a, port)})
		}
	}
	add(state.ClusterIP, s.ClusterIPs, p.Port)
	add(state.ExternalIP, s.ExternalIPs, p.Port)
	add(state.LoadBalancer, s.LoadBalancers, p.Port)
	if s.NodePorts && p.NodePort != 0 {
		for _, a := range s.ClusterIPs {
			any := netip.IPv6Unspecified()
			if a.Is4() {
				any = netip.IPv4Unspecified()
			}
			add(state.NodePort, []netip.Addr{any}, p.NodePort)
		}
	}
	return out
}

// backends are the endpoints behind a port: those of each slice that has a port
// of its name and protocol. While endpoints move between slices one may be in
// two of them; then the more usable of both is taken, and of equals the one that
// says that it is here.
func backends(p Port, slices []*Slice, node string) []state.ServiceBackend {
	type behind struct {
		port      uint16
		endpoints []Endpoint
	}
	var all []behind
	n := 0
	for _, slice := range slices {
		for _, port := range slice.Ports {
			if port.Name == p.Name && port.Protocol == p.Protocol {
				all = append(all, behind{port.Port, slice.Endpoints})
				n += len(slice.Endpoints)
			}
		}
	}
	out := make([]state.ServiceBackend, 0, n)
	at := make(map[netip.AddrPort]int, n)
	for _, some := range all {
		for _, e := range some.endpoints {
			b := e.backend(some.port, node)
			i, twice := at[b.AddrPort]
			if !twice {
				at[b.AddrPort] = len(out)
				out = append(out, b)
			} else if d := usability(b) - usability(out[i]); d > 0 || d == 0 && b.Local && !out[i].Local {
				out[i] = b
			}
		}
	}
	return out
}

func (e Endpoint) backend(port uint16, node string) state.ServiceBackend {
	b := state.ServiceBackend{
		AddrPort: netip.AddrPortFrom(e.Addr, port), Node: e.Node, Local: e.Node != "" && e.Node == node,
		Ready: e.Ready, Serving: e.Serving, Terminating: e.Terminating,
	}
	if e.Hints != nil {
		b.ForZones, b.ForNodes = e.Hints.Zones, e.Hints.Nodes
	}
	return b
}

func usability(b state.ServiceBackend) int {
	switch {
	case b.Ready:
		return 2
	case b.Serving && b.Terminating:
		return 1
	}
	return 0
}

// Translator follows which slices belong to which Service. It is not for
// concurrent use.
type Translator struct {
	w    *Watch
	node string
	of   map[Key]Key   // slice → Service
	has  map[Key][]Key // Service → slices
}

// NewTranslator translates for node what w follows.
func NewTranslator(w *Watch, node string) *Translator {
	return &Translator{w: w, node: node, of: map[Key]Key{}, has: map[Key][]Key{}}
}

// Affected is a Service that has to be looked at again.
type Affected struct {
	Key Key
	At  time.Time // when the first of its changes arrived
	// Triggered are the times that its slices give for what they describe.
	Triggered []time.Time
}

// Affected says which Services changes concern, each once, in their order.
func (t *Translator) Affected(changes []Change) []Affected {
	var out []Affected
	at := map[Key]int{}
	note := func(service Key, when, triggered time.Time) {
		if service.Name == "" {
			return
		}
		i, known := at[service]
		if !known {
			i = len(out)
			at[service] = i
			out = append(out, Affected{Key: service, At: when})
		}
		if !triggered.IsZero() {
			out[i].Triggered = append(out[i].Triggered, triggered)
		}
	}
	for _, c := range changes {
		switch c.Kind {
		case Services:
			note(c.Key, c.At, time.Time{})
		case Slices:
			before := t.of[c.Key]
			s := t.w.Slices.Get(c.Key)
			now, triggered := Key{}, time.Time{}
			if s != nil {
				now, triggered = s.Service, s.Triggered
			}
			t.move(c.Key, before, now)
			note(before, c.At, time.Time{})
			note(now, c.At, triggered)
		}
	}
	return out
}

// move enters that a slice belongs to another Service than before.
func (t *Translator) move(slice, before, now Key) {
	if before == now {
		return
	}
	if left := slices.DeleteFunc(t.has[before], func(k Key) bool { return k == slice }); len(left) > 0 {
		t.has[before] = left
	} else {
		delete(t.has, before)
	}
	delete(t.of, slice)
	if now.Name == "" {
		return
	}
	t.of[slice] = now
	// By name: what comes of several slices does not depend on which was heard of first.
	at, _ := slices.BinarySearchFunc(t.has[now], slice, func(a, b Key) int { return strings.Compare(a.Name, b.Name) })
	t.has[now] = slices.Insert(t.has[now], at, slice)
}

// Service says what a Service wants now, and what is wrong with it.
func (t *Translator) Service(key Key) (_ state.Service, problems []string, ok bool) {
	s := t.w.Services.Get(key)
	if s == nil {
		return state.Service{}, nil, false
	}
	problems = append(problems, s.Problems...)
	var list []*Slice
	for _, k := range t.has[key] {
		if slice := t.w.Slices.Get(k); slice != nil {
			list = append(list, slice)
			for _, p := range slice.Problems {
				problems = append(problems, "EndpointSlice "+k.Name+": "+p)
			}
		}
	}
	out, ok := Translate(key, s, list, t.node)
	if !ok {
		problems = nil
	}
	return out, problems, ok
}
