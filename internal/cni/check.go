// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// faults are the things that CHECK found broken, each a sentence.
type faults []string

func (f *faults) add(format string, args ...any) { *f = append(*f, fmt.Sprintf(format, args...)) }

// check names everything of an attachment that is not as ADD left it. Routes
// that prevResult does not list are others' business.
func (p *plugin) check() error {
	if err := p.Validate(); err != nil {
		return err
	}
	if !p.hasPrevResult() {
		return invalid("prevResult", "is missing, and CHECK compares with it")
	}
	prev, err := parseResult(p.PrevResult, p.CNIVersion)
	if err != nil {
		return err
	}
	if err := p.checkNetNS(); err != nil {
		return err
	}
	a, found, err := p.store.find(p.attachment())
	if err != nil {
		return err
	}
	var f faults
	if !found || a.State != stateReady {
		f.add("the attachment has no complete record in %s", p.store.Path)
	}
	p.checkInterfaces(prev, &f)
	if err := p.checkEndpoint(a, &f); err != nil {
		return err
	}
	if found {
		p.checkReservations(a, &f)
		p.checkMasquerade(a, &f)
	}
	if err := p.checkIPAM(a, prev); isLater(err) {
		return err
	} else if err != nil {
		f.add("%v", err)
	}
	if len(f) > 0 {
		return types.NewError(errNotAsExpected, fmt.Sprintf("interface %s of container %s is not as expected", p.env.ifname, p.env.containerID), strings.Join(f, "; "))
	}
	return nil
}

// checkInterfaces compares with prevResult: interfaces, addresses, routes.
func (p *plugin) checkInterfaces(prev *types100.Result, f *faults) {
	pd, err := p.openPod()
	if err != nil {
		f.add("%v", err)
		return
	}
	defer pd.close()
	ours := -1
	for i, x := range prev.Interfaces {
		switch {
		case x.Sandbox == "":
			checkLink(nil, x, "on the node", f)
		case x.Name == p.env.ifname:
			ours = i
			checkLink(pd.link, x, "in the container", f)
		}
	}
	if ours < 0 {
		f.add("prevResult lists no interface %s in the container", p.env.ifname)
	}
	for _, ip := range prev.IPs {
		addr, _ := netip.AddrFromSlice(ip.Address.IP)
		if ip.Interface != nil && *ip.Interface != ours {
			continue
		}
		if addr = addr.Unmap(); !pd.prefix(addr).IsValid() {
			f.add("address %s is missing from %s", addr, p.env.ifname)
		} else if link.Routed(p.Mode) {
			checkHostRoute(addr, f)
		}
	}
	for _, r := range prev.Routes {
		// By whatever interface: a second one leaves the default to the first.
		if has, err := pd.hasRouteAnywhere(r); err == nil && !has {
			f.add("the route to %s is missing from the container", r.Dst.String())
		}
	}
}

// checkLink compares one interface; l is looked up on the node when nil.
func checkLink(l netlink.Link, want *types100.Interface, where string, f *faults) {
	if l == nil {
		var err error
		if l, err = netlink.LinkByName(want.Name); err != nil {
			f.add("interface %s is missing %s", want.Name, where)
			return
		}
	}
	attrs := l.Attrs()
	if attrs.Flags&net.FlagUp == 0 {
		f.add("interface %s %s is down", want.Name, where)
	}
	if want.Mac != "" && !strings.EqualFold(want.Mac, attrs.HardwareAddr.String()) {
		f.add("interface %s %s has MAC address %s, not %s", want.Name, where, attrs.HardwareAddr, want.Mac)
	}
	// A bridge's is the smallest of its ports, which come and go.
	if want.Mtu != 0 && want.Mtu != attrs.MTU && l.Type() != "bridge" {
		f.add("interface %s %s has MTU %d, not %d", want.Name, where, attrs.MTU, want.Mtu)
	}
}

// checkHostRoute wants the node to know the way to a routed pod.
func checkHostRoute(a netip.Addr, f *faults) {
	family := netlink.FAMILY_V6
	if a.Is4() {
		family = netlink.FAMILY_V4
	}
	dst := ipNet(netip.PrefixFrom(a, a.BitLen()))
	if list, err := netns.Routes(family, &netlink.Route{Dst: &dst}, netlink.RT_FILTER_DST); err == nil && len(list) == 0 {
		f.add("the node's route to %s is missing", a)
	}
}

// hasRouteAnywhere looks for a route in its own table.
func (p *pod) hasRouteAnywhere(want *types.Route) (bool, error) {
	family, r := netlink.FAMILY_V6, &netlink.Route{Dst: &want.Dst, Table: unix.RT_TABLE_MAIN}
	if want.Dst.IP.To4() != nil {
		family = netlink.FAMILY_V4
	}
	if want.Table != nil && *want.Table != unix.RT_TABLE_UNSPEC {
		r.Table = *want.Table
	}
	list, err := netns.RoutesIn(p.h, family, r, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
	return len(list) > 0, err
}

// checkEndpoint asks the engine. Its error says that nobody can tell now.
func (p *plugin) checkEndpoint(a attachment, f *faults) error {
	_, err := p.node(request{Op: opCheck, Ports: p.RuntimeConfig.PortMappings, Where: engine.Whereabouts{ID: a.Endpoint, Netns: p.env.netns, IfName: p.env.ifname, Owner: state.OwnerCNI}})
	if isLater(err) {
		return err
	}
	if errors.Is(err, engine.ErrNotFound) {
		err = errors.New("the interface is not an endpoint: it has no Services and no policy")
	}
	if err != nil {
		f.add("%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return nil
}

func (p *plugin) checkReservations(a attachment, f *faults) {
	if a.IPAM != OwnIPAM {
		return
	}
	owners, err := p.store.ipam().Owners()
	if err != nil {
		f.add("%v", err)
		return
	}
	for _, addr := range a.Addrs {
		if owners[addr] != a.owner() {
			f.add("address %s is not reserved for the container", addr)
		}
	}
}

func (p *plugin) checkMasquerade(a attachment, f *faults) {
	if a.Masquerade == "" {
		return
	}
	missing, err := p.natTable().Missing(a.Masquerade, a.Addrs)
	if err != nil {
		f.add("%v", err)
	}
	for _, addr := range missing {
		f.add("address %s is not masqueraded (nftables table %s)", addr, p.natTable().Name)
	}
}

// checkIPAM passes CHECK on to a delegated plugin, which compares with what it
// gave: in routed modes, the interface has the addresses without their networks.
func (p *plugin) checkIPAM(a attachment, prev *types100.Result) error {
	if p.Mode == Chained || p.IPAM.Type == OwnIPAM {
		return nil
	}
	for _, ip := range prev.IPs {
		addr, _ := netip.AddrFromSlice(ip.Address.IP)
		for _, given := range a.Given {
			if given.Prefix.Addr() == addr.Unmap() {
				ip.Address, ip.Gateway = ipNet(given.Prefix), given.Gateway.AsSlice()
			}
		}
	}
	config, err := withPrevResult(p.raw, prev, p.CNIVersion)
	if err != nil {
		return err
	}
	if _, err := delegate(p.IPAM.Type, config, p.env); err != nil {
		return fmt.Errorf("IPAM plugin %s: %w", p.IPAM.Type, err)
	}
	return nil
}

// withPrevResult is config with r as prevResult, in the given version of both.
func withPrevResult(config []byte, r *types100.Result, version string) ([]byte, error) {
	v, err := r.GetAsVersion(version)
	if err != nil {
		return nil, err
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(config, &fields); err != nil {
		return nil, err
	}
	if fields["prevResult"], err = json.Marshal(v); err != nil {
		return nil, err
	}
	fields["cniVersion"], _ = json.Marshal(version)
	return json.Marshal(fields)
}
