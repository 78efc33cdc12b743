// SPDX-License-Identifier: Apache-2.0

package k8s

// What is kept of each kind, and how it is read from the API's. Reading never
// fails: what cannot be understood becomes a problem of that object, and the
// rest of it, and all others, go on.

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/mustang-net/mustang/internal/state"
)

// Key names an object. Nodes and namespaces have no Namespace.
type Key struct{ Namespace, Name string }

func (k Key) String() string {
	if k.Namespace == "" {
		return k.Name
	}
	return k.Namespace + "/" + k.Name
}

// Service is what is kept of a Service.
type Service struct {
	UID      string
	Created  time.Time
	Skipped  string // why it is not ours to serve; "" when it is
	Problems []string

	ClusterIPs    []netip.Addr
	ExternalIPs   []netip.Addr
	LoadBalancers []netip.Addr // those that this node answers for (ipMode VIP)
	Ports         []Port
	NodePorts     bool // of a type that has them

	Affinity            time.Duration
	External, Internal  state.TrafficPolicy
	SourceRanges        []netip.Prefix
	HealthCheckNodePort uint16
	Distribution        string
}

// Port is one port of a Service.
type Port struct {
	Name           string
	Protocol       state.Protocol
	Port, NodePort uint16
}

// Slice is what is kept of an EndpointSlice.
type Slice struct {
	Service   Key
	Problems  []string
	Ports     []SlicePort
	Endpoints []Endpoint
	Triggered time.Time // when what it describes began to change; zero: not told
}

// SlicePort is one port of all endpoints of a slice.
type SlicePort struct {
	Name     string
	Protocol state.Protocol
	Port     uint16
}

// Endpoint is one endpoint of a slice.
type Endpoint struct {
	Addr                        netip.Addr
	Node                        string
	Ready, Serving, Terminating bool
	Hints                       *Hints // nil: none
}

// Hints say for whom an endpoint is meant.
type Hints struct{ Zones, Nodes []string }

// Node is what is kept of a Node.
type Node struct {
	Created  int64 // in Unix's seconds
	Labels   map[string]string
	Addrs    []netip.Addr // InternalIP, in the order given; without any, ExternalIP
	External []netip.Addr // ExternalIP
	PodCIDRs []netip.Prefix
	Leaving  bool     // it is being deleted, or about to be
	Taints   []string // their keys
	Problems []string
}

// Zone is the node's zone, "" when it has none.
func (n *Node) Zone() string { return n.Labels[corev1.LabelTopologyZone] }

// Pod is what is kept of a Pod.
type Pod struct {
	UID     string
	Created int64 // in Unix's seconds
	// StaticUID is what the kubelet calls a pod that it had from a file: the API's
	// object is only its mirror, with another UID.
	StaticUID   string
	Labels      map[string]string
	Node        string
	IPs         []netip.Addr
	Phase       string
	Ports       []PodPort // named container ports
	HostNetwork bool
	Terminating bool // it is being deleted
}

// PodPort is a container port with a name.
type PodPort struct {
	Name     string
	Protocol string // TCP, UDP, SCTP
	Port     uint16
}

// Namespace is what is kept of a Namespace.
type Namespace struct{ Labels map[string]string }

// Policy is a NetworkPolicy, whole but for its metadata.
type Policy struct {
	UID  string
	Spec networkingv1.NetworkPolicySpec
}

// intern makes equal strings of many objects one.
func intern(s string) string { return unique.Make(s).Value() }

// internLabels is labels with each key and value interned: most objects share them.
func internLabels(labels map[string]string) map[string]string {
	out := make(map[string]string, len(labels))
	for k, v := range labels {
		out[intern(k)] = intern(v)
	}
	return out
}

// problems collects sentences about one object.
type problems []string

func (p *problems) add(format string, args ...any) { *p = append(*p, fmt.Sprintf(format, args...)) }

func (p *problems) addrs(field string, list []string) []netip.Addr {
	var out []netip.Addr
	seen := make(map[netip.Addr]bool, len(list))
	for _, s := range list {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" {
			p.add("%s %q is not an IP address; it is left out", field, s)
			continue
		}
		if a = a.Unmap(); !seen[a] {
			seen[a] = true
			out = append(out, a)
		}
	}
	return out
}

// prefixes reads networks. ok is false when one could not be read.
func (p *problems) prefixes(field string, list []string) (out []netip.Prefix, ok bool) {
	ok = true
	for _, s := range list {
		n, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			p.add("%s %q is not a network; write it like 192.0.2.0/24", field, s)
			ok = false
			continue
		}
		out = append(out, state.Network(n))
	}
	return out, ok
}

// protocol is the protocol of field; ok is false for one that is not served.
func (p *problems) protocol(field string, name corev1.Protocol) (_ state.Protocol, ok bool) {
	switch name {
	case corev1.ProtocolTCP, "":
		return state.TCP, true
	case corev1.ProtocolUDP:
		return state.UDP, true
	case corev1.ProtocolSCTP:
		return state.SCTP, true
	}
	p.add("%s has protocol %s, which mustang does not translate; that port is left out", field, name)
	return 0, false
}

func readService(o *corev1.Service) *Service {
	s := &Service{UID: string(o.UID), Created: o.CreationTimestamp.Time}
	if s.Skipped = skipped(o); s.Skipped != "" {
		return s
	}
	var p problems
	spec := &o.Spec
	ips := spec.ClusterIPs
	if len(ips) == 0 { // written before dual stack
		ips = []string{spec.ClusterIP}
	}
	s.ClusterIPs = p.addrs("spec.clusterIPs", ips)
	s.ExternalIPs = p.addrs("spec.externalIPs", spec.ExternalIPs)
	s.NodePorts = spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer
	for i := range spec.Ports {
		port := &spec.Ports[i]
		protocol, ok := p.protocol(fmt.Sprintf("spec.ports %q", port.Name), port.Protocol)
		if ok {
			s.Ports = append(s.Ports, Port{intern(port.Name), protocol, uint16(port.Port), uint16(port.NodePort)})
		}
	}
	if spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		s.Affinity = time.Duration(corev1.DefaultClientIPServiceAffinitySeconds) * time.Second
		if c := spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			s.Affinity = time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
		}
	}
	if spec.InternalTrafficPolicy != nil && *spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal {
		s.Internal = state.PolicyLocal
	}
	if spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		s.External = state.PolicyLocal
	}
	if spec.TrafficDistribution != nil {
		s.Distribution = intern(*spec.TrafficDistribution)
	}
	if spec.Type == corev1.ServiceTypeLoadBalancer {
		s.loadBalancer(o, &p)
	}
	s.ExternalIPs, s.LoadBalancers = s.ofItsFamilies(s.ExternalIPs), s.ofItsFamilies(s.LoadBalancers)
	s.LoadBalancers = s.external(&p, "status.loadBalancer.ingress", s.LoadBalancers, 0)
	s.ExternalIPs = s.external(&p, "spec.externalIPs", s.ExternalIPs, len(s.LoadBalancers))
	s.Problems = p
	return s
}

// ofItsFamilies leaves out addresses of a family that the Service does not have, as
// kube-proxy does: no endpoint could serve them, and somebody else may.
func (s *Service) ofItsFamilies(list []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(list, func(a netip.Addr) bool {
		return !slices.ContainsFunc(s.ClusterIPs, func(own netip.Addr) bool { return own.Is4() == a.Is4() })
	})
}

// maxExternal is how many ways to reach its ports a Service may have by external and load balancers' addresses: the
// product of two lists, neither of which the API bounds.
const maxExternal = 16384

// external is as many addresses of a list as there is room for, beside the number that others have taken.
func (s *Service) external(p *problems, field string, list []netip.Addr, taken int) []netip.Addr {
	room := maxExternal/max(len(s.Ports), 1) - taken
	if len(list) <= room {
		return list
	}
	p.add("%s has %d addresses, for %d ports: more than %d ways to reach a Service are not served; the first %d addresses are",
		field, len(list), len(s.Ports), maxExternal, room)
	return list[:room]
}

// skipped says why a Service is not ours to serve.
func skipped(o *corev1.Service) string {
	_, other := o.Labels["service.kubernetes.io/service-proxy-name"]
	_, headless := o.Labels[corev1.IsHeadlessService]
	switch {
	case other:
		return "it names another proxy"
	case headless: // by its label, though it has an address
		return "it is called headless"
	case o.Spec.Type == corev1.ServiceTypeExternalName:
		return "it is an alias of a name"
	case o.Spec.ClusterIP == corev1.ClusterIPNone:
		return "it is headless"
	case o.Spec.ClusterIP == "":
		return "it has no address yet"
	}
	return ""
}

func (s *Service) loadBalancer(o *corev1.Service, p *problems) {
	s.HealthCheckNodePort = uint16(o.Spec.HealthCheckNodePort)
	if s.External != state.PolicyLocal {
		s.HealthCheckNodePort = 0
	}
	var vips []string
	for _, in := range o.Status.LoadBalancer.Ingress {
		if in.IP != "" && (in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP) {
			vips = append(vips, in.IP)
		}
	}
	s.LoadBalancers = p.addrs("status.loadBalancer.ingress", vips)
	// One that is both is the load balancer's, whose clients may be limited.
	s.ExternalIPs = slices.DeleteFunc(s.ExternalIPs, func(a netip.Addr) bool { return slices.Contains(s.LoadBalancers, a) })
	var ok bool
	if s.SourceRanges, ok = p.prefixes("spec.loadBalancerSourceRanges", o.Spec.LoadBalancerSourceRanges); !ok {
		// Who may use it is not known in full. Closed until told otherwise.
		p.add("its load balancer's addresses are not served until every one of spec.loadBalancerSourceRanges can be read")
		s.LoadBalancers = nil
	}
}

func readSlice(o *discoveryv1.EndpointSlice) *Slice {
	s := &Slice{Service: Key{intern(o.Namespace), intern(o.Labels[discoveryv1.LabelServiceName])}}
	if o.AddressType == discoveryv1.AddressTypeFQDN || s.Service.Name == "" {
		return s
	}
	var p problems
	if t, err := time.Parse(time.RFC3339Nano, o.Annotations[corev1.EndpointsLastChangeTriggerTime]); err == nil {
		s.Triggered = t
	}
	for _, port := range o.Ports {
		name, protocol := deref(port.Name), deref(port.Protocol)
		number, ok := p.protocol(fmt.Sprintf("ports %q", name), protocol)
		if ok && port.Port != nil && *port.Port > 0 {
			s.Ports = append(s.Ports, SlicePort{intern(name), number, uint16(*port.Port)})
		}
	}
	s.Endpoints = make([]Endpoint, 0, len(o.Endpoints))
	for i := range o.Endpoints {
		e, ok := readEndpoint(&o.Endpoints[i], &p)
		if ok && e.Addr.Is4() != (o.AddressType == discoveryv1.AddressTypeIPv4) {
			p.add("endpoint %s is not %s, which the slice's addressType says; it is left out", e.Addr, o.AddressType)
			ok = false
		}
		if ok {
			s.Endpoints = append(s.Endpoints, e)
		}
	}
	s.Problems = p
	return s
}

func readEndpoint(o *discoveryv1.Endpoint, p *problems) (Endpoint, bool) {
	if len(o.Addresses) == 0 {
		return Endpoint{}, false
	}
	// All addresses of an endpoint are the same place; the API says to take the first.
	a, err := netip.ParseAddr(o.Addresses[0])
	if err != nil || a.Zone() != "" || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() {
		p.add("endpoint %q is not an address that can be reached; it is left out", o.Addresses[0])
		return Endpoint{}, false
	}
	e := Endpoint{Addr: a.Unmap(), Node: intern(deref(o.NodeName))}
	// nil means ready, serving, not terminating.
	e.Ready = o.Conditions.Ready == nil || *o.Conditions.Ready
	e.Serving = o.Conditions.Serving == nil || *o.Conditions.Serving
	e.Terminating = deref(o.Conditions.Terminating)
	if o.Hints != nil && len(o.Hints.ForZones)+len(o.Hints.ForNodes) > 0 {
		e.Hints = &Hints{}
		for _, z := range o.Hints.ForZones {
			e.Hints.Zones = append(e.Hints.Zones, intern(z.Name))
		}
		for _, n := range o.Hints.ForNodes {
			e.Hints.Nodes = append(e.Hints.Nodes, intern(n.Name))
		}
	}
	return e, true
}

func addressesOf(o *corev1.Node, kind corev1.NodeAddressType) (out []string) {
	for _, a := range o.Status.Addresses {
		if a.Type == kind {
			out = append(out, a.Address)
		}
	}
	return out
}

func readNode(o *corev1.Node) *Node {
	n := &Node{Created: o.CreationTimestamp.Unix(), Labels: internLabels(o.Labels), Leaving: o.DeletionTimestamp != nil}
	for _, t := range o.Spec.Taints {
		n.Leaving = n.Leaving || t.Key == "ToBeDeletedByClusterAutoscaler"
		n.Taints = append(n.Taints, t.Key)
	}
	var p problems
	n.Addrs = p.addrs("status.addresses", addressesOf(o, corev1.NodeInternalIP))
	n.External = p.addrs("status.addresses", addressesOf(o, corev1.NodeExternalIP))
	if len(n.Addrs) == 0 { // as the kubelet takes them for pods of the node's network
		n.Addrs = n.External
	}
	cidrs := o.Spec.PodCIDRs
	if len(cidrs) == 0 && o.Spec.PodCIDR != "" {
		cidrs = []string{o.Spec.PodCIDR}
	}
	n.PodCIDRs, _ = p.prefixes("spec.podCIDRs", cidrs)
	n.Problems = p
	return n
}

// staticUID is an annotation that the kubelet puts on mirrors of its static pods.
const staticUID = "kubernetes.io/config.hash"

// Draining says that the pod finishes what it has.
func (p *Pod) Draining() bool { return p.Terminating && !p.Ended() }

// Ended says that the pod has let go of its addresses.
func (p *Pod) Ended() bool {
	return p.Phase == string(corev1.PodSucceeded) || p.Phase == string(corev1.PodFailed)
}

func readPod(o *corev1.Pod) *Pod {
	p := &Pod{
		UID: string(o.UID), Created: o.CreationTimestamp.Unix(), StaticUID: o.Annotations[staticUID], Labels: internLabels(o.Labels), Node: intern(o.Spec.NodeName), Phase: intern(string(o.Status.Phase)),
		HostNetwork: o.Spec.HostNetwork, Terminating: o.DeletionTimestamp != nil,
	}
	ips := make([]string, 0, len(o.Status.PodIPs))
	for _, ip := range o.Status.PodIPs {
		ips = append(ips, ip.IP)
	}
	var ignored problems // the kubelet writes these, and there is nobody to tell
	p.IPs = ignored.addrs("status.podIPs", ips)
	for _, c := range o.Spec.Containers {
		p.namedPorts(c.Ports)
	}
	for _, c := range o.Spec.InitContainers {
		// A sidecar is an init container that stays.
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			p.namedPorts(c.Ports)
		}
	}
	return p
}

func (p *Pod) namedPorts(ports []corev1.ContainerPort) {
	for _, port := range ports {
		if port.Name != "" {
			p.Ports = append(p.Ports, PodPort{intern(port.Name), intern(string(port.Protocol)), uint16(port.ContainerPort)})
		}
	}
}

func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// The following say whether a new version of an object means anything new: a
// list after an outage brings every object again.

func (s *Service) same(o *Service) bool {
	return s.UID == o.UID && s.Created.Equal(o.Created) && s.Skipped == o.Skipped && slices.Equal(s.Problems, o.Problems) &&
		slices.Equal(s.ClusterIPs, o.ClusterIPs) && slices.Equal(s.ExternalIPs, o.ExternalIPs) &&
		slices.Equal(s.LoadBalancers, o.LoadBalancers) && slices.Equal(s.Ports, o.Ports) && s.NodePorts == o.NodePorts &&
		s.Affinity == o.Affinity && s.External == o.External && s.Internal == o.Internal &&
		slices.Equal(s.SourceRanges, o.SourceRanges) && s.HealthCheckNodePort == o.HealthCheckNodePort && s.Distribution == o.Distribution
}

func (s *Slice) same(o *Slice) bool {
	return s.Service == o.Service && slices.Equal(s.Problems, o.Problems) && slices.Equal(s.Ports, o.Ports) &&
		slices.EqualFunc(s.Endpoints, o.Endpoints, Endpoint.same)
}

func (e Endpoint) same(o Endpoint) bool {
	if (e.Hints == nil) != (o.Hints == nil) {
		return false
	}
	if e.Hints != nil && !(slices.Equal(e.Hints.Zones, o.Hints.Zones) && slices.Equal(e.Hints.Nodes, o.Hints.Nodes)) {
		return false
	}
	e.Hints, o.Hints = nil, nil
	return e == o
}

func (n *Node) same(o *Node) bool {
	return n.Created == o.Created && maps.Equal(n.Labels, o.Labels) && slices.Equal(n.Addrs, o.Addrs) && slices.Equal(n.External, o.External) && slices.Equal(n.PodCIDRs, o.PodCIDRs) &&
		n.Leaving == o.Leaving && slices.Equal(n.Taints, o.Taints) && slices.Equal(n.Problems, o.Problems)
}

func (p *Pod) same(o *Pod) bool {
	return p.UID == o.UID && p.StaticUID == o.StaticUID && maps.Equal(p.Labels, o.Labels) && p.Node == o.Node && slices.Equal(p.IPs, o.IPs) &&
		p.Phase == o.Phase && slices.Equal(p.Ports, o.Ports) && p.HostNetwork == o.HostNetwork
}

func (n *Namespace) same(o *Namespace) bool { return maps.Equal(n.Labels, o.Labels) }
