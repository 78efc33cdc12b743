// SPDX-License-Identifier: Apache-2.0

// Package policygen makes random worlds of policies, pods and namespaces, and
// random changes to them, for tests that compare what is planned, and what the
// kernel does, with the oracle. A world speaks the API's language; everything
// it does to itself it does to a model as well.
package policygen

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/policy/manifest"
	"github.com/mustang-net/mustang/internal/policy/oracle"
	"github.com/mustang-net/mustang/internal/state"
)

// Slots are how many pods there can be; those below Local are on this node,
// with the endpoint of their number plus one.
const (
	Slots = 9
	Local = 5
)

// World is what there is now, for the oracle and for a model.
type World struct {
	Oracle oracle.World
	Model  *policy.Model

	rng   *rand.Rand
	pods  [Slots]*oracle.Pod
	Trace []string // what was done, for people
}

// NewWorld is a world with pods, and no policies.
func NewWorld(rng *rand.Rand, limits policy.Limits) *World {
	w := &World{rng: rng, Model: policy.New(limits), Oracle: oracle.World{Namespaces: map[string]map[string]string{}}}
	w.Model.SetNode([]netip.Addr{NodeAddr(false), NodeAddr(true)})
	for _, ns := range namespaces {
		w.relabelNamespace(ns)
	}
	for i := range Slots {
		w.replacePod(i)
	}
	return w
}

// Addr is the address of pod i, which outlives the pod.
func Addr(i int, v6 bool) netip.Addr {
	n := byte(i + 1)
	if v6 {
		return netip.AddrFrom16([16]byte{0: 0xfd, 15: n})
	}
	return netip.AddrFrom4([4]byte{10, 0, 0, n})
}

// NodeAddr is this node's.
func NodeAddr(v6 bool) netip.Addr {
	if v6 {
		return netip.MustParseAddr("fd00:1::1")
	}
	return netip.MustParseAddr("10.0.1.1")
}

// Outside are addresses of nobody's pod: other nodes and hosts.
func Outside(v6 bool) []netip.Addr {
	if v6 {
		return addrs("fd00:1::2", "2001:db8::1", "2001:db8::2", "2001:db8:1::1", "::1:2:3")
	}
	return addrs("10.0.1.2", "198.51.100.1", "198.51.100.2", "198.51.101.1", "203.0.113.9")
}

func addrs(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, t := range texts {
		out = append(out, netip.MustParseAddr(t))
	}
	return out
}

// Pod is pod i as it is now; nil when there is none.
func (w *World) Pod(i int) *oracle.Pod { return w.pods[i] }

func (w *World) note(format string, args ...any) {
	w.Trace = append(w.Trace, fmt.Sprintf(format, args...))
}

var (
	namespaces = []string{"a", "b", "c"}
	labelKeys  = []string{"app", "tier", "team"}
	values     = []string{"x", "y", "z"}
	portNames  = []string{"http", "dns", "api"}
	protocols  = []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}
	// Ports are those that flows and rules are made of.
	Ports = []uint16{1, 53, 79, 80, 81, 443, 1000, 1023, 1024, 8080, 32767, 32768, 65534, 65535}
)

func pick[T any](rng *rand.Rand, list []T) T { return list[rng.IntN(len(list))] }

func (w *World) labels() map[string]string {
	out := map[string]string{}
	for _, k := range labelKeys {
		if w.rng.IntN(3) > 0 {
			out[k] = pick(w.rng, values)
		}
	}
	return out
}

// uniqueKey is of a label that no two pods have alike, for which few selectors ask.
const uniqueKey = "pod-name"

func (w *World) podLabels(i int) map[string]string {
	out := w.labels()
	if w.rng.IntN(4) > 0 {
		out[uniqueKey] = fmt.Sprintf("p%d", i)
	}
	return out
}

// Step changes one thing.
func (w *World) Step() {
	switch roll := w.rng.IntN(100); {
	case roll < 35:
		w.setPolicy()
	case roll < 55:
		w.deletePolicy()
	case roll < 80:
		w.replacePod(w.rng.IntN(Slots))
	case roll < 88:
		w.deletePod(w.rng.IntN(Slots))
	case roll < 96:
		w.relabelNamespace(pick(w.rng, namespaces))
	default:
		w.note("the model is told to start again")
		w.Model.Again()
	}
}

func (w *World) relabelNamespace(name string) {
	labels := w.labels()
	labels[policy.NamespaceName] = name
	w.note("namespace %s %v", name, labels)
	w.Oracle.Namespaces[name] = labels
	w.Model.SetNamespace(state.OwnerCLI, name, labels)
}

// replacePod makes pod i another one, or the same with other labels or ports.
func (w *World) replacePod(i int) {
	old := w.pods[i]
	p := &oracle.Pod{Namespace: pick(w.rng, namespaces), Name: fmt.Sprintf("p%d", i), Labels: w.podLabels(i),
		Addrs: []netip.Addr{Addr(i, false), Addr(i, true)}}
	if old != nil && w.rng.IntN(2) == 0 { // a pod keeps its namespace and its ports
		p.Namespace, p.Ports = old.Namespace, old.Ports
	} else {
		for _, name := range portNames {
			if w.rng.IntN(2) == 0 {
				p.Ports = append(p.Ports, corev1.ContainerPort{Name: name, Protocol: pick(w.rng, append(protocols, "")), ContainerPort: int32(pick(w.rng, Ports))})
			}
		}
	}
	if old != nil && old.Namespace != p.Namespace {
		w.Model.DeletePod(policy.Key{Namespace: old.Namespace, Name: old.Name})
	}
	w.note("pod %d %s/%s %v ports %v", i, p.Namespace, p.Name, p.Labels, p.Ports)
	w.pods[i] = p
	w.refreshPods()
	w.Model.SetPod(modelPod(*p))
	if i < Local {
		w.Model.SetEndpoint(policy.Endpoint{ID: uint32(i + 1), Pod: policy.Key{Namespace: p.Namespace, Name: p.Name}, Addrs: p.Addrs})
	}
}

// deletePod leaves this node one pod at least: without any there is no case.
func (w *World) deletePod(i int) {
	p := w.pods[i]
	if p == nil || i < Local && w.local() == 1 {
		return
	}
	w.note("pod %d is gone", i)
	w.pods[i] = nil
	w.refreshPods()
	w.Model.DeletePod(policy.Key{Namespace: p.Namespace, Name: p.Name})
	if i < Local {
		w.Model.DeleteEndpoint(uint32(i + 1))
	}
}

// local is how many pods are on this node.
func (w *World) local() int {
	n := 0
	for _, p := range w.pods[:Local] {
		if p != nil {
			n++
		}
	}
	return n
}

func (w *World) refreshPods() {
	w.Oracle.Pods = nil
	for _, p := range w.pods {
		if p != nil {
			w.Oracle.Pods = append(w.Oracle.Pods, *p)
		}
	}
}

func modelPod(p oracle.Pod) policy.Pod {
	out := policy.Pod{Key: policy.Key{Namespace: p.Namespace, Name: p.Name}, Labels: maps.Clone(p.Labels), Addrs: slices.Clone(p.Addrs)}
	for _, c := range p.Ports {
		protocol, _ := manifest.Protocol(c.Protocol)
		out.Ports = append(out.Ports, policy.NamedPort{Name: c.Name, Protocol: protocol, Number: uint16(c.ContainerPort)})
	}
	return out
}

const maxPolicies = 8

func (w *World) setPolicy() {
	p := w.randomPolicy()
	at := slices.IndexFunc(w.Oracle.Policies, func(q networkingv1.NetworkPolicy) bool {
		return q.Namespace == p.Namespace && q.Name == p.Name
	})
	switch {
	case at >= 0:
		w.Oracle.Policies[at] = p
	case len(w.Oracle.Policies) >= maxPolicies:
		return
	default:
		w.Oracle.Policies = append(w.Oracle.Policies, p)
	}
	w.note("policy %s/%s %+v", p.Namespace, p.Name, text(p.Spec))
	made, err := manifest.Policy(&p)
	if err != nil {
		panic(err) // the generator makes valid policies
	}
	w.Model.SetPolicy(made)
}

func (w *World) deletePolicy() {
	if len(w.Oracle.Policies) == 0 {
		return
	}
	at := w.rng.IntN(len(w.Oracle.Policies))
	p := w.Oracle.Policies[at]
	w.note("policy %s/%s is gone", p.Namespace, p.Name)
	w.Oracle.Policies = slices.Delete(w.Oracle.Policies, at, at+1)
	w.Model.DeletePolicy(policy.Key{Namespace: p.Namespace, Name: p.Name})
}
