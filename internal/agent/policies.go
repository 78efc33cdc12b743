// SPDX-License-Identifier: Apache-2.0

package agent

// NetworkPolicies, and the pods and namespaces that they select: from what
// Kubernetes says to the engine's model, and from there into the tables.

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/policy/manifest"
	"github.com/mustang-net/mustang/internal/state"
)

// policies is the part of the syncer that is about NetworkPolicies. Its step
// runs in the syncer's goroutine.
type policies struct {
	a       *Agent
	pending []k8s.Change // not told to the model yet; at first, everything
	retrying
	said  string        // why the last try failed; "": it did not
	wake  chan struct{} // an address of the node came or went
	moved atomic.Bool   // so it is

	leftOut atomic.Int64

	behind func() bool // policies and namespaces may be older than pods

	// told are pods that the model knows since publish was called last, as they
	// were told; nil: it is none of this node's.
	told map[k8s.Key]*k8s.Pod

	mu    sync.Mutex
	whole bool                 // everything has been told, and is in the tables
	here  map[k8s.Key]*k8s.Pod // this node's pods, as the tables know them
	news  chan struct{}        // closed at the next change of the above
}

func newPolicies(a *Agent) *policies {
	return &policies{
		a: a, behind: a.watch.Behind, wake: make(chan struct{}, 1), told: map[k8s.Key]*k8s.Pod{}, here: map[k8s.Key]*k8s.Pod{}, news: make(chan struct{}),
	}
}

// ready says that the tables hold what Kubernetes said at some time since the start.
func (p *policies) ready() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.whole
}

// step tells the engine what changed: the first time, everything.
func (p *policies) step(ctx context.Context, changes []k8s.Change) {
	for _, c := range changes {
		switch c.Kind {
		case k8s.Pods, k8s.Namespaces, k8s.Policies:
			p.pending = append(p.pending, c)
		}
	}
	if p.rests() {
		return // what is pending waits, too
	}
	whole := !p.ready()
	retry := p.again()
	moved := p.moved.Swap(false)
	if !whole && !retry && !moved && len(p.pending) == 0 {
		return
	}
	start := time.Now()
	changes = p.pending
	err := p.apply(ctx, moved || retry)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		p.a.metrics.failures.Inc()
		p.wait(start)
		if p.said != err.Error() {
			p.said = err.Error()
			p.a.log.Error("policy could not be brought into force; no pod may more than before, and it is tried again", "error", err)
		}
		return
	}
	p.succeeded()
	p.said = ""
	p.publish()
	if whole {
		p.a.log.Info("policy is in force", "policies", p.a.watch.Policies.Len(), "pods", p.a.watch.Pods.Len(), "took", time.Since(start).Round(time.Millisecond))
		return
	}
	for _, c := range changes {
		p.a.metrics.policyDelay.Observe(time.Since(c.At).Seconds())
	}
}

// apply tells the model what is pending, once, and writes the tables.
func (p *policies) apply(ctx context.Context, refresh bool) error {
	return p.a.with(ctx, func(e *engine.Engine) error {
		err := e.FeedPolicies(func(m *policy.Model) { // first: what is pending may be what mends a failure
			p.tell(m, p.pending)
			p.pending = nil
		})
		if err == nil && refresh {
			err = e.RefreshNode()
		}
		if err != nil {
			return err
		}
		for k, pod := range p.told {
			if pod == nil {
				continue
			}
			if err := e.Relabel(kubernetes(k), pod.Labels, namedPorts(pod)); err != nil {
				p.a.log.Warn("a pod's labels could not be written down; only what is shown of it is old", "pod", k, "error", err)
			}
		}
		return p.conditions(e)
	})
}

// conditions tells which policies are not in force in whole, because tables
// are full.
func (p *policies) conditions(e *engine.Engine) error {
	m, err := e.Policies()
	if err != nil {
		return err
	}
	now := map[object][]string{}
	for _, c := range m.Conditions() {
		if c.Rule.Policy.Owner != state.OwnerKubernetes {
			continue
		}
		o := policyAt(k8s.Key{Namespace: c.Rule.Policy.Namespace, Name: c.Rule.Policy.Name})
		now[o] = append(now[o], fmt.Sprintf("spec.%s[%d] is not in force in whole: %s; what it would allow is dropped", c.Rule.Direction, c.Rule.Index, c.Why()))
	}
	p.a.problems.replace(k8s.Policies, fromEngine, now)
	p.leftOut.Store(int64(m.LeftOut()))
	return nil
}

func policyAt(k k8s.Key) object { return object{k8s.Policies, k} }

// kubernetes is the model's key of a Kubernetes object.
func kubernetes(k k8s.Key) policy.Key {
	return policy.Key{Namespace: k.Namespace, Name: k.Name, Owner: state.OwnerKubernetes}
}

// tell tells of what changed. Of pods that are said to have one address, the last that
// is told of has it: that is the youngest of those that stay, also after a start, when all are told.
func (p *policies) tell(m *policy.Model, changes []k8s.Change) {
	place := make(map[k8s.Key]int64, len(changes)) // among pods, from 1 on
	for _, c := range changes {
		if c.Kind != k8s.Pods {
			continue
		}
		if pod := p.a.watch.Pods.Get(c.Key); pod != nil && pod.Terminating {
			place[c.Key] = 1
		} else if pod != nil {
			place[c.Key] = 1 + pod.Created
		}
	}
	age := func(c k8s.Change) int64 {
		if c.Kind != k8s.Pods {
			return 0
		}
		return place[c.Key]
	}
	slices.SortStableFunc(changes, func(a, b k8s.Change) int { return cmp.Compare(age(a), age(b)) })
	for _, c := range changes {
		switch c.Kind {
		case k8s.Namespaces:
			p.tellNamespace(m, c.Key)
		case k8s.Policies:
			p.tellPolicy(m, c.Key)
		case k8s.Pods:
			p.tellPod(m, c.Key)
		}
	}
}

func (p *policies) tellNamespace(m *policy.Model, k k8s.Key) {
	if ns := p.a.watch.Namespaces.Get(k); ns != nil {
		m.SetNamespace(state.OwnerKubernetes, k.Name, ns.Labels)
	} else {
		m.DeleteNamespace(state.OwnerKubernetes, k.Name)
	}
}

func (p *policies) tellPolicy(m *policy.Model, k k8s.Key) {
	object := p.a.watch.Policies.Get(k)
	if object == nil {
		m.DeletePolicy(kubernetes(k))
		p.a.problems.object(policyAt(k), nil)
		return
	}
	made := policy.Policy{Key: kubernetes(k)}
	var wrong []string
	for _, err := range manifest.Spec(&made, &object.Spec) {
		wrong = append(wrong, err.Error()+"; it allows nothing, or selects more pods")
	}
	p.a.problems.object(policyAt(k), wrong)
	m.SetPolicy(made)
}

func (p *policies) tellPod(m *policy.Model, k k8s.Key) {
	pod := p.a.watch.Pods.Get(k)
	if pod == nil || pod.Ended() {
		m.DeletePod(kubernetes(k))
		p.told[k] = nil
		return
	}
	m.SetPod(policy.Pod{Key: kubernetes(k), UID: pod.UID, StaticUID: pod.StaticUID, Labels: pod.Labels, Addrs: pod.IPs, Ports: namedPorts(pod),
		HostNetwork: pod.HostNetwork})
	if pod.HostNetwork || pod.Node != p.a.config.Node {
		pod = nil
	}
	p.told[k] = pod
}

func namedPorts(pod *k8s.Pod) []state.NamedPort {
	var out []state.NamedPort
	for _, port := range pod.Ports {
		if n, ok := manifest.ProtocolNamed(port.Protocol); ok {
			out = append(out, state.NamedPort{Name: port.Name, Protocol: n, Number: port.Port})
		}
	}
	return out
}

// publish lets whoever waits for a pod know what the tables know now.
func (p *policies) publish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, pod := range p.told {
		if pod != nil {
			p.here[k] = pod
		} else {
			delete(p.here, k)
		}
	}
	p.told = map[k8s.Key]*k8s.Pod{}
	p.whole = true
	close(p.news)
	p.news = make(chan struct{})
}

// unheld are this node's pods that run, as Kubernetes says, and of whose addresses none is
// among held, the endpoints': no policy holds them, and no Service is theirs to use.
func (p *policies) unheld(held map[netip.Addr]bool) (list []k8s.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, pod := range p.here {
		// That a pod is being deleted changes nothing in the tables, and is not told by itself.
		now := p.a.watch.Pods.Get(k)
		if now != nil && !now.Terminating && len(pod.IPs) > 0 && !slices.ContainsFunc(pod.IPs, func(a netip.Addr) bool { return held[a] }) {
			list = append(list, k)
		}
	}
	return list
}

// outside are this node's pods with an address in none of these networks, by name.
func (p *policies) outside(networks []netip.Prefix) (list []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, pod := range p.here {
		if slices.ContainsFunc(pod.IPs, func(a netip.Addr) bool {
			return !slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(a) })
		}) {
			list = append(list, k.String())
		}
	}
	slices.Sort(list)
	return list
}

// behindPause is how long a pod waits before it is asked again whether what is known
// of policies is older than it.
const behindPause = 100 * time.Millisecond

// labels are a pod's, once the tables know the pod, and its policies as they are.
func (p *policies) labels(ctx context.Context, ref state.PodRef) (map[string]string, error) {
	key := k8s.Key{Namespace: ref.Namespace, Name: ref.Name}
	behind := false
	for {
		var again <-chan time.Time
		was := behind
		if behind = p.behind(); behind || was { // what was missed is on its way
			again = time.After(behindPause)
		}
		p.mu.Lock()
		whole, news := p.whole, p.news
		pod := p.here[key]
		p.mu.Unlock()
		if whole && ref.Name == "" {
			return nil, nil
		}
		if pod != nil && (ref.UID == "" || ref.UID == pod.UID || ref.UID == pod.StaticUID) && again == nil {
			return pod.Labels, nil
		}
		select {
		case <-news:
		case <-again:
		case <-ctx.Done():
			what := "the API server has not told of it"
			switch {
			case !whole:
				what = "the agent does not know everything yet"
			case behind:
				what = "the API server tells of pods, and not of NetworkPolicies or Namespaces"
			}
			return nil, fmt.Errorf("%s: %w", what, ctx.Err())
		}
	}
}

// added measures how long a new pod waited for its policy.
func (p *policies) added(took time.Duration) { p.a.metrics.addDelay.Observe(took.Seconds()) }
