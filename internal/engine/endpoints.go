// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/state"
)

// EndpointSpec names an interface of a pod that is to become an endpoint.
// Everything else is found out, unless Made says it.
type EndpointSpec struct {
	Netns       string // path of the pod's network namespace
	IfName      string // inside it
	Owner       state.Owner
	ServicePath state.ServicePath // "" is both
	Labels      map[string]string
	Ports       []state.NamedPort // of its containers
	Pod         state.PodRef
	Masquerade  *state.Masquerade // nil: it is not
	// Made describes the interface for whoever makes it, just now, and has not
	// set it up yet: its indexes, addresses and MTU. Its host's end is nobody
	// else's, see attachKind.
	Made *state.Endpoint
	// OwnQdiscs says that somebody is about to put a qdisc of his own on the
	// host's end, as the bandwidth plugin does.
	OwnQdiscs bool
	// InPod puts the programs inside the pod also when the interface is one end
	// of a pair: one whose other end is not this node's.
	InPod bool
}

func (e *Engine) endpointTables() reconcile.Endpoints {
	return reconcile.NewEndpoints(reconcile.EndpointTables{Endpoints: e.dp.Endpoints, Addrs: e.dp.Addrs, Netns: e.dp.Netns})
}

// loadEndpoints joins tables and store at their first use, and removes what is
// in only one of them.
func (e *Engine) loadEndpoints() error {
	if e.known != nil || e.dp == nil {
		return nil
	}
	known, err := e.endpointTables().List()
	if err != nil {
		return fmt.Errorf("restore endpoints: %w", err)
	}
	records, err := e.store.Endpoints()
	if err != nil {
		return err
	}
	linked, err := e.dp.LinkedEndpoints()
	if err != nil {
		return err
	}
	for id, ep := range known {
		r, recorded := records[id]
		if recorded {
			ep.Netns, ep.IfName, ep.HostIf, ep.PodIndex = r.Netns, r.IfName, r.HostIf, r.PodIndex
			ep.Labels, ep.Ports, ep.Pod, ep.Attach, ep.Qdisc, ep.Masquerade = r.Labels, r.Ports, r.Pod, r.Attach, r.Qdisc, r.Masquerade
		} else {
			lost, unknown := e.lostMasquerade(id)
			ep.Masquerade, err = lost, errors.Join(err, unknown)
			ep.HostIf = lostHostIf(ep)
		}
		switch {
		case !isLost(ep):
		// The store is gone; where programs are at work, leave them.
		case linked[id]:
			ep.Attach = e.dp.LinkKind(id)
		case ep.Placement == state.InPod || datapath.HasFilters(ep):
			// Into a pod nobody can look without its path: benefit of the doubt.
			ep.Attach = datapath.AttachClsact
		default:
			err = errors.Join(err, e.endpointTables().Delete(ep, known))
			delete(known, id)
			continue
		}
		known[id] = ep
	}
	err = errors.Join(err, e.pruneEndpoints(known, records, linked))
	if err == nil {
		e.known = known
		e.restore(records)
	}
	return err
}

func (e *Engine) pruneEndpoints(known, records map[uint32]state.Endpoint, linked map[uint32]bool) error {
	var errs []error
	for id, r := range records {
		if _, ok := known[id]; !ok && !e.isAsRecorded(r) && unseen(r) == "" {
			errs = append(errs, e.detachFilters(r), e.store.DeleteEndpoint(id))
		}
	}
	for id := range linked {
		if _, ok := known[id]; !ok {
			errs = append(errs, e.dp.Detach(id))
		}
	}
	return errors.Join(append(errs, e.endpointTables().Prune(known), e.pruneMasquerade(known))...)
}

// Endpoints are all endpoints, by id.
func (e *Engine) Endpoints() ([]state.Endpoint, error) {
	if err := e.loadEndpoints(); err != nil {
		return nil, err
	}
	var out []state.Endpoint
	for _, id := range slices.Sorted(maps.Keys(e.known)) {
		out = append(out, e.known[id])
	}
	return out, nil
}

// Counters are what an endpoint sent and received, over all CPUs.
func (e *Engine) Counters(id uint32) (from, to state.Counter, err error) {
	return e.dp.Traffic(id)
}

// AddEndpoint makes an interface an endpoint: it is in the tables before its
// programs are attached, so that no packet finds a program that does not know
// it. The endpoint is complete when this returns, or nothing of it is there.
func (e *Engine) AddEndpoint(_ context.Context, spec EndpointSpec) (state.Endpoint, error) {
	if spec.ServicePath == "" {
		spec.ServicePath = state.PathBoth
	}
	if e.dp == nil {
		return state.Endpoint{}, errReadOnly
	}
	e.moved = time.Now()
	ep, err := examined(spec)
	stranger := false
	if err == nil {
		err = e.prepareIsolation()
	}
	if err == nil {
		stranger, err = e.isStranger(ep)
	}
	if err == nil && !stranger {
		err = e.loadEndpoints()
	}
	if err == nil {
		err = e.makeRoom(ep)
	}
	if ep.Attach == "" {
		ep.Attach = e.attachKind(spec, ep)
	}
	if err == nil {
		err = e.ensurePrograms(ep)
	}
	if err == nil {
		err = e.number(&ep)
	}
	if err == nil {
		ep.Qdisc, err = e.needsQdisc(spec, ep)
	}
	if err != nil {
		return ep, privilege(err)
	}
	if err := e.begin(operation{Kind: opAddEndpoint, Endpoint: &ep}); err != nil {
		return ep, err
	}
	if err := e.install(ep); err != nil {
		left := e.uninstall(ep)
		if left != nil { // the next tool goes on from here
			return ep, errors.Join(privilege(err), left, e.begin(operation{Kind: opRemoveEndpoint, Endpoint: &ep}))
		}
		e.leftMasquerade(ep)
		return ep, errors.Join(privilege(err), e.done())
	}
	if e.known != nil {
		e.known[ep.ID] = ep
	}
	return ep, e.completed()
}

// examined is the endpoint to be: as its maker says, or as is found out.
func examined(spec EndpointSpec) (state.Endpoint, error) {
	var ep state.Endpoint
	if spec.Made == nil {
		var err error
		if ep, err = discover(spec); err != nil {
			return ep, err
		}
	} else {
		ep = *spec.Made
		ep.Owner, ep.ServicePath, ep.Labels, ep.Ports, ep.Pod = spec.Owner, spec.ServicePath, spec.Labels, spec.Ports, spec.Pod
	}
	ep.Masquerade = spec.Masquerade
	return ep, nil
}

// attachKind chooses how programs are held. A tcx attachment waits for an RCU
// grace period while the kernel holds its routing lock: two of them are most of
// a pod's start, and pods that start at once stand in line for them. A clsact
// filter waits for none, and costs a packet some 60 ns more. So a runtime's new
// pair gets filters on the host's end: nobody else has anything there, whom they
// would have to stand before, and the pod cannot reach them. When the node is
// quiet an agent makes links of them (settle.go). Inside a pod only tcx will do,
// because a link cannot be detached by whoever has rights there.
func (e *Engine) attachKind(spec EndpointSpec, ep state.Endpoint) string {
	if spec.Made != nil && spec.Owner == state.OwnerCNI && ep.Placement == state.HostEnd && !spec.OwnQdiscs {
		return datapath.AttachClsact
	}
	return e.dp.AttachKind()
}

// isStranger says that no endpoint has anything of ep's, neither an address nor
// its namespace nor its parent link: then it needs to know none of them, and a
// node with many pods takes the next one as fast as the first.
func (e *Engine) isStranger(ep state.Endpoint) (bool, error) {
	if e.known != nil || ep.Parent != 0 {
		return false, nil
	}
	for _, a := range ep.Addrs() {
		if _, taken, err := e.dp.Addrs.Get(datapath.FromAddr(a)); err != nil || taken {
			return false, err
		}
	}
	_, taken, err := e.dp.Netns.Get(ep.NetnsCookie)
	return !taken, err
}

// ErrExists is about an interface that another call made an endpoint.
var ErrExists = errors.New("is an endpoint already")

// makeRoom refuses what is there already, and removes remains of pods that
// are gone, with their host ports.
func (e *Engine) makeRoom(ep state.Endpoint) error {
	for id, other := range e.known {
		same := other.Netns == ep.Netns && other.IfName == ep.IfName
		clash, conflict := clashes(ep, other)
		if !same && !conflict {
			continue
		}
		if !e.alive(other) {
			if err := e.bury(other); err != nil {
				return fmt.Errorf("remove endpoint %d, whose pod is gone: %w", id, err)
			}
			continue
		}
		if same {
			return fmt.Errorf("%s in %s %w: %d; `mustang ep rm %d` removes it", ep.IfName, ep.Netns, ErrExists, id, id)
		}
		return fmt.Errorf("address %s of %s in %s belongs to endpoint %d (%s in %s); give the pod another, or `mustang ep rm %d`",
			clash, ep.IfName, ep.Netns, id, other.IfName, other.Netns, id)
	}
	return nil
}

func clashes(a, b state.Endpoint) (string, bool) {
	for _, addr := range a.Addrs() {
		if slices.Contains(b.Addrs(), addr) {
			return addr.String(), true
		}
	}
	return "", false
}

// alive says whether ep's interface is still there. Without a record nobody
// can tell, and it counts as alive; so it does while this process has no file or
// memory left to look.
func (e *Engine) alive(ep state.Endpoint) bool {
	if isLost(ep) {
		return true
	}
	alive := false
	err := e.inPod(ep, func() error { // other errors, too, mean that it is not there
		l, err := netlink.LinkByIndex(ep.PodIndex)
		alive = err == nil && l.Attrs().Name == ep.IfName
		return err
	})
	return alive || slices.ContainsFunc(exhausted, func(e error) bool { return errors.Is(err, e) })
}

// exhausted is what says that the process or the machine has nothing left for a try.
var exhausted = []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS}

// inPod runs fn in ep's namespace. It does nothing when that is gone; a new
// one under the same name is another pod's.
func (e *Engine) inPod(ep state.Endpoint, fn func() error) error {
	ns, err := netns.Open(ep.Netns)
	if slices.ContainsFunc(exhausted, func(e error) bool { return errors.Is(err, e) }) {
		return err
	}
	if err != nil {
		return nil
	}
	defer ns.Close()
	return netns.DoFile(ns, func() error {
		if c, err := netns.Cookie(); err != nil || c != ep.NetnsCookie {
			return err
		}
		return fn()
	})
}

// atHook runs fn in the namespace of the interface that carries the programs.
func (e *Engine) atHook(ep state.Endpoint, fn func() error) error {
	if ep.Placement == state.InPod {
		return e.inPod(ep, fn)
	}
	return fn()
}

func (e *Engine) ensurePrograms(ep state.Endpoint) error {
	if err := e.dp.EnsurePrograms(ep); err != nil {
		return err
	}
	if ep.ServicePath != state.PathBoth && ep.ServicePath != state.PathSocket {
		return nil
	}
	return e.dp.EnsureSock(e.scope.cgroupRoot)
}

// number gives ep an id and a generation. The search for a free id starts
// where the generations stand, so that an id rests before it is used again.
func (e *Engine) number(ep *state.Endpoint) error {
	generation, err := e.dp.ComingGeneration()
	if err != nil {
		return err
	}
	ids := e.dp.MaxEndpoints() - 1 // 0 means "not an endpoint"
	for i := range ids {
		id := (generation-1+i)%ids + 1
		used, err := e.idUsed(id)
		if err != nil {
			return err
		}
		if !used {
			ep.ID, ep.Generation = id, generation
			return nil
		}
	}
	return fmt.Errorf("all %d endpoints of this node are in use; `mustang ep rm` one", ids)
}

func (e *Engine) idUsed(id uint32) (bool, error) {
	if e.known != nil {
		_, used := e.known[id]
		return used, nil
	}
	slot, _, err := e.dp.Endpoints.Get(id)
	return slot.Generation != 0, err
}

func (e *Engine) needsQdisc(spec EndpointSpec, ep state.Endpoint) (needs bool, err error) {
	if ep.Attach != datapath.AttachClsact {
		return false, nil
	}
	if spec.Made != nil {
		return true, nil // a new interface has none
	}
	err = e.atHook(ep, func() error {
		has, err := datapath.HasClsact(ep.IfIndex)
		needs = !has
		return err
	})
	return needs, err
}

// install writes ep everywhere; doing it again is harmless.
func (e *Engine) install(ep state.Endpoint) error {
	if err := e.store.PutEndpoint(ep); err != nil {
		return err
	}
	if err := e.dp.Counters.Zero(ep.ID); err != nil {
		return err
	}
	if err := e.dp.Routers.Put([]uint32{ep.ID}, []datapath.Addr{datapath.FromAddr(ep.Router6)}); err != nil {
		return err
	}
	if err := e.isolate(ep); err != nil {
		return err
	}
	if err := e.masquerade(ep); err != nil {
		return err
	}
	if ep.Placement == state.InPod {
		if err := e.ensureTurns(); err != nil {
			return err
		}
	}
	if err := e.endpointTables().Put(ep, e.known); err != nil {
		return err
	}
	if err := e.guardParent(ep); err != nil {
		return err
	}
	if err := e.attach(ep); err != nil {
		return err
	}
	return e.narrowPod(ep)
}

// attach attaches the programs of an endpoint that comes. Unlike one that goes, it must be
// within reach: else its pod would be without them.
func (e *Engine) attach(ep state.Endpoint) error {
	attached := false
	err := e.atHook(ep, func() error {
		attached = true
		return e.dp.Attach(ep)
	})
	if err == nil && !attached {
		err = fmt.Errorf("the pod's network namespace %s cannot be opened from here, or is another one's here; where an agent runs, its host.netns must be the directory of the runtime's namespaces", ep.Netns)
	}
	return err
}

// finishAdd is install for a killed tool. A pod that died meanwhile gets its
// endpoint removed.
func (e *Engine) finishAdd(ep state.Endpoint) error {
	if !e.alive(ep) {
		return e.finishRemove(ep)
	}
	known, err := e.endpointTables().List()
	if err != nil {
		return err
	}
	delete(known, ep.ID)
	e.known = known
	err = e.ensurePrograms(ep)
	if err == nil {
		err = e.install(ep)
	}
	failed := err != nil
	if failed {
		err = errors.Join(err, e.uninstall(ep))
	}
	e.known = nil
	if failed {
		e.leftMasquerade(ep)
	}
	return err
}

// FindEndpoint is the id of the endpoint of an interface.
func (e *Engine) FindEndpoint(path, ifname string) (uint32, error) {
	if err := e.loadEndpoints(); err != nil {
		return 0, err
	}
	return e.pick(func(ep state.Endpoint) bool { return ep.Netns == path && ep.IfName == ifname }, ifname, path)
}
