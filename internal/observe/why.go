// SPDX-License-Identifier: Apache-2.0

package observe

// Would a packet pass now, and why not? The programs that enforce answer it,
// asked in a dry run hook by hook.

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// Why says whether a new flow's first packet from src would reach dst, as pods,
// endpoint ids or addresses, dst with [:PORT[/PROTO]]; one answer for each
// address family that both have. Nothing is sent, and nothing changes. The
// calling thread is in the node's network namespace.
func (n *Node) Why(src, dst string) ([]Answer, error) {
	endpoints, err := n.endpoints()
	if err != nil {
		return nil, err
	}
	to, err := parseTarget(dst)
	if err != nil {
		return nil, err
	}
	from, err := find(src, endpoints)
	if err != nil {
		return nil, fmt.Errorf("SRC: %w", err)
	}
	there, err := find(to.where, endpoints)
	if err != nil {
		return nil, fmt.Errorf("DST: %w", err)
	}
	var answers []Answer
	for _, v4 := range []bool{true, false} {
		a, hasA := from.of(v4)
		b, hasB := there.of(v4)
		if !hasA || !hasB {
			continue
		}
		q := question{n: n, names: nameCache{n: n}, endpoints: endpoints, from: from, to: there, proto: to.proto,
			src: netip.AddrPortFrom(a, firstPort), dst: netip.AddrPortFrom(b, to.port)}
		if q.proto == 0 {
			q.proto = map[bool]uint8{true: protoICMP, false: protoICMPv6}[v4]
		}
		answer, err := q.answer()
		if err != nil {
			return nil, err
		}
		answers = append(answers, answer)
	}
	if len(answers) == 0 {
		return nil, fmt.Errorf("%s and %s have no address family in common", src, dst)
	}
	return answers, nil
}

const (
	firstPort = 61000 // the source port asked about; the next way has the next
	maxWays   = 32    // backends that are asked about
)

// question is one question of one family.
type question struct {
	n         *Node
	endpoints map[uint32]state.Endpoint
	from, to  place
	src, dst  netip.AddrPort
	proto     uint8
	run       *datapath.DryRun
	names     nameCache
	front     datapath.Frontend // that dst is, if it is one
}

func (q *question) answer() (Answer, error) {
	a := Answer{Source: q.from.end(netip.AddrPortFrom(q.src.Addr(), 0)), Destination: q.to.end(q.dst),
		Protocol: protocolNames[q.proto], Warnings: []string{}, Ways: []Way{}}
	current, err := q.n.dp.Current()
	if err != nil {
		return a, err
	}
	if !current {
		a.Warnings = append(a.Warnings, "the node's programs are another build's; this is what the programs of this mustang would decide")
	}
	for _, p := range []place{q.from, q.to} {
		if p.ep != nil && gone(*p.ep) {
			a.Warnings = append(a.Warnings, fmt.Sprintf("the interface of %s (%s in %s) is gone: whatever the programs decide, nothing comes from there, and nothing arrives", describe(*p.ep), p.ep.IfName, p.ep.Netns))
		}
	}
	svc, err := q.service()
	if err != nil {
		return a, err
	}
	if svc.warning != "" {
		a.Warnings = append(a.Warnings, svc.warning)
	}
	chooses := svc.at == atPacket && len(svc.backends) > 0
	if q.run, err = q.n.dp.DryRun(chooses); err != nil {
		return a, err
	}
	err = q.ask(&a, svc)
	a.conclude()
	return a, errors.Join(err, q.run.Close())
}

// ask asks about every backend, or about the destination itself.
func (q *question) ask(a *Answer, svc service) error {
	if svc.known {
		a.Service = &Chosen{Frontend: q.dst, Number: svc.number, At: svc.at, Backends: []netip.AddrPort{}}
		for _, b := range svc.backends {
			a.Service.Backends = append(a.Service.Backends, b.at)
		}
	}
	if svc.stop != nil {
		a.Ways = append(a.Ways, *svc.stop)
		return nil
	}
	if len(svc.backends) == 0 {
		w := Way{Steps: []Step{}}
		err := q.walk(&w, q.dst)
		a.Ways = append(a.Ways, w)
		return err
	}
	for i, b := range svc.backends {
		if i == maxWays {
			a.Warnings = append(a.Warnings, fmt.Sprintf("only the first %d of %d backends were asked about", maxWays, len(svc.backends)))
			break
		}
		w, err := q.askBackend(svc, b, i)
		if err != nil {
			return err
		}
		a.Ways = append(a.Ways, w)
	}
	return nil
}

func (q *question) askBackend(svc service, b backend, i int) (Way, error) {
	w := Way{Steps: []Step{}}
	at, err := find(b.at.Addr().String(), q.endpoints)
	if err != nil {
		return w, err
	}
	end := at.end(b.at)
	w.Backend = &end
	q.src = netip.AddrPortFrom(q.src.Addr(), uint16(firstPort+i)) // a flow of its own
	if svc.at == atSocket {
		w.step("connect() in "+q.from.end(q.src).Name(), "tables", Forwarded,
			fmt.Sprintf("Service %d leads the socket to %s", svc.number, end))
		return w, q.walk(&w, b.at)
	}
	front := state.Frontend{AddrPort: q.dst, Protocol: state.Protocol(q.proto)}
	if err := q.run.Choose(front, b.id); err != nil {
		return w, err
	}
	return w, q.walk(&w, q.dst)
}

// walk follows a packet to dst.
func (q *question) walk(w *Way, dst netip.AddrPort) error {
	p := probe{src: q.src, dst: dst, proto: q.proto}
	if q.from.ep != nil {
		return q.leavePod(w, p, *q.from.ep)
	}
	to, err := find(dst.Addr().String(), q.endpoints)
	if err != nil {
		return err
	}
	if to.ep == nil {
		w.end(Undecided, "neither end is a pod of this node, and what Services do for clients outside and for the node's own sockets is not asked; ask about a pod, on its node", "")
		return nil
	}
	return q.enterNode(w, p, *to.ep)
}

// leavePod follows a packet from a pod.
func (q *question) leavePod(w *Way, p probe, ep state.Endpoint) error {
	routed, err := q.podRoutes(w, ep, p.dst.Addr())
	if err != nil || !routed {
		return err
	}
	if stop, err := q.unattached(w, ep); err != nil || stop {
		return err
	}
	p.srcMAC, p.dstMAC = ep.MAC, orZero(ep.NodeMAC)
	var d datapath.Decision
	err = inPlace(ep, func() (err error) {
		d, err = q.run.Ask(datapath.HookFromPod, ep, datapath.Packet{Frame: p.frame(), IfIndex: ep.IfIndex})
		return err
	})
	if err != nil {
		return err
	}
	at := "from_pod, the program at " + hookPlace(ep)
	if q.stopped(w, at, d) {
		return nil
	}
	detail := "it passes"
	if e := d.Event; e != nil && e.Backend != 0 {
		end := q.nameOf(datapath.ToAddr(e.Target), datapath.Port(e.TargetPort))
		detail = "it passes, translated to the backend " + end.String()
	}
	detail += q.allowed(d.Event)
	return q.goOn(w, at, detail, d, ep)
}

// goOn follows a packet that from_pod has let pass.
func (q *question) goOn(w *Way, at, detail string, d datapath.Decision, ep state.Endpoint) error {
	if d.Verdict == datapath.VerdictRedirect && d.RedirectKind == bpfgen.RedirectNeigh {
		by := "leaves the node by " + linkName(d.RedirectIfindex)
		w.step(at, "program", Forwarded, detail+dressed(d.Frame, ep)+", and "+by+" past the host's stack")
		w.end(Forwarded, "it passes, and "+by+"; what happens there is not this node's to say", "")
		return nil
	}
	if d.Verdict == datapath.VerdictRedirect {
		to, known := q.byInterface(d.RedirectIfindex, ep, d.RedirectKind)
		if !known {
			return fmt.Errorf("the program sends the packet to interface %d, which is no endpoint's; `mustang ep ls` lists them", d.RedirectIfindex)
		}
		if d.RedirectKind == bpfgen.RedirectPeer {
			w.step(at, "program", Forwarded, detail+", and is handed to "+describe(to)+" at once: this program has decided for it, too")
			w.end(Forwarded, "it passes, and reaches "+describe(to), "")
			return nil
		}
		w.step(at, "program", Forwarded, detail+", and goes on to "+describe(to))
		return q.enterPod(w, d.Frame, to, ep.IfIndex)
	}
	dst := destination(d.Frame)
	to, err := find(dst.String(), q.endpoints)
	if err != nil {
		return err
	}
	if to.ep == nil {
		w.step(at, "program", Forwarded, detail+", and the kernel routes it")
		return q.leaveNode(w, d.Frame, ep, dst)
	}
	frame := d.Frame
	if ep.Placement == state.InPod && to.ep.Parent == ep.Parent && ep.Parent != 0 {
		w.step(at, "program", Forwarded, detail+", and goes to its sibling "+describe(*to.ep)+" by the link")
	} else {
		w.step(at, "program", Forwarded, detail+", and the kernel routes it to "+describe(*to.ep))
		frame = relink(frame, orZero(to.ep.NodeMAC), to.ep.MAC)
	}
	return q.enterPod(w, frame, *to.ep, ep.IfIndex)
}

// dressed says under which address of the node's what ep has sent leaves it, if
// it does: in the tunnel, or masqueraded.
func dressed(frame []byte, ep state.Endpoint) string {
	src := source(frame)
	switch {
	case slices.Contains(ep.Addrs(), src):
		return ""
	case slices.Contains(ep.Addrs(), innerSource(frame)):
		return fmt.Sprintf(", in the tunnel from %s to %s", src, destination(frame))
	}
	return ", masqueraded as " + src.String()
}

// enterNode follows a packet from outside, or from the node, to a pod.
func (q *question) enterNode(w *Way, p probe, to state.Endpoint) error {
	arrived, from, err := arrival(p.src.Addr())
	if err != nil {
		return err
	}
	w.step(from, "kernel", Forwarded, "the node routes it to "+describe(to))
	p.srcMAC, p.dstMAC = senderMAC(to, p.dst.Addr()), to.MAC
	return q.enterPod(w, p.frame(), to, arrived)
}

// enterPod asks the hook in front of a pod.
func (q *question) enterPod(w *Way, frame []byte, to state.Endpoint, arrived int) error {
	if stop, err := q.unattached(w, to); err != nil || stop {
		return err
	}
	var d datapath.Decision
	err := inPlace(to, func() (err error) {
		d, err = q.run.Ask(datapath.HookToPod, to, datapath.Packet{Frame: frame, IfIndex: to.IfIndex, Arrived: arrivedIn(to, arrived)})
		return err
	})
	if err != nil {
		return err
	}
	at := "to_pod, the program at " + hookPlace(to)
	if q.stopped(w, at, d) {
		return nil
	}
	w.step(at, "program", Forwarded, "it passes"+q.allowed(d.Event))
	w.end(Forwarded, "it passes, and reaches "+describe(to), "")
	return nil
}

// arrivedIn is the interface by which the packet came, where a hook can know:
// inside a pod it is the pod's own namespace's business.
func arrivedIn(to state.Endpoint, arrived int) int {
	if to.Placement == state.InPod {
		return 0
	}
	return arrived
}

// stopped notes that a program ended the way.
func (q *question) stopped(w *Way, at string, d datapath.Decision) bool {
	if d.Verdict != datapath.VerdictDrop && d.Reason == bpfgen.ReasonNone {
		return false
	}
	verdict := Dropped
	if d.Verdict == datapath.VerdictRedirect {
		verdict = Refused
	}
	r := bpfgen.Reasons[min(d.Reason, bpfgen.ReasonCount-1)]
	w.Reason = r.Name
	sentence, mend := r.Sentence, q.mend(r.Number)
	if e := d.Event; e != nil {
		w.Policy = q.names.judged(e.Set, e.Rule)
		if by, how := q.denied(e); by != "" {
			sentence, mend = by, how
		}
	}
	w.step(at, "program", verdict, sentence+" ("+r.Name+")")
	w.end(verdict, verdictSentence(verdict)+": "+sentence, mend)
	return true
}

func verdictSentence(verdict string) string {
	if verdict == Refused {
		return "it is refused, and the sender learns of it at once"
	}
	return "it is dropped"
}

// nameOf is an address with the name of the pod that has it.
func (q *question) nameOf(a netip.Addr, port uint16) End {
	at, err := find(a.String(), q.endpoints)
	if err != nil {
		return End{Address: a, Port: port}
	}
	return at.end(netip.AddrPortFrom(a, port))
}

// byInterface is the endpoint that a redirect leads to. A redirect back into
// the interface it came from is the sender itself.
func (q *question) byInterface(ifindex int, self state.Endpoint, kind uint32) (state.Endpoint, bool) {
	if kind == bpfgen.RedirectIngress {
		return self, true
	}
	for _, ep := range q.endpoints {
		if ep.Placement == state.HostEnd && ep.IfIndex == ifindex {
			return ep, true
		}
	}
	return state.Endpoint{}, false
}

func describe(ep state.Endpoint) string {
	if name := podName(ep); name != "" {
		return name
	}
	return fmt.Sprintf("endpoint %d", ep.ID)
}

func hookPlace(ep state.Endpoint) string {
	if ep.Placement == state.InPod {
		return fmt.Sprintf("%s inside %s", cmp.Or(ep.IfName, "its interface"), describe(ep))
	}
	return fmt.Sprintf("%s, the node's end of %s", cmp.Or(ep.HostIf, fmt.Sprintf("interface %d", ep.IfIndex)), describe(ep))
}
