// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/state"
)

// What an older mustang cannot read of an object isolates more pods and allows
// less; everything else of it holds, at its place.
func TestWhatCannotBeReadAllowsLess(t *testing.T) {
	web := policy.Selector{{Key: "app", Operator: policy.In, Values: []string{"web"}}}
	everything := policy.Rule{}
	for _, c := range []struct {
		name, spec string
		wrong      []string // words of each error
		want       policy.Policy
	}{
		{"all can be read", "{podSelector: {matchLabels: {app: web}}, ingress: [{}]}", nil,
			policy.Policy{Pods: web, IsolatesIngress: true, Ingress: []policy.Rule{everything}}},
		{"an operator of the selector: more pods are selected", "{podSelector: {matchLabels: {app: web}, matchExpressions: [{key: n, operator: Gt, values: ['1']}]}}",
			[]string{"spec.podSelector.matchExpressions[0].operator"}, policy.Policy{Pods: web, IsolatesIngress: true}},
		{"the same with a rule: of those more none is opened",
			"{podSelector: {matchLabels: {app: web}, matchExpressions: [{key: n, operator: Gt, values: ['1']}]}, policyTypes: [Ingress, Egress], ingress: [{}], egress: [{}]}",
			[]string{"spec.podSelector.matchExpressions[0].operator"},
			policy.Policy{Pods: web, IsolatesIngress: true, IsolatesEgress: true, Ingress: []policy.Rule{nothing}, Egress: []policy.Rule{nothing}}},
		{"an operator of a peer: its rule allows nothing, the next one holds",
			"{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {matchExpressions: [{key: n, operator: Gt, values: ['1']}]}}]}, {}]}",
			[]string{"spec.ingress[0].from[0].podSelector"}, policy.Policy{Pods: web, IsolatesIngress: true, Ingress: []policy.Rule{nothing, everything}}},
		{"a protocol and a block", "{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [{ports: [{protocol: QUIC, port: 1}]}, {to: [{ipBlock: {cidr: nonsense}}]}]}",
			[]string{"spec.egress[0].ports[0].protocol", "spec.egress[1].to[0].ipBlock.cidr"},
			policy.Policy{Pods: web, IsolatesEgress: true, Egress: []policy.Rule{nothing, nothing}}},
		{"a kind of peer that is not known says nothing", "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{}]}]}",
			[]string{"spec.ingress[0].from[0]"}, policy.Policy{Pods: web, IsolatesIngress: true, Ingress: []policy.Rule{nothing}}},
		{"a policy type beside one that is known", "{podSelector: {matchLabels: {app: web}}, policyTypes: [Both, Egress]}",
			[]string{"spec.policyTypes[0]"}, policy.Policy{Pods: web, IsolatesEgress: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var spec networkingv1.NetworkPolicySpec
			if err := yaml.UnmarshalStrict([]byte(c.spec), &spec); err != nil {
				t.Fatal(err)
			}
			var got policy.Policy
			errs := Spec(&got, &spec)
			if len(errs) != len(c.wrong) {
				t.Fatalf("%d errors: %v", len(errs), errs)
			}
			for i, words := range c.wrong {
				if !strings.Contains(errs[i].Error(), words) {
					t.Errorf("%v does not name %s", errs[i], words)
				}
			}
			if d := cmp.Diff(c.want, got, cmpopts.IgnoreUnexported(policy.Policy{})); d != "" {
				t.Error(d)
			}
		})
	}
}

// A rule that allows nothing does: the model makes no entry of it.
func TestNothingAllowsNothing(t *testing.T) {
	m := policy.New(policy.Limits{Identities: 100, Prefixes: 100, Peers: 100, Ports: 100})
	key := policy.Key{Namespace: "a", Name: "b", Owner: state.OwnerKubernetes}
	m.SetPod(policy.Pod{Key: key})
	m.SetEndpoint(policy.Endpoint{ID: 1, Pod: key})
	m.SetPolicy(policy.Policy{Key: key, IsolatesIngress: true, Ingress: []policy.Rule{nothing}})
	if c := m.Plan(); len(c.Put.Peers)+len(c.Put.Ports) != 0 || c.Put.Endpoints[1].Ingress == 0 {
		t.Errorf("%+v", c.Put)
	}
}
