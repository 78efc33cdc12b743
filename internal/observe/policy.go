// SPDX-License-Identifier: Apache-2.0

package observe

// Policy's part of a verdict, by the names of its objects.

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/policy"
)

// PolicyNames says which objects numbers stand for: what an agent wrote down, or
// the model of what the command line gave.
type PolicyNames interface {
	Rule(id uint32) (policy.RuleName, bool)
	Set(id uint64) (policy.SetName, bool)
}

// Judged is what policy said about one end of a flow: its opener's egress, or
// its responder's ingress. An end that no policy selects is not judged.
type Judged struct {
	Direction  string   `json:"direction"`
	SelectedBy []string `json:"selected_by,omitempty"` // the policies that isolate the pod
	Policy     string   `json:"policy,omitempty"`      // whose rule allowed it; "": none did, or its name is not known here
	Rule       int      `json:"rule,omitempty"`        // of that direction, from 1
	Number     uint32   `json:"number,omitempty"`      // of the rule; 0: none allowed it
}

// Denied says that no rule allowed the flow at this end.
func (j Judged) Denied() bool { return j.Number == 0 }

func (j Judged) String() string {
	switch {
	case j.Denied() && len(j.SelectedBy) > 0:
		return fmt.Sprintf("%s: default-deny of %s", j.Direction, strings.Join(j.SelectedBy, ", "))
	case j.Denied():
		return j.Direction + ": default-deny of the policies that select the pod"
	case j.Policy == "":
		return fmt.Sprintf("%s: allowed by rule %#x, whose name is not known here", j.Direction, j.Number)
	}
	return fmt.Sprintf("%s: allowed by rule %d of %s", j.Direction, j.Rule, j.Policy)
}

// policies are the names of rules and sets, no older than age.
func (c *nameCache) policies(age time.Duration) PolicyNames {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.model != nil && time.Since(c.modelRead) < age {
		return c.model
	}
	endpoints, err := c.n.endpoints()
	if err != nil {
		return c.model
	}
	c.modelRead = time.Now()
	var names policy.Names
	if an, err := c.n.store.ReadNames(&names); an && err == nil {
		c.model = names // an agent's, which may not run any more
		return c.model
	}
	if m, err := engine.LookPolicies(c.n.store, endpoints); err == nil {
		c.model = m
	}
	return c.model
}

// maybeNamed says whether policies that are read now may have a name for a set that those
// read before had none for. To read them takes long where there are many, and some sets
// never get a name: those of policies that have gone, while their flows go on.
func (c *nameCache) maybeNamed(set uint64, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	last, asked := c.unnamed[set]
	if now.Sub(c.modelRead) < nameAgeGuess || asked && now.Sub(last) < nameAge {
		return false
	}
	maps.DeleteFunc(c.unnamed, func(_ uint64, last time.Time) bool { return now.Sub(last) >= nameAge })
	if c.unnamed == nil {
		c.unnamed = make(map[uint64]time.Time)
	}
	c.unnamed[set] = now
	return true
}

// judged names what policy said; sets and rules are by enum verdict_end.
func (c *nameCache) judged(sets [2]uint64, rules [2]uint32) (out []Judged) {
	for end, direction := range []policy.Direction{bpfgen.VerdictEgress: policy.Egress, bpfgen.VerdictIngress: policy.Ingress} {
		if sets[end] == 0 {
			continue
		}
		j := Judged{Direction: direction.String(), Number: rules[end]}
		if !j.name(c.policies(nameAge), sets[end]) && c.maybeNamed(sets[end], time.Now()) {
			j.name(c.policies(nameAgeGuess), sets[end])
		}
		out = append(out, j)
	}
	return out
}

// name names the rule and the set; false: one of them is not known.
func (j *Judged) name(names PolicyNames, id uint64) bool {
	if names == nil {
		return false
	}
	rule, ruleKnown := names.Rule(j.Number)
	if ruleKnown && j.Number != 0 {
		j.Policy, j.Rule = rule.Policy.String(), rule.Index+1
	}
	set, setKnown := names.Set(id)
	j.SelectedBy = nil
	for _, p := range set.Policies {
		j.SelectedBy = append(j.SelectedBy, p.String())
	}
	return setKnown && (ruleKnown || j.Number == 0)
}

// allowed is policy's part in letting a packet pass, as the rest of a sentence.
func (q *question) allowed(e *datapath.Event) string {
	if e == nil {
		return ""
	}
	var parts []string
	for _, j := range q.names.judged(e.Set, e.Rule) {
		parts = append(parts, j.String())
	}
	if len(parts) == 0 {
		return ""
	}
	return " (" + strings.Join(parts, "; ") + ")"
}

// denied is which end's policy stops a packet, and the smallest rule that would
// let it pass; "" when it is not policy.
func (q *question) denied(e *datapath.Event) (sentence, mend string) {
	egress := e.Reason == bpfgen.ReasonPolicyEgress
	if !egress && e.Reason != bpfgen.ReasonPolicyIngress {
		return "", ""
	}
	opener := q.nameOf(datapath.ToAddr(e.T.Src), 0)
	responder := q.nameOf(datapath.ToAddr(e.Target), datapath.Port(e.TargetPort))
	if !hasPorts(q.proto) {
		responder.Port = 0
	}
	isolated, peer, word, side := responder, opener, "ingress", "from"
	if egress {
		isolated, peer, word, side = opener, responder, "egress", "to"
	}
	by := "the policies that select it"
	for _, j := range q.names.judged(e.Set, e.Rule) {
		if j.Direction == word && len(j.SelectedBy) > 0 {
			by = strings.Join(j.SelectedBy, ", ")
		}
	}
	sentence = fmt.Sprintf("%s of %s is closed by default, because %s selects it, and no %s rule allows %s%s",
		word, isolated.Name(), by, word, peer.String(), q.portText(responder.Port))
	mend = fmt.Sprintf("add to a NetworkPolicy that selects %s (such as %s) the %s rule `%s`",
		isolated.Name(), by, word, q.rule(side, isolated, peer, responder.Port))
	return sentence, mend
}

func (q *question) portText(port uint16) string {
	if !hasPorts(q.proto) {
		return ""
	}
	return fmt.Sprintf(" on %s port %d", protocolNames[q.proto], port)
}

// rule is the smallest rule that allows a peer, in the API's terms.
func (q *question) rule(side string, isolated, peer End, port uint16) string {
	who := fmt.Sprintf("ipBlock: {cidr: %s}", netip.PrefixFrom(peer.Address, peer.Address.BitLen()))
	if peer.Endpoint != 0 {
		who = "podSelector: {" + matchLabels(lasting(peer.Labels)) + "}"
		if ns := q.namespace(peer); ns != q.namespace(isolated) {
			who += ", namespaceSelector: {" + matchLabels(map[string]string{policy.NamespaceName: ns}) + "}"
		}
	}
	ports := ""
	if hasPorts(q.proto) {
		ports = fmt.Sprintf(", ports: [{protocol: %s, port: %d}]", strings.ToUpper(protocolNames[q.proto]), port)
	}
	return fmt.Sprintf("%s: [{%s}]%s", side, who, ports)
}

// namespace is the one that policies take a pod to be in, also where nobody told the
// pod's own name, and so an End has none.
func (q *question) namespace(e End) string {
	return cmp.Or(e.Namespace, q.endpoints[e.Endpoint].Pod.Namespace, "default")
}

// matchLabels are quoted, as JSON, for YAML takes a bare 0 for a number and a bare
// true for a boolean, which the API refuses in a label.
func matchLabels(labels map[string]string) string {
	if len(labels) == 0 {
		return ""
	}
	text, _ := json.Marshal(labels) // strings cannot fail
	return "matchLabels: " + string(text)
}

// fleeting are labels that controllers give to one replica or one revision: a rule
// by them matches no pod after the next rollout.
var fleeting = []string{
	"pod-template-hash", "rollouts-pod-template-hash", "pod-template-generation", "controller-revision-hash",
	"apps.kubernetes.io/pod-index", "statefulset.kubernetes.io/pod-name",
	"controller-uid", "batch.kubernetes.io/controller-uid", "job-name", "batch.kubernetes.io/job-name",
	"batch.kubernetes.io/job-completion-index",
}

// lasting are the labels without those that are fleeting, unless there are no others.
func lasting(labels map[string]string) map[string]string {
	out := maps.Clone(labels)
	maps.DeleteFunc(out, func(k, _ string) bool { return slices.Contains(fleeting, k) })
	if len(out) == 0 {
		return labels
	}
	return out
}
