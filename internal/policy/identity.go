// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"
)

// identity is what selectors see of pods: their namespace, labels and named
// ports. Pods that are alike share one.
type identity struct {
	id        uint64
	digest    digest
	namespace string
	labels    map[string]string
	ports     []NamedPort
	pods      map[*pod]bool
	selectors map[*selector]bool // that select it
}

func (m *Model) identityOf(p Pod) *identity {
	ports := sorted(p.Ports)
	parts := []string{"pod", p.Namespace}
	for _, k := range slices.Sorted(maps.Keys(p.Labels)) {
		parts = append(parts, "l", k, p.Labels[k])
	}
	for _, n := range ports {
		parts = append(parts, "p", n.Name, n.Protocol.String(), strconv.Itoa(int(n.Number)))
	}
	d := digestOf(parts...)
	id := m.peerNumbers.number(d)
	if known := m.identities[id]; known != nil {
		return known
	}
	made := &identity{id: id, digest: d, namespace: p.Namespace, labels: p.Labels, ports: ports,
		pods: map[*pod]bool{}, selectors: map[*selector]bool{}}
	m.identities[id] = made
	if m.inNamespace[p.Namespace] == nil {
		m.inNamespace[p.Namespace] = map[*identity]bool{}
	}
	m.inNamespace[p.Namespace][made] = true
	for _, s := range m.labels.addIdentity(made) {
		m.relate(s, made)
	}
	return made
}

func (m *Model) releaseIdentity(id *identity) {
	if id == nil || len(id.pods) > 0 {
		return
	}
	for s := range id.selectors {
		m.unrelate(s, id)
	}
	m.labels.dropIdentity(id)
	delete(m.identities, id.id)
	m.peerNumbers.release(id.digest)
	delete(m.inNamespace[id.namespace], id)
	if len(m.inNamespace[id.namespace]) == 0 {
		delete(m.inNamespace, id.namespace)
	}
}

// addrs are where pods of the identity are.
func (id *identity) addrs(m *Model) []netip.Addr {
	var out []netip.Addr
	for p := range id.pods {
		out = append(out, p.Addrs...)
		for ep := range m.interfaces[p.Key] {
			out = append(out, m.endpoints[ep].Addrs...)
		}
	}
	return out
}

// selector is a peer of some rules: pods in the policy's own namespace, or in
// those that namespaces selects. It exists while a set uses it.
type selector struct {
	key        string
	namespace  string
	namespaces *Selector
	pods       Selector
	matches    map[*identity]bool
	users      map[*set][]int // the rules of each set that have it
}

// selector is the one of a peer of a policy in namespace.
func (m *Model) selector(namespace string, namespaces *Selector, pods Selector) *selector {
	key := join("own", namespace, pods.canonical())
	if namespaces != nil {
		key = join("in", namespaces.canonical(), pods.canonical())
	}
	if s := m.selectors[key]; s != nil {
		return s
	}
	s := &selector{key: key, namespace: namespace, namespaces: namespaces, pods: pods,
		matches: map[*identity]bool{}, users: map[*set][]int{}}
	m.selectors[key] = s
	if candidates, ok := m.labels.addSelector(s, m.identities); ok {
		for _, id := range candidates {
			m.relate(s, id)
		}
		return s
	}
	if namespaces == nil {
		for id := range m.inNamespace[namespace] {
			m.relate(s, id)
		}
		return s
	}
	for ns, ids := range m.inNamespace {
		if m.inNamespaces(*namespaces, ns) {
			for id := range ids {
				m.relate(s, id)
			}
		}
	}
	return s
}

func (m *Model) selects(s *selector, id *identity) bool {
	if s.namespaces == nil && s.namespace != id.namespace {
		return false
	}
	return s.pods.Matches(id.labels) && (s.namespaces == nil || m.inNamespaces(*s.namespaces, id.namespace))
}

// relate brings up to date whether s selects id.
func (m *Model) relate(s *selector, id *identity) {
	if !m.selects(s, id) {
		m.unrelate(s, id)
		return
	}
	if s.matches[id] {
		return
	}
	s.matches[id] = true
	id.selectors[s] = true
	m.related(s, id)
}

func (m *Model) unrelate(s *selector, id *identity) {
	if !s.matches[id] {
		return
	}
	delete(s.matches, id)
	delete(id.selectors, s)
	m.related(s, id)
}

func (m *Model) related(s *selector, id *identity) {
	for user := range s.users {
		user.dirty[id.id] = true
	}
	if len(id.selectors) <= 1 { // the first, or there is none any more
		m.addressesChanged(id)
	}
}

func (m *Model) addressesChanged(id *identity) {
	for _, a := range id.addrs(m) {
		m.dirtyAddrs[a] = true
	}
}

func (m *Model) dropSelector(s *selector) {
	for id := range s.matches {
		delete(id.selectors, s)
		if len(id.selectors) == 0 {
			m.addressesChanged(id)
		}
	}
	m.labels.dropSelector(s)
	delete(m.selectors, s.key)
}

// holder is the identity that an address has as a pod's; nil when it is none's,
// or when no rule selects that pod.
func (m *Model) holder(a netip.Addr) *identity {
	p := m.podAt(a)
	if p == nil || p.identity == nil || len(p.identity.selectors) == 0 && m.anyPodRules == 0 {
		return nil
	}
	return p.identity
}

// PodAt is the pod that has an address.
func (m *Model) PodAt(a netip.Addr) (Pod, bool) {
	if p := m.podAt(a); p != nil {
		return p.Pod, true
	}
	return Pod{}, false
}

// podAt: an interface on this node goes before what the API says, and who came
// last before others.
func (m *Model) podAt(a netip.Addr) *pod {
	var found *pod
	here := false
	for _, c := range m.claims[a] {
		if p := m.podOf(c.pod, c.uid); p != nil && (c.here || !here) {
			found, here = p, c.here
		}
	}
	return found
}
