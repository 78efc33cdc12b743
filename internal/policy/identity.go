// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strconv"
)

// identity is what rules in use see of pods: their namespace, and the labels and named ports
// that are asked for. Pods that are alike in that share one.
type identity struct {
	id        uint64
	digest    digest
	content   string
	namespace string
	labels    map[string]string // with what they are asked for: see view.labelsOf
	ports     []NamedPort
	pods      map[*pod]bool
	selectors map[*selector]bool // that select it
}

func (m *Model) identityOf(p *pod) *identity {
	labels, ports := m.asked.seen.labelsOf(&p.Pod), m.asked.seen.portsOf(p)
	parts := []string{"pod", p.Namespace}
	for _, l := range labels {
		parts = append(parts, "l", l.key, l.value)
	}
	for _, n := range ports {
		parts = append(parts, "p", n.Name, n.Protocol.String(), strconv.Itoa(int(n.Number)))
	}
	content := join(parts...)
	if known := m.byContent[content]; known != nil {
		return known
	}
	d := digestOf(parts...)
	made := &identity{id: m.peerNumbers.number(d), digest: d, content: content, namespace: p.Namespace,
		labels: make(map[string]string, len(labels)), ports: ports, pods: map[*pod]bool{}, selectors: map[*selector]bool{}}
	for _, l := range labels {
		made.labels[l.key] = l.value
	}
	m.identities[made.id], m.byContent[content] = made, made
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
	delete(m.byContent, id.content)
	m.gone.identities[id.id] = true
	m.peerNumbers.release(id.digest)
	delete(m.inNamespace[id.namespace], id)
	if len(m.inNamespace[id.namespace]) == 0 {
		delete(m.inNamespace, id.namespace)
	}
}

// lookAgain gives the pods another identity about which something is asked that was not, or
// is not any more.
func (m *Model) lookAgain() {
	differs := m.asked.update(m.full)
	if differs.empty() {
		return
	}
	left := map[*identity]bool{}
	for _, p := range m.pods {
		if p.identity == nil || !differs.concerns(&p.Pod) {
			continue
		}
		if fresh := m.identityOf(p); fresh != p.identity {
			left[p.identity] = true
			m.move(p, fresh)
		}
	}
	for id := range left {
		m.releaseIdentity(id)
	}
}

// move gives p another identity.
func (m *Model) move(p *pod, to *identity) {
	from := p.identity
	delete(from.pods, p)
	to.pods[p] = true
	p.identity = to
	if len(from.selectors)+len(to.selectors)+m.anyPodRules > 0 {
		p.eachAddr(m, func(a netip.Addr) { m.dirtyAddrs[a] = true })
	}
}

// eachAddr is where p is.
func (p *pod) eachAddr(m *Model, fn func(netip.Addr)) {
	for _, a := range p.Addrs {
		fn(a)
	}
	for ep := range m.interfaces[p.Key] {
		for _, a := range m.endpoints[ep].Addrs {
			fn(a)
		}
	}
}

// addrs are where pods of the identity are.
func (id *identity) addrs(m *Model) []netip.Addr {
	var out []netip.Addr
	for p := range id.pods {
		p.eachAddr(m, func(a netip.Addr) { out = append(out, a) })
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

// selector is the one of a peer of a policy in namespace. A new one selects nothing until
// identities say what it asks, and it meets them.
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
	m.asked.ask(pods.questions(), 1)
	m.unmet = append(m.unmet, s)
	return s
}

// meet lets new selectors select.
func (m *Model) meet() {
	for _, s := range m.unmet {
		for id := range m.candidates(s) {
			m.relate(s, id)
		}
	}
	m.unmet = nil
}

// candidates are the identities that a new selector may select.
func (m *Model) candidates(s *selector) iter.Seq[*identity] {
	if candidates, ok := m.labels.addSelector(s, m.identities); ok {
		return slices.Values(candidates)
	}
	if s.namespaces == nil {
		return maps.Keys(m.inNamespace[s.namespace])
	}
	return func(yield func(*identity) bool) {
		for ns, ids := range m.inNamespace {
			if !m.inNamespaces(*s.namespaces, ns) {
				continue
			}
			for id := range ids {
				if !yield(id) {
					return
				}
			}
		}
	}
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
	m.asked.ask(s.pods.questions(), -1)
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
