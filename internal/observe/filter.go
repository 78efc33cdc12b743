// SPDX-License-Identifier: Apache-2.0

package observe

// Which flows to show.

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Filter says which flows to show. Fields that are not empty must all match;
// of the values in one field, any.
type Filter struct {
	Pods       []string // of either end: namespace/name, or name
	Namespaces []string // of either end
	Services   []string // number, address, or address:port
	Verdicts   []string
	Reasons    []string
	Protocols  []string
	Ports      []uint16 // of either end, or the Service's
	From, To   []string // one end: pod, address, or prefix; To: the Service's address, too
}

// Check finds what can never match, with the sentence that says so.
func (f Filter) Check() error {
	for _, v := range f.Verdicts {
		if !slices.Contains(verdictWords, v) {
			return fmt.Errorf("--verdict: %q is none of %s", v, strings.Join(verdictWords, ", "))
		}
	}
	for _, r := range f.Reasons {
		if !slices.ContainsFunc(bpfgen.Reasons[1:], func(known bpfgen.Reason) bool { return known.Name == r }) {
			return fmt.Errorf("--reason: %q is no drop reason; docs/reasons.md lists them", r)
		}
	}
	for _, p := range f.Pods {
		if err := checkPod("--pod", p); err != nil {
			return err
		}
	}
	for _, ns := range f.Namespaces {
		if !isNamespace(ns) {
			return fmt.Errorf("--namespace: %q is no namespace's name: use lower-case letters, digits and '-'", ns)
		}
	}
	for _, s := range f.Services {
		_, service, err := serviceFilter(s)
		if at, wrong := netip.ParseAddrPort(s); wrong == nil && at.Port() == 0 {
			return fmt.Errorf("--service: %q has the port 0, which no Service has; give its port, or the address alone", s)
		}
		if err != nil {
			return fmt.Errorf("--service: %q is no Service's number, address or address:port; `mustang svc ls` shows them", s)
		}
		if err := checkZone("--service", s, service.Addr()); err != nil {
			return err
		}
	}
	for _, p := range f.Protocols {
		if !isProtocol(p) {
			return fmt.Errorf("--protocol: %q is none of %s", p, strings.Join(namedProtocols(), ", "))
		}
	}
	if len(f.Reasons) > 0 && len(f.Verdicts) > 0 && !slices.ContainsFunc(f.Verdicts, func(v string) bool { return v != "forwarded" }) {
		return errors.New("--reason is of what is stopped, and --verdict asks for what is forwarded alone; leave one out")
	}
	if err := checkEnds("--from", f.From); err != nil {
		return err
	}
	if err := checkEnds("--to", f.To); err != nil {
		return err
	}
	from4, from6 := families(f.From)
	to4, to6 := families(f.To)
	if len(f.From) > 0 && len(f.To) > 0 && !(from4 && to4) && !(from6 && to6) {
		return errors.New("--from and --to are of different families, which no flow joins; give both of one")
	}
	return nil
}

// families are those that one of list can have: a pod, both.
func families(list []string) (v4, v6 bool) {
	for _, s := range list {
		p, ok := prefix(s)
		v4 = v4 || !ok || p.Addr().Is4()
		v6 = v6 || !ok || p.Addr().Is6()
	}
	return v4, v6
}

// isNamespace is what Kubernetes and `pod add --namespace` take.
func isNamespace(name string) bool { return len(validation.IsDNS1123Label(name)) == 0 }

// checkPod refuses what no pod is called. Outside Kubernetes that is its network
// namespace's name, which may be anything but a path.
func checkPod(flag, s string) error {
	namespace, name, ok := strings.Cut(s, "/")
	if ok && (!isNamespace(namespace) || name == "" || strings.Contains(name, "/")) {
		return fmt.Errorf("%s: %q is no pod; write NAMESPACE/NAME, or NAME", flag, s)
	}
	return nil
}

// otherProtocol is how protocol calls what has no name.
var otherProtocol = regexp.MustCompile(`(?i)^(protocol [0-9]+|ethertype 0x[0-9a-f]{4})$`)

func isProtocol(s string) bool {
	return otherProtocol.MatchString(s) || slices.ContainsFunc(namedProtocols(), func(name string) bool { return strings.EqualFold(name, s) })
}

func namedProtocols() []string {
	return slices.Concat(slices.Sorted(maps.Values(protocolNames)), slices.Sorted(maps.Values(ethertypes)))
}

// noPod is what no pod is called, whose name may be like an address of IPv4, nor a namespace, whose may not.
var noPod = regexp.MustCompile(`[][:]|^[0-9.]*\.[0-9.]*/`)

// checkEnds finds what looks like an address, and is none that an end can have:
// as a pod's name it would match nothing, silently.
func checkEnds(flag string, list []string) error {
	for _, s := range list {
		if _, err := netip.ParseAddrPort(s); err == nil {
			return fmt.Errorf("%s: %q has a port; give the address alone, and --port", flag, s)
		}
		before, _, slash := strings.Cut(s, "/")
		a, err := netip.ParseAddr(before)
		if err != nil && noPod.MatchString(s) {
			return fmt.Errorf("%s: %q is neither a pod nor an address; write addresses like 192.0.2.1, 192.0.2.0/24 or 2001:db8::1", flag, s)
		}
		if err != nil {
			if err := checkPod(flag, s); err != nil {
				return err
			}
			continue
		}
		if err := checkZone(flag, s, a); err != nil {
			return err
		}
		if _, ok := prefix(s); slash && !ok {
			return fmt.Errorf("%s: %q is no prefix; write it like 192.0.2.0/24 or 2001:db8::/32", flag, s)
		}
	}
	return nil
}

// checkZone refuses an address with a zone, written as s.
func checkZone(what, s string, a netip.Addr) error {
	if a.Zone() != "" {
		return fmt.Errorf("%s: %q has a zone, which packets do not tell; leave %%%s out", what, s, a.Zone())
	}
	return nil
}

// prefix reads a prefix, or an address as the prefix that has only it. One of
// IPv4 that is written as IPv6 (::ffff:192.0.2.1) is IPv4, as packets are.
func prefix(s string) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(s)
	if a, bad := netip.ParseAddr(s); bad == nil {
		p, err = netip.PrefixFrom(a, a.BitLen()), nil
	}
	if err == nil && p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p, err == nil
}

// serviceFilter is what a Service is asked for by: its number, from 1, else its
// address with any port (0) or one.
func serviceFilter(s string) (number uint64, at netip.AddrPort, err error) {
	if number, err = strconv.ParseUint(s, 10, 32); err == nil && number > 0 {
		return number, at, nil
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return 0, netip.AddrPortFrom(a.Unmap(), 0), nil
	}
	at, err = netip.ParseAddrPort(s)
	return 0, netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), err
}

// Match says whether f is to be shown.
func (f Filter) Match(flow Flow) bool {
	src, dst := flow.Source, flow.Destination
	return any1(f.Pods, func(p string) bool { return src.is(p) || dst.is(p) }) &&
		any1(f.Namespaces, func(ns string) bool { return src.in(ns) || dst.in(ns) }) &&
		any1(f.Services, func(s string) bool { return flow.Service.is(s) }) &&
		any1(f.Verdicts, func(v string) bool { return flow.Verdict == v }) &&
		any1(f.Reasons, func(r string) bool { return flow.Reason == r }) &&
		any1(f.Protocols, func(p string) bool { return strings.EqualFold(flow.Protocol, p) }) &&
		any1(f.Ports, func(p uint16) bool {
			return src.Port == p || dst.Port == p || flow.Service != nil && flow.Service.Frontend.Port() == p
		}) &&
		any1(f.From, src.at) &&
		any1(f.To, func(where string) bool { return dst.at(where) || flow.Service.at(where) })
}

// any1 is true when one of list does, or there is none.
func any1[T any](list []T, does func(T) bool) bool {
	return len(list) == 0 || slices.ContainsFunc(list, does)
}

func (e End) is(pod string) bool {
	return e.Pod != "" && (e.Name() == pod || e.Pod == pod)
}

func (e End) in(namespace string) bool {
	return e.Namespace == namespace || e.within == namespace
}

// at says whether an end is a pod, has an address, or is in a prefix.
func (e End) at(where string) bool {
	if p, ok := prefix(where); ok {
		return p.Contains(e.Address)
	}
	return e.is(where)
}

// at says whether the Service has an address, or one in a prefix: whoever sends
// there knows no other destination.
func (s *ServiceRef) at(where string) bool {
	return s != nil && End{Address: s.Frontend.Addr()}.at(where)
}

func (s *ServiceRef) is(text string) bool {
	if s == nil {
		return false
	}
	number, at, err := serviceFilter(text)
	switch {
	case err != nil:
		return false
	case number != 0:
		return uint64(s.Number) == number
	case at.Port() == 0:
		return s.Frontend.Addr() == at.Addr()
	}
	return s.Frontend == at
}
