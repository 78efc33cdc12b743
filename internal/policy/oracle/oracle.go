// SPDX-License-Identifier: Apache-2.0

// Package oracle evaluates NetworkPolicies slowly and obviously: the text of
// networking.k8s.io/v1, sentence by sentence, on the API's own objects. What
// the kernel does is checked against it, so it shares nothing with what it
// checks.
package oracle

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// World is everything that a verdict depends on.
type World struct {
	Policies   []networkingv1.NetworkPolicy
	Pods       []Pod
	Namespaces map[string]map[string]string // labels
}

// Pod is a pod with its own addresses. (Those of the host's network have none,
// and are nobody's to select.)
type Pod struct {
	Namespace, Name string
	Labels          map[string]string
	Addrs           []netip.Addr
	Ports           []corev1.ContainerPort
}

// Flow is a flow's first packet. Port is the destination's, of the protocols
// that have ports.
type Flow struct {
	Src, Dst netip.Addr
	Protocol corev1.Protocol // "" is one that has no ports, such as ICMP
	Port     uint16
	// FromNode says that the source is the destination pod's local node.
	FromNode bool
}

// Egress says whether policy lets flow f out of pod.
func (w *World) Egress(pod Pod, f Flow) bool {
	if slices.Contains(pod.Addrs, f.Dst) {
		return true // a pod cannot block access to itself
	}
	isolated := false
	for _, p := range w.Policies {
		if !selectsPod(p, pod) || !slices.Contains(policyTypes(p), networkingv1.PolicyTypeEgress) {
			continue
		}
		isolated = true
		for _, r := range p.Spec.Egress {
			if w.portsMatch(r.Ports, f) && w.peersMatch(r.To, p.Namespace, f.Dst) && w.namedPortsReach(r.Ports, r.To, p.Namespace, f) {
				return true
			}
		}
	}
	// "Outgoing traffic is allowed if there are no NetworkPolicies selecting the pod, OR if the
	// traffic matches at least one egress rule across all of the NetworkPolicy objects".
	return !isolated
}

// Ingress says whether policy lets flow f into pod.
func (w *World) Ingress(pod Pod, f Flow) bool {
	if slices.Contains(pod.Addrs, f.Src) {
		return true
	}
	if f.FromNode {
		return true // "OR if the traffic source is the pod's local node"
	}
	isolated := false
	for _, p := range w.Policies {
		if !selectsPod(p, pod) || !slices.Contains(policyTypes(p), networkingv1.PolicyTypeIngress) {
			continue
		}
		isolated = true
		for _, r := range p.Spec.Ingress {
			if w.portsMatch(r.Ports, f) && w.peersMatch(r.From, p.Namespace, f.Src) {
				return true
			}
		}
	}
	return !isolated
}

// "podSelector selects the pods to which this NetworkPolicy object applies. An empty selector
// matches all pods in the policy's namespace."
func selectsPod(p networkingv1.NetworkPolicy, pod Pod) bool {
	return p.Namespace == pod.Namespace && selected(p.Spec.PodSelector, pod.Labels)
}

// "If this field is not specified, it will default based on the existence of ingress or egress
// rules; policies that contain an egress section are assumed to affect egress, and all policies
// (whether or not they contain an ingress section) are assumed to affect ingress."
func policyTypes(p networkingv1.NetworkPolicy) []networkingv1.PolicyType {
	if len(p.Spec.PolicyTypes) > 0 {
		return p.Spec.PolicyTypes
	}
	if len(p.Spec.Egress) > 0 {
		return []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}
	}
	return []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
}

// "If this field is empty or missing, this rule matches all ports. If this field is present and
// contains at least one item, then this rule allows traffic only if the traffic matches at least
// one port in the list."
func (w *World) portsMatch(ports []networkingv1.NetworkPolicyPort, f Flow) bool {
	if len(ports) == 0 {
		return true
	}
	for _, p := range ports {
		if w.portMatches(p, f) {
			return true
		}
	}
	return false
}

func (w *World) portMatches(p networkingv1.NetworkPolicyPort, f Flow) bool {
	// "If not specified, this field defaults to TCP."
	protocol := corev1.ProtocolTCP
	if p.Protocol != nil {
		protocol = *p.Protocol
	}
	if f.Protocol != protocol {
		return false
	}
	// "If this field is not provided, this matches all port names and numbers."
	if p.Port == nil {
		return true
	}
	// "This can either be a numerical or named port on a pod."
	if p.Port.StrVal != "" {
		return w.named(f.Dst, p.Port.StrVal, protocol, f.Port)
	}
	// "endPort indicates that the range of ports from port to endPort if set, inclusive, should
	// be allowed by the policy."
	if p.EndPort != nil {
		return int(f.Port) >= p.Port.IntValue() && int(f.Port) <= int(*p.EndPort)
	}
	return int(f.Port) == p.Port.IntValue()
}

// named says whether the pod at dst has a port of that name and number.
func (w *World) named(dst netip.Addr, name string, protocol corev1.Protocol, port uint16) bool {
	pod, ok := w.podAt(dst)
	if !ok {
		return false
	}
	for _, c := range pod.Ports {
		has := c.Protocol
		if has == "" {
			has = corev1.ProtocolTCP
		}
		if c.Name == name && has == protocol && int(c.ContainerPort) == int(port) {
			return true
		}
	}
	return false
}

// namedPortsReach: the API does not say what a port's name means for a block of addresses. Here
// it means nothing: a block has addresses, and only pods have names for ports. So a flow that
// only matches by a port's name must match a peer that selects pods (or all peers).
func (w *World) namedPortsReach(ports []networkingv1.NetworkPolicyPort, peers []networkingv1.NetworkPolicyPeer, namespace string, f Flow) bool {
	if len(ports) == 0 || len(peers) == 0 {
		return true
	}
	for _, p := range ports {
		if p.Port == nil || p.Port.StrVal == "" {
			if w.portMatches(p, f) {
				return true
			}
		}
	}
	pods := slices.DeleteFunc(slices.Clone(peers), func(p networkingv1.NetworkPolicyPeer) bool { return p.IPBlock != nil })
	return len(pods) > 0 && w.peersMatch(pods, namespace, f.Dst)
}

// "Items in this list are combined using a logical OR operation. If this field is empty or
// missing, this rule matches all sources. If this field is present and contains at least one
// item, this rule allows traffic only if the traffic matches at least one item in the list."
func (w *World) peersMatch(peers []networkingv1.NetworkPolicyPeer, namespace string, addr netip.Addr) bool {
	if len(peers) == 0 {
		return true
	}
	for _, p := range peers {
		if w.peerMatches(p, namespace, addr) {
			return true
		}
	}
	return false
}

func (w *World) peerMatches(p networkingv1.NetworkPolicyPeer, namespace string, addr netip.Addr) bool {
	// "If this field is set then neither of the other fields can be."
	if p.IPBlock != nil {
		return inBlock(*p.IPBlock, addr)
	}
	pod, ok := w.podAt(addr)
	if !ok {
		return false
	}
	// "If namespaceSelector is also set, then the NetworkPolicyPeer as a whole selects the pods
	// matching podSelector in the Namespaces selected by NamespaceSelector. Otherwise it selects
	// the pods matching podSelector in the policy's own namespace."
	if p.NamespaceSelector != nil {
		if !selected(*p.NamespaceSelector, w.Namespaces[pod.Namespace]) {
			return false
		}
	} else if pod.Namespace != namespace {
		return false
	}
	// "Otherwise it selects all pods in the namespaces selected by namespaceSelector."
	return p.PodSelector == nil || selected(*p.PodSelector, pod.Labels)
}

func (w *World) podAt(addr netip.Addr) (Pod, bool) {
	for _, p := range w.Pods {
		if slices.Contains(p.Addrs, addr) {
			return p, true
		}
	}
	return Pod{}, false
}

// "IPBlock describes a particular CIDR that is allowed. The except entry describes CIDRs that
// should not be included within this rule."
func inBlock(b networkingv1.IPBlock, addr netip.Addr) bool {
	if !netip.MustParsePrefix(b.CIDR).Contains(addr) {
		return false
	}
	for _, e := range b.Except {
		if netip.MustParsePrefix(e).Contains(addr) {
			return false
		}
	}
	return true
}

// "The result of matchLabels and matchExpressions are ANDed. An empty label selector matches all
// objects."
func selected(s metav1.LabelSelector, labels map[string]string) bool {
	for k, v := range s.MatchLabels {
		if has, ok := labels[k]; !ok || has != v {
			return false
		}
	}
	for _, e := range s.MatchExpressions {
		value, ok := labels[e.Key]
		holds := false
		switch e.Operator {
		case metav1.LabelSelectorOpIn:
			holds = ok && slices.Contains(e.Values, value)
		case metav1.LabelSelectorOpNotIn:
			holds = !ok || !slices.Contains(e.Values, value)
		case metav1.LabelSelectorOpExists:
			holds = ok
		case metav1.LabelSelectorOpDoesNotExist:
			holds = !ok
		}
		if !holds {
			return false
		}
	}
	return true
}
