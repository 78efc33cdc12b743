// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/ipam"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/state"
)

// add connects a container, or leaves nothing of it.
func (p *plugin) add() error {
	if err := p.Validate(); err != nil {
		return err
	}
	if err := p.checkNetNS(); err != nil {
		return err
	}
	if p.Mode != Chained && p.hasPrevResult() {
		return invalid("mode", "%q makes the interface, but another plugin has made one before (prevResult): use mode chained", p.Mode)
	}
	if err := p.supported(); err != nil {
		return err
	}
	a := p.attachment()
	a.State, a.Masquerade, a.Bandwidth = stateMaking, p.masqueradeGroup(), p.RuntimeConfig.Bandwidth
	a.HostPorts = len(p.RuntimeConfig.PortMappings) > 0
	if err := p.settle(a); err != nil {
		return err
	}
	left, err := p.store.claim(&a, p.by)
	if err != nil {
		return err
	}
	if left != nil {
		if err := p.undo(*left, false); err != nil {
			return fmt.Errorf("clean up what a killed ADD of %s left: %w", a.key(), err)
		}
		if err := p.store.Write(a.file(), a); err != nil {
			return err
		}
	}
	result, err := p.make(&a)
	if err == nil {
		a.State, a.Agent = stateReady, false
		err = p.store.Write(a.file(), a)
	}
	if err != nil {
		return p.undoFailed(a, err)
	}
	return p.print(result)
}

// supported refuses a mode that this kernel does not have.
func (p *plugin) supported() error {
	if err := link.Supported(p.Mode); err != nil {
		return coded(types.ErrUnsupportedField, err)
	}
	return nil
}

// undoFailed takes back what a failed ADD made; its error stays the answer. Whoever has the
// addresses of an endpoint that was never made keeps what leads to them.
func (p *plugin) undoFailed(a attachment, err error) error {
	if a.Endpoint == 0 && a.Mode != Chained {
		a.Addrs = nil
	}
	undo := p.undo(a, true)
	if undo == nil {
		undo = p.store.Forget(a.file())
	}
	if undo != nil { // the record stays, for DEL
		p.warn("clean up after a failed ADD: %v", undo)
	}
	return err
}

// make does the work of ADD. a is filled in as things become known.
func (p *plugin) make(a *attachment) (*types100.Result, error) {
	if p.Mode == Chained {
		return p.makeChained(a)
	}
	var given addresses
	var lease func() (link.Lease, error)
	if leases(p.IPAM.Type) {
		lease = func() (link.Lease, error) { return p.lease(a, &given) }
	} else if err := p.allocate(a, &given); err != nil {
		return nil, err
	}
	spec, err := p.linkSpec(*a, given, lease)
	if err != nil {
		return nil, err
	}
	if a.Uplink = spec.Uplink; a.Masquerade != "" || link.HasShim(a.Mode) { // needed to clean up
		if err := p.store.Write(a.file(), *a); err != nil {
			return nil, err
		}
	}
	if err := p.keepDevice(a, &spec); err != nil {
		return nil, err
	}
	spec.Attach = func(ep state.Endpoint) error {
		if a.Endpoint != 0 { // the one without addresses, by which the network was asked
			if err := p.detach(*a, a.whereabouts()); err != nil {
				return err
			}
		}
		return p.attach(a, engine.EndpointSpec{Made: &ep})
	}
	made, err := engine.Connect(p.scope(), spec)
	if err != nil {
		return nil, linkError(*a, err)
	}
	for _, note := range made.BigTCP.Notes {
		p.warn("%s", note)
	}
	result, err := p.finishPod(*a, spec, made, given)
	if err != nil {
		return nil, err
	}
	if err := p.forward(spec.IPv4.IsValid(), spec.IPv6.IsValid()); err != nil {
		return nil, err
	}
	if err := p.masqueradeAdd(*a); err != nil {
		return nil, err
	}
	return result, nil
}

// linkError gives the codes that runtimes know.
func linkError(a attachment, err error) error {
	if errors.Is(err, link.ErrExists) || errors.Is(err, link.ErrForeign) || errors.Is(err, engine.ErrExists) {
		return codedf(errExists, "interface %s exists already: %v", a.IfName, err)
	}
	return err
}

// attach puts the datapath on the interface, of which s says more.
func (p *plugin) attach(a *attachment, s engine.EndpointSpec) error {
	s.Netns, s.IfName, s.Owner, s.ServicePath = a.NetNS, a.IfName, state.OwnerCNI, state.ServicePath(p.ServicePath)
	s.Labels, s.Pod, s.OwnQdiscs = p.Args.CNI.Labels, p.pod(), len(a.Bandwidth) > 0
	if p.Masquerade {
		s.Masquerade = &state.Masquerade{Inside: p.inside()}
	}
	r := request{Op: opAdd, Spec: s}
	if s.Made == nil || len(s.Made.Addrs()) > 0 { // else it is about to ask for them
		r.Ports = p.RuntimeConfig.PortMappings
	}
	ep, err := p.node(r)
	if err == nil {
		a.Endpoint, a.Addrs = ep.ID, ep.Addrs()
	}
	return linkError(*a, err)
}

// pod is what the runtime tells of whose container it is.
func (p *plugin) pod() state.PodRef {
	return state.PodRef{Namespace: p.cniArgs["K8S_POD_NAMESPACE"], Name: p.cniArgs["K8S_POD_NAME"], UID: p.cniArgs["K8S_POD_UID"]}
}

// addresses are what IPAM gave, own or delegated.
type addresses struct {
	ips    []ipam.Allocation
	routes []*types.Route
	dns    types.DNS
}

func (g addresses) of(v4 bool) ipam.Allocation {
	for _, a := range g.ips {
		if a.Prefix.Addr().Is4() == v4 {
			return a
		}
	}
	return ipam.Allocation{}
}

// gateway is the next hop of a family's default route: that route's own where an IPAM
// plugin gave one, for pods on a segment that it knows, else the one beside the address.
// Zero: it named none.
func (p *plugin) gateway(g addresses, v4 bool) netip.Addr {
	if p.IPAM.Type != OwnIPAM && link.OnSegment(p.Mode) && g.of(v4).Prefix.IsValid() {
		for _, r := range g.routes {
			if prefixOf(r.Dst).Addr().Is4() == v4 && isDefault(r) && hopOf(r).IsValid() {
				return hopOf(r)
			}
		}
	}
	return g.of(v4).Gateway
}

// lease asks IPAM when the interface is there. The record learns what has to be
// cleaned up: not the id, which another is about to take the place of.
func (p *plugin) lease(a *attachment, g *addresses) (link.Lease, error) {
	if err := p.allocate(a, g); err != nil {
		return link.Lease{}, err
	}
	r := *a
	r.Endpoint = 0
	return link.Lease{IPv4: g.of(true).Prefix, IPv6: g.of(false).Prefix, Gateway4: p.gateway(*g, true), Gateway6: p.gateway(*g, false)},
		p.store.Write(r.file(), r)
}

// allocate asks IPAM.
func (p *plugin) allocate(a *attachment, g *addresses) (err error) {
	if p.IPAM.Type == OwnIPAM {
		*g, err = p.ownAddresses(*a)
	} else {
		*g, err = p.delegatedAddresses()
	}
	if err != nil {
		return err
	}
	for _, x := range g.ips {
		a.Addrs = append(a.Addrs, x.Prefix.Addr())
		if p.IPAM.Type != OwnIPAM {
			a.Given = append(a.Given, x)
		}
	}
	return nil
}

func (p *plugin) ownAddresses(a attachment) (addresses, error) {
	want, err := p.wantedIPs(p.cniArgs)
	if err != nil {
		return addresses{}, err
	}
	list, err := p.take(a.owner(), want)
	if errors.Is(err, ipam.ErrExhausted) || errors.Is(err, ipam.ErrTaken) {
		return addresses{}, coded(errExhausted, err)
	}
	g := addresses{ips: list}
	for i := range p.IPAM.Routes {
		g.routes = append(g.routes, &p.IPAM.Routes[i])
	}
	return g, err
}

// delegatedAddresses takes at most one address of each family: an endpoint has
// no more.
func (p *plugin) delegatedAddresses() (g addresses, err error) {
	out, err := delegate(p.IPAM.Type, p.raw, p.env)
	if err != nil {
		return g, err
	}
	r, err := parseResult(out, p.CNIVersion)
	if err != nil {
		return g, err
	}
	for _, ip := range r.IPs {
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return g, codedf(types.ErrDecodingFailure, "IPAM plugin %s gave no address in %q", p.IPAM.Type, ip)
		}
		addr = addr.Unmap()
		ones, _ := ip.Address.Mask.Size()
		gw, _ := netip.AddrFromSlice(ip.Gateway)
		if g.of(addr.Is4()).Prefix.IsValid() {
			return g, codedf(types.ErrInvalidNetworkConfig, "ipam: %s gave a second address of one family, %s: mustang takes one of each", p.IPAM.Type, addr)
		}
		g.ips = append(g.ips, ipam.Allocation{Prefix: netip.PrefixFrom(addr, ones), Gateway: gw.Unmap()})
	}
	if len(g.ips) == 0 {
		return g, codedf(types.ErrInvalidNetworkConfig, "ipam: %s gave no address", p.IPAM.Type)
	}
	g.routes, g.dns = r.Routes, r.DNS
	return g, nil
}

func (p *plugin) linkSpec(a attachment, g addresses, lease func() (link.Lease, error)) (link.Spec, error) {
	s := a.linkSpec()
	s.Here, s.Lease, s.Foreign = p.here, lease, p.IPAM.Type != OwnIPAM
	mac, err := p.wantedMAC(p.cniArgs)
	if err != nil {
		return s, err
	}
	v4, v6 := g.of(true), g.of(false)
	s.MAC, s.IPv4, s.IPv6 = mac, v4.Prefix, v6.Prefix
	if s.Uplink, s.MTU, err = p.uplinkAndMTU(); err != nil {
		return s, err
	}
	p.applyLocalMTU(&s)
	s.BigTCP = p.BigTCP
	if !link.Routed(p.Mode) {
		s.Gateway4, s.Gateway6 = p.gateway(g, true), p.gateway(g, false)
	}
	if err := s.Validate(); err != nil {
		return s, codedf(types.ErrInvalidNetworkConfig, "mode %s: %v", p.Mode, err)
	}
	return s, nil
}
