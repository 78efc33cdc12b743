// SPDX-License-Identifier: Apache-2.0

package path

// What a packet costs at each hook: programs as they are attached in a lab, with
// tables that real connections filled, fed by the kernel's test run.

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/mustang-net/mustang/bench/samehost"
	"github.com/mustang-net/mustang/bench/stats"
	"github.com/mustang-net/mustang/lab"
)

// Hook is what one kind of packet costs at one hook.
type Hook struct {
	Mode   string         `json:"mode"`
	Place  string         `json:"place"`  // host end, or in pod
	Family string         `json:"family"` // v4 or v6
	Hook   string         `json:"hook"`   // from_pod, to_pod
	Packet string         `json:"packet"`
	Cost   stats.Estimate `json:"cost"` // in the document's unit, of a packet
}

// name is the hook's in a record's part of its mode.
func (h Hook) name() string { return fmt.Sprintf("%s %s: %s", h.Hook, h.Family, h.Packet) }

// hookCase is a packet and the hook that it is sent into.
type hookCase struct {
	hook, packet string
	prog         *program
	frame        frame
	out          flow      // how the packet leaves the program
	verdict      uint32    // what the program must answer
	firstPort    uint16    // not 0: each packet begins a flow, from this source port up
	before       *hookCase // not nil: the sender's hook, whose control block comes along
}

// hookWorld is a lab with open connections, each of which has carried a request
// and its answer: their entries are those of established flows.
type hookWorld struct {
	lab            *lab.Lab
	client, server *attached
	conns          []net.Conn
	v6             bool
	direct         flow // client pod to server pod
	seen, post     flow // by the Service: as the client sees it, as the server does
	fromNode       flow // through the host's stack
}

const hookPort = samehost.Port

// measureHooks builds a lab of one mode and measures its hooks in both families.
func measureHooks(ctx context.Context, o Options, mode string) (list []Hook, err error) {
	l, err := lab.New(ctx, lab.Config{Name: "bnhook", Mode: lab.Mode(mode), Services: lab.MustangTC, Binary: o.Binary})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	client, err := l.Node().AddPod(ctx, "client")
	if err != nil {
		return nil, err
	}
	server, err := l.Node().AddPod(ctx, "server")
	if err != nil {
		return nil, err
	}
	if err := l.Node().AddServices(ctx, []lab.Service{
		{VIP: lab.VIP4(1), Port: hookPort, Protocol: "tcp", Backends: []netip.AddrPort{netip.AddrPortFrom(server.IPv4, hookPort)}},
		{VIP: lab.VIP6(1), Port: hookPort, Protocol: "tcp", Backends: []netip.AddrPort{netip.AddrPortFrom(server.IPv6, hookPort)}},
	}); err != nil {
		return nil, err
	}
	empty, err := newEmpty()
	if err != nil {
		return nil, err
	}
	defer empty.Close()
	for _, v6 := range []bool{false, true} {
		w := &hookWorld{lab: l, v6: v6}
		got, err := w.measure(o, empty, client, server)
		if err = errors.Join(err, w.close()); err != nil {
			return list, fmt.Errorf("hooks of %s: %w", mode, err)
		}
		for i := range got {
			got[i].Mode = mode
		}
		list = append(list, got...)
	}
	return list, nil
}

func (w *hookWorld) measure(o Options, empty *program, client, server *lab.Pod) (list []Hook, err error) {
	if err := w.connectAll(client, server); err != nil {
		return nil, err
	}
	if w.client, err = findAttached(w.lab.Node(), client); err != nil {
		return nil, err
	}
	if w.server, err = findAttached(w.lab.Node(), server); err != nil {
		return nil, err
	}
	if w.client.fromPod == nil || w.server.toPod == nil {
		return nil, errors.New("no program is attached to the pods' interfaces")
	}
	for _, c := range w.cases() {
		cost, err := c.measure(o, empty)
		if err != nil {
			return list, fmt.Errorf("%s, %s (%v to %v): %w", c.hook, c.packet, c.frame.from, c.frame.to, err)
		}
		list = append(list, Hook{
			Place: map[bool]string{false: "host end", true: "in pod"}[w.client.inPod], Family: w.family(),
			Hook: c.hook, Packet: c.packet, Cost: cost,
		})
	}
	return list, nil
}

func (w *hookWorld) family() string { return map[bool]string{false: "v4", true: "v6"}[w.v6] }

func (w *hookWorld) close() error {
	var errs []error
	for _, c := range w.conns {
		errs = append(errs, c.Close())
	}
	for _, a := range []*attached{w.client, w.server} {
		if a != nil {
			a.close()
		}
	}
	return errors.Join(errs...)
}

// connectAll opens the connections: pod to pod, by the Service, and from the
// node, whose packets reach the server by the host's stack.
func (w *hookWorld) connectAll(client, server *lab.Pod) error {
	at, vip := netip.AddrPortFrom(server.IPv4, hookPort), netip.AddrPortFrom(lab.VIP4(1), hookPort)
	if w.v6 {
		at, vip = netip.AddrPortFrom(server.IPv6, hookPort), netip.AddrPortFrom(lab.VIP6(1), hookPort)
	}
	var listener net.Listener
	if err := server.Do(func() (err error) {
		listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		return err
	}); err != nil {
		return err
	}
	defer listener.Close()
	from, err := w.connect(listener, &client.Space, at)
	if err != nil {
		return err
	}
	w.direct = flow{from, at}
	if from, err = w.connect(listener, &client.Space, vip); err != nil {
		return err
	}
	w.seen, w.post = flow{from, vip}, flow{from, at}
	from, err = w.connect(listener, &w.lab.Node().Space, at)
	w.fromNode = flow{from, at}
	return err
}

// ownPort is the near end's of the first connection. The kernel's choice would put
// flows into other slots of the short way each time, now and then two into one.
const ownPort = 31000

// connect opens a connection, exchanges a byte both ways twice, and returns the
// near end's address.
func (w *hookWorld) connect(listener net.Listener, space *lab.Space, to netip.AddrPort) (netip.AddrPort, error) {
	var near net.Conn
	port := ownPort + len(w.conns)
	if w.v6 {
		port += 100 // IPv4's connections linger
	}
	d := net.Dialer{Timeout: 5 * time.Second, LocalAddr: &net.TCPAddr{Port: port}}
	err := space.Do(func() (err error) {
		near, err = d.Dial("tcp", to.String())
		return err
	})
	if err != nil {
		return netip.AddrPort{}, err
	}
	w.conns = append(w.conns, near)
	far, err := listener.Accept()
	if err != nil {
		return netip.AddrPort{}, err
	}
	w.conns = append(w.conns, far)
	buf := make([]byte, 1)
	for range 2 {
		for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
			_ = way[1].SetDeadline(time.Now().Add(5 * time.Second))
			_, err1 := way[0].Write(buf)
			_, err2 := way[1].Read(buf)
			if err := errors.Join(err1, err2); err != nil {
				return netip.AddrPort{}, fmt.Errorf("exchange with %s: %w", to, err)
			}
		}
	}
	return near.LocalAddr().(*net.TCPAddr).AddrPort(), nil
}

// cases lists the packets. On the host's end of a veth the sender's program does
// all of the work between two pods, so to_pod is met by what came through the
// stack only; inside the pods, and by netkit, every packet meets both, the latter
// mostly with the former's voucher.
func (w *hookWorld) cases() []hookCase {
	there := frame{src: w.client.mac, dst: w.client.neighbor, flags: tcpPSH | tcpACK}
	back := frame{src: w.server.mac, dst: w.server.neighbor, flags: tcpPSH | tcpACK}
	with := func(f frame, of flow, flags uint8) frame { f.flow, f.flags = of, flags; return f }
	const data = tcpPSH | tcpACK
	done := uint32(tcRedirect)
	if w.client.inPod {
		done = tcNext
	}
	postBack := w.post.reversed()
	both := w.client.inPod || w.client.netkit
	list := []hookCase{
		{"from_pod", "established", w.client.fromPod, with(there, w.direct, data), w.direct, done, 0, nil},
		{"from_pod", "established, reply", w.server.fromPod, with(back, w.direct.reversed(), data), w.direct.reversed(), done, 0, nil},
		{"from_pod", "Service, established", w.client.fromPod, with(there, w.seen, data), w.post, done, 0, nil},
		{"from_pod", "Service, reply", w.server.fromPod, with(back, postBack, data), w.seen.reversed(), done, 0, nil},
		{"from_pod", "new flow", w.client.fromPod, with(there, w.direct, tcpSYN), w.direct, done, 20000, nil},
		{"from_pod", "Service, new flow", w.client.fromPod, with(there, w.seen, tcpSYN), w.post, done, 40000, nil},
	}
	if !both {
		node := frame{src: w.server.neighbor, dst: w.server.mac}
		return append(list,
			hookCase{"from_pod", "to the node, reply", w.server.fromPod, with(back, w.fromNode.reversed(), data), w.fromNode.reversed(), tcNext, 0, nil},
			hookCase{"to_pod", "from the node, established", w.server.toPod, with(node, w.fromNode, data), w.fromNode, tcNext, 0, nil},
			hookCase{"to_pod", "from the node, new flow", w.server.toPod, with(node, w.fromNode, tcpSYN), w.fromNode, tcNext, 20000, nil})
	}
	in, out := frame{src: w.client.mac, dst: w.server.mac}, frame{src: w.server.mac, dst: w.client.mac}
	return append(list,
		hookCase{"to_pod", "established", w.server.toPod, with(in, w.direct, data), w.direct, tcNext, 0, nil},
		hookCase{"to_pod", "established, vouched for", w.server.toPod, with(in, w.direct, data), w.direct, tcNext, 0, &list[0]},
		hookCase{"to_pod", "established, reply", w.client.toPod, with(out, w.direct.reversed(), data), w.direct.reversed(), tcNext, 0, nil},
		hookCase{"to_pod", "Service, established", w.server.toPod, with(in, w.post, data), w.post, tcNext, 0, nil},
		hookCase{"to_pod", "Service, reply", w.client.toPod, with(out, postBack, data), w.seen.reversed(), tcNext, 0, nil})
}

// measure checks once that the packet goes where it should, and then takes the
// median over runs of what the program adds to an empty one.
func (c hookCase) measure(o Options, empty *program) (stats.Estimate, error) {
	if c.before != nil {
		left, err := c.before.leaves()
		if err != nil {
			return stats.Estimate{}, err
		}
		c.frame.control = left
	}
	r, err := newRestorer(c.frame, c.firstPort > 0)
	if err != nil {
		return stats.Estimate{}, err
	}
	defer r.close()
	if err := c.check(r); err != nil {
		return stats.Estimate{}, err
	}
	n := o.Hooks
	if c.firstPort > 0 {
		n = o.NewFlows
		if c.frame.flow.to != c.out.to {
			n.Packets /= 2 // a translated flow has two entries
		}
	}
	var values []float64
	for i := range n.Runs {
		first := c.firstPort + uint16(i*n.Packets) + 1
		base, err := r.time(empty, n.Packets, first)
		if err != nil {
			return stats.Estimate{}, err
		}
		took, err := r.time(c.prog, n.Packets, first)
		if err != nil {
			return stats.Estimate{}, err
		}
		values = append(values, o.cost(took-base))
	}
	return stats.Of(values, 1), nil
}

// leaves is what the packet has in its control block when the program lets it out.
func (c hookCase) leaves() (control, error) {
	r, err := newRestorer(c.frame, false)
	if err != nil {
		return control{}, err
	}
	defer r.close()
	_, out, err := r.once(c.prog, 0)
	return out.control, err
}

func (c hookCase) check(r *restorer) error {
	verdict, out, err := r.once(c.prog, c.firstPort)
	if err != nil {
		return err
	}
	want, got := c.out, flowOf(out.frame)
	if c.firstPort > 0 {
		want.from = netip.AddrPortFrom(want.from.Addr(), c.firstPort)
	}
	if verdict != c.verdict || got != want {
		return fmt.Errorf("verdict %d and %v to %v, want %d and %v to %v", int32(verdict), got.from, got.to, int32(c.verdict), want.from, want.to)
	}
	return nil
}
