// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"fmt"
	"strings"
	"testing"
)

const policyHead = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n"

// Files that kubectl takes: comments between documents, and what a cluster wrote beside the policy.
func TestReadTakesWhatKubectlTakes(t *testing.T) {
	for name, text := range map[string]string{
		"a comment before the first": "# Copyright\n---\n" + policyHead + "metadata: {name: a}\nspec: {podSelector: {}}\n",
		"one between":                policyHead + "metadata: {name: a}\nspec: {podSelector: {}}\n---\n# nothing\n---\n",
		"a status":                   policyHead + "metadata: {name: a, namespace: default}\nspec: {podSelector: {}}\nstatus: {}\n",
	} {
		if f, err := Read(strings.NewReader(text)); err != nil || len(f.Policies) != 1 || f.Policies[0].Name != "a" {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
}

// What an API server refuses: in force, it would select nothing.
func TestReadRefusesWhatNothingIsCalled(t *testing.T) {
	spec := func(text string) string { return fmt.Sprintf("%smetadata: {name: a}\nspec: %s\n", policyHead, text) }
	for field, text := range map[string]string{
		"spec.podSelector.matchLabels":                                spec("{podSelector: {matchLabels: {app: 'web '}}}"),
		"spec.podSelector.matchLabels: ":                              spec("{podSelector: {matchLabels: {'app name': web}}}"),
		"spec.ingress[0].from[0].podSelector.matchExpressions[0].val": spec("{podSelector: {}, ingress: [{from: [{podSelector: {matchExpressions: [{key: a, operator: In, values: ['web,api']}]}}]}]}"),
		"spec.egress[0].to[1].namespaceSelector.matchLabels":          spec("{podSelector: {}, egress: [{to: [{podSelector: {}}, {namespaceSelector: {matchLabels: {a: 'b c'}}}]}]}"),
		"spec.policyTypes":                                            spec("{podSelector: {}, policyTypes: [Ingress, Ingress, Egress]}"),
		"metadata.namespace":                                          policyHead + "metadata: {name: a, namespace: Shop}\nspec: {podSelector: {}}\n",
		"metadata.name: \"a b/c\"":                                    policyHead + "metadata: {name: a b/c}\nspec: {podSelector: {}}\n",
		"metadata.name: \"Shop\"":                                     "apiVersion: v1\nkind: Namespace\nmetadata: {name: Shop}\n",
		"metadata.labels":                                             "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {a: b c}}\n",
	} {
		if f, err := Read(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %+v, %v", field, f, err)
		}
	}
}
