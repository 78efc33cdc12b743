// SPDX-License-Identifier: Apache-2.0

package engine

// Policy: the model of what is to be, from the store and the endpoints or from
// who watches Kubernetes, and its way into the tables.

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/state"
	"github.com/mustang-net/mustang/internal/store"
)

// storedPolicies is what the store keeps: what was given on the command line.
type storedPolicies struct {
	Policies   []policy.Policy              `json:",omitempty"`
	Namespaces map[string]map[string]string `json:",omitempty"`
}

func (p *storedPolicies) empty() bool { return len(p.Policies) == 0 && len(p.Namespaces) == 0 }

// clone can be changed without changing p.
func (p *storedPolicies) clone() storedPolicies {
	out := storedPolicies{slices.Clone(p.Policies), maps.Clone(p.Namespaces)}
	if out.Namespaces == nil {
		out.Namespaces = map[string]map[string]string{}
	}
	return out
}

func (e *Engine) readPolicies() (storedPolicies, error) {
	var p storedPolicies
	_, err := e.store.ReadPolicies(&p)
	return p, err
}

func (e *Engine) policyTables() reconcile.Policies {
	return reconcile.NewPolicies(reconcile.PolicyTables{Ports: e.dp.Ports, Peers: e.dp.PolicyPeers, Identities: e.dp.Identities,
		Prefixes: e.dp.PolicyPrefixes, Policies: e.dp.Policies, Endpoints: e.dp.Endpoints})
}

// loadPolicies fills the model at its first use.
func (e *Engine) loadPolicies() error {
	if e.policies != nil || e.dp == nil {
		return nil
	}
	if err := e.loadEndpoints(); err != nil {
		return err
	}
	stored, err := e.readPolicies()
	if err != nil {
		return err
	}
	var l policy.Limits
	if l.Identities, l.Prefixes, l.Peers, l.Ports, err = e.dp.PolicySizes(); err != nil {
		return err
	}
	records, err := e.store.Endpoints()
	if err != nil {
		return err
	}
	kept, err := e.keptPolicies()
	if err != nil {
		return err
	}
	e.policies = policy.New(l)
	e.policies.Keep(kept)
	if e.opts.Fed {
		e.policies.Watched()
	}
	e.feedStored(storedPolicies{}, stored)
	for id, ep := range e.known {
		if ep.Labels == nil { // what the tables alone say of it
			ep.Labels, ep.Ports, ep.Pod = records[id].Labels, records[id].Ports, records[id].Pod
		}
		e.feedEndpoint(ep)
	}
	if err := e.feedNode(); err != nil {
		e.policies = nil // without the node's addresses it is not filled
		return err
	}
	return nil
}

// keptPolicies is what the tables hold that is to have its room again.
func (e *Engine) keptPolicies() (policy.Kept, error) {
	kept := policy.Kept{Sets: map[uint64]bool{}, Addrs: map[netip.Addr]bool{}}
	isolations, err := e.dp.Policies.All()
	if err != nil {
		return kept, err
	}
	for _, i := range isolations {
		kept.Sets[i.Ingress] = i.IngressFlags&bpfgen.SetIncomplete == 0
		kept.Sets[i.Egress] = i.EgressFlags&bpfgen.SetIncomplete == 0
	}
	identities, err := e.dp.Identities.All()
	for a := range identities {
		kept.Addrs[datapath.ToAddr(a)] = true
	}
	return kept, err
}

// governed says that policy is in play here at all.
func (e *Engine) governed() (bool, error) {
	if e.policies != nil || e.opts.Fed {
		return true, nil
	}
	stored, err := e.readPolicies()
	return len(stored.Policies) > 0, err
}

// prepareIsolation loads what isolate needs, before the new endpoint is in the
// store: its record has nothing in the tables yet.
func (e *Engine) prepareIsolation() error {
	if err := e.PolicyHeld(); err != nil {
		return err
	}
	governed, err := e.governed()
	if err != nil || !governed {
		return err
	}
	return e.loadPolicies()
}

func (e *Engine) feedStored(old, now storedPolicies) {
	for _, p := range old.Policies {
		e.policies.DeletePolicy(p.Key)
	}
	for name := range old.Namespaces {
		e.policies.DeleteNamespace(state.OwnerCLI, name)
	}
	for name, labels := range now.Namespaces {
		e.policies.SetNamespace(state.OwnerCLI, name, labels)
	}
	for _, p := range now.Policies {
		e.policies.SetPolicy(p)
	}
}

// feedEndpoint tells the model of an endpoint, and of its pod where nobody else
// does.
func (e *Engine) feedEndpoint(ep state.Endpoint) {
	key := e.podOf(ep)
	if e.isOwnPod(ep) {
		e.policies.SetPod(policy.Pod{Key: key, Labels: ep.Labels, Addrs: ep.Addrs(), Ports: ep.Ports})
	}
	e.policies.SetEndpoint(policy.Endpoint{ID: ep.ID, Pod: key, UID: ep.Pod.UID, Addrs: ep.Addrs()})
}

// isOwnPod says that nobody but the endpoint tells what its pod is.
func (e *Engine) isOwnPod(ep state.Endpoint) bool {
	return !e.opts.Fed || ep.Owner == state.OwnerCLI || ep.Pod.Name == "" && !isLost(ep)
}

// podOf is the pod that an endpoint belongs to. One that was not named is by
// itself, in the default namespace.
func (e *Engine) podOf(ep state.Endpoint) policy.Key {
	k := policy.Key{Namespace: ep.Pod.Namespace, Name: ep.Pod.Name, Owner: state.OwnerKubernetes}
	if e.isOwnPod(ep) {
		k.Owner = state.OwnerCLI
	}
	if k.Namespace == "" {
		k.Namespace = "default"
	}
	if k.Name == "" {
		k.Name = fmt.Sprintf("endpoint %d", ep.ID) // which nobody can call a pod
	}
	return k
}

// feedNode tells the model which addresses are this namespace's.
func (e *Engine) feedNode() error {
	addrs, err := nodeAddrs()
	if err != nil {
		return err
	}
	e.policies.SetNode(addrs)
	return nil
}

// nodeAddrs are this namespace's addresses.
func nodeAddrs() ([]netip.Addr, error) {
	list, err := netns.Addrs(nil)
	if err != nil {
		return nil, fmt.Errorf("list the node's addresses: %w", err)
	}
	var addrs []netip.Addr
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			addrs = append(addrs, ip.Unmap())
		}
	}
	return addrs, nil
}

// Policies is the model, filled and planned, to look at; nil when there is no
// scope.
func (e *Engine) Policies() (*policy.Model, error) {
	if err := e.PolicyHeld(); err != nil {
		return nil, err
	}
	if err := e.loadPolicies(); err != nil || e.policies == nil {
		return nil, err
	}
	e.policies.Look()
	return e.policies, nil
}

// writePolicies brings the tables to what the model says. Where that leaves pods told apart by
// what nobody asks any more, a second change takes it away: so another process, which has not
// heard of it, plans the same.
func (e *Engine) writePolicies() error {
	if err := e.writeChange(e.policies.Plan()); err != nil {
		return err
	}
	if e.policies.Trailing() {
		if err := e.writeChange(e.policies.Plan()); err != nil {
			return err
		}
	}
	return e.keepNames() // also without a change: it may have failed the last time
}

func (e *Engine) writeChange(c policy.Change) error {
	if c.Empty() {
		return nil
	}
	generations, err := e.policyTables().Apply(c)
	if err != nil {
		e.policies.Again()
		return fmt.Errorf("write policy: %w", err)
	}
	for id, g := range generations {
		if ep, ok := e.known[id]; ok {
			ep.Generation = g
			e.known[id] = ep
		}
	}
	return nil
}

// isolate puts ep's policy into the tables, before ep itself: its programs
// forward nothing yet. On a node without policies that is one write.
func (e *Engine) isolate(ep state.Endpoint) error {
	if e.held() {
		return e.close(ep)
	}
	governed, err := e.governed()
	if err != nil {
		return err
	}
	if !governed {
		return e.dp.Policies.Delete([]uint32{ep.ID})
	}
	if err := e.loadPolicies(); err != nil {
		return err
	}
	e.feedEndpoint(ep)
	if err := e.feedNode(); err != nil { // its interface may have brought an address
		return err
	}
	return e.writePolicies()
}

// unisolate is the reverse, after ep has left the tables.
func (e *Engine) unisolate(ep state.Endpoint) error {
	governed, err := e.governed()
	if err != nil {
		return err
	}
	if !governed || e.held() {
		return e.dp.Policies.Delete([]uint32{ep.ID})
	}
	if err := e.loadPolicies(); err != nil {
		return err
	}
	e.policies.DeleteEndpoint(ep.ID)
	key := e.podOf(ep)
	if e.isOwnPod(ep) {
		e.policies.DeletePod(key)
	}
	for id, other := range e.known {
		if id != ep.ID && e.podOf(other) == key { // the pod's other interface
			e.feedEndpoint(other)
		}
	}
	return e.writePolicies()
}

// ApplyPolicyFile adds policies and namespaces' labels, and replaces those of
// the same names. All take effect or none.
func (e *Engine) ApplyPolicyFile(policies []policy.Policy, namespaces map[string]map[string]string) error {
	return e.changePolicies(func(now *storedPolicies) error {
		for _, p := range policies {
			p.Owner = state.OwnerCLI
			if at := now.index(p.Key); at >= 0 {
				now.Policies[at] = p
			} else {
				now.Policies = append(now.Policies, p)
			}
		}
		maps.Copy(now.Namespaces, namespaces)
		slices.SortFunc(now.Policies, func(a, b policy.Policy) int { return a.Compare(b.Key) })
		return nil
	})
}

// RemovePolicies removes policies and what was said about namespaces;
// ErrNotFound when one policy does not exist, and then nothing is removed.
func (e *Engine) RemovePolicies(keys []policy.Key, namespaces []string) error {
	return e.changePolicies(func(now *storedPolicies) error {
		for _, k := range keys {
			k.Owner = state.OwnerCLI
			at := now.index(k)
			if at < 0 {
				return e.noSuchPolicy(k)
			}
			now.Policies = slices.Delete(now.Policies, at, at+1)
		}
		for _, name := range namespaces {
			delete(now.Namespaces, name)
		}
		return nil
	})
}

func (e *Engine) noSuchPolicy(k policy.Key) error {
	if m, err := e.Policies(); err == nil && m != nil {
		k.Owner = state.OwnerKubernetes
		if slices.ContainsFunc(m.Policies(), func(p policy.Policy) bool { return p.Key == k }) {
			return fmt.Errorf("policy %s is Kubernetes's; delete it there: `kubectl -n %s delete networkpolicy %s`", k, k.Namespace, k.Name)
		}
	}
	return fmt.Errorf("policy %s: %w; `mustang policy ls` lists those that exist", k, ErrNotFound)
}

func (p *storedPolicies) index(k policy.Key) int {
	return slices.IndexFunc(p.Policies, func(q policy.Policy) bool { return q.Key == k })
}

func (e *Engine) changePolicies(change func(*storedPolicies) error) error {
	if e.dp == nil {
		return errReadOnly
	}
	if err := e.PolicyHeld(); err != nil {
		return err
	}
	old, err := e.readPolicies()
	if err != nil {
		return err
	}
	now := old.clone()
	if err := change(&now); err != nil {
		return err
	}
	if err := e.loadPolicies(); err != nil {
		return err
	}
	if err := e.begin(operation{Kind: opPolicies, Policies: &now}); err != nil {
		return err
	}
	err = e.replacePolicies(old, now)
	if err == nil {
		return e.done()
	}
	if undo := e.replacePolicies(now, old); undo != nil {
		// The next tool brings the old state back.
		return errors.Join(err, e.begin(operation{Kind: opPolicies, Policies: &old}))
	}
	return errors.Join(err, e.done())
}

// replacePolicies makes now what is stored and what is in force.
func (e *Engine) replacePolicies(old, now storedPolicies) error {
	e.feedStored(old, now)
	if err := e.feedNode(); err != nil {
		return err
	}
	if err := e.writePolicies(); err != nil {
		return err
	}
	return e.storePolicies(now)
}

func (e *Engine) storePolicies(now storedPolicies) error {
	if now.empty() {
		return e.store.DeletePolicies()
	}
	return e.store.WritePolicies(now)
}

// finishPolicies is replacePolicies for a killed tool.
func (e *Engine) finishPolicies(now storedPolicies) error {
	if e.held() { // they are in force with the rest
		return e.storePolicies(now)
	}
	old, err := e.readPolicies()
	if err == nil {
		err = e.loadPolicies()
	}
	if err == nil {
		err = e.replacePolicies(old, now)
	}
	return err
}

// LookPolicies is the model of what was given on the command line, for who
// looks at a node without its lock; it writes nothing.
func LookPolicies(st store.Store, endpoints map[uint32]state.Endpoint) (*policy.Model, error) {
	const plenty = 1 << 30
	e := &Engine{store: st, policies: policy.New(policy.Limits{Peers: plenty, Ports: plenty, Identities: plenty, Prefixes: plenty})}
	stored, err := e.readPolicies()
	if err != nil {
		return nil, err
	}
	e.feedStored(storedPolicies{}, stored)
	for _, ep := range endpoints {
		e.feedEndpoint(ep)
	}
	e.policies.Plan() // it is planning that gives endpoints their sets
	return e.policies, nil
}
