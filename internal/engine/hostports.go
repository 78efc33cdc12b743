// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// HostPort is a port of the node that leads to a pod (CNI's portMappings). It
// is a Service of owner cni with one frontend, one backend, and the policy Local.
type HostPort struct {
	Protocol state.Protocol
	// HostIP is an address of this node's: a pod may name any other, which is not its to take.
	// Invalid or unspecified: every address that takes node ports; a loopback's is for the node's own sockets.
	HostIP   netip.Addr
	HostPort uint16
	Pod      netip.AddrPort
}

func (h HostPort) service() state.Service {
	f := state.ServiceFrontend{Kind: state.ExternalIP, AddrPort: netip.AddrPortFrom(h.HostIP, h.HostPort)}
	if !h.HostIP.IsValid() || h.HostIP.IsUnspecified() {
		any := netip.IPv4Unspecified()
		if h.Pod.Addr().Is6() {
			any = netip.IPv6Unspecified()
		}
		f = state.ServiceFrontend{Kind: state.NodePort, AddrPort: netip.AddrPortFrom(any, h.HostPort)}
	}
	return state.Service{
		ServiceID: service.PlainID(state.OwnerCNI, state.Frontend{AddrPort: f.AddrPort, Protocol: h.Protocol}),
		External:  state.PolicyLocal,
		Ports: []state.ServicePort{{
			Protocol: h.Protocol, Frontends: []state.ServiceFrontend{f},
			Backends: []state.ServiceBackend{{AddrPort: h.Pod, Ready: true, Serving: true, Local: true}},
		}},
	}
}

// ErrPortTaken is about a host port that leads to another pod, or is a Service's.
var ErrPortTaken = errors.New("is taken")

// frontend is what the port is in the tables.
func (h HostPort) frontend() state.BindingKey {
	s := h.service()
	return state.BindingKey{Frontend: state.Frontend{AddrPort: s.Ports[0].Frontends[0].AddrPort, Protocol: h.Protocol}}
}

// isOpen says that b leads from the port to its pod.
func (h HostPort) isOpen(b state.Binding) bool {
	return b.Owner == state.OwnerCNI && len(b.Backends) == 1 && b.Backends[0] == h.Pod
}

// ownAddress says that h's is one of this node's, all of them, or a loopback's.
func (h HostPort) ownAddress() (bool, error) {
	if !h.HostIP.IsValid() || h.HostIP.IsUnspecified() || h.HostIP.IsLoopback() {
		return true, nil
	}
	addrs, err := nodeAddrs()
	return slices.Contains(addrs, h.HostIP.Unmap()), err
}

// AddHostPorts opens host ports, all or none. Ones that are open to the same
// pods already are no error; nor are those at addresses that this node has not:
// where pods of several nodes say the same, each opens those of its own.
func (e *Engine) AddHostPorts(list ...HostPort) error {
	if err := e.loadCatalog(); err != nil {
		return err
	}
	if e.services == nil {
		return errReadOnly
	}
	var services []state.Service
	for _, h := range list {
		own, err := h.ownAddress()
		if err != nil {
			return err
		}
		if !own {
			e.opts.Notify(fmt.Sprintf("host port %s of %s stays closed: %s is no address of this node", h.frontend().Frontend, h.Pod, h.HostIP))
			continue
		}
		if err := e.takeFromDead(h); err != nil {
			return err
		}
		key := h.frontend()
		if b, found := e.services.Get(key); found && !h.isOpen(b) {
			holder, _ := e.catalog.Holder(key.Frontend)
			return fmt.Errorf("host port %s %w: it leads to %v, of %v's Service %s; give the pod another", key.Frontend, ErrPortTaken, b.Backends, b.Owner, holder)
		}
		services = append(services, h.service())
	}
	change := e.catalog.Plan(services, nil)
	if err := change.Refused(); err != nil {
		return err
	}
	return e.change(change, operation{})
}

// RemoveHostPorts closes host ports; ones that are closed, or lead to another
// pod by now, are no error.
func (e *Engine) RemoveHostPorts(list ...HostPort) error {
	if err := e.loadCatalog(); err != nil || e.services == nil {
		return err
	}
	var ids []state.ServiceID
	for _, h := range list {
		if b, ok := e.services.Get(h.frontend()); ok && h.isOpen(b) {
			ids = append(ids, h.service().ServiceID)
		}
	}
	return e.change(e.catalog.Plan(nil, ids), operation{})
}

// takeFromDead removes the pod that has h's port, if it is gone: a dead pod, whose DEL never
// came, holds none.
func (e *Engine) takeFromDead(h HostPort) error {
	b, found := e.services.Get(h.frontend())
	if !found || h.isOpen(b) || b.Owner != state.OwnerCNI || len(b.Backends) != 1 {
		return nil
	}
	dead, err := e.Dead(state.OwnerCNI)
	if err != nil {
		return err
	}
	for _, ep := range dead {
		if !slices.Contains(ep.Addrs(), b.Backends[0].Addr()) {
			continue
		}
		if err := e.bury(ep); err != nil {
			return fmt.Errorf("host port %s %w by endpoint %d (%s), whose pod is gone: remove it by `mustang ep rm %[3]d`, for here that failed: %[5]w", h.frontend().Frontend, ErrPortTaken, ep.ID, ep.Netns, err)
		}
	}
	return nil
}

// bury removes an endpoint whose pod is gone, and before it the host ports that lead there:
// who gets its address does not get what comes by them, even if this is killed in between.
func (e *Engine) bury(ep state.Endpoint) error {
	err := e.closeHostPorts(func(pod netip.Addr) (bool, error) { return slices.Contains(ep.Addrs(), pod), nil })
	if err != nil {
		return err
	}
	return e.remove(ep, true)
}

// SweepHostPorts closes the host ports that lead to no endpoint.
func (e *Engine) SweepHostPorts() error {
	return e.closeHostPorts(func(pod netip.Addr) (bool, error) {
		_, lives, err := e.dp.Addrs.Get(datapath.FromAddr(pod))
		return !lives, err
	})
}

// closeHostPorts closes the host ports that lead to a pod's address that gone chooses.
func (e *Engine) closeHostPorts(gone func(pod netip.Addr) (bool, error)) error {
	if err := e.loadCatalog(); err != nil || e.services == nil {
		return err
	}
	var ids []state.ServiceID
	for _, b := range e.services.List() {
		if b.Owner != state.OwnerCNI || len(b.Backends) != 1 {
			continue
		}
		closes, err := gone(b.Backends[0].Addr())
		if err != nil {
			return err
		}
		if id, held := e.catalog.Holder(b.Frontend); closes && held {
			ids = append(ids, id)
		}
	}
	return e.change(e.catalog.Plan(nil, ids), operation{})
}

// CheckHostPorts answers an error for each that is not open, joined.
func (e *Engine) CheckHostPorts(list ...HostPort) error {
	if err := e.loadCatalog(); err != nil {
		return err
	}
	var errs []error
	for _, h := range list {
		open := false
		if e.services != nil {
			b, found := e.services.Get(h.frontend())
			open = found && h.isOpen(b)
		}
		if open {
			continue
		}
		if own, err := h.ownAddress(); own || err != nil {
			errs = append(errs, fmt.Errorf("host port %s does not lead to %s", h.frontend().Frontend, h.Pod))
		}
	}
	return errors.Join(errs...)
}
