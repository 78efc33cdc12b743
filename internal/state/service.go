// SPDX-License-Identifier: Apache-2.0

package state

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Frontend is what clients connect to. IPv4 addresses are plain, never mapped
// into IPv6. The unspecified address is every address of the node that takes
// node ports.
type Frontend struct {
	AddrPort netip.AddrPort
	Protocol Protocol
}

func (f Frontend) String() string { return f.Protocol.String() + " " + f.AddrPort.String() }

// Compare orders frontends by address, port, protocol.
func (f Frontend) Compare(g Frontend) int {
	return cmp.Or(f.AddrPort.Compare(g.AddrPort), cmp.Compare(f.Protocol, g.Protocol))
}

// FrontendKind is what a frontend's address is. The numbers are those of
// bpf/service.h.
type FrontendKind uint8

const (
	ClusterIP    FrontendKind = iota // known inside the cluster: its other ports are refused
	NodePort                         // a port of the node's own addresses
	ExternalIP                       // an address that something outside routes to this node
	LoadBalancer                     // an address of a load balancer outside (ipMode VIP)
)

var frontendKinds = []string{"ClusterIP", "NodePort", "ExternalIP", "LoadBalancer"}

func (k FrontendKind) String() string { return nameOf(frontendKinds, int(k)) }

// External says that clients outside the cluster are meant to use it.
func (k FrontendKind) External() bool { return k != ClusterIP }

// MarshalText is the name of k, for JSON.
func (k FrontendKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText is the reverse of MarshalText.
func (k *FrontendKind) UnmarshalText(b []byte) error {
	i, err := indexOf("kind of frontend", frontendKinds, string(b))
	*k = FrontendKind(i)
	return err
}

// TrafficPolicy is which backends the clients of a frontend may be led to.
type TrafficPolicy uint8

const (
	PolicyCluster TrafficPolicy = iota // any
	PolicyLocal                        // those of this node; packets are dropped where it has none
)

var trafficPolicies = []string{"Cluster", "Local"}

func (p TrafficPolicy) String() string { return nameOf(trafficPolicies, int(p)) }

// MarshalText is the name of p, for JSON.
func (p TrafficPolicy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText is the reverse of MarshalText.
func (p *TrafficPolicy) UnmarshalText(b []byte) error {
	i, err := indexOf("traffic policy", trafficPolicies, string(b))
	*p = TrafficPolicy(i)
	return err
}

// Algorithm is how a new flow picks its backend.
type Algorithm uint8

const (
	Random Algorithm = iota
	Maglev           // by the flow's addresses and ports: the same on every node
)

var algorithms = []string{"random", "maglev"}

func (a Algorithm) String() string { return nameOf(algorithms, int(a)) }

// MarshalText is the name of a, for JSON.
func (a Algorithm) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText is the reverse of MarshalText.
func (a *Algorithm) UnmarshalText(b []byte) error {
	i, err := indexOf("algorithm", algorithms, string(b))
	*a = Algorithm(i)
	return err
}

func nameOf(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("unknown (%d)", i)
}

func indexOf(what string, names []string, s string) (int, error) {
	for i, name := range names {
		if strings.EqualFold(name, s) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("%s %q is none of %s", what, s, strings.Join(names, ", "))
}

// ServiceID names a Service. What has no namespace has "" for one.
type ServiceID struct {
	Owner     Owner
	Namespace string
	Name      string
}

func (id ServiceID) String() string {
	if id.Namespace == "" {
		return id.Name
	}
	return id.Namespace + "/" + id.Name
}

// Compare orders Services by owner, namespace, name.
func (id ServiceID) Compare(o ServiceID) int {
	return cmp.Or(cmp.Compare(id.Owner, o.Owner), strings.Compare(id.Namespace, o.Namespace), strings.Compare(id.Name, o.Name))
}

// Service is one Service as its owner wants it, whole: every port, every
// frontend, and every backend in whatever condition. What of it applies to this
// node is internal/service's business.
type Service struct {
	ServiceID
	Ports []ServicePort

	Affinity  time.Duration `json:",omitempty"` // sessionAffinity ClientIP's time-out; 0: none
	External  TrafficPolicy `json:",omitempty"` // externalTrafficPolicy
	Internal  TrafficPolicy `json:",omitempty"` // internalTrafficPolicy
	Algorithm Algorithm     `json:",omitempty"`
	// SourceRanges are who may use the LoadBalancer frontends; none: everybody.
	SourceRanges []netip.Prefix `json:",omitempty"`
	// HealthCheckNodePort and TrafficDistribution are carried for who serves and
	// shows them: a distribution takes effect through the hints of backends.
	HealthCheckNodePort uint16 `json:",omitempty"`
	TrafficDistribution string `json:",omitempty"`
}

// ServicePort is one port of a Service: where clients find it, and who serves it.
type ServicePort struct {
	Name      string `json:",omitempty"`
	Protocol  Protocol
	Frontends []ServiceFrontend // of both families
	Backends  []ServiceBackend  // of both families; a frontend takes those of its own
}

// ServiceFrontend is one way to reach a port.
type ServiceFrontend struct {
	Kind     FrontendKind
	AddrPort netip.AddrPort // NodePort: the unspecified address of the family
}

// ServiceBackend is one endpoint behind a port, as EndpointSlices describe it.
type ServiceBackend struct {
	AddrPort netip.AddrPort
	Node     string `json:",omitempty"`
	Local    bool   `json:",omitempty"` // it is on this node
	// Conditions of EndpointSlice v1. One that is published before it is ready
	// (publishNotReadyAddresses) counts as ready.
	Ready, Serving, Terminating bool

	ForZones []string `json:",omitempty"` // hints
	ForNodes []string `json:",omitempty"`
}

// Binding is one frontend with the backends that it has on this node: what the
// tables hold. The order of backends is that of the slots; it carries no
// meaning.
type Binding struct {
	Number   uint32 // what people call it by; 0 before it is given one
	Owner    Owner
	Service  ServiceID `json:",omitzero"` // as far as it is known: the tables do not hold it
	Frontend Frontend
	Kind     FrontendKind
	// Outside: it is for clients outside the cluster alone, beside one of the
	// same frontend for everybody else.
	Outside  bool `json:",omitempty"`
	Backends []netip.AddrPort

	Group     uint64        `json:",omitempty"` // the same for all frontends of a Service's port
	Affinity  time.Duration `json:",omitempty"` // whole seconds
	Algorithm Algorithm     `json:",omitempty"`
	// KeepSource: the backends see the address of a client from outside, not the node's.
	KeepSource bool `json:",omitempty"`
	// Drop: there are backends, but none that this node may use: packets are
	// dropped, where a Service without any refuses them.
	Drop bool `json:",omitempty"`
	// SplitOutside: clients from outside have a binding of their own.
	SplitOutside bool           `json:",omitempty"`
	SourceRanges []netip.Prefix `json:",omitempty"`
}

// BindingKey is what there can be only one binding of.
type BindingKey struct {
	Frontend Frontend
	Outside  bool `json:",omitempty"`
}

// Key is b's.
func (b Binding) Key() BindingKey { return BindingKey{b.Frontend, b.Outside} }

// CompareKey orders bindings by frontend, that for clients outside last.
func (b Binding) CompareKey(k BindingKey) int {
	return cmp.Or(b.Frontend.Compare(k.Frontend), boolCompare(b.Outside, k.Outside))
}

// Backend is where a Service's connections go. Port 0 is every port of the
// address, protocol 0 every protocol.
type Backend struct {
	AddrPort netip.AddrPort
	Protocol Protocol `json:",omitempty"`
}

// SortBindings orders bindings by number, then by frontend.
func SortBindings(s []Binding) {
	slices.SortFunc(s, func(a, b Binding) int {
		return cmp.Or(cmp.Compare(a.Number, b.Number), a.CompareKey(b.Key()))
	})
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
