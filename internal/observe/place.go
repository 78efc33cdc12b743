// SPDX-License-Identifier: Apache-2.0

package observe

// What `why` is asked about: SRC and DST[:PORT[/PROTO]].

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/mustang-net/mustang/internal/state"
)

// place is one end of a question.
type place struct {
	ep    *state.Endpoint // nil: no pod of this node
	addrs []netip.Addr
}

// of is the place's address of a family.
func (p place) of(v4 bool) (netip.Addr, bool) {
	for _, a := range p.addrs {
		if a.Is4() == v4 {
			return a, true
		}
	}
	return netip.Addr{}, false
}

func (p place) end(a netip.AddrPort) End {
	var e End
	if p.ep != nil {
		e = endOf(*p.ep)
	}
	e.Address, e.Port = a.Addr(), a.Port()
	return e
}

// target is DST[:PORT[/PROTO]].
type target struct {
	where string
	port  uint16
	proto uint8 // 0: echo requests
}

// CheckEnds finds what is no SRC, or no DST[:PORT[/PROTO]], whatever pods there are.
func CheckEnds(src, dst string) error {
	to, err := parseTarget(dst)
	if err != nil {
		return err
	}
	for _, end := range []struct{ what, text string }{{"SRC", src}, {"DST", to.where}} {
		if a, err := netip.ParseAddr(end.text); err == nil {
			if err := checkZone(end.what, end.text, a); err != nil {
				return err
			}
		}
	}
	return nil
}

func parseTarget(text string) (target, error) {
	t := target{where: text}
	if _, err := netip.ParseAddr(text); err == nil {
		return t, nil
	}
	where, rest, found := text, "", false
	if i := strings.LastIndexByte(text, ':'); i >= 0 && !strings.HasSuffix(text, "]") {
		where, rest, found = text[:i], text[i+1:], true
	}
	t.where = strings.TrimSuffix(strings.TrimPrefix(where, "["), "]")
	if !found {
		return t, nil
	}
	number, proto, given := strings.Cut(rest, "/")
	port, err := strconv.ParseUint(number, 10, 16)
	if err != nil || port == 0 {
		return t, fmt.Errorf("%q: port %q is not a number between 1 and 65535; DST is written pod:PORT[/tcp|udp|sctp], address:PORT, or [IPv6]:PORT", text, number)
	}
	t.port, t.proto = uint16(port), protoTCP
	switch {
	case given && proto == "udp":
		t.proto = protoUDP
	case given && proto == "sctp":
		t.proto = protoSCTP
	case given && proto != "tcp":
		return t, fmt.Errorf("%q: protocol %q is none of tcp, udp, sctp; without a port, an echo request is asked about", text, proto)
	}
	return t, nil
}

// find is the place that text names: an address, an endpoint's id, a pod.
func find(text string, endpoints map[uint32]state.Endpoint) (place, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		for _, ep := range endpoints {
			if slices.Contains(ep.Addrs(), a.Unmap()) {
				return place{&ep, []netip.Addr{a.Unmap()}}, nil
			}
		}
		return place{nil, []netip.Addr{a.Unmap()}}, nil
	}
	if id, err := strconv.ParseUint(text, 10, 32); err == nil {
		if ep, known := endpoints[uint32(id)]; known {
			return place{&ep, ep.Addrs()}, nil
		}
		return place{}, fmt.Errorf("endpoint %d does not exist on this node; `mustang ep ls` lists those that do", id)
	}
	var found []state.Endpoint
	for _, id := range slices.Sorted(maps.Keys(endpoints)) {
		ep := endpoints[id]
		if (ep.Pod.Name != "" && ep.Pod.Name == text) || podName(ep) == text || netnsName(ep) == text {
			found = append(found, ep)
		}
	}
	switch len(found) {
	case 0:
		return place{}, fmt.Errorf("%q is no pod of this node, no endpoint's id and no address; `mustang ep ls` lists the endpoints, and a pod of another node is named by its address", text)
	case 1:
		return place{&found[0], found[0].Addrs()}, nil
	}
	var ids []string
	for _, ep := range found {
		ids = append(ids, fmt.Sprintf("%d (%s, %s)", ep.ID, podName(ep), ep.IfName))
	}
	return place{}, fmt.Errorf("%q may be endpoint %s; name one by its id", text, strings.Join(ids, " or "))
}
