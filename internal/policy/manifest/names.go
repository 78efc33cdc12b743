// SPDX-License-Identifier: Apache-2.0

package manifest

// What an API server refuses of names and labels. Nothing can have such a name:
// a policy that asks for it would be in force, and select nothing.

import (
	"fmt"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/mustang-net/mustang/internal/policy"
)

func namedWrong(k policy.Key) []error {
	var errs []error
	if k.Name == "" {
		errs = append(errs, invalid("metadata.name", "is missing; give the policy a name"))
	} else if wrong := validation.IsDNS1123Subdomain(k.Name); len(wrong) > 0 {
		errs = append(errs, invalid("metadata.name", "%q is no policy's name: %s", k.Name, wrong[0]))
	}
	if wrong := validation.IsDNS1123Label(k.Namespace); len(wrong) > 0 {
		errs = append(errs, invalid("metadata.namespace", "%q is no namespace's name: %s", k.Namespace, wrong[0]))
	}
	return errs
}

// selectsWrong is what no label can be of the selectors of spec.
func selectsWrong(spec *networkingv1.NetworkPolicySpec) []error {
	var list field.ErrorList
	look := func(path *field.Path, s *metav1.LabelSelector) {
		list = append(list, metav1validation.ValidateLabelSelector(s, metav1validation.LabelSelectorValidationOptions{}, path)...)
	}
	peers := func(path *field.Path, peers []networkingv1.NetworkPolicyPeer) {
		for i, p := range peers {
			look(path.Index(i).Child("podSelector"), p.PodSelector)
			look(path.Index(i).Child("namespaceSelector"), p.NamespaceSelector)
		}
	}
	at := field.NewPath("spec")
	look(at.Child("podSelector"), &spec.PodSelector)
	for i, r := range spec.Ingress {
		peers(at.Child("ingress").Index(i).Child("from"), r.From)
	}
	for i, r := range spec.Egress {
		peers(at.Child("egress").Index(i).Child("to"), r.To)
	}
	var errs []error
	for _, e := range list {
		errs = append(errs, e)
	}
	return errs
}

func (n *namespaceObject) wrong() error {
	if n.Name == "" {
		return invalid("metadata.name", "is missing; give the namespace a name")
	}
	if wrong := validation.IsDNS1123Label(n.Name); len(wrong) > 0 {
		return invalid("metadata.name", "%q is no namespace's name: %s", n.Name, wrong[0])
	}
	if list := metav1validation.ValidateLabels(n.Labels, field.NewPath("metadata", "labels")); len(list) > 0 {
		return fmt.Errorf("%s: %w", n.Name, list[0])
	}
	return nil
}
