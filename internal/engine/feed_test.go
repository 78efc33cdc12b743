// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/state"
	"github.com/mustang-net/mustang/internal/store"
)

// kube is the key of a Kubernetes object.
func kube(name string) policy.Key {
	return policy.Key{Namespace: "ns", Name: name, Owner: state.OwnerKubernetes}
}

func kubePod(name string) policy.Pod {
	return policy.Pod{Key: kube(name), Labels: map[string]string{"app": name}}
}

func kubePolicy(name, apps string) policy.Policy {
	p := closedTo(name, apps)
	p.Key = kube(name)
	return p
}

func named(name string) map[string]string { return map[string]string{"name": name} }

// asAgent does fn with an engine that is fed.
func (n *node) asAgent(fn func(*Engine) error) {
	n.t.Helper()
	n.opts.Fed = true
	defer func() { n.opts.Fed = false }()
	n.must(fn)
}

func (n *node) refused(what string, err error) {
	n.t.Helper()
	if !errors.Is(err, ErrHeld) {
		n.t.Errorf("%s: %v; it is to be refused", what, err)
	}
}

// Where Kubernetes tells of pods, an endpoint is closed until its pod is known.
func TestAPodThatIsNotKnownIsClosed(t *testing.T) {
	n := newNode(t)
	n.run("ip addr add 10.9.255.1/32 dev lo")
	a, b := n.pod(1), n.pod(2)
	n.asAgent(func(e *Engine) error {
		_, err := e.AddEndpoint(context.Background(), labelled(a, state.OwnerCNI, named("a")))
		n.refused("a pod before anything is known", err)
		if err := e.FeedPolicies(func(m *policy.Model) { m.SetPod(kubePod("a")) }); err != nil {
			return err
		}
		for path, name := range map[string]string{a: "a", b: "b"} {
			if _, err := e.AddEndpoint(context.Background(), labelled(path, state.OwnerCNI, named(name))); err != nil {
				return err
			}
		}
		n.hold(a, "10.9.0.2", false)
		n.hold(b, "10.9.0.1", false)
		n.hold(b, "fd09::1", false)
		n.run("ping -c 1 -W 30 10.9.0.2")
		n.counted(e, "policy_unknown")
		err = e.FeedPolicies(func(m *policy.Model) { m.SetPod(kubePod("b")) })
		n.hold(a, "10.9.0.2", true)
		n.hold(b, "10.9.0.1", true)
		return err
	})
}

// counted wants some packets dropped for a reason.
func (n *node) counted(e *Engine, reason string) {
	n.t.Helper()
	d, err := e.drops()
	for _, x := range d {
		if x.Reason == reason && x.Packets > 0 {
			return
		}
	}
	n.t.Errorf("nothing is counted as %s: %v %v", reason, d, err)
}

// What an agent put into the tables stays when it goes, whatever others do, and
// until the next one knows everything.
func TestAnAgentsPolicyOutlivesIt(t *testing.T) {
	n := newNode(t)
	n.run("ip addr add 10.9.255.1/32 dev lo")
	a, b, c := n.pod(1), n.pod(2), n.pod(3)
	n.addLabelled(a, state.OwnerCLI, map[string]string{"app": "a"})
	n.must(func(e *Engine) error { return e.ApplyPolicyFile([]policy.Policy{closedTo("p", "a")}, nil) })
	tell := func(m *policy.Model) {
		m.SetPod(kubePod("b"))
		m.SetPolicy(kubePolicy("p", "b"))
		m.SetPolicy(kubePolicy("its", "b"))
	}
	n.asAgent(func(e *Engine) error {
		if err := e.FeedPolicies(tell); err != nil {
			return err
		}
		if err := e.RemovePolicies([]policy.Key{{Namespace: "ns", Name: "its"}}, nil); err == nil || !strings.Contains(err.Error(), "kubectl -n ns delete networkpolicy its") {
			t.Errorf("removing Kubernetes's: %v", err)
		}
		_, err := e.AddEndpoint(context.Background(), labelled(b, state.OwnerCNI, named("b")))
		return err
	})
	closed := func() {
		t.Helper()
		n.hold(b, "10.9.0.1", false) // by the command line's policy
		n.hold(a, "10.9.0.2", false) // by Kubernetes's of the same name
	}
	closed()
	n.must(func(e *Engine) error { // no agent runs
		_, err := e.AddEndpoint(context.Background(), labelled(c, state.OwnerCNI, named("c")))
		n.refused("a pod without an agent", err)
		n.refused("a policy without an agent", e.ApplyPolicyFile([]policy.Policy{closedTo("q", "a")}, nil))
		n.refused("to remove a policy without an agent", e.RemovePolicies([]policy.Key{{Namespace: "ns", Name: "p"}}, nil))
		return nil
	})
	n.hold(c, "10.9.255.1", true) // it is no endpoint
	closed()
	// A tool was killed while it added c: it is finished, and closed.
	n.must(func(e *Engine) error {
		ep, err := examined(labelled(c, state.OwnerCNI, named("c")))
		if err == nil {
			ep.Attach, ep.ServicePath = e.attachKind(EndpointSpec{}, ep), state.PathBoth
			err = e.number(&ep)
		}
		if err != nil {
			return err
		}
		return e.store.WriteJournal(operation{Kind: opAddEndpoint, Endpoint: &ep})
	})
	n.asAgent(func(e *Engine) error {
		closed()
		n.hold(c, "10.9.0.1", false)
		if err := e.RemoveAt(Whereabouts{Netns: c, IfName: "eth0", Owner: state.OwnerCNI, Living: true}); err != nil {
			return err
		}
		closed()
		return e.FeedPolicies(func(m *policy.Model) { m.SetPod(kubePod("b")) }) // the policy is gone
	})
	n.hold(a, "10.9.0.2", true)
	n.hold(b, "10.9.0.1", false)
}

// Names tell what numbers mean to who has no model.
func TestNamesAreKept(t *testing.T) {
	n := newNode(t)
	b := n.pod(2)
	n.asAgent(func(e *Engine) error {
		if err := e.FeedPolicies(func(m *policy.Model) {
			m.SetPod(kubePod("b"))
			p := kubePolicy("p", "b")
			p.Ingress = []policy.Rule{{}}
			m.SetPolicy(p)
		}); err != nil {
			return err
		}
		if _, err := e.AddEndpoint(context.Background(), labelled(b, state.OwnerCNI, named("b"))); err != nil {
			return err
		}
		return e.Relabel(kube("b"), map[string]string{"app": "b", "tier": "x"}, nil)
	})
	var names policy.Names
	if ok, err := store.At(n.scope.StateDir).ReadNames(&names); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if len(names.Rules) != 1 || len(names.Sets) != 1 {
		t.Fatalf("%+v", names)
	}
	for id, r := range names.Rules {
		if got, ok := names.Rule(id); !ok || got != r || r.Policy != kube("p") || r.Direction != policy.Ingress {
			t.Errorf("%+v", r)
		}
	}
	for id := range names.Sets {
		if s, ok := names.Set(uint64(uint32(id))); !ok || len(s.Policies) != 1 || s.Policies[0] != kube("p") {
			t.Errorf("%+v", s)
		}
	}
	for _, ep := range n.endpoints() {
		if ep.Labels["tier"] != "x" {
			t.Errorf("the endpoint's labels are %v", ep.Labels)
		}
	}
}

// Names that could not be written are written with the next word, though nothing else is new.
func TestNamesThatCouldNotBeWrittenAre(t *testing.T) {
	n := newNode(t)
	a := n.pod(1)
	n.asAgent(func(e *Engine) error {
		if _, err := e.AddEndpoint(context.Background(), labelled(a, state.OwnerCNI, named("a"))); !errors.Is(err, ErrHeld) {
			return err
		}
		if err := e.FeedPolicies(func(m *policy.Model) { m.SetPod(kubePod("a")) }); err != nil {
			return err
		}
		if _, err := e.AddEndpoint(context.Background(), labelled(a, state.OwnerCNI, named("a"))); err != nil {
			return err
		}
		file := filepath.Join(n.scope.StateDir, "policy-names.json")
		if err := errors.Join(os.Rename(file, file+".away"), os.MkdirAll(filepath.Join(file, "x"), 0o700)); err != nil {
			return err
		}
		if err := e.FeedPolicies(func(m *policy.Model) { m.SetPolicy(kubePolicy("closed", "a")) }); err == nil {
			t.Error("names were written where nothing can be")
		}
		if err := errors.Join(os.RemoveAll(file), os.Rename(file+".away", file)); err != nil {
			return err
		}
		if err := e.FeedPolicies(func(*policy.Model) {}); err != nil {
			return err
		}
		var names policy.Names
		if _, err := e.store.ReadNames(&names); err != nil || len(names.Sets) == 0 {
			t.Errorf("names are %v, %v", names, err)
		}
		return nil
	})
}
