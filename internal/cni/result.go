// SPDX-License-Identifier: Apache-2.0

package cni

// What ADD answers, and the last touches to a pod that need looking at it.

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
)

// pod is a handle into a container's namespace and its interface.
type pod struct {
	file  *os.File
	h     *netlink.Handle
	link  netlink.Link
	addrs []netlink.Addr
}

func (p *plugin) openPod() (*pod, error) {
	path, ifname := p.netnsHere(), p.env.ifname
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	pd := &pod{file: f}
	if pd.h, err = netlink.NewHandleAt(vns.NsHandle(f.Fd()), unix.NETLINK_ROUTE); err != nil {
		pd.close()
		return nil, fmt.Errorf("netlink in %s: %w", p.env.netns, err)
	}
	if pd.link, err = pd.h.LinkByName(ifname); err != nil {
		pd.close()
		return nil, fmt.Errorf("interface %s in %s: %w", ifname, p.env.netns, err)
	}
	if pd.addrs, err = netns.AddrsIn(pd.h, pd.link); err != nil {
		pd.close()
		return nil, fmt.Errorf("list addresses of %s in %s: %w", ifname, p.env.netns, err)
	}
	return pd, nil
}

func (p *pod) close() {
	if p.h != nil {
		p.h.Close()
	}
	p.file.Close()
}

// prefix is the interface's own for the address; invalid: it does not have it.
func (p *pod) prefix(a netip.Addr) netip.Prefix {
	for _, x := range p.addrs {
		ip, _ := netip.AddrFromSlice(x.IP)
		if ones, _ := x.Mask.Size(); ip.Unmap() == a {
			return netip.PrefixFrom(a, ones)
		}
	}
	return netip.Prefix{}
}

// finishPod adds the routes that IPAM asked for, and describes the pod.
func (p *plugin) finishPod(a attachment, spec link.Spec, made link.Result, g addresses) (*types100.Result, error) {
	r := &types100.Result{CNIVersion: types100.ImplementedSpecVersion, DNS: p.DNS}
	if r.DNS.IsEmpty() {
		r.DNS = g.dns
	}
	r.Interfaces = append(hostInterfaces(spec, made), &types100.Interface{
		Name: a.IfName, Mac: made.PodMAC.String(), Mtu: made.PodMTU, Sandbox: p.env.netns,
	})
	if i := slices.IndexFunc(g.routes, func(w *types.Route) bool { return isDefault(w) && (w.MTU != 0 || w.AdvMSS != 0 || w.Priority != 0) }); i >= 0 {
		p.warn("ipam.routes: mtu, advmss and priority of the default route to %s are not obeyed: give mtu in the network's configuration, and the route a table where rules ask for it", &g.routes[i].Dst)
	}
	for _, x := range g.ips {
		gw, first := made.Gateway6, made.Default6
		if x.Prefix.Addr().Is4() {
			gw, first = made.Gateway4, made.Default4
		}
		// The default route may lead by another than what IPAM names beside the address.
		has, hop := x.Prefix, cmp.Or(x.Gateway, gw)
		if link.Routed(spec.Mode) {
			has, hop = netip.PrefixFrom(has.Addr(), has.Addr().BitLen()), gw
		}
		r.IPs = append(r.IPs, &types100.IPConfig{Interface: types100.Int(len(r.Interfaces) - 1), Address: ipNet(has), Gateway: hop.AsSlice()})
		if first {
			all := netip.PrefixFrom(gw, 0).Masked()
			r.Routes = append(r.Routes, &types.Route{Dst: ipNet(all), GW: gw.AsSlice()})
		}
		routes, err := p.addRoutes(routesOf(x.Prefix, has, hop, first, g.routes))
		if err != nil {
			return nil, err
		}
		r.Routes = append(r.Routes, routes...)
	}
	return r, nil
}

// hostInterfaces are those on the node that came with the pod.
func hostInterfaces(spec link.Spec, made link.Result) (out []*types100.Interface) {
	if spec.Mode == link.Bridge {
		out = append(out, &types100.Interface{Name: spec.Bridge(), Mac: made.ParentMAC.String(), Mtu: made.ParentMTU})
	}
	if link.HasHostEnd(spec.Mode) {
		out = append(out, &types100.Interface{Name: spec.HostIfName, Mac: made.HostMAC.String(), Mtu: made.HostMTU})
	}
	return out
}

// routesOf are the routes of one family that the pod is to have besides its
// default: those of IPAM, and for a second interface (not first), which has no default
// route, its own network. has is the address as the interface has it. One without a next
// hop leads by gw, and where there is none either to neighbours.
func routesOf(network, has netip.Prefix, gw netip.Addr, first bool, wanted []*types.Route) (out []*types.Route) {
	if !first && has.IsSingleIP() && !network.IsSingleIP() {
		out = append(out, &types.Route{Dst: ipNet(network.Masked()), GW: gw.AsSlice()})
	}
	for _, w := range wanted {
		if prefixOf(w.Dst).Addr().Is4() != network.Addr().Is4() || isDefault(w) {
			continue // the other family's, or the default, which stays with the first interface
		}
		w = w.Copy()
		own := hopOf(w)
		beside := has.Contains(own) || own.IsLinkLocalUnicast() && !has.IsSingleIP()
		if !own.IsValid() || gw.IsValid() && !beside {
			w.GW = gw.AsSlice()
		}
		out = append(out, w)
	}
	return out
}

// prefixOf is a network, of IPv4 also where that is written as IPv6.
func prefixOf(n net.IPNet) netip.Prefix {
	a, _ := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), ones)
}

// isDefault says whether a route is what the pod's default route is made of. In a table of
// its own it is one like others: a rule asks for it.
func isDefault(r *types.Route) bool {
	return prefixOf(r.Dst).Bits() == 0 && (r.Table == nil || *r.Table == unix.RT_TABLE_UNSPEC || *r.Table == unix.RT_TABLE_MAIN)
}

// hopOf is a route's own next hop. 0.0.0.0, which DHCP has (RFC 3442), is none.
func hopOf(r *types.Route) netip.Addr {
	a, _ := netip.AddrFromSlice(r.GW)
	if a = a.Unmap(); a.IsUnspecified() {
		return netip.Addr{}
	}
	return a
}

// addRoutes adds routes to the pod, and answers them as they are there: not those to
// where another interface leads already, and with the MTU that the link gave them.
func (p *plugin) addRoutes(routes []*types.Route) ([]*types.Route, error) {
	if len(routes) == 0 {
		return nil, nil
	}
	pd, err := p.openPod()
	if err != nil {
		return nil, err
	}
	defer pd.close()
	var made []*types.Route
	for _, w := range routes {
		r := &netlink.Route{LinkIndex: pd.link.Attrs().Index, Dst: &w.Dst, Gw: w.GW, Priority: w.Priority, MTU: w.MTU, AdvMSS: w.AdvMSS}
		if w.GW != nil {
			r.Flags = unix.RTNH_F_ONLINK
		} else {
			r.Scope = netlink.SCOPE_LINK
		}
		if w.Table != nil {
			r.Table = *w.Table
		}
		ours, err := link.AddRoute(pd.h, r)
		if err != nil {
			return nil, fmt.Errorf("add route to %s by %s: %w", r.Dst, p.env.ifname, err)
		}
		if ours {
			w.MTU = r.MTU
			made = append(made, w)
		}
	}
	return made, nil
}

func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// print writes the result in the configuration's version.
func (p *plugin) print(r *types100.Result) error {
	if r == nil { // chained: the result before us, as it came
		return p.printPrevious()
	}
	if p.CNIVersion >= "1" {
		return json.NewEncoder(p.out).Encode(newResult(r, p.CNIVersion))
	}
	v, err := r.GetAsVersion(p.CNIVersion)
	if err != nil {
		return codedf(types.ErrIncompatibleCNIVersion, "answer in version %s: %v", p.CNIVersion, err)
	}
	return json.NewEncoder(p.out).Encode(v)
}

// result is a types100.Result, which encodes itself twice, and reads itself in
// between, to leave out an empty dns.
type result struct {
	CNIVersion string                `json:"cniVersion"`
	Interfaces []*types100.Interface `json:"interfaces,omitempty"`
	IPs        []*types100.IPConfig  `json:"ips,omitempty"`
	Routes     []*types.Route        `json:"routes,omitempty"`
	DNS        *types.DNS            `json:"dns,omitempty"`
}

func newResult(r *types100.Result, version string) result {
	out := result{version, r.Interfaces, r.IPs, r.Routes, nil}
	if !r.DNS.IsEmpty() {
		out.DNS = &r.DNS
	}
	return out
}

func (p *plugin) printPrevious() error {
	fields := make(map[string]json.RawMessage)
	if err := json.Unmarshal(p.PrevResult, &fields); err != nil {
		return err
	}
	if _, ok := fields["cniVersion"]; ok {
		_, err := p.out.Write(append(p.PrevResult, '\n'))
		return err
	}
	fields["cniVersion"], _ = json.Marshal(p.CNIVersion)
	return json.NewEncoder(p.out).Encode(fields)
}
