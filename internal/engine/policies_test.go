// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/state"
)

// hold wants an echo from the pod at path to come back, or none within a second.
func (n *node) hold(path, to string, want bool) {
	n.t.Helper()
	wait := map[bool]string{false: "1", true: "30"}[want]
	got := false
	err := netns.Do(path, func() error {
		got = exec.Command("ping", "-c", "1", "-W", wait, to).Run() == nil
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	if got != want {
		n.t.Errorf("%s reaches %s: %v, want %v", path, to, got, want)
	}
}

func (n *node) addLabelled(path string, owner state.Owner, labels map[string]string) state.Endpoint {
	n.t.Helper()
	var ep state.Endpoint
	n.must(func(e *Engine) (err error) {
		ep, err = e.AddEndpoint(context.Background(), labelled(path, owner, labels))
		return err
	})
	return ep
}

// labelled is a pod's interface; the label "name" is the pod's name.
func labelled(path string, owner state.Owner, labels map[string]string) EndpointSpec {
	return EndpointSpec{Netns: path, IfName: "eth0", Owner: owner, Labels: labels, Pod: state.PodRef{Namespace: "ns", Name: labels["name"]}}
}

func app(name string) policy.Selector {
	return policy.Selector{{Key: "app", Operator: policy.In, Values: []string{name}}}
}

// closedTo is a policy that lets nobody in.
func closedTo(name, apps string) policy.Policy {
	return policy.Policy{Key: policy.Key{Namespace: "ns", Name: name, Owner: state.OwnerCLI}, Pods: app(apps), IsolatesIngress: true}
}

func TestPoliciesOutliveTheTool(t *testing.T) {
	n := newNode(t)
	n.run("ip addr add 10.9.255.1/32 dev lo")
	a, b := n.pod(1), n.pod(2)
	n.addLabelled(a, state.OwnerCLI, map[string]string{"app": "a"})
	n.must(func(e *Engine) error { return e.ApplyPolicyFile([]policy.Policy{closedTo("p", "b")}, nil) })
	n.hold(a, "10.9.0.2", true) // not an endpoint yet
	// A new tool, and an endpoint that the policy was there before.
	n.addLabelled(b, state.OwnerCLI, map[string]string{"app": "b"})
	n.hold(a, "10.9.0.2", false)
	n.hold(a, "fd09::2", false)
	n.hold(b, "10.9.0.1", true)
	n.run("ping -c 1 -W 30 10.9.0.2") // the node itself
	// Also from an address that it got since, of which nobody has told the tables.
	n.run("sysctl -qw net.ipv6.conf.all.forwarding=1 && ip addr add 10.9.255.2/32 dev lo && ip addr add fd09::255:2/128 dev h2 nodad")
	n.run("ip route add fd09::2/128 dev h2 && ip -n %s-p2 route add fd09::255:2/128 dev eth0", n.name)
	n.run("ping -c 1 -W 3 -I 10.9.255.2 10.9.0.2 && ping -c 1 -W 3 -I fd09::255:2 fd09::2")
	open := closedTo("p", "b")
	open.Ingress = []policy.Rule{{Peers: []policy.Peer{{Pods: &policy.Selector{app("a")[0]}}}}}
	n.must(func(e *Engine) error { return e.ApplyPolicyFile([]policy.Policy{open}, nil) })
	n.hold(a, "10.9.0.2", true)
	n.must(func(e *Engine) error {
		m, err := e.Policies()
		if err == nil && len(m.Policies()) != 1 {
			t.Errorf("%d policies", len(m.Policies()))
		}
		return err
	})
	err := n.do(func(e *Engine) error {
		return e.RemovePolicies([]policy.Key{open.Key, {Namespace: "x", Name: "y"}}, nil)
	})
	if !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
	n.must(func(e *Engine) error { return e.RemovePolicies([]policy.Key{open.Key}, nil) })
	n.must(func(e *Engine) error {
		identities, err := e.dp.Identities.All()
		maps.DeleteFunc(identities, func(_ datapath.Addr, who datapath.Identity) bool { return who.Pod == policy.Node })
		policies, err2 := e.dp.Policies.All()
		peers, err3 := e.dp.PolicyPeers.All()
		if len(identities)+len(policies)+len(peers) > 0 {
			t.Errorf("without policies there remain %v, %v, %v", identities, policies, peers)
		}
		return errors.Join(err, err2, err3)
	})
}

// Who made an interface tells its pod's ports, too: rules go by their names.
func TestAPolicyByThePortsOfAPodThatWasMade(t *testing.T) {
	n := newNode(t)
	a, b := n.pod(1), n.pod(2)
	n.addLabelled(a, state.OwnerCLI, map[string]string{"app": "a"})
	made := n.addLabelled(b, state.OwnerCLI, map[string]string{"app": "b"})
	n.must(func(e *Engine) error { return e.RemoveEndpoint(made.ID) })
	byName := closedTo("p", "b")
	byName.Ingress = []policy.Rule{{Ports: []policy.Port{{Protocol: state.TCP, Name: "http"}}}}
	n.must(func(e *Engine) error { return e.ApplyPolicyFile([]policy.Policy{byName}, nil) })
	spec := labelled(b, state.OwnerCLI, map[string]string{"app": "b"})
	spec.Made, spec.Ports = &made, []state.NamedPort{{Name: "http", Protocol: state.TCP, Number: 8080}}
	n.must(func(e *Engine) error { _, err := e.AddEndpoint(context.Background(), spec); return err })
	for at, want := range map[string]bool{"10.9.0.2:8080": true, "10.9.0.2:8081": false} {
		var l net.Listener
		err := netns.Do(b, func() (err error) { l, err = net.Listen("tcp", at); return err })
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		wait := map[bool]time.Duration{false: time.Second, true: 30 * time.Second}[want]
		err = netns.Do(a, func() error {
			c, err := net.DialTimeout("tcp", at, wait)
			if err == nil {
				c.Close()
			}
			return err
		})
		if (err == nil) != want {
			t.Errorf("%s: %v, want it reached: %v", at, err, want)
		}
	}
}

// An interface that was not named is no pod that people name.
func TestAPodIsNotTakenForAnInterfaceWithoutAName(t *testing.T) {
	n := newNode(t)
	a, b := n.pod(1), n.pod(2)
	spec := labelled(a, state.OwnerCLI, map[string]string{"app": "a"})
	spec.Pod = state.PodRef{}
	var unnamed state.Endpoint
	n.must(func(e *Engine) (err error) { unnamed, err = e.AddEndpoint(context.Background(), spec); return err })
	spec = labelled(b, state.OwnerCLI, map[string]string{"app": "b"})
	spec.Pod = state.PodRef{Namespace: "default", Name: fmt.Sprintf("endpoint-%d", unnamed.ID)}
	n.must(func(e *Engine) error { _, err := e.AddEndpoint(context.Background(), spec); return err })
	closed := closedTo("p", "b")
	closed.Key.Namespace = "default"
	n.must(func(e *Engine) error { return e.ApplyPolicyFile([]policy.Policy{closed}, nil) })
	n.must(func(e *Engine) error {
		m, err := e.Policies()
		if err != nil {
			return err
		}
		first, _ := m.PodAt(netip.MustParseAddr("10.9.0.1"))
		second, _ := m.PodAt(netip.MustParseAddr("10.9.0.2"))
		if first.Key == second.Key {
			t.Errorf("both are %v", first.Key)
		}
		return nil
	})
	n.hold(a, "10.9.0.2", false)
	n.hold(b, "10.9.0.1", true)
}

// A tool that is killed between its journal and the tables is finished by the
// next one, whatever that is there for.
func TestAKilledPolicyChangeIsFinished(t *testing.T) {
	n := newNode(t)
	a, b := n.pod(1), n.pod(2)
	n.addLabelled(a, state.OwnerCLI, map[string]string{"app": "a"})
	n.addLabelled(b, state.OwnerCLI, map[string]string{"app": "b"})
	n.must(func(e *Engine) error {
		return e.store.WriteJournal(operation{Kind: opPolicies, Policies: &storedPolicies{Policies: []policy.Policy{closedTo("p", "b")}}})
	})
	n.hold(a, "10.9.0.2", true)
	n.endpoints()
	n.hold(a, "10.9.0.2", false)
	n.must(func(e *Engine) error { return e.RemovePolicies([]policy.Key{{Namespace: "ns", Name: "p"}}, nil) })
	n.hold(a, "10.9.0.2", true)
}

// A full table costs the rule that does not fit, and nobody else.
func TestAFullTableClosesItsRuleOnly(t *testing.T) {
	n := newNode(t)
	n.opts.Sizes.Peers = 8
	a, b, c := n.pod(1), n.pod(2), n.pod(3)
	n.addLabelled(a, state.OwnerCLI, map[string]string{"app": "a"})
	n.addLabelled(b, state.OwnerCLI, map[string]string{"app": "b"})
	n.addLabelled(c, state.OwnerCLI, map[string]string{"app": "c"})
	fits, tooMany := closedTo("fits", "b"), closedTo("too-many", "c")
	block := func(i int) policy.Rule {
		return policy.Rule{Peers: []policy.Peer{{Block: &policy.Block{CIDR: netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/32", i))}}}}
	}
	fits.Ingress = []policy.Rule{{Peers: []policy.Peer{{Pods: &policy.Selector{app("a")[0]}}}}}
	for i := range 20 {
		tooMany.Ingress = append(tooMany.Ingress, block(i))
	}
	tooMany.Ingress = append(tooMany.Ingress, fits.Ingress...)
	n.must(func(e *Engine) error { return e.ApplyPolicyFile([]policy.Policy{fits, tooMany}, nil) })
	n.hold(a, "10.9.0.2", true)
	n.hold(a, "10.9.0.3", false)
	n.must(func(e *Engine) error {
		m, err := e.Policies()
		if err != nil {
			return err
		}
		conditions := m.Conditions()
		if len(conditions) == 0 {
			t.Error("no condition tells of the rules that do not fit")
		}
		for _, c := range conditions {
			if c.Rule.Policy != tooMany.Key || c.Table != "peers" {
				t.Errorf("%+v", c)
			}
		}
		d, err := e.drops()
		for _, x := range d {
			if x.Reason == "policy_incomplete" && x.Packets > 0 {
				return err
			}
		}
		t.Errorf("nothing is counted as policy_incomplete: %v", d)
		return err
	})
}
