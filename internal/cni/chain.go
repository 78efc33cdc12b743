// SPDX-License-Identifier: Apache-2.0

package cni

// Mode chained: another plugin made the interface, mustang puts its datapath
// on it, and takes it off again.

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/mustang-net/mustang/internal/engine"
)

// makeChained attaches to the interface that prevResult names. The result is
// nil: prevResult passes untouched.
func (p *plugin) makeChained(a *attachment) (*types100.Result, error) {
	prev, err := p.previous()
	if err != nil {
		return nil, err
	}
	if _, err := p.wantedMAC(p.cniArgs); err != nil {
		return nil, err
	}
	index := slices.IndexFunc(prev.Interfaces, func(i *types100.Interface) bool {
		return i.Name == p.env.ifname && i.Sandbox != ""
	})
	if index < 0 {
		return nil, invalid("prevResult", "has no interface %s in the container: put mustang behind the plugin that makes it", p.env.ifname)
	}
	for _, ip := range prev.IPs {
		if addr, ok := netip.AddrFromSlice(ip.Address.IP); ok && (ip.Interface == nil || *ip.Interface == index) {
			a.Addrs = append(a.Addrs, addr.Unmap())
		}
	}
	if a.Masquerade != "" {
		if err := p.store.Write(a.file(), *a); err != nil {
			return nil, err
		}
		if err := p.masqueradeAdd(*a); err != nil {
			return nil, err
		}
	}
	err = p.attach(a, engine.EndpointSpec{})
	if errors.Is(err, engine.ErrElsewhere) { // one end of a pair, as host-device may move it
		err = p.attach(a, engine.EndpointSpec{InPod: true})
	}
	return nil, err
}

// previous is the result of the plugins before.
func (p *plugin) previous() (*types100.Result, error) {
	if !p.hasPrevResult() {
		return nil, invalid("mode", "\"chained\" needs another plugin before it in the list (prevResult is missing): put mustang behind the one that makes the interface, or use another mode")
	}
	r, err := parseResult(p.PrevResult, p.CNIVersion)
	if err != nil {
		return nil, codedf(types.ErrDecodingFailure, "prevResult: %v", err)
	}
	return r, nil
}
