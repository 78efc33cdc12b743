// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/mustang-net/mustang/internal/cluster/peer"
)

// Options of a connectivity test.
type Options struct {
	Nodes   []string // the two to test between, or the one to test alone; default: the first two with a ready agent
	Outside []string // HOST:PORT by TCP, outside of the cluster; default: the API server's own address
	Keep    bool     // leave the namespace, to look into it
}

// Check is one line of the result.
type Check struct {
	What   string `json:"what"`
	From   string `json:"from"`
	To     string `json:"to"`
	Family string `json:"family"`
	Failed string `json:"failed,omitempty"` // why; "": it passed
	Note   string `json:"note,omitempty"`
	Millis int64  `json:"millis"`
}

// within is how long one question may take; settled, how long a policy may take
// to come into force; known, what Kubernetes makes by itself: a namespace's service
// account, and a Service's endpoints, until every node leads to them.
const (
	within  = 10 * time.Second
	settled = 10 * time.Second
	known   = 30 * time.Second
)

// Test makes clients and servers in a namespace of its own, has them talk, and
// removes everything. Failed checks are no error.
func (c *Cluster) Test(ctx context.Context, o Options, done func(Check)) (checks []Check, err error) {
	w, err := c.newWorld(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() {
		if !o.Keep && w.namespace != "" {
			c.note("removing namespace " + w.namespace)
			err = errors.Join(err, w.remove())
		}
	}()
	c.note("making clients and servers")
	if err := w.build(ctx); err != nil {
		return nil, err
	}
	exec := func(ctx context.Context, pod string, args ...string) ([]byte, error) {
		return c.api.Exec(ctx, w.namespace, pod, "peer", append([]string{"/bin/mustang", "connectivity", "ask"}, args...)...)
	}
	t := &test{world: w, ctx: ctx, exec: exec, done: func(k Check) { checks = append(checks, k); done(k) }}
	t.servicesKnown()
	t.eachFamily(t.family)
	t.dns()
	t.outside(o.Outside)
	t.eachFamily(t.unguarded)
	if err := w.guard(ctx); err != nil {
		return checks, err
	}
	t.eachFamily(t.policy)
	return checks, ctx.Err()
}

// newWorld chooses the nodes. One alone is chosen where it was asked for, or is all there is: a
// test between nodes that asks nothing between them would pass.
func (c *Cluster) newWorld(ctx context.Context, o Options) (*world, error) {
	members, err := c.members(ctx)
	if err != nil {
		return nil, err
	}
	w := &world{c: c, pods: map[string]*corev1.Pod{}, services: map[string]*corev1.Service{}}
	missing := slices.Clone(o.Nodes)
	for _, m := range members {
		name := m.node.Name
		if len(o.Nodes) > 0 && !slices.Contains(o.Nodes, name) || len(w.nodes) == 2 {
			continue
		}
		missing = slices.DeleteFunc(missing, func(n string) bool { return n == name })
		if m.agent == nil || !isReady(m.agent) {
			missing = append(missing, name)
			continue
		}
		w.nodes = append(w.nodes, m.node)
		for _, k := range m.agent.Spec.Containers {
			if k.Name == container {
				w.image = k.Image
			}
		}
	}
	if len(w.nodes) == 0 || len(w.nodes) == 1 && len(missing) > 0 {
		err := fmt.Errorf("no agent is ready on: %s; `mustang status --cluster` tells why", strings.Join(missing, ", "))
		if len(w.nodes) == 1 {
			err = fmt.Errorf("%w; --nodes %s tests that node alone", err, w.nodes[0].Name)
		}
		return nil, err
	}
	if len(w.nodes) == 1 {
		c.note("node " + w.nodes[0].Name + " is tested alone: nothing between nodes is asked")
	}
	return w, nil
}

// test is a run.
type test struct {
	*world
	ctx  context.Context
	exec func(ctx context.Context, pod string, args ...string) ([]byte, error) // what asks, in a pod
	done func(Check)
}

// eachFamily does what there is to do for each family that pods have.
func (t *test) eachFamily(do func(v4 bool)) {
	for _, v4 := range []bool{true, false} {
		if t.ip("client", v4).IsValid() {
			do(v4)
		}
	}
}

// ask has a pod ask, once.
func (t *test) ask(from, how, target string) (a peer.Answer, err error) {
	text, err := t.run(from, "--timeout", within.String(), how, target)
	if err == nil {
		err = json.Unmarshal(text, &a)
	}
	return a, err
}

// run asks in a pod, and waits for the answer a while longer than whoever asks there: the
// stream to it may hang.
func (t *test) run(pod string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(t.ctx, within+30*time.Second)
	defer cancel()
	return t.exec(ctx, pod, args...)
}

// check asks, and wants what the function wants of the answer. What an interruption cut short
// has neither passed nor failed.
func (t *test) check(k Check, from, how, target string, want func(peer.Answer) error) {
	if t.ctx.Err() != nil {
		return
	}
	start := time.Now()
	a, err := t.ask(from, how, target)
	if t.ctx.Err() != nil {
		return
	}
	if err == nil && want != nil {
		err = want(a)
	}
	if a.Path > 0 {
		k.Note = fmt.Sprintf("%d bytes", a.Path)
	}
	k.From, k.Millis = from, time.Since(start).Milliseconds()
	if err != nil {
		k.Failed = err.Error()
	}
	t.done(k)
}

// servicesKnown waits until every node leads to every Service: its endpoints are
// written some time after their pods are ready, and until then it refuses. Where
// it never answers, the checks say so.
func (t *test) servicesKnown() {
	until := time.Now().Add(known)
	for _, from := range []string{"host-here", "host-there"} {
		for _, place := range []string{"here", "there"} {
			for _, v4 := range []bool{true, false} {
				vip := t.clusterIP(place, v4)
				if t.pods[from] == nil || t.pods["server-"+place] == nil || !vip.IsValid() || !t.ip("client", v4).IsValid() {
					continue
				}
				for {
					_, err := t.ask(from, "tcp", netip.AddrPortFrom(vip, 80).String())
					if err == nil || time.Now().After(until) || !pause(t.ctx, 100*time.Millisecond) {
						break
					}
				}
			}
		}
	}
}

// by wants the answer of a server, who saw the address client; invalid: whose
// does not matter.
func by(server string, client netip.Addr) func(peer.Answer) error {
	return func(a peer.Answer) error {
		switch {
		case a.Server != server:
			return fmt.Errorf("%q answered in place of %s", a.Server, server)
		case client.IsValid() && a.Client != client.String():
			return fmt.Errorf("the server saw %s in place of %s", a.Client, client)
		}
		return nil
	}
}

func family(v4 bool) string {
	if v4 {
		return "IPv4"
	}
	return "IPv6"
}

// family is all that concerns one family and no policy.
func (t *test) family(v4 bool) {
	f, client := family(v4), t.ip("client", v4)
	for i, place := range []string{"here", "there"} {
		server := "server-" + place
		if t.pods[server] == nil {
			continue
		}
		where := []string{"same node", "other node"}[i]
		pod := netip.AddrPortFrom(t.ip(server, v4), peer.Port).String()
		for _, how := range []string{"tcp", "udp", "bulk", "mtu"} {
			t.check(Check{What: words[how] + ", pod to pod", To: server + ", " + where, Family: f}, "client", how, pod, by(server, client))
		}
		if vip := t.clusterIP(place, v4); vip.IsValid() {
			svc := netip.AddrPortFrom(vip, 80).String()
			for _, how := range []string{"tcp", "udp", "bulk"} {
				t.check(Check{What: words[how] + ", Service", To: server + ", " + where, Family: f}, "client", how, svc, by(server, client))
			}
			t.check(Check{What: "TCP, hairpin", To: "itself by its Service", Family: f}, server, "tcp", svc, by(server, netip.Addr{}))
			t.check(Check{What: "TCP, Service", To: server + ", " + where, Family: f}, "host-here", "tcp", svc, by(server, netip.Addr{}))
		}
		t.check(Check{What: "TCP, node to pod", To: server + ", " + where, Family: f}, "host-here", "tcp", pod, by(server, netip.Addr{}))
		t.nodePorts(place, server, v4)
	}
}

var words = map[string]string{"tcp": "TCP", "udp": "UDP", "bulk": "2 MiB", "mtu": "longest datagram"}

// nodePorts asks a Service's port on each node, from a pod, and from the other
// node as a client outside would.
func (t *test) nodePorts(service, server string, v4 bool) {
	for n := range t.nodes {
		addr := t.nodeIP(n, v4)
		if !addr.IsValid() || !t.clusterIP(service, v4).IsValid() {
			continue
		}
		for _, p := range t.services[service].Spec.Ports {
			how := "tcp"
			if p.Protocol == corev1.ProtocolUDP {
				how = "udp"
			}
			target := netip.AddrPortFrom(addr, uint16(p.NodePort)).String()
			k := Check{What: words[how] + ", NodePort of " + t.nodes[n].Name, To: server, Family: family(v4)}
			t.check(k, "client", how, target, by(server, netip.Addr{}))
			if from := []string{"host-there", "host-here"}[n]; t.pods[from] != nil {
				t.check(k, from, how, target, by(server, netip.Addr{}))
			}
		}
	}
}

func (t *test) dns() {
	for _, name := range []string{"kubernetes.default.svc", "here", "here." + t.namespace} {
		t.check(Check{What: "DNS", To: name}, "client", "dns", name, nil)
	}
	t.check(Check{What: "TCP, Service by name", To: "server-here"}, "client", "tcp", "here:80", by("server-here", netip.Addr{}))
}

// outside asks addresses that are no pod's.
func (t *test) outside(targets []string) {
	if len(targets) == 0 {
		var slice discoveryv1.EndpointSliceList
		err := t.c.api.Get(t.ctx, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dkubernetes", &slice)
		if err != nil {
			if t.ctx.Err() == nil {
				t.done(Check{What: "outside", Failed: err.Error()})
			}
			return
		}
		for _, s := range slice.Items {
			if len(s.Endpoints) > 0 && len(s.Ports) > 0 && s.Ports[0].Port != nil {
				a, _ := netip.ParseAddr(s.Endpoints[0].Addresses[0])
				targets = append(targets, netip.AddrPortFrom(a, uint16(*s.Ports[0].Port)).String())
			}
		}
	}
	for _, target := range targets {
		k := Check{What: "TCP, outside", To: target}
		if a, err := netip.ParseAddrPort(target); err == nil {
			k.Family = family(a.Addr().Is4())
		}
		t.check(k, "client", "connect", target, nil)
	}
}

// unguarded wants a stranger to reach the servers while there is no policy: who
// reaches nobody would later seem to be denied.
func (t *test) unguarded(v4 bool) {
	t.eachServer(v4, func(to, pod, server string) {
		for _, how := range []string{"tcp", "udp"} {
			t.check(Check{What: words[how] + ", no policy yet", To: to, Family: family(v4)}, "stranger", how, pod, by(server, t.ip("stranger", v4)))
		}
	})
}

// eachServer does something for each server: what it is called, its address, its name.
func (t *test) eachServer(v4 bool, do func(to, pod, server string)) {
	for i, place := range []string{"here", "there"} {
		if server := "server-" + place; t.pods[server] != nil {
			do(server+", "+[]string{"same node", "other node"}[i], netip.AddrPortFrom(t.ip(server, v4), peer.Port).String(), server)
		}
	}
}

// policy wants a friend to reach the servers, and a stranger not to, as soon as
// the policy is in force.
func (t *test) policy(v4 bool) {
	t.eachServer(v4, func(to, pod, server string) {
		for _, how := range []string{"tcp", "udp"} {
			t.check(Check{What: words[how] + ", policy allows", To: to, Family: family(v4)}, "client", how, pod, by(server, netip.Addr{}))
			t.denied(Check{What: words[how] + ", policy denies", From: "stranger", To: to, Family: family(v4)}, how, pod)
		}
	})
}

// denied wants a stranger's questions to be in vain, three times in a row.
func (t *test) denied(k Check, how, target string) {
	start := time.Now()
	for passed := start; t.ctx.Err() == nil; {
		_, err := t.run("stranger", "--timeout", "1s", "--times", strconv.Itoa(3), "--in-vain", how, target)
		if err == nil {
			break
		}
		if passed = time.Now(); passed.Sub(start) > settled {
			k.Failed = err.Error()
			break
		}
	}
	if t.ctx.Err() != nil {
		return // nobody has seen whether it is
	}
	k.Millis = time.Since(start).Milliseconds()
	t.done(k)
}
