// SPDX-License-Identifier: Apache-2.0

// Package manifest reads NetworkPolicies as people and API servers write them.
// It is the only place that knows the API's types; the CNI plugin does without.
package manifest

import (
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/state"
)

// fieldError is about one field of an object, by its path.
type fieldError struct{ path, text string }

func (e *fieldError) Error() string { return e.path + ": " + e.text }

func invalid(path, format string, args ...any) error {
	return &fieldError{path, fmt.Sprintf(format, args...)}
}

// Policy is p with the API's defaults filled in. It refuses what an API server
// would refuse.
func Policy(p *networkingv1.NetworkPolicy) (policy.Policy, error) {
	out := policy.Policy{Key: policy.Key{Namespace: p.Namespace, Name: p.Name}}
	if out.Namespace == "" {
		out.Namespace = corev1.NamespaceDefault
	}
	errs := append(namedWrong(out.Key), Spec(&out, &p.Spec)...)
	if errs = append(errs, selectsWrong(&p.Spec)...); len(errs) > 0 {
		return out, fmt.Errorf("NetworkPolicy %s: %w", out.Key, errs[0])
	}
	return out, nil
}

// Spec puts spec into out. What it cannot read, as of an API that is newer, it
// leaves out in a way that isolates more and allows less, and answers an error
// for each: rules keep their places.
func Spec(out *policy.Policy, spec *networkingv1.NetworkPolicySpec) []error {
	var errs []error
	var err error
	out.Pods, err = selector("spec.podSelector", &spec.PodSelector)
	more := err != nil // pods are selected
	if more {
		errs = append(errs, err)
	}
	if out.IsolatesIngress, out.IsolatesEgress, err = types(spec); err != nil {
		errs = append(errs, err)
	}
	for i, r := range spec.Ingress {
		made, err := rule(fmt.Sprintf("spec.ingress[%d]", i), "from", r.Ports, r.From)
		if err != nil {
			errs, made = append(errs, err), nothing
		}
		out.Ingress = append(out.Ingress, made)
	}
	for i, r := range spec.Egress {
		made, err := rule(fmt.Sprintf("spec.egress[%d]", i), "to", r.Ports, r.To)
		if err != nil {
			errs, made = append(errs, err), nothing
		}
		out.Egress = append(out.Egress, made)
	}
	for _, rules := range [][]policy.Rule{out.Ingress, out.Egress} {
		for i := range rules {
			if more { // whom they would open
				rules[i] = nothing
			}
		}
	}
	return errs
}

// nothing is a rule that allows nothing: its range of ports is empty.
var nothing = policy.Rule{Ports: []policy.Port{{Protocol: state.TCP, First: 1, Last: 0}}}

func types(spec *networkingv1.NetworkPolicySpec) (ingress, egress bool, err error) {
	if len(spec.PolicyTypes) > 2 {
		err = invalid("spec.policyTypes", "has %d; there are two, Ingress and Egress", len(spec.PolicyTypes))
	}
	if len(spec.PolicyTypes) == 0 {
		return true, len(spec.Egress) > 0, nil
	}
	for i, t := range spec.PolicyTypes {
		switch t {
		case networkingv1.PolicyTypeIngress:
			ingress = true
		case networkingv1.PolicyTypeEgress:
			egress = true
		default:
			err = invalid(fmt.Sprintf("spec.policyTypes[%d]", i), "%q is neither Ingress nor Egress", t)
		}
	}
	return ingress, egress, err
}

func rule(path, peersField string, ports []networkingv1.NetworkPolicyPort, peers []networkingv1.NetworkPolicyPeer) (policy.Rule, error) {
	var out policy.Rule
	for i, p := range ports {
		made, err := port(fmt.Sprintf("%s.ports[%d]", path, i), p)
		if err != nil {
			return out, err
		}
		out.Ports = append(out.Ports, made)
	}
	for i, p := range peers {
		made, err := peer(fmt.Sprintf("%s.%s[%d]", path, peersField, i), p)
		if err != nil {
			return out, err
		}
		out.Peers = append(out.Peers, made)
	}
	return out, nil
}

var protocols = map[corev1.Protocol]state.Protocol{
	corev1.ProtocolTCP: state.TCP, corev1.ProtocolUDP: state.UDP, corev1.ProtocolSCTP: state.SCTP,
}

// ProtocolNamed is the number of a container port's protocol; "" is TCP.
func ProtocolNamed(name string) (state.Protocol, bool) { return Protocol(corev1.Protocol(name)) }

// Protocol is the number of an API's protocol; "" is TCP.
func Protocol(p corev1.Protocol) (state.Protocol, bool) {
	if p == "" {
		return state.TCP, true
	}
	n, ok := protocols[p]
	return n, ok
}

func port(path string, p networkingv1.NetworkPolicyPort) (policy.Port, error) {
	out := policy.Port{Protocol: state.TCP, Last: 65535}
	if p.Protocol != nil {
		n, ok := protocols[*p.Protocol]
		if !ok {
			return out, invalid(path+".protocol", "%q is none of TCP, UDP, SCTP", *p.Protocol)
		}
		out.Protocol = n
	}
	switch {
	case p.Port == nil:
		if p.EndPort != nil {
			return out, invalid(path+".endPort", "has no meaning without port; name the range's first port")
		}
	case p.Port.Type == intstr.String:
		if p.EndPort != nil {
			return out, invalid(path+".endPort", "has no meaning with a port's name; give port as a number")
		}
		out.Name, out.Last = p.Port.StrVal, 0
		return out, portName(path+".port", out.Name)
	default:
		first, last := p.Port.IntValue(), p.Port.IntValue()
		if p.EndPort != nil {
			last = int(*p.EndPort)
		}
		if first < 1 || first > 65535 {
			return out, invalid(path+".port", "%d is not a port; use 1 to 65535", first)
		}
		if last < first || last > 65535 {
			return out, invalid(path+".endPort", "%d is not in the range from port to 65535", last)
		}
		out.First, out.Last = uint16(first), uint16(last)
	}
	return out, nil
}

// RFC 6335 5.1
var portNameOK = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)

func portName(path, name string) error {
	if len(name) > 15 || !portNameOK.MatchString(name) || !strings.ContainsAny(name, "abcdefghijklmnopqrstuvwxyz") ||
		strings.Contains(name, "--") {
		return invalid(path, "%q is no port name: use up to 15 lower-case letters, digits and single dashes, one letter at least", name)
	}
	return nil
}

func peer(path string, p networkingv1.NetworkPolicyPeer) (policy.Peer, error) {
	var out policy.Peer
	if p.IPBlock != nil {
		if p.PodSelector != nil || p.NamespaceSelector != nil {
			return out, invalid(path, "has ipBlock and a selector; make two entries of it")
		}
		b, err := block(path+".ipBlock", p.IPBlock)
		out.Block = &b
		return out, err
	}
	if p.PodSelector == nil && p.NamespaceSelector == nil {
		return out, invalid(path, "says nothing; name podSelector, namespaceSelector or ipBlock")
	}
	for _, s := range []struct {
		field string
		from  *metav1.LabelSelector
		to    **policy.Selector
	}{{"podSelector", p.PodSelector, &out.Pods}, {"namespaceSelector", p.NamespaceSelector, &out.Namespaces}} {
		if s.from == nil {
			continue
		}
		made, err := selector(path+"."+s.field, s.from)
		if err != nil {
			return out, err
		}
		*s.to = &made
	}
	return out, nil
}

func block(path string, b *networkingv1.IPBlock) (policy.Block, error) {
	var out policy.Block
	var err error
	if out.CIDR, err = prefix(path+".cidr", b.CIDR); err != nil {
		return out, err
	}
	for i, text := range b.Except {
		at := fmt.Sprintf("%s.except[%d]", path, i)
		e, err := prefix(at, text)
		if err != nil {
			return out, err
		}
		if !out.CIDR.Overlaps(e) || e.Bits() <= out.CIDR.Bits() {
			return out, invalid(at, "%s is not a part of %s", text, b.CIDR)
		}
		out.Except = append(out.Except, e)
	}
	return out, nil
}

func prefix(path, text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil || p.Addr().Is4In6() {
		return p, invalid(path, "%q is no prefix such as 192.0.2.0/24 or 2001:db8::/64", text)
	}
	return p.Masked(), nil
}

// selector is s with matchLabels as requirements, in a fixed order. With an error
// it is without what cannot be read, and so selects more.
func selector(path string, s *metav1.LabelSelector) (_ policy.Selector, wrong error) {
	out := policy.Selector{}
	for _, k := range slices.Sorted(maps.Keys(s.MatchLabels)) {
		out = append(out, policy.Requirement{Key: k, Operator: policy.In, Values: []string{s.MatchLabels[k]}})
	}
	for i, e := range s.MatchExpressions {
		r, err := requirement(fmt.Sprintf("%s.matchExpressions[%d]", path, i), e)
		if err != nil {
			wrong = err
			continue
		}
		out = append(out, r)
	}
	return out, wrong
}

func requirement(path string, e metav1.LabelSelectorRequirement) (policy.Requirement, error) {
	r := policy.Requirement{Key: e.Key, Operator: policy.Operator(e.Operator), Values: e.Values}
	switch r.Operator {
	case policy.In, policy.NotIn:
		if len(r.Values) == 0 {
			return r, invalid(path+".values", "is empty; operator %s needs one at least", r.Operator)
		}
	case policy.Exists, policy.DoesNotExist:
		if len(r.Values) > 0 {
			return r, invalid(path+".values", "has no meaning with operator %s; leave it out", r.Operator)
		}
	default:
		return r, invalid(path+".operator", "%q is none of In, NotIn, Exists, DoesNotExist", e.Operator)
	}
	if r.Key == "" {
		return r, invalid(path+".key", "is missing; name a label")
	}
	return r, nil
}
