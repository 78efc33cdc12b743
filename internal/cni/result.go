// SPDX-License-Identifier: Apache-2.0

package cni

// What ADD answers, and the last touches to a pod that need looking at it.

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/link"
)

// pod is a handle into a container's namespace and its interface.
type pod struct {
	file  *os.File
	h     *netlink.Handle
	link  netlink.Link
	addrs []netlink.Addr
}

func openPod(path, ifname string) (*pod, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	p := &pod{file: f}
	if p.h, err = netlink.NewHandleAt(vns.NsHandle(f.Fd()), unix.NETLINK_ROUTE); err != nil {
		p.close()
		return nil, fmt.Errorf("netlink in %s: %w", path, err)
	}
	if p.link, err = p.h.LinkByName(ifname); err != nil {
		p.close()
		return nil, fmt.Errorf("interface %s in %s: %w", ifname, path, err)
	}
	if p.addrs, err = p.h.AddrList(p.link, netlink.FAMILY_ALL); err != nil {
		p.close()
		return nil, fmt.Errorf("list addresses of %s in %s: %w", ifname, path, err)
	}
	return p, nil
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
	pd, err := openPod(a.NetNS, a.IfName)
	if err != nil {
		return nil, err
	}
	defer pd.close()
	r := &types100.Result{CNIVersion: types100.ImplementedSpecVersion, DNS: p.DNS}
	if r.DNS.IsEmpty() {
		r.DNS = g.dns
	}
	r.Interfaces = append(hostInterfaces(spec, made), &types100.Interface{
		Name: a.IfName, Mac: pd.link.Attrs().HardwareAddr.String(), Mtu: pd.link.Attrs().MTU, Sandbox: p.env.netns,
	})
	gw4, gw6 := spec.Gateways()
	for _, x := range g.ips {
		gw := gw6
		if x.Prefix.Addr().Is4() {
			gw = gw4
		}
		has := pd.prefix(x.Prefix.Addr())
		if !has.IsValid() {
			return nil, fmt.Errorf("%s did not get its address %s", a.IfName, x.Prefix.Addr())
		}
		r.IPs = append(r.IPs, &types100.IPConfig{Interface: types100.Int(len(r.Interfaces) - 1), Address: ipNet(has), Gateway: gw.AsSlice()})
		routes, err := pd.addRoutes(x.Prefix, has, gw, g.routes)
		if err != nil {
			return nil, err
		}
		r.Routes = append(r.Routes, routes...)
	}
	return r, nil
}

// hostInterfaces are those on the node that came with the pod.
func hostInterfaces(spec link.Spec, made link.Result) (out []*types100.Interface) {
	for _, index := range []int{made.ParentIfIndex, made.HostIfIndex} {
		if index == 0 {
			continue
		}
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			continue
		}
		attrs := l.Attrs()
		if attrs.Name == spec.HostIfName || spec.Mode == link.Bridge {
			out = append(out, &types100.Interface{Name: attrs.Name, Mac: attrs.HardwareAddr.String(), Mtu: attrs.MTU})
		}
	}
	return out
}

// addRoutes adds one family's: those of IPAM, and for a second interface,
// which has no default route, its own network. It answers all of ours.
func (p *pod) addRoutes(network, has netip.Prefix, gw netip.Addr, wanted []*types.Route) (out []*types.Route, err error) {
	all := netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	if network.Addr().Is4() {
		all = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	isDefault, err := p.hasRoute(all)
	if err != nil {
		return nil, err
	}
	if isDefault {
		out = append(out, &types.Route{Dst: ipNet(all), GW: gw.AsSlice()})
	} else if has.IsSingleIP() && !network.IsSingleIP() {
		wanted = append([]*types.Route{{Dst: ipNet(network.Masked())}}, wanted...)
	}
	for _, w := range wanted {
		dst, _ := netip.AddrFromSlice(w.Dst.IP)
		ones, _ := w.Dst.Mask.Size()
		if dst = dst.Unmap(); dst.Is4() != network.Addr().Is4() || ones == 0 {
			continue // the other family's, or the default, which stays with the first interface
		}
		via := gw
		if given, ok := netip.AddrFromSlice(w.GW); ok && has.Contains(given.Unmap()) {
			via = given.Unmap()
		}
		r := &netlink.Route{LinkIndex: p.link.Attrs().Index, Dst: &net.IPNet{IP: dst.AsSlice(), Mask: w.Dst.Mask}, Priority: w.Priority, MTU: w.MTU, AdvMSS: w.AdvMSS}
		if via.IsValid() {
			r.Gw, r.Flags = via.AsSlice(), unix.RTNH_F_ONLINK
		} else {
			r.Scope = netlink.SCOPE_LINK
		}
		if w.Table != nil {
			r.Table = *w.Table
		}
		if err := p.h.RouteReplace(r); err != nil {
			return nil, fmt.Errorf("add route to %s by %s: %w", r.Dst, p.link.Attrs().Name, err)
		}
		answer := w.Copy()
		answer.GW = r.Gw
		out = append(out, answer)
	}
	return out, nil
}

func (p *pod) hasRoute(dst netip.Prefix) (bool, error) {
	family := unix.AF_INET6
	if dst.Addr().Is4() {
		family = unix.AF_INET
	}
	net := ipNet(dst)
	list, err := p.h.RouteListFiltered(family, &netlink.Route{LinkIndex: p.link.Attrs().Index, Dst: &net}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_DST)
	if err != nil {
		return false, fmt.Errorf("list routes of the pod: %w", err)
	}
	return len(list) > 0, nil
}

func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// print writes the result in the configuration's version.
func (p *plugin) print(r *types100.Result) error {
	if r == nil { // chained: the result before us, as it came
		return p.printPrevious()
	}
	v, err := r.GetAsVersion(p.CNIVersion)
	if err != nil {
		return codedf(types.ErrIncompatibleCNIVersion, "answer in version %s: %v", p.CNIVersion, err)
	}
	return json.NewEncoder(p.out).Encode(v)
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
