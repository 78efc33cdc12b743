// SPDX-License-Identifier: Apache-2.0

package observe

// What lies around the programs on a packet's way: the Service's tables, the
// kernel's routing, and whether the programs are there at all.

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// Where a Service's backend is chosen.
const (
	atSocket = "socket"
	atPacket = "packet"
)

// backend is one of a Service's.
type backend struct {
	id uint32
	at netip.AddrPort
}

// service is what the tables say of the destination as a Service.
type service struct {
	known    bool
	number   uint32
	at       string
	backends []backend
	stop     *Way   // the socket is refused
	warning  string // why it is not done where the endpoint has it; or ""
}

// service looks the destination up. Socket programs cannot be test-run, so what
// they would do is told from the tables that they read.
func (q *question) service() (service, error) {
	var s service
	ep := q.from.ep
	if ep == nil || ep.ServicePath == state.PathNone || !hasPorts(q.proto) {
		return s, nil
	}
	s.at = atPacket
	if ep.ServicePath != state.PathTC && q.proto != protoSCTP { // no program sees an SCTP socket connect
		s.at = atSocket
	}
	found, err := q.n.dp.FindFrontend(state.Frontend{AddrPort: q.dst, Protocol: state.Protocol(q.proto)})
	if err != nil {
		return s, err
	}
	if s.at == atSocket && (found.Known || found.Refuses) {
		led, err := q.socketsLed(&s, *ep)
		if err != nil || !led {
			return s, err
		}
	}
	if !found.Known {
		if found.Refuses && s.at == atSocket {
			s.stop = q.refusedAtSocket(bpfgen.ReasonServicePort)
		}
		return s, nil
	}
	s.known, s.number = true, found.Entry.Number
	q.front = found.Entry
	reason, err := q.n.dp.ServiceClosed(found.Entry, q.src.Addr())
	if err != nil {
		return s, err
	}
	switch {
	case reason == bpfgen.ReasonNone:
		s.backends, err = q.backends(found.Entry)
	case s.at == atPacket:
	case reason != bpfgen.ReasonNoBackend && ep.ServicePath != state.PathSocket:
		s.at = atPacket // the socket programs leave what is to be dropped to the packet programs
	default:
		s.stop = q.refusedAtSocket(reason)
	}
	return s, err
}

// socketsLed is false where no Service leads a packet of ep: the programs that would lead its
// sockets are not attached, and nothing else would. Where the packet programs would, s is at them.
func (q *question) socketsLed(s *service, ep state.Endpoint) (bool, error) {
	attached, err := q.n.dp.SockAttached(q.dst.Addr().Is4())
	if err != nil || attached {
		return attached, err
	}
	const unattached = "the programs that lead sockets to Services are attached to no cgroup (was the directory of --cgroup-root removed?), so %s; the next pod that is added has them attached anew"
	if ep.ServicePath == state.PathSocket {
		s.warning = fmt.Sprintf(unattached, fmt.Sprintf("no Service leads the sockets of %s, whose service path is socket", describe(ep)))
		return false, nil
	}
	s.at, s.warning = atPacket, fmt.Sprintf(unattached, "the Service is chosen by packet")
	return true, nil
}

func (q *question) backends(entry datapath.Frontend) (out []backend, err error) {
	ids, err := q.n.dp.ServiceBackends(entry, q.src.Addr())
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		b, known, err := q.n.dp.Backends.Get(id)
		if err != nil {
			return nil, err
		}
		if known {
			out = append(out, backend{id, datapath.BackendAddr(b)})
		}
	}
	return out, nil
}

func (q *question) refusedAtSocket(reason uint32) *Way {
	r := bpfgen.Reasons[reason]
	w := &Way{Reason: r.Name, Steps: []Step{}}
	errno := "ECONNREFUSED"
	if reason != bpfgen.ReasonNoBackend && reason != bpfgen.ReasonServicePort {
		errno = "EHOSTUNREACH"
	}
	w.step("connect() in "+q.from.end(q.src).Name(), "tables", Refused, "it fails with "+errno+": "+r.Sentence+" ("+r.Name+")")
	w.end(Refused, "it is refused at the socket: "+r.Sentence, q.mend(reason))
	return w
}

// inPlace runs fn in the namespace of ep's hook.
func inPlace(ep state.Endpoint, fn func() error) error {
	if ep.Placement == state.HostEnd {
		return fn()
	}
	return inPod(ep, fn)
}

func inPod(ep state.Endpoint, fn func() error) error {
	if ep.Netns == "" {
		return fmt.Errorf("nobody has recorded where the network namespace of endpoint %d is; `mustang ep rm %d` and add it again", ep.ID, ep.ID)
	}
	if err := netns.Do(ep.Netns, fn); err != nil {
		return fmt.Errorf("in the namespace of %s: %w", describe(ep), err)
	}
	return nil
}

// gone says whether ep's interface is not there any more, although the tables have it.
func gone(ep state.Endpoint) bool {
	if ep.Netns == "" {
		return false // nobody knows
	}
	there := false
	err := netns.Do(ep.Netns, func() error {
		cookie, err := netns.Cookie()
		if err != nil {
			return err
		}
		l, err := netlink.LinkByIndex(ep.PodIndex)
		there = err == nil && cookie == ep.NetnsCookie && l.Attrs().Name == ep.IfName
		return err
	})
	return !there && (err == nil || errors.Is(err, fs.ErrNotExist) || errors.As(err, new(netlink.LinkNotFoundError)))
}

// unattached ends the way where ep's programs are not at work.
func (q *question) unattached(w *Way, ep state.Endpoint) (bool, error) {
	if err := q.n.dp.CheckPrograms(ep); err != nil {
		r := bpfgen.Reasons[bpfgen.ReasonNoProgram]
		w.Reason = r.Name
		w.step("the entry program at "+hookPlace(ep), "tables", Dropped, err.Error())
		w.end(Dropped, "it is dropped: "+r.Sentence, r.Mend)
		return true, nil
	}
	for look := range looks {
		if look > 0 {
			time.Sleep(lookAgain)
		}
		if attached, err := q.attached(ep); err != nil || attached {
			return false, err
		}
	}
	if now, err := q.n.endpoints(); err == nil && now[ep.ID].Generation != ep.Generation {
		return true, fmt.Errorf("endpoint %d (%s) came or went meanwhile; ask again", ep.ID, describe(ep))
	}
	return true, fmt.Errorf("the programs of endpoint %d (%s) are not attached, so nothing decides about its packets; `mustang ep rm %d` and add it again", ep.ID, describe(ep), ep.ID)
}

// An endpoint that comes has its slot a moment before its programs.
const (
	looks     = 3
	lookAgain = 50 * time.Millisecond
)

func (q *question) attached(ep state.Endpoint) (attached bool, err error) {
	err = inPlace(ep, func() (err error) {
		if attached, err = q.n.dp.Attached(ep); attached || err != nil || ep.Attach != datapath.AttachClsact {
			return err
		}
		ep.Attach = datapath.AttachTCX // an agent settles it meanwhile: links were there before the filters went
		attached, err = q.n.dp.Attached(ep)
		return err
	})
	return attached, err
}

// podRoutes says whether the pod's own kernel knows a way to dst.
func (q *question) podRoutes(w *Way, ep state.Endpoint, dst netip.Addr) (bool, error) {
	if ep.Netns == "" {
		return true, nil // the hook tells more than nothing
	}
	var missing error
	own := false
	err := inPod(ep, func() error {
		var routes []netlink.Route
		routes, missing = netlink.RouteGet(net.IP(dst.AsSlice()))
		own = len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
		return nil
	})
	if err == nil && own {
		w.step("the kernel of "+describe(ep), "kernel", Forwarded, fmt.Sprintf("%s is the pod's own address", dst))
		w.end(Forwarded, "it passes, and reaches the pod itself: it never leaves it, and no program or policy is asked", "")
		return false, nil
	}
	if err != nil || missing == nil {
		return err == nil, err
	}
	w.step("the kernel of "+describe(ep), "kernel", NoRoute, fmt.Sprintf("it has no route to %s: %v", dst, missing))
	w.end(NoRoute, "the pod itself has no route there, so it sends nothing", fmt.Sprintf("give the pod a route to %s (`ip route` in its namespace shows what it has)", dst))
	return false, nil
}

// leaveNode follows a packet out of the node: by the parent link's program for
// pods on such a link, then by the kernel's routing.
func (q *question) leaveNode(w *Way, frame []byte, ep state.Endpoint, dst netip.Addr) error {
	if ep.Parent != 0 {
		d, err := q.run.Ask(datapath.HookParent, ep, datapath.Packet{Frame: frame, IfIndex: ep.Parent})
		if err != nil {
			return err
		}
		at := fmt.Sprintf("parent_egress, the program at %s, the link of the node's pods", linkName(ep.Parent))
		if q.stopped(w, at, d) {
			return nil
		}
		w.step(at, "program", Forwarded, "it passes")
		w.end(Forwarded, fmt.Sprintf("it passes, and leaves the node by %s", linkName(ep.Parent)), "")
		return nil
	}
	if ep.Placement == state.InPod {
		w.end(Forwarded, fmt.Sprintf("it passes, and leaves by the pod's own %s", ep.IfName), "")
		return nil
	}
	return q.routeByNode(w, frame, ep, dst)
}

// arrival is the interface by which a packet from src comes to this node; 0
// for one of the node's own.
func arrival(src netip.Addr) (ifindex int, from string, err error) {
	routes, err := netlink.RouteGet(net.IP(src.AsSlice()))
	if errors.Is(err, unix.ENETUNREACH) || err == nil && len(routes) == 0 {
		return 0, "", fmt.Errorf("this node has no route to %s, so nothing comes from there, and no answer would go back", src)
	}
	if err != nil {
		return 0, "", fmt.Errorf("look up the way to %s: %w", src, err)
	}
	if routes[0].Type == unix.RTN_LOCAL {
		return 0, "the node itself", nil
	}
	return routes[0].LinkIndex, "outside the node, by " + linkName(routes[0].LinkIndex), nil
}

func linkName(ifindex int) string {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return fmt.Sprintf("interface %d", ifindex)
	}
	return l.Attrs().Name
}

// senderMAC is the link address from which the node's packets come to a pod's address.
// Inside a pod that is by which programs know the node.
func senderMAC(to state.Endpoint, dst netip.Addr) net.HardwareAddr {
	if to.Placement == state.HostEnd {
		return orZero(to.NodeMAC)
	}
	routes, err := netlink.RouteGet(net.IP(dst.AsSlice()))
	if err != nil || len(routes) == 0 {
		return orZero(nil)
	}
	l, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return orZero(nil)
	}
	return orZero(l.Attrs().HardwareAddr)
}

// orZero is a link address, or zeros where none is known.
func orZero(a net.HardwareAddr) net.HardwareAddr {
	if len(a) == 6 {
		return a
	}
	return make(net.HardwareAddr, 6)
}
