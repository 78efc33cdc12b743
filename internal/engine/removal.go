// SPDX-License-Identifier: Apache-2.0

package engine

// Exact on removal: what becomes of the flows of a backend that left. The
// reasons are in docs/removal.md.

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// departures are what a change takes away. They are in its journal, because
// the tables do not show any more what they held.
type departures struct {
	Left  []departure     `json:",omitempty"`
	Gone  []state.Backend `json:",omitempty"` // their flows through any Service end
	Pods  []netip.Addr    `json:",omitempty"` // of this node: all their flows end
	Reset bool            `json:",omitempty"` // established TCP of Left ends, too
}

// departure is the backends that left one Service.
type departure struct {
	Frontend state.Frontend
	Backends []netip.AddrPort
}

func (d departures) set() *datapath.Departures {
	var s datapath.Departures
	for _, left := range d.Left {
		for _, b := range left.Backends {
			s.Left(left.Frontend, b, d.Reset)
		}
	}
	for _, b := range d.Gone {
		s.Gone(b)
	}
	for _, a := range d.Pods {
		s.PodGone(a)
	}
	return &s
}

// left adds the backends of old that are not in now.
func (d *departures) left(f state.Frontend, old, now []netip.AddrPort) {
	stay := make(map[netip.AddrPort]bool, len(now))
	for _, b := range now {
		stay[b] = true
	}
	var gone []netip.AddrPort
	for _, b := range old {
		if !stay[b] {
			stay[b] = true
			gone = append(gone, b)
		}
	}
	if len(gone) > 0 {
		d.Left = append(d.Left, departure{f, gone})
	}
}

// departing is what op takes away from the Services as they are. A backend that
// one of a frontend's bindings still has stays, whichever led there.
func (e *Engine) departing(op operation) departures {
	d := departures{Reset: e.ResetRemoved}
	now := make(map[state.Frontend][]netip.AddrPort)
	changed := make(map[state.BindingKey]bool, len(op.Upserts)+len(op.Removes))
	for _, b := range op.Upserts {
		changed[b.Key()] = true
		now[b.Frontend] = append(now[b.Frontend], b.Backends...)
	}
	for _, k := range op.Removes {
		changed[k] = true
	}
	old := make(map[state.Frontend][]netip.AddrPort)
	var order []state.Frontend
	for _, k := range slices.SortedFunc(maps.Keys(changed), compareKeys) {
		other := state.BindingKey{Frontend: k.Frontend, Outside: !k.Outside}
		if b, ok := e.services.Get(other); ok && !changed[other] {
			now[k.Frontend] = append(now[k.Frontend], b.Backends...)
		}
		if b, ok := e.services.Get(k); ok {
			if _, known := old[k.Frontend]; !known {
				order = append(order, k.Frontend)
			}
			old[k.Frontend] = append(old[k.Frontend], b.Backends...)
		}
	}
	for _, f := range order {
		d.left(f, old[f], now[f])
	}
	return d
}

func compareKeys(a, b state.BindingKey) int { return a.Frontend.Compare(b.Frontend) }

// undeparting is what undoing op takes away again.
func (e *Engine) undeparting(op operation) departures {
	var d departures
	for _, b := range op.Upserts {
		old, _ := e.services.Get(b.Key())
		d.left(b.Frontend, b.Backends, old.Backends)
	}
	return d
}

// BackendsGone ends the connections to backends that do not exist any more:
// of TCP, too, which goes on while a backend is only out of its Services. It
// is for who knows that an endpoint has gone (Kubernetes: it is in no slice
// any more, not even as terminating), whether or not a Service still names it.
func (e *Engine) BackendsGone(list ...state.Backend) error {
	if e.dp == nil {
		return errReadOnly
	}
	op := operation{Kind: opGone, Departures: departures{Gone: list}}
	if err := e.begin(op); err != nil {
		return err
	}
	e.settle(op.Departures)
	return e.done()
}

// prepare does early what settle would take its time for.
func (e *Engine) prepare(d departures) {
	if set := d.set(); set.Has(state.UDP) || set.Has(state.TCP) {
		_ = e.dp.PrepareSockets() // settle meets the error again, and tells
	}
}

// lateness bounds the wait where the kernel cannot say that a grace period is over.
const lateness = 50 * time.Millisecond

// settleRounds bounds how often is looked for what departed, late: a datagram that comes between the ends of the two
// halves of its flow brings the first of them back.
const settleRounds = 3

// settle moves or ends the flows of what left, at once, and again after every
// program that may have seen the old state has ended. The change it belongs to
// is in force already: whatever fails here is a notice.
func (e *Engine) settle(d departures) {
	set := d.set()
	if set.Empty() {
		return
	}
	found, err := e.settleOnce(set, false)
	// Of a pod that just goes, most often nothing went there; whoever goes there
	// from now on is too late for this.
	again := found || err != nil || len(d.Left) > 0
	if again && (set.Has(state.UDP) || set.Has(state.TCP) || set.Has(state.SCTP)) {
		for range settleRounds { // finds again what failed before
			if datapath.Grace() != nil {
				time.Sleep(lateness)
			}
			if found, err = e.settleOnce(set, true); !found && err == nil {
				break
			}
		}
	}
	if err != nil {
		e.opts.Notify("the change is in force, but some connections to what it removed may go on: " + err.Error())
	}
}

// settleOnce reports whether it found anything that must move or end.
func (e *Engine) settleOnce(set *datapath.Departures, late bool) (found bool, err error) {
	conns, err := e.dp.Clients(set)
	if err != nil {
		return false, err
	}
	forgotten, ended := 0, 0
	forget := func() (err error) {
		forgotten, err = e.dp.ForgetFlows(set, late)
		return err
	}
	end := func() (err error) {
		ended, err = e.endSockets(set, conns)
		return err
	}
	if late { // sockets end before their flows, whose last packets are still translated
		err = errors.Join(end(), forget())
	} else {
		err = errors.Join(forget(), end())
	}
	err = errors.Join(err, e.dp.ForgetSockFlows(set, late))
	return len(conns)+forgotten+ended > 0, err
}

// endSockets destroys the sockets that connect() led to what departed, and the
// clients of conns, each from inside its pod's namespace.
func (e *Engine) endSockets(set *datapath.Departures, conns map[datapath.Connection]bool) (found int, err error) {
	list, err := e.dp.Sockets(set)
	each := errors.Is(err, datapath.ErrNoIterator) // namespace has to be asked
	if each {
		err = nil
	}
	if err != nil || len(list) == 0 && len(conns) == 0 && !each {
		return 0, err
	}
	if err := e.loadEndpoints(); err != nil {
		return len(list), err
	}
	byNetns := make(map[uint64][]datapath.Socket)
	for _, s := range list {
		byNetns[s.NetnsCookie] = append(byNetns[s.NetnsCookie], s)
	}
	clients := make(map[netip.Addr]bool, len(conns))
	for c := range conns {
		clients[c.Local.Addr()] = true
	}
	var errs []error
	found = len(list)
	if home, err := netns.Cookie(); err == nil { // the node's own: this thread's
		here := byNetns[home]
		if each {
			here, err = e.dp.SocketsHere(set)
			found += len(here)
		}
		errs = append(errs, err, datapath.EndSockets(here))
	}
	asked := make(map[uint64]bool)
	for _, ep := range e.known {
		sockets, client := byNetns[ep.NetnsCookie], clients[ep.IP4] || clients[ep.IP6]
		ask := each && !asked[ep.NetnsCookie] && ep.Netns != ""
		delete(byNetns, ep.NetnsCookie) // a pod may have several endpoints
		asked[ep.NetnsCookie] = true
		if len(sockets) == 0 && !client && !ask {
			continue
		}
		n, err := e.endInPod(ep, sockets, client, conns, ask, set)
		found += n
		if err != nil {
			errs = append(errs, fmt.Errorf("in the pod of endpoint %d: %w", ep.ID, err))
		}
	}
	return found, errors.Join(errs...)
}

// endInPod destroys these sockets, the clients of conns among the pod's own, if
// there are any, and those that are to be asked for; it says how many these were.
func (e *Engine) endInPod(ep state.Endpoint, sockets []datapath.Socket, client bool, conns map[datapath.Connection]bool,
	ask bool, set *datapath.Departures) (asked int, err error) {
	if ep.Netns == "" {
		return 0, fmt.Errorf("where its namespace is was lost with %s", e.scope.StateDir)
	}
	err = e.inPod(ep, func() error {
		if ask {
			more, err := e.dp.SocketsHere(set)
			if err != nil {
				return err
			}
			asked = len(more)
			sockets = append(sockets, more...)
		}
		if client {
			more, err := datapath.ClientSockets(conns)
			if err != nil {
				return err
			}
			sockets = append(sockets, more...)
		}
		return datapath.EndSockets(sockets)
	})
	return asked, err
}
