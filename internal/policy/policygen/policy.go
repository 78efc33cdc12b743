// SPDX-License-Identifier: Apache-2.0

package policygen

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/mustang-net/mustang/internal/policy/oracle"
)

func text(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func (w *World) randomPolicy() networkingv1.NetworkPolicy {
	rng := w.rng
	p := networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: pick(rng, namespaces), Name: fmt.Sprintf("np%d", rng.IntN(4))}}
	p.Spec.PodSelector = w.selector()
	for range rng.IntN(3) {
		p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{Ports: w.ports(), From: w.peers()})
	}
	if rng.IntN(2) == 0 {
		for range rng.IntN(3) {
			p.Spec.Egress = append(p.Spec.Egress, networkingv1.NetworkPolicyEgressRule{Ports: w.ports(), To: w.peers()})
		}
	}
	switch rng.IntN(4) {
	case 0:
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	case 1:
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
	case 2:
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}
	}
	return p
}

func (w *World) selector() metav1.LabelSelector {
	rng := w.rng
	var s metav1.LabelSelector
	if rng.IntN(3) == 0 {
		return s
	}
	if rng.IntN(2) == 0 {
		key, values := w.label()
		s.MatchLabels = map[string]string{key: pick(rng, values)}
	}
	for range rng.IntN(2) {
		key, values := w.label()
		e := metav1.LabelSelectorRequirement{Key: key}
		switch rng.IntN(4) {
		case 0:
			e.Operator, e.Values = metav1.LabelSelectorOpIn, []string{pick(rng, values), pick(rng, values)}
		case 1:
			e.Operator, e.Values = metav1.LabelSelectorOpNotIn, []string{pick(rng, values)}
		case 2:
			e.Operator = metav1.LabelSelectorOpExists
		default:
			e.Operator = metav1.LabelSelectorOpDoesNotExist
		}
		s.MatchExpressions = append(s.MatchExpressions, e)
	}
	return s
}

// label is a key, with the values that pods may have of it.
func (w *World) label() (string, []string) {
	if w.rng.IntN(8) > 0 {
		return pick(w.rng, labelKeys), values
	}
	names := make([]string, Slots)
	for i := range names {
		names[i] = fmt.Sprintf("p%d", i)
	}
	return uniqueKey, names
}

func (w *World) ports() []networkingv1.NetworkPolicyPort {
	rng := w.rng
	var out []networkingv1.NetworkPolicyPort
	for range rng.IntN(3) {
		var p networkingv1.NetworkPolicyPort
		if rng.IntN(4) > 0 {
			protocol := pick(rng, protocols)
			p.Protocol = &protocol
		}
		switch rng.IntN(5) {
		case 0: // all ports
		case 1:
			name := intstr.FromString(pick(rng, portNames))
			p.Port = &name
		case 2, 3:
			number := intstr.FromInt32(int32(pick(rng, Ports)))
			p.Port = &number
			if rng.IntN(2) == 0 {
				end := max(number.IntVal, int32(pick(rng, Ports)))
				p.EndPort = &end
			}
		default:
			number := intstr.FromInt32(1 + rng.Int32N(65535))
			p.Port = &number
			end := number.IntVal + rng.Int32N(65536-number.IntVal)
			p.EndPort = &end
		}
		out = append(out, p)
	}
	return out
}

func (w *World) peers() []networkingv1.NetworkPolicyPeer {
	rng := w.rng
	var out []networkingv1.NetworkPolicyPeer
	for range rng.IntN(4) {
		var p networkingv1.NetworkPolicyPeer
		switch rng.IntN(5) {
		case 0, 1:
			p.IPBlock = w.block()
		case 2:
			s := w.selector()
			p.PodSelector = &s
		case 3:
			s := w.selector()
			p.NamespaceSelector = &s
		default:
			s, n := w.selector(), w.selector()
			p.PodSelector, p.NamespaceSelector = &s, &n
		}
		out = append(out, p)
	}
	return out
}

// block is a prefix around some address of the world, and smaller ones in it.
func (w *World) block() *networkingv1.IPBlock {
	rng := w.rng
	v6 := rng.IntN(2) == 0
	lengths := []int{0, 8, 16, 24, 25, 28, 31, 32}
	if v6 {
		lengths = []int{0, 16, 32, 64, 96, 112, 124, 126, 127, 128}
	}
	about := func() netip.Addr { return someAddr(rng, v6) }
	cidr := netip.PrefixFrom(about(), pick(rng, lengths)).Masked()
	b := &networkingv1.IPBlock{CIDR: cidr.String()}
	for range rng.IntN(3) {
		e := netip.PrefixFrom(about(), pick(rng, lengths)).Masked()
		if cidr.Overlaps(e) && e.Bits() > cidr.Bits() {
			b.Except = append(b.Except, e.String())
		}
	}
	return b
}

func someAddr(rng *rand.Rand, v6 bool) netip.Addr {
	switch n := rng.IntN(Slots + len(Outside(v6)) + 1); {
	case n < Slots:
		return Addr(n, v6)
	case n == Slots:
		return NodeAddr(v6)
	default:
		return Outside(v6)[n-Slots-1]
	}
}

// Case is a first packet between two ends, one of them at least on this node.
type Case struct {
	oracle.Flow
	From, To int // pods on this node; -1: another end
	Number   uint8
}

// Case picks one.
func (w *World) Case() Case {
	rng := w.rng
	for {
		v6 := rng.IntN(2) == 0
		c := Case{From: -1, To: -1}
		c.Src, c.Dst = someAddr(rng, v6), someAddr(rng, v6)
		for i := range Local {
			if w.pods[i] == nil {
				continue
			}
			if c.Src == Addr(i, v6) {
				c.From = i
			}
			if c.Dst == Addr(i, v6) {
				c.To = i
			}
		}
		if c.From < 0 && c.To < 0 {
			continue
		}
		c.FromNode = c.Src == NodeAddr(v6)
		protocol := pick(rng, append(protocols, ""))
		c.Protocol = protocol
		c.Number = map[corev1.Protocol]uint8{corev1.ProtocolTCP: 6, corev1.ProtocolUDP: 17, corev1.ProtocolSCTP: 132}[protocol]
		if protocol == "" {
			c.Number = 1
			if v6 {
				c.Number = 58
			}
			return c
		}
		c.Port = pick(rng, Ports)
		if rng.IntN(3) == 0 {
			c.Port = uint16(1 + rng.IntN(65535))
		}
		return c
	}
}

// Ends are the oracle's verdicts of both ends; true where there is none on this
// node.
func (w *World) Ends(c Case) [2]bool {
	return [2]bool{c.From < 0 || w.Oracle.Egress(*w.pods[c.From], c.Flow), c.To < 0 || w.Oracle.Ingress(*w.pods[c.To], c.Flow)}
}

// Verdict is the oracle's: "egress", "ingress", or "" when the flow may be.
func (w *World) Verdict(c Case) string {
	if c.From >= 0 && !w.Oracle.Egress(*w.pods[c.From], c.Flow) {
		return "egress"
	}
	if c.To >= 0 && !w.Oracle.Ingress(*w.pods[c.To], c.Flow) {
		return "ingress"
	}
	return ""
}
