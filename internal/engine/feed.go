// SPDX-License-Identifier: Apache-2.0

package engine

// Policy as an agent that watches Kubernetes tells it. From its first word on,
// the tables' policy is the agent's: without it nobody knows what they are to
// hold, so nobody changes them, and no pod starts.

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/state"
)

// ErrHeld is about policy that cannot be decided now: it is an agent's, who
// does not run, or has not heard everything from Kubernetes yet.
var ErrHeld = errors.New("this node's policy is its agent's")

// held says that what is in force about policy stays as it is.
func (e *Engine) held() bool {
	if e.opts.Fed {
		return !e.fed
	}
	return e.store.HasNames()
}

// PolicyHeld is ErrHeld with its reason while policy cannot be decided, and so no
// endpoint can be added; else nil.
func (e *Engine) PolicyHeld() error {
	switch {
	case !e.held():
		return nil
	case e.opts.Fed:
		return fmt.Errorf("%w, which has not heard everything from the API server yet; try again when it has", ErrHeld)
	}
	return fmt.Errorf("%w, which does not run; start it, or remove everything by `mustang reset`", ErrHeld)
}

// FeedPolicies has tell tell the model what is new, and brings the tables to
// what it says then. The first call tells everything, and is the first from
// which on anything about policy changes. Endpoints, and pods that are not
// Kubernetes's, are the engine's own to tell.
func (e *Engine) FeedPolicies(tell func(*policy.Model)) error {
	if e.dp == nil {
		return errReadOnly
	}
	if err := e.loadPolicies(); err != nil {
		return err
	}
	tell(e.policies)
	e.findLostPods()
	if !e.store.HasNames() { // before the first write: who finds it left half done, leaves it
		if err := e.store.WriteNames(policy.Names{}); err != nil {
			return err
		}
	}
	e.fed = true
	return e.writePolicies()
}

// findLostPods finds by their addresses the pods of endpoints whose records are lost.
// One that is not found stays closed.
func (e *Engine) findLostPods() {
	for id, ep := range e.known {
		if !e.isUnnamed(ep) {
			continue
		}
		for _, a := range ep.Addrs() {
			if p, ok := e.policies.PodAt(a); ok && p.Owner == state.OwnerKubernetes {
				ep.Pod = state.PodRef{Namespace: p.Namespace, Name: p.Name}
				e.known[id] = ep
				e.feedEndpoint(ep)
				break
			}
		}
	}
}

// isUnnamed says that ep is the pod's of whom its record, which is lost, told.
func (e *Engine) isUnnamed(ep state.Endpoint) bool {
	return e.opts.Fed && ep.Owner == state.OwnerCNI && ep.Pod.Name == "" && isLost(ep)
}

// RefreshNode brings the tables to this namespace's addresses as they are now.
func (e *Engine) RefreshNode() error {
	if e.held() || e.policies == nil {
		return nil // whoever fills the model looks
	}
	if err := e.feedNode(); err != nil {
		return err
	}
	return e.writePolicies()
}

// keepNames writes down what numbers in verdicts mean, for readers that do not
// hold the model. What the command line gives, they find out by themselves.
func (e *Engine) keepNames() error {
	if !e.opts.Fed {
		return nil
	}
	names, changed := e.policies.Names()
	if !changed {
		return nil
	}
	if err := e.store.WriteNames(names); err != nil {
		return err
	}
	e.policies.NamesKept()
	return nil
}

// close is isolate while policy is held: nobody but the node reaches ep.
func (e *Engine) close(ep state.Endpoint) error {
	u := policy.Unknown
	return e.dp.Policies.Put([]uint32{ep.ID}, []datapath.EndpointPolicy{{
		Ingress: u.Ingress, Egress: u.Egress, IngressFlags: u.IngressFlags, EgressFlags: u.EgressFlags,
	}})
}

// Relabel keeps a pod's labels and ports with its endpoints, for who shows them.
func (e *Engine) Relabel(pod policy.Key, labels map[string]string, ports []state.NamedPort) error {
	if err := e.loadEndpoints(); err != nil {
		return err
	}
	var errs []error
	for id, ep := range e.known {
		if e.podOf(ep) != pod || maps.Equal(ep.Labels, labels) && slices.Equal(ep.Ports, ports) {
			continue
		}
		ep.Labels, ep.Ports = labels, ports
		if err := e.store.PutEndpoint(ep); err != nil {
			errs = append(errs, err)
			continue
		}
		e.known[id] = ep
	}
	return errors.Join(errs...)
}
