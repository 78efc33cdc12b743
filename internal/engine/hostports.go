// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"net/netip"

	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// HostPort is a port of the node that leads to a pod (CNI's portMappings). It
// is a Service of owner cni with one frontend, one backend, and the policy Local.
type HostPort struct {
	Protocol state.Protocol
	HostIP   netip.Addr // invalid or unspecified: every address that takes node ports
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

// AddHostPorts opens host ports, all or none. Ones that are open to the same
// pods already are no error.
func (e *Engine) AddHostPorts(list ...HostPort) error {
	if err := e.loadCatalog(); err != nil {
		return err
	}
	if e.services == nil {
		return errReadOnly
	}
	var services []state.Service
	for _, h := range list {
		s := h.service()
		key := state.BindingKey{Frontend: state.Frontend{AddrPort: s.Ports[0].Frontends[0].AddrPort, Protocol: h.Protocol}}
		if b, taken := e.services.Get(key); taken && (b.Owner != state.OwnerCNI || len(b.Backends) != 1 || b.Backends[0] != h.Pod) {
			holder, _ := e.catalog.Holder(key)
			return fmt.Errorf("host port %s is taken: it leads to %v, of %v's Service %s; give the pod another", key.Frontend, b.Backends, b.Owner, holder)
		}
		services = append(services, s)
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
		s := h.service()
		b, ok := e.services.Get(state.BindingKey{Frontend: state.Frontend{AddrPort: s.Ports[0].Frontends[0].AddrPort, Protocol: h.Protocol}})
		if ok && b.Owner == state.OwnerCNI && len(b.Backends) == 1 && b.Backends[0] == h.Pod {
			ids = append(ids, s.ServiceID)
		}
	}
	return e.change(e.catalog.Plan(nil, ids), operation{})
}
