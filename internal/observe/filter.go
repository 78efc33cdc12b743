// SPDX-License-Identifier: Apache-2.0

package observe

// Which flows to show.

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

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
	From, To   []string // one end: pod, address, or prefix
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
	for _, s := range f.Services {
		if _, _, err := serviceFilter(s); err != nil {
			return fmt.Errorf("--service: %q is no number, address or address:port; `mustang svc ls` shows them", s)
		}
	}
	return nil
}

// serviceFilter is what a Service is asked for by: its number, else its address
// with any port (0) or one.
func serviceFilter(s string) (number uint64, at netip.AddrPort, err error) {
	if number, err = strconv.ParseUint(s, 10, 32); err == nil {
		return number, at, nil
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return 0, netip.AddrPortFrom(a, 0), nil
	}
	at, err = netip.ParseAddrPort(s)
	return 0, at, err
}

// Match says whether f is to be shown.
func (f Filter) Match(flow Flow) bool {
	src, dst := flow.Source, flow.Destination
	return any1(f.Pods, func(p string) bool { return src.is(p) || dst.is(p) }) &&
		any1(f.Namespaces, func(ns string) bool { return src.Namespace == ns || dst.Namespace == ns }) &&
		any1(f.Services, func(s string) bool { return flow.Service.is(s) }) &&
		any1(f.Verdicts, func(v string) bool { return flow.Verdict == v }) &&
		any1(f.Reasons, func(r string) bool { return flow.Reason == r }) &&
		any1(f.Protocols, func(p string) bool { return strings.EqualFold(flow.Protocol, p) }) &&
		any1(f.Ports, func(p uint16) bool {
			return src.Port == p || dst.Port == p || flow.Service != nil && flow.Service.Frontend.Port() == p
		}) &&
		any1(f.From, src.at) && any1(f.To, dst.at)
}

// any1 is true when one of list does, or there is none.
func any1[T any](list []T, does func(T) bool) bool {
	return len(list) == 0 || slices.ContainsFunc(list, does)
}

func (e End) is(pod string) bool {
	return e.Pod != "" && (e.Name() == pod || e.Pod == pod)
}

// at says whether an end is a pod, has an address, or is in a prefix.
func (e End) at(where string) bool {
	if p, err := netip.ParsePrefix(where); err == nil {
		return p.Contains(e.Address)
	}
	if a, err := netip.ParseAddr(where); err == nil {
		return a == e.Address
	}
	return e.is(where)
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
