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

	"github.com/mustang-net/mustang/internal/state"
)

// MaxBackends is how many backends one Service may have. A frontend's slots are
// walked when it is listed or replaced, and beyond this a Service is a mistake.
const MaxBackends = 65535

// Spec is a Service as people write it.
type Spec struct {
	Service  string   `json:"service"`            // "10.96.0.100:80", "[fd00::1]:80"
	Protocol string   `json:"protocol,omitempty"` // "tcp", "udp"; "" is both
	Backends []string `json:"backends"`
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

// ParseProtocols reads "tcp", "udp", or "" for both.
func ParseProtocols(s string) ([]state.Protocol, error) {
	switch strings.ToLower(s) {
	case "tcp":
		return []state.Protocol{state.TCP}, nil
	case "udp":
		return []state.Protocol{state.UDP}, nil
	case "":
		return []state.Protocol{state.TCP, state.UDP}, nil
	}
	return nil, invalid("protocol %q is neither tcp nor udp; leave it out for both", s)
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

// Parse turns s into one Service a protocol, validated. All mistakes are
// reported together.
func Parse(s Spec) ([]state.Service, error) {
	var errs []error
	note := func(err error) bool {
		if err != nil {
			errs = append(errs, err)
		}
		return err == nil
	}
	protocols, err := ParseProtocols(s.Protocol)
	note(err)
	front, err := ParseAddrPort("service", s.Service)
	if note(err) {
		note(CheckFrontend(front))
	}
	if len(s.Backends) > MaxBackends {
		note(invalid("service %s has %d backends; at most %d are possible", s.Service, len(s.Backends), MaxBackends))
		return nil, errors.Join(errs...)
	}
	backends := make([]netip.AddrPort, 0, len(s.Backends))
	seen := make(map[netip.AddrPort]bool, len(s.Backends))
	for _, text := range s.Backends {
		b, err := ParseAddrPort("backend", text)
		if !note(err) || !note(checkBackend(front, b, s.Service)) {
			continue
		}
		if seen[b] {
			note(invalid("service %s names backend %s twice; give it once", s.Service, b))
		}
		seen[b] = true
		backends = append(backends, b)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	out := make([]state.Service, len(protocols))
	for i, p := range protocols {
		out[i] = state.Service{Frontend: state.Frontend{AddrPort: front, Protocol: p}, Backends: backends}
	}
	return out, nil
}

// ParseAll parses every spec before any takes effect, and refuses a frontend
// that is given twice.
func ParseAll(specs []Spec) ([]state.Service, error) {
	var errs []error
	out := make([]state.Service, 0, len(specs))
	seen := make(map[state.Frontend]int, len(specs))
	for i, spec := range specs {
		services, err := Parse(spec)
		if err != nil {
			errs = append(errs, fmt.Errorf("entry %d: %w", i+1, err))
			continue
		}
		for _, s := range services {
			if first, ok := seen[s.Frontend]; ok {
				errs = append(errs, invalid("entry %d: service %s is also entry %d; merge them into one", i+1, s.Frontend, first))
			}
			seen[s.Frontend] = i + 1
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
	a := f.Addr()
	switch {
	case a.IsUnspecified():
		return invalid("service %s: the unspecified address cannot be a Service's; choose an unused unicast address", f)
	case a.IsLoopback():
		return invalid("service %s: a loopback address never leaves its own namespace; choose an unused unicast address", f)
	case a.IsMulticast() || isBroadcast(a):
		return invalid("service %s: a multicast or broadcast address has no single backend; choose an unused unicast address", f)
	case a.Is6() && a.IsLinkLocalUnicast():
		return invalid("service %s: a link-local address needs a zone; choose a global or unique-local one", f)
	}
	return nil
}

func checkBackend(front, b netip.AddrPort, service string) error {
	a := b.Addr()
	switch {
	case a.IsUnspecified(), a.IsMulticast(), isBroadcast(a):
		return invalid("backend %s of service %s is not a unicast address; give the address of a pod or server", b, service)
	case a.IsLoopback():
		return invalid("backend %s of service %s is a loopback address, which is another machine's for each pod; give the address of a pod or server", b, service)
	case front.IsValid() && front.Addr().Is4() != a.Is4():
		return invalid("backend %s of service %s is %s; give a backend of the Service's family, or add a Service with an %s address", b, service, family(a), family(a))
	case front == b:
		return invalid("backend %s is the service itself; give the address of a pod or server", b)
	}
	return nil
}

func isBroadcast(a netip.Addr) bool { return a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) }

func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}
