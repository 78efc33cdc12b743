// SPDX-License-Identifier: Apache-2.0

// Package service parses and validates Services, and plans the slots of their
// backends. It is pure: no maps, no files.
package service

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/mustang-net/mustang/internal/state"
)

// MaxBackends is how many backends one Service may have. A frontend's slots are
// walked when it is listed or replaced, and beyond this a Service is a mistake.
const MaxBackends = 65535

// Spec is a Service as people write it.
type Spec struct {
	Service  string   `json:"service"`            // "10.96.0.100:80", "[fd00::1]:80"
	Protocol string   `json:"protocol,omitempty"` // "tcp", "udp", "sctp"; "" is both of the former
	Backends []string `json:"backends"`

	NodePort        uint16   `json:"nodePort,omitempty"`
	ExternalIPs     []string `json:"externalIPs,omitempty"`
	LoadBalancerIPs []string `json:"loadBalancerIPs,omitempty"`
	SourceRanges    []string `json:"sourceRanges,omitempty"` // of clients of LoadBalancerIPs
	ExternalPolicy  string   `json:"externalTrafficPolicy,omitempty"`
	InternalPolicy  string   `json:"internalTrafficPolicy,omitempty"`
	Affinity        string   `json:"affinity,omitempty"` // a duration; "" is none
	Algorithm       string   `json:"algorithm,omitempty"`
}

// InvalidError is input that can never work. It is the caller's mistake, so the
// tool exits with the status of wrong usage.
type InvalidError struct{ msg string }

func (e *InvalidError) Error() string { return e.msg }

// ExitCode is the tool's exit status for this error.
func (e *InvalidError) ExitCode() int { return 2 }

func invalid(format string, args ...any) error {
	return &InvalidError{fmt.Sprintf(format, args...)}
}

// ParseProtocols reads "tcp", "udp", "sctp", or "" for the first two.
func ParseProtocols(s string) ([]state.Protocol, error) {
	switch strings.ToLower(s) {
	case "tcp":
		return []state.Protocol{state.TCP}, nil
	case "udp":
		return []state.Protocol{state.UDP}, nil
	case "sctp":
		return []state.Protocol{state.SCTP}, nil
	case "":
		return []state.Protocol{state.TCP, state.UDP}, nil
	}
	return nil, invalid("protocol %q is none of tcp, udp, sctp; leave it out for tcp and udp", s)
}

// ParseAddrPort reads an address with its port. what names the field in errors.
func ParseAddrPort(what, s string) (netip.AddrPort, error) {
	host, port, ok := splitHostPort(s)
	if !ok {
		return netip.AddrPort{}, invalid("%s %q has no port; write ADDRESS:PORT, or [ADDRESS]:PORT for IPv6", what, s)
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return netip.AddrPort{}, invalid("%s %q: %q is not an IP address; names are not resolved, give the address itself", what, s, host)
	}
	if addr.Zone() != "" {
		return netip.AddrPort{}, invalid("%s %q has a zone; give an address without %%%s", what, s, addr.Zone())
	}
	if strings.Contains(host, ":") != strings.HasPrefix(s, "[") {
		return netip.AddrPort{}, invalid("%s %q: brackets belong around IPv6 addresses, and only those; write [ADDRESS]:PORT", what, s)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return netip.AddrPort{}, invalid("%s %q: port %q is not a number from 1 to 65535", what, s, port)
	}
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), nil
}

func splitHostPort(s string) (host, port string, ok bool) {
	if rest, found := strings.CutPrefix(s, "["); found {
		return strings.Cut(rest, "]:")
	}
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return "", "", false
	}
	return s[:i], s[i+1:], true
}

// parser collects mistakes, so that all are reported together.
type parser struct {
	spec Spec
	errs []error
}

func (p *parser) note(err error) bool {
	if err != nil {
		p.errs = append(p.errs, err)
	}
	return err == nil
}

// Parse turns s into one Service a protocol, validated. All mistakes are
// reported together.
func Parse(s Spec) ([]state.Service, error) {
	p := &parser{spec: s}
	protocols, err := ParseProtocols(s.Protocol)
	p.note(err)
	front, err := ParseAddrPort("service", s.Service)
	if p.note(err) {
		p.note(CheckFrontend(front))
	}
	if len(s.Backends) > MaxBackends {
		p.note(invalid("service %s has %d backends; at most %d are possible", s.Service, len(s.Backends), MaxBackends))
		return nil, errors.Join(p.errs...)
	}
	svc := p.options()
	port := state.ServicePort{Frontends: p.frontends(front), Backends: p.backends(front)}
	if len(p.errs) > 0 {
		return nil, errors.Join(p.errs...)
	}
	out := make([]state.Service, len(protocols))
	for i, proto := range protocols {
		port.Protocol = proto
		out[i] = svc
		out[i].Name = state.Frontend{AddrPort: front, Protocol: proto}.String()
		out[i].Ports = []state.ServicePort{port}
	}
	return out, nil
}

func (p *parser) backends(front netip.AddrPort) []state.ServiceBackend {
	out := make([]state.ServiceBackend, 0, len(p.spec.Backends))
	seen := make(map[netip.AddrPort]bool, len(p.spec.Backends))
	for _, text := range p.spec.Backends {
		b, err := ParseAddrPort("backend", text)
		if !p.note(err) || !p.note(checkBackend(front, b, p.spec.Service)) {
			continue
		}
		if seen[b] {
			p.note(invalid("service %s names backend %s twice; give it once", p.spec.Service, b))
		}
		seen[b] = true
		out = append(out, state.ServiceBackend{AddrPort: b, Ready: true, Serving: true})
	}
	return out
}

// frontends are front, and the others that share its port and family.
func (p *parser) frontends(front netip.AddrPort) []state.ServiceFrontend {
	out := []state.ServiceFrontend{{Kind: state.ClusterIP, AddrPort: front}}
	if p.spec.NodePort != 0 {
		any := netip.IPv4Unspecified()
		if front.Addr().Is6() {
			any = netip.IPv6Unspecified()
		}
		out = append(out, state.ServiceFrontend{Kind: state.NodePort, AddrPort: netip.AddrPortFrom(any, p.spec.NodePort)})
	}
	more := func(what string, kind state.FrontendKind, list []string) {
		for _, text := range list {
			a, err := netip.ParseAddr(text)
			if err != nil {
				p.note(invalid("%s %q of service %s is not an IP address; its port is the Service's", what, text, p.spec.Service))
				continue
			}
			a = a.Unmap()
			if front.IsValid() && a.Is4() != front.Addr().Is4() {
				p.note(invalid("%s %s of service %s is %s; add a Service of that family for it", what, a, p.spec.Service, familyName(a)))
				continue
			}
			if wrong := unusable(a); wrong != "" {
				p.note(invalid("%s %s of service %s: %s", what, a, p.spec.Service, wrong))
				continue
			}
			if front.IsValid() {
				out = append(out, state.ServiceFrontend{Kind: kind, AddrPort: netip.AddrPortFrom(a, front.Port())})
			}
		}
	}
	more("external IP", state.ExternalIP, p.spec.ExternalIPs)
	more("load balancer IP", state.LoadBalancer, p.spec.LoadBalancerIPs)
	for i, f := range out {
		for _, g := range out[:i] {
			if f.AddrPort == g.AddrPort {
				p.note(invalid("service %s names the address %s twice; give it once", p.spec.Service, f.AddrPort))
			}
		}
	}
	return out
}

// options are what is said of the Service as a whole.
func (p *parser) options() state.Service {
	var s state.Service
	text := func(to interface{ UnmarshalText([]byte) error }, field, value string) {
		if value == "" {
			return
		}
		if err := to.UnmarshalText([]byte(value)); err != nil {
			p.note(invalid("%s of service %s: %v", field, p.spec.Service, err))
		}
	}
	text(&s.External, "externalTrafficPolicy", p.spec.ExternalPolicy)
	text(&s.Internal, "internalTrafficPolicy", p.spec.InternalPolicy)
	text(&s.Algorithm, "algorithm", p.spec.Algorithm)
	if p.spec.Affinity != "" {
		d, err := time.ParseDuration(p.spec.Affinity)
		if err != nil || d < time.Second || d > MaxAffinity {
			p.note(invalid("affinity %q of service %s is not a time between 1s and 24h, as 3h", p.spec.Affinity, p.spec.Service))
		}
		s.Affinity = d
	}
	for _, r := range p.spec.SourceRanges {
		prefix, err := netip.ParsePrefix(r)
		if err != nil {
			p.note(invalid("source range %q of service %s is not a CIDR, as 192.0.2.0/24", r, p.spec.Service))
			continue
		}
		s.SourceRanges = append(s.SourceRanges, state.Network(prefix))
	}
	if len(s.SourceRanges) > 0 && len(p.spec.LoadBalancerIPs) == 0 {
		p.note(invalid("service %s has source ranges, but no load balancer IP that they could be for", p.spec.Service))
	}
	if s.External != state.PolicyCluster && p.spec.NodePort == 0 && len(p.spec.ExternalIPs) == 0 && len(p.spec.LoadBalancerIPs) == 0 {
		p.note(invalid("externalTrafficPolicy of service %s is of clients outside, and it has no node port, external IP or load balancer IP for them; give one, or leave the policy out", p.spec.Service))
	}
	return s
}

// joined are the errors that one consists of.
func joined(err error) []error {
	if list, ok := err.(interface{ Unwrap() []error }); ok {
		return list.Unwrap()
	}
	return []error{err}
}

// ParseAll parses every spec before any takes effect, and refuses a frontend
// that is given twice.
func ParseAll(specs []Spec) ([]state.Service, error) {
	var errs []error
	out := make([]state.Service, 0, len(specs))
	seen := make(map[state.ServiceID]int, len(specs))
	for i, spec := range specs {
		services, err := Parse(spec)
		if err != nil {
			for _, one := range joined(err) {
				errs = append(errs, fmt.Errorf("entry %d: %w", i+1, one))
			}
			continue
		}
		for _, s := range services {
			if first, ok := seen[s.ServiceID]; ok {
				errs = append(errs, invalid("entry %d: service %s is also entry %d; merge them into one", i+1, s, first))
			}
			seen[s.ServiceID] = i + 1
		}
		out = append(out, services...)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return out, nil
}

// CheckFrontend refuses addresses that cannot be a Service's.
func CheckFrontend(f netip.AddrPort) error {
	if wrong := unusable(f.Addr()); wrong != "" {
		return invalid("service %s: %s", f, wrong)
	}
	return nil
}

// unusable is why an address cannot be a Service's; "" when it can.
func unusable(a netip.Addr) string {
	switch {
	case a.IsUnspecified():
		return "the unspecified address cannot be a Service's; choose an unused unicast address"
	case a.IsLoopback():
		return "a loopback address never leaves its own namespace; choose an unused unicast address"
	case a.IsMulticast() || isBroadcast(a):
		return "a multicast or broadcast address has no single backend; choose an unused unicast address"
	case a.Zone() != "":
		return "an address with a zone cannot be a Service's; give it without %" + a.Zone()
	case a.Is6() && a.IsLinkLocalUnicast():
		return "a link-local address needs a zone; choose a global or unique-local one"
	}
	return ""
}

// checkFrontend is CheckFrontend for a frontend of any kind.
func checkFrontend(f state.ServiceFrontend) error {
	switch {
	case f.AddrPort.Port() == 0:
		return invalid("its %v %s has no port; a port is from 1 to 65535", f.Kind, f.AddrPort)
	case f.Kind != state.NodePort:
		return CheckFrontend(f.AddrPort)
	case !f.AddrPort.Addr().IsUnspecified():
		return invalid("its NodePort names the address %s; a node port is of every address of the node", f.AddrPort.Addr())
	}
	return nil
}

// checkEndpoint refuses addresses that no backend can have.
func checkEndpoint(b netip.AddrPort) error {
	a := b.Addr()
	switch {
	case a.IsUnspecified(), a.IsMulticast(), isBroadcast(a):
		return invalid("backend %s is not a unicast address; give the address of a pod or server", b)
	case a.IsLoopback():
		return invalid("backend %s is a loopback address, which is another machine's for each pod; give the address of a pod or server", b)
	case a.Is6() && a.IsLinkLocalUnicast():
		return invalid("backend %s is a link-local address, which needs a zone; give the pod's or server's global or unique-local one", b)
	case b.Port() == 0:
		return invalid("backend %s has no port; a port is from 1 to 65535", b)
	}
	return nil
}

func checkBackend(front, b netip.AddrPort, service string) error {
	a := b.Addr()
	if err := checkEndpoint(b); err != nil {
		return invalid("service %s: %v", service, err)
	}
	switch {
	case front.IsValid() && front.Addr().Is4() != a.Is4():
		return invalid("backend %s of service %s is %s; give a backend of the Service's family, or add a Service with an %s address", b, service, familyName(a), familyName(a))
	case front == b:
		return invalid("backend %s is the service itself; give the address of a pod or server", b)
	}
	return nil
}

func isBroadcast(a netip.Addr) bool { return a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) }

func familyName(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}
