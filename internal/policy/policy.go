// SPDX-License-Identifier: Apache-2.0

// Package policy turns NetworkPolicies, pods and namespaces into the rules of
// one node's tables. It is pure: state goes in by Set and Delete, and Plan says
// what the tables are to hold that they do not hold yet.
//
// Numbers are hashes of what they stand for: an identity of a namespace and of the labels
// and named ports that rules in use ask for; a policy set of a direction and the policies in it with their
// rules. So a number never changes its meaning, two processes agree without asking each
// other, and what is in the tables after a restart is what is planned again. Two contents
// have two numbers, also where their hashes are one.
package policy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/state"
)

// Key names an object in a namespace. Objects of different owners are different
// objects, also when they have one name.
type Key struct {
	Namespace, Name string
	Owner           state.Owner
}

func (k Key) String() string { return k.Namespace + "/" + k.Name }

// Compare orders keys by namespace, then name.
func (k Key) Compare(l Key) int {
	return cmp.Or(cmp.Compare(k.Namespace, l.Namespace), cmp.Compare(k.Name, l.Name), cmp.Compare(k.Owner, l.Owner))
}

// Policy is one networking.k8s.io/v1 NetworkPolicy with its defaults filled in.
type Policy struct {
	Key
	// Pods selects, within the policy's namespace, those that it isolates.
	Pods Selector
	// IsolatesIngress and IsolatesEgress are its policyTypes.
	IsolatesIngress, IsolatesEgress bool
	Ingress, Egress                 []Rule

	content [2]string // of the rules of each direction: equal rules have equal ones
}

// Rule allows what matches one of its ports and one of its peers. No ports are
// all ports of all protocols; no peers are everybody.
type Rule struct {
	Ports []Port `json:",omitempty"`
	Peers []Peer `json:",omitempty"`
}

// Port is a range of a protocol's ports, or the name of a port of the
// destination pod. All ports of a protocol are 0 to 65535.
type Port struct {
	Protocol    state.Protocol
	Name        string `json:",omitempty"`
	First, Last uint16
}

// Peer is either a block of addresses or a selection of pods: those that Pods
// selects in the namespaces that Namespaces selects. Without Namespaces it is
// the policy's own one; without Pods all pods there.
type Peer struct {
	Pods       *Selector `json:",omitempty"`
	Namespaces *Selector `json:",omitempty"`
	Block      *Block    `json:",omitempty"`
}

// Block is the addresses of CIDR that are in none of Except.
type Block struct {
	CIDR   netip.Prefix
	Except []netip.Prefix `json:",omitempty"`
}

// Pod is a pod of any node. HostNetwork pods are nothing but their node's
// processes, and no selector selects them. A pod that has ended (phase
// Succeeded or Failed) has lost its addresses: delete it. One that is
// terminating stays until it is gone.
type Pod struct {
	Key
	// UID is the API's; StaticUID what the kubelet calls the one that a mirror shows.
	UID, StaticUID string
	Labels         map[string]string
	Addrs          []netip.Addr
	Ports          []NamedPort
	HostNetwork    bool
}

// NamedPort is a container's port that has a name.
type NamedPort = state.NamedPort

// Endpoint is an interface of a pod on this node. Its addresses are the pod's
// before anybody publishes them. While its pod is not known it is closed:
// nothing but the node reaches it, and it reaches nothing. An endpoint without
// a pod's name is no pod, and no policy is about it.
type Endpoint struct {
	ID    uint32
	Pod   Key
	UID   string // as the runtime told it; "": it did not, and the name decides
	Addrs []netip.Addr
}

// Direction is seen from the isolated pod.
type Direction uint8

const (
	Ingress Direction = iota
	Egress
)

func (d Direction) String() string {
	if d == Egress {
		return "egress"
	}
	return "ingress"
}

// MarshalText is the name of d, for JSON.
func (d Direction) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads what MarshalText writes.
func (d *Direction) UnmarshalText(text []byte) error {
	for _, v := range []Direction{Ingress, Egress} {
		if string(text) == v.String() {
			*d = v
			return nil
		}
	}
	return fmt.Errorf("%q is neither ingress nor egress", text)
}

// NamespaceName is the label that every namespace has.
const NamespaceName = "kubernetes.io/metadata.name"

// rules are the policy's of one direction.
func (p *Policy) rules(d Direction) []Rule {
	if d == Egress {
		return p.Egress
	}
	return p.Ingress
}

// contentOf is the same for rules that say the same in the same words.
func contentOf(rules []Rule) string {
	text, err := json.Marshal(rules)
	if err != nil {
		panic(err) // they are plain data
	}
	return string(text)
}

// isolates says whether the pods that p selects are isolated in direction d.
func (p *Policy) isolates(d Direction) bool {
	if d == Egress {
		return p.IsolatesEgress
	}
	return p.IsolatesIngress
}

// sorted is ports in their order, each once.
func sorted(ports []NamedPort) []NamedPort {
	out := slices.Clone(ports)
	slices.SortFunc(out, NamedPort.Compare)
	return slices.Compact(out)
}
