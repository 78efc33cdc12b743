// SPDX-License-Identifier: Apache-2.0

package node

// The routing rules that lead into the door. To what is not the node's own, one of
// a family does, before the main table. To the node's own addresses it takes rules
// that stand before table local, at the same preference as the kernel's rule for
// that: 0, below which there is none. The kernel puts a new rule behind those of
// its preference, so table local's is moved behind ours: an equal one is added
// there, then the first is removed. It is in force at every instant, and nothing
// is left to restore when ours go.

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// doorPriority is before the main table and most of others' rules.
const doorPriority = 109

// lastPort is the highest that the kernel takes in a rule.
const lastPort = 65534

// DoorPorts are ports, First to Last, of one of the node's own addresses.
type DoorPorts struct {
	Addr        netip.Addr
	First, Last uint16
}

// MergeDoorPorts puts what overlaps or adjoins into one: each is a rule that the
// node's route lookups ask.
func MergeDoorPorts(list []DoorPorts) (out []DoorPorts) {
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b DoorPorts) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.First, b.First))
	})
	for _, p := range list {
		if n := len(out) - 1; n >= 0 && out[n].Addr == p.Addr && int(p.First) <= int(out[n].Last)+1 {
			out[n].Last = max(out[n].Last, p.Last)
		} else {
			out = append(out, p)
		}
	}
	return out
}

// rule says that SCTP of an origin goes by our table.
type rule struct {
	family int
	iif    string
	own    DoorPorts // zero: whatever the destination, and at doorPriority
}

// mainRules are for the node's own sockets, and the check of the way back to where
// an answer came from (rp_filter), which counts as theirs. That check knows a
// packet's protocol and ports while some rule asks for them of packets that come
// in: so does the last one, and never holds.
var mainRules = []rule{{family: unix.AF_INET, iif: "lo"}, {family: unix.AF_INET6, iif: "lo"}, {family: unix.AF_INET, iif: DoorName}}

func familyOf(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// leadBeforeMain makes the rules of these families, and removes those of others.
func leadBeforeMain(families []int) error {
	var errs []error
	for _, r := range mainRules {
		errs = append(errs, r.change(slices.Contains(families, r.family)))
	}
	return errors.Join(errs...)
}

// change adds or removes the rule. What is so already is success.
func (r rule) change(add bool) error {
	header := nl.RtMsg{RtMsg: unix.RtMsg{Family: uint8(r.family), Type: nl.FR_ACT_TO_TBL}}
	attrs := []attr{
		{nl.FRA_TABLE, nl.Uint32Attr(doorTable)},
		{nl.FRA_PRIORITY, nl.Uint32Attr(doorPriority)},
		{nl.FRA_IIFNAME, nl.ZeroTerminated(r.iif)},
		{nl.FRA_IP_PROTO, nl.Uint8Attr(unix.IPPROTO_SCTP)},
		{nl.FRA_PROTOCOL, nl.Uint8Attr(routeProtocol)},
	}
	if r.own.Addr.IsValid() {
		header.Dst_len = uint8(r.own.Addr.BitLen())
		attrs[1].value = nl.Uint32Attr(0)
		attrs = append(attrs, attr{nl.FRA_DST, r.own.Addr.AsSlice()}, attr{nl.FRA_DPORT_RANGE, r.own.span()})
	}
	kind, flags := unix.RTM_DELRULE, 0
	if add {
		kind, flags = unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL
	}
	err := changeRule(kind, flags, header, attrs)
	if add && errors.Is(err, unix.EEXIST) || !add && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT)) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("change the rule for SCTP to Services: %w", err)
	}
	return nil
}

// span is the ports as the kernel takes them.
func (p DoorPorts) span() []byte {
	return binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, p.First), p.Last)
}

type attr struct {
	kind  int
	value []byte
}

// changeRule is one change of the kernel's rules. Tests count them, and stop.
var changeRule = func(kind, flags int, header nl.RtMsg, attrs []attr) error {
	req := nl.NewNetlinkRequest(kind, flags|unix.NLM_F_ACK)
	req.AddData(&header)
	for _, a := range attrs {
		req.AddData(nl.NewRtAttr(a.kind, a.value))
	}
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// leadBeforeLocal makes the rules for exactly these, each of them before table
// local. It can be done again at any point of itself.
func leadBeforeLocal(own []DoorPorts) error {
	var errs []error
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		var want []rule
		for _, p := range own {
			if familyOf(p.Addr) != family {
				continue
			}
			if p.First > lastPort {
				errs = append(errs, fmt.Errorf("no way into %s for SCTP to %s: the kernel takes no routing rule for this port; use another", DoorName, netip.AddrPortFrom(p.Addr, p.First)))
				continue
			}
			p.Last = min(p.Last, lastPort)
			want = append(want, rule{family, "lo", p})
		}
		errs = append(errs, syncFirst(family, want))
	}
	return errors.Join(errs...)
}

// syncFirst makes want what there is of ours among the first rules of a family.
func syncFirst(family int, want []rule) error {
	list, err := firstRules(family)
	if err != nil {
		return err
	}
	err = putFirst(family, want, list)
	if err == nil {
		err = moveLocal(family)
	}
	errs := []error{err}
	for _, s := range list {
		if s.ours() && !slices.ContainsFunc(want, s.is) {
			errs = append(errs, rule{family, "lo", s.ports()}.change(false))
		}
	}
	return errors.Join(errs...)
}

// putFirst adds what is missing. Others' rules at this preference stand behind table
// local's or before it, and must stay there: so with one, nothing can be moved.
func putFirst(family int, want []rule, list []standing) error {
	local := slices.IndexFunc(list, standing.local)
	others := slices.IndexFunc(list, standing.others)
	for _, r := range want {
		at := slices.IndexFunc(list, func(s standing) bool { return s.ours() && s.is(r) })
		if at >= 0 && (local < 0 || at < local) {
			continue
		}
		if local >= 0 && others >= 0 {
			return fmt.Errorf("no way into %s for SCTP to %s: its rule must stand before that of table local, at preference 0, where another's stands, too (`ip -%d rule`, the one with %v); give that one a preference of its own",
				DoorName, netip.AddrPortFrom(r.own.Addr, r.own.First), map[int]int{unix.AF_INET: 4, unix.AF_INET6: 6}[family], list[others])
		}
		if at >= 0 {
			continue
		}
		if err := r.change(true); err != nil {
			return err
		}
	}
	return nil
}

// moveLocal puts table local's rule behind ours where it is not. Of two, which a
// killed tool leaves, the first goes. Where others have moved it to another
// preference, ours precede it anyway.
func moveLocal(family int) error {
	list, err := firstRules(family)
	if err != nil || slices.ContainsFunc(list, standing.others) {
		return err // as putFirst has left it
	}
	first := slices.IndexFunc(list, standing.local)
	if first < 0 || !slices.ContainsFunc(list[first:], standing.ours) {
		return nil
	}
	rule := list[first]
	if !list[len(list)-1].local() {
		if err := rule.change(unix.RTM_NEWRULE, unix.NLM_F_CREATE); err != nil {
			return err
		}
	}
	if err := rule.change(unix.RTM_DELRULE, 0); err != nil { // the kernel takes the first that is like this
		return err
	}
	return moveLocal(family)
}

// standing is a rule as the kernel lists it.
type standing struct {
	header *nl.RtMsg
	attrs  []syscall.NetlinkRouteAttr
}

// firstRules are those of preference 0, in their order.
func firstRules(family int) (out []standing, err error) {
	list, err := netns.Dump(func() ([][]byte, error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETRULE, unix.NLM_F_DUMP)
		req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: uint8(family)}})
		return req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWRULE)
	})
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil // a kernel without IPv6
	}
	if err != nil {
		return nil, fmt.Errorf("list routing rules: %w", err)
	}
	for _, m := range list {
		s := standing{header: nl.DeserializeRtMsg(m)}
		if s.attrs, err = nl.ParseRouteAttr(m[s.header.Len():]); err != nil {
			return nil, fmt.Errorf("list routing rules: %w", err)
		}
		if s.number(nl.FRA_PRIORITY) == 0 && int(s.header.Family) == family {
			out = append(out, s)
		}
	}
	return out, nil
}

func (s standing) attr(kind int) []byte {
	for _, a := range s.attrs {
		if int(a.Attr.Type) == kind {
			return a.Value
		}
	}
	return nil
}

// number is an attribute's value of one or four bytes, 0 without it.
func (s standing) number(kind int) uint32 {
	switch v := s.attr(kind); len(v) {
	case 1:
		return uint32(v[0])
	case 4:
		return binary.NativeEndian.Uint32(v)
	}
	return 0
}

func (s standing) ours() bool {
	return s.number(nl.FRA_TABLE) == doorTable && s.number(nl.FRA_PROTOCOL) == routeProtocol
}

// others says whether it is neither ours nor table local's.
func (s standing) others() bool { return !s.ours() && !s.local() }

// is says whether it is the rule r of ours.
func (s standing) is(r rule) bool { return s.ports() == r.own }

// ports are those of one of ours.
func (s standing) ports() (p DoorPorts) {
	if a, ok := netip.AddrFromSlice(s.attr(nl.FRA_DST)); ok {
		p.Addr = a
	}
	if v := s.attr(nl.FRA_DPORT_RANGE); len(v) == 4 {
		p.First, p.Last = binary.NativeEndian.Uint16(v), binary.NativeEndian.Uint16(v[2:])
	}
	return p
}

// local says whether it leads whatever there is to table local, as the kernel's does.
func (s standing) local() bool {
	h := s.header
	if h.Type != nl.FR_ACT_TO_TBL || h.Flags != 0 || h.Dst_len|h.Src_len|h.Tos != 0 || s.number(nl.FRA_TABLE) != unix.RT_TABLE_LOCAL {
		return false
	}
	for _, a := range s.attrs {
		switch int(a.Attr.Type) {
		case nl.FRA_TABLE, nl.FRA_PROTOCOL, nl.FRA_PRIORITY:
		case nl.FRA_SUPPRESS_PREFIXLEN, nl.FRA_SUPPRESS_IFGROUP:
			if !bytes.Equal(a.Value, []byte{0xff, 0xff, 0xff, 0xff}) {
				return false
			}
		default:
			return false
		}
	}
	return true
}

// change adds a rule like this, or removes the first.
func (s standing) change(kind, flags int) error {
	attrs := []attr{{nl.FRA_PRIORITY, nl.Uint32Attr(0)}}
	for _, a := range s.attrs {
		if int(a.Attr.Type) != nl.FRA_PRIORITY {
			attrs = append(attrs, attr{int(a.Attr.Type), a.Value})
		}
	}
	if err := changeRule(kind, flags, *s.header, attrs); err != nil {
		return fmt.Errorf("move the rule of table local behind those for SCTP to Services: %w", err)
	}
	return nil
}

func (s standing) String() string {
	text := fmt.Sprintf("table %d", s.number(nl.FRA_TABLE))
	if iif := s.attr(nl.FRA_IIFNAME); len(iif) > 0 {
		text += fmt.Sprintf(", iif %s", bytes.TrimRight(iif, "\x00"))
	}
	return text
}
