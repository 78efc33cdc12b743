// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/state"
)

// Model is the state that a node's tables follow from, and what they hold by
// its last plan. It is not for concurrent use.
type Model struct {
	limits     Limits
	policies   map[string]map[Key]*Policy                   // by namespace
	namespaces map[string]map[state.Owner]map[string]string // their labels, as each owner says
	pods       map[Key]*pod
	endpoints  map[uint32]*endpoint
	interfaces map[Key]map[uint32]bool // ids of a pod's endpoints
	claims     map[netip.Addr][]claim
	node       map[netip.Addr]bool

	asked       asked
	identities  map[uint64]*identity
	byContent   map[string]*identity
	inNamespace map[string]map[*identity]bool
	selectors   map[string]*selector
	unmet       []*selector // new ones
	labels      labelIndex
	groups      map[uint64]*group
	sets        map[uint64]*set
	lists       map[uint64]*list
	names       names

	peerNumbers                           numbers  // of pods' identities and of prefixes': they are keys of one table
	prefixDigests                         []digest // prefix identities of the last walk
	setNumbers, groupNumbers, listNumbers numbers

	groupsMade   int // so far, for their order
	anyPodRules  int // of sets in use
	peers, ports int // entries in use
	refusedAt    int // entries of peers in use when a set was refused some of it, the most

	dirtyEndpoints map[uint32]bool
	dirtyAddrs     map[netip.Addr]bool
	dirtyPrefixes  bool
	singlesRefused int // addresses that there might have been when a group of blocks found no room among them; 0: none did

	kept    Kept
	written written
	change  Change
	gone    goneSets
	strict  map[*set]bool
	full    bool
	watched bool // Kubernetes tells of namespaces
	renamed bool // there are other sets or rules than Names has told
}

type pod struct {
	Pod
	named    []NamedPort // in their order
	identity *identity   // nil: no rule sees it
}

type endpoint struct {
	Endpoint
	ingress, egress *set // nil: not isolated
}

// claim is a pod's on an address; here: by an interface on this node, which
// outdoes what the API says.
type claim struct {
	pod  Key
	uid  string // of here
	here bool
}

// written is what the tables hold, besides what sets and lists know of themselves.
type written struct {
	identities map[netip.Addr]Identity
	singles    map[netip.Addr]uint64 // prefix identities of single addresses
	prefixes   map[netip.Prefix]uint64
	endpoints  map[uint32]Isolation
}

// Kept is what tables hold that were written by another model. Where not
// everything fits, that comes first: what is in force stays so.
type Kept struct {
	Sets  map[uint64]bool // in force in whole
	Addrs map[netip.Addr]bool
}

// Keep tells a model that has made no plan yet what its tables hold.
func (m *Model) Keep(k Kept) { m.kept = k }

// New is an empty model for tables of these sizes. Its first plan is full.
func New(limits Limits) *Model {
	m := &Model{
		limits: limits, policies: map[string]map[Key]*Policy{}, namespaces: map[string]map[state.Owner]map[string]string{},
		pods: map[Key]*pod{}, endpoints: map[uint32]*endpoint{}, interfaces: map[Key]map[uint32]bool{}, claims: map[netip.Addr][]claim{}, node: map[netip.Addr]bool{},
		asked: newAsked(), identities: map[uint64]*identity{}, byContent: map[string]*identity{}, inNamespace: map[string]map[*identity]bool{}, selectors: map[string]*selector{}, labels: newLabelIndex(),
		groups: map[uint64]*group{}, sets: map[uint64]*set{}, lists: map[uint64]*list{}, names: newNames(),
		dirtyEndpoints: map[uint32]bool{}, dirtyAddrs: map[netip.Addr]bool{}, strict: map[*set]bool{}, full: true,
		written: written{map[netip.Addr]Identity{}, map[netip.Addr]uint64{}, map[netip.Prefix]uint64{}, map[uint32]Isolation{}},
	}
	m.peerNumbers, m.setNumbers, m.groupNumbers, m.listNumbers = newNumbers(), newNumbers(), newNumbers(), newNumbers()
	m.peerNumbers.number(noGroup)
	m.setNumbers.number(unknownSet)
	m.begin()
	m.renamed = true // that there are none is news, too
	return m
}

// SetPolicy adds a policy, or replaces the one of its name.
func (m *Model) SetPolicy(p Policy) {
	in := m.policies[p.Namespace]
	if in == nil {
		in = map[Key]*Policy{}
		m.policies[p.Namespace] = in
	}
	for d, rules := range [][]Rule{p.Ingress, p.Egress} {
		p.content[d] = contentOf(rules)
	}
	old := in[p.Key]
	if old != nil {
		m.names.left(old)
	}
	in[p.Key] = &p
	m.names.policy(&p)
	m.policyChanged(old, &p)
}

// DeletePolicy removes a policy; an absent one is success. So for the others.
func (m *Model) DeletePolicy(k Key) {
	old := m.policies[k.Namespace][k]
	if old == nil {
		return
	}
	m.names.left(old)
	delete(m.policies[k.Namespace], k)
	if len(m.policies[k.Namespace]) == 0 {
		delete(m.policies, k.Namespace)
	}
	m.policyChanged(old, nil)
}

// hasRule says whether there is such a rule.
func (m *Model) hasRule(k RuleName) bool {
	p := m.policies[k.Policy.Namespace][k.Policy]
	return p != nil && k.Index < len(p.rules(k.Direction))
}

// Policies are all policies, by name.
func (m *Model) Policies() []Policy {
	var out []Policy
	for _, in := range m.policies {
		for _, p := range in {
			out = append(out, *p)
		}
	}
	slices.SortFunc(out, func(a, b Policy) int { return a.Compare(b.Key) })
	return out
}

// policyChanged looks again at the endpoints that a policy isolated or isolates, and at
// no other: where many policies are in one namespace, each selects few of its pods. One
// whose pod is not known has no policies, and is looked at when its pod is.
func (m *Model) policyChanged(old, now *Policy) {
	for id, ep := range m.endpoints {
		p := m.podOf(ep.Pod, ep.UID)
		if p == nil || p.identity == nil {
			continue
		}
		if old.selects(p) || now.selects(p) {
			m.dirtyEndpoints[id] = true
		}
	}
}

// selects says whether p is about a pod; nil is about none. Pods of this node alone are
// asked: what no peer asks of them is nothing to their identities.
func (p *Policy) selects(who *pod) bool {
	return p != nil && p.Namespace == who.Namespace && p.Pods.Matches(who.Labels)
}

// Watched says that Kubernetes tells of namespaces. Of one that it has not told, or
// does not tell any more while pods of it are there, only the name is known: no
// selector holds of it by labels that it might have.
func (m *Model) Watched() {
	was := map[string]map[*selector]bool{}
	for name := range m.inNamespace {
		was[name] = m.selectingNamespace(name)
	}
	m.watched = true
	for name := range m.inNamespace {
		m.namespaceChanged(name, was[name])
	}
}

// SetNamespace gives a namespace its labels. What Kubernetes says of it goes
// before what others say. One that was never set has its name as its only label.
func (m *Model) SetNamespace(by state.Owner, name string, labels map[string]string) {
	said := m.namespaces[name]
	if old, ok := said[by]; ok && maps.Equal(old, labels) {
		return
	}
	was := m.selectingNamespace(name)
	if said == nil {
		said = map[state.Owner]map[string]string{}
		m.namespaces[name] = said
	}
	said[by] = maps.Clone(labels)
	m.namespaceChanged(name, was)
}

func (m *Model) DeleteNamespace(by state.Owner, name string) {
	was := m.selectingNamespace(name)
	delete(m.namespaces[name], by)
	if len(m.namespaces[name]) == 0 {
		delete(m.namespaces, name)
	}
	m.namespaceChanged(name, was)
}

// selectingNamespace are the selectors of namespaces that select one with pods.
func (m *Model) selectingNamespace(name string) map[*selector]bool {
	out := map[*selector]bool{}
	for _, s := range m.selectors {
		if s.namespaces != nil && len(m.inNamespace[name]) > 0 && m.inNamespaces(*s.namespaces, name) {
			out[s] = true
		}
	}
	return out
}

// namespaceChanged looks again at its pods for the selectors that select the namespace
// now and did not, or the other way around.
func (m *Model) namespaceChanged(name string, was map[*selector]bool) {
	is := m.selectingNamespace(name)
	for _, s := range m.selectors {
		if is[s] == was[s] {
			continue
		}
		for id := range m.inNamespace[name] {
			m.relate(s, id)
		}
	}
}

// inNamespaces says whether s selects a namespace.
func (m *Model) inNamespaces(s Selector, name string) bool {
	if m.watched && len(m.namespaces[name]) == 0 && slices.ContainsFunc(s, func(r Requirement) bool { return r.Key != NamespaceName }) {
		return false
	}
	return s.Matches(m.namespaceLabels(name))
}

func (m *Model) namespaceLabels(name string) map[string]string {
	said := m.namespaces[name]
	labels, ok := said[state.OwnerKubernetes]
	if !ok {
		labels = said[state.OwnerCLI]
	}
	if labels[NamespaceName] == name {
		return labels
	}
	labels = maps.Clone(labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[NamespaceName] = name
	return labels
}

// SetPod adds a pod of any node, or replaces the one of its name.
func (m *Model) SetPod(p Pod) {
	old := m.pods[p.Key]
	if old != nil && old.UID == p.UID && old.StaticUID == p.StaticUID && maps.Equal(old.Labels, p.Labels) && slices.Equal(old.Addrs, p.Addrs) &&
		slices.Equal(old.Ports, p.Ports) && old.HostNetwork == p.HostNetwork {
		return
	}
	p.Labels, p.Addrs, p.Ports = maps.Clone(p.Labels), slices.Clone(p.Addrs), slices.Clone(p.Ports)
	fresh := &pod{Pod: p, named: sorted(p.Ports)}
	if !p.HostNetwork {
		fresh.identity = m.identityOf(fresh)
	}
	var had, has []netip.Addr
	if old != nil && old.identity != nil {
		had = old.Addrs
	}
	m.pods[p.Key] = fresh
	if fresh.identity != nil {
		fresh.identity.pods[fresh] = true
		has = fresh.Addrs
	}
	m.forgetPod(old, has)
	for _, a := range has {
		if !slices.Contains(had, a) { // a new label is no new claim
			m.claims[a] = append(m.claims[a], claim{pod: p.Key})
		}
		m.dirtyAddrs[a] = true
	}
	m.podChanged(p.Key)
	if old != nil {
		m.releaseIdentity(old.identity)
	}
}

func (m *Model) DeletePod(k Key) {
	old := m.pods[k]
	if old == nil {
		return
	}
	m.forgetPod(old, nil)
	delete(m.pods, k)
	m.podChanged(k)
	m.releaseIdentity(old.identity)
}

// forgetPod takes back what a pod claims, but for what stays its; its identity goes
// when nobody else has it.
func (m *Model) forgetPod(p *pod, stays []netip.Addr) {
	if p == nil || p.identity == nil {
		return
	}
	delete(p.identity.pods, p)
	for _, a := range p.Addrs {
		if !slices.Contains(stays, a) {
			m.unclaim(a, claim{pod: p.Key})
		}
	}
}

// unclaim takes back one claim: another interface of the pod may have the address, too.
func (m *Model) unclaim(a netip.Addr, c claim) {
	m.dirtyAddrs[a] = true
	list := m.claims[a]
	if i := slices.Index(list, c); i >= 0 {
		list = slices.Delete(list, i, i+1)
	}
	if len(list) == 0 {
		delete(m.claims, a)
		return
	}
	m.claims[a] = list
}

// podOf is the pod of a name, unless what has this UID was another one before it.
func (m *Model) podOf(k Key, uid string) *pod {
	p := m.pods[k]
	if p != nil && uid != "" && p.UID != "" && uid != p.UID && uid != p.StaticUID {
		return nil
	}
	return p
}

// podChanged looks again at the endpoints of a pod.
func (m *Model) podChanged(k Key) {
	for id := range m.interfaces[k] {
		m.dirtyEndpoints[id] = true
		for _, a := range m.endpoints[id].Addrs {
			m.dirtyAddrs[a] = true
		}
	}
}

// SetEndpoint says which interface of this node is which pod's.
func (m *Model) SetEndpoint(e Endpoint) {
	old := m.endpoints[e.ID]
	if old != nil && old.Pod == e.Pod && old.UID == e.UID && slices.Equal(old.Addrs, e.Addrs) {
		return
	}
	fresh := &endpoint{Endpoint: e}
	fresh.Addrs = slices.Clone(e.Addrs)
	if old != nil {
		m.forgetEndpoint(old)
		fresh.ingress, fresh.egress = old.ingress, old.egress
	}
	m.endpoints[e.ID] = fresh
	m.dirtyEndpoints[e.ID] = true
	if e.Pod == (Key{}) {
		return
	}
	if m.interfaces[e.Pod] == nil {
		m.interfaces[e.Pod] = map[uint32]bool{}
	}
	m.interfaces[e.Pod][e.ID] = true
	for _, a := range e.Addrs {
		m.claims[a] = append(m.claims[a], claim{e.Pod, e.UID, true})
		m.dirtyAddrs[a] = true
	}
}

// Endpoints are the ids of all endpoints.
func (m *Model) Endpoints() []uint32 { return slices.Sorted(maps.Keys(m.endpoints)) }

func (m *Model) DeleteEndpoint(id uint32) {
	old := m.endpoints[id]
	if old == nil {
		return
	}
	m.forgetEndpoint(old)
	m.release(old.ingress)
	m.release(old.egress)
	delete(m.endpoints, id)
	m.dirtyEndpoints[id] = true
}

func (m *Model) forgetEndpoint(ep *endpoint) {
	delete(m.interfaces[ep.Pod], ep.ID)
	if len(m.interfaces[ep.Pod]) == 0 {
		delete(m.interfaces, ep.Pod)
	}
	for _, a := range ep.Addrs {
		m.unclaim(a, claim{ep.Pod, ep.UID, true})
	}
}

// SetNode gives the addresses of this node's own namespace.
func (m *Model) SetNode(addrs []netip.Addr) {
	for a := range m.node {
		m.dirtyAddrs[a] = true
	}
	clear(m.node)
	for _, a := range addrs {
		m.node[a] = true
		m.dirtyAddrs[a] = true
	}
}
