// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// ErrElsewhere is about a pair whose other end, or an interface whose parent, is
// not on this node.
var ErrElsewhere = errors.New("is not in this network namespace")

// discover finds out everything about the interface that spec names.
func discover(spec EndpointSpec) (state.Endpoint, error) {
	path, err := filepath.Abs(spec.Netns)
	if err != nil {
		return state.Endpoint{}, err
	}
	ns, err := netns.Open(path)
	if err != nil {
		return state.Endpoint{}, fmt.Errorf("netns %s: %w; `ip netns` lists the named ones, and /proc/PID/ns/net is a process's", path, err)
	}
	defer ns.Close()
	ep := state.Endpoint{Netns: path, IfName: spec.IfName, Owner: spec.Owner, ServicePath: spec.ServicePath, Labels: spec.Labels, Ports: spec.Ports, Pod: spec.Pod}
	home, err := netns.Current()
	if err != nil {
		return ep, err
	}
	defer home.Close()
	var link netlink.Link
	homeID := -1 // the node's namespace, as the pod's calls it
	if err := netns.DoFile(ns, func() (err error) {
		if link, err = examine(&ep); err != nil {
			return err
		}
		homeID, err = netlink.GetNetNsIdByFd(int(home.Fd()))
		return err
	}); err != nil {
		return ep, err
	}
	if home, err := netns.Cookie(); err == nil && home == ep.NetnsCookie {
		return ep, fmt.Errorf("netns %s is this node's own; give the pod's", path)
	}
	attrs := link.Attrs()
	switch kind := link.Type(); {
	case spec.InPod:
	case kind == "netkit":
		ep.Attach = datapath.AttachNetkit
		return ep, hostEnd(&ep, ns, link)
	case kind == "veth":
		return ep, hostEnd(&ep, ns, link)
	}
	ep.Placement = state.InPod
	ep.IfIndex = attrs.Index
	if l, ok := link.(*netlink.IPVlan); ok {
		ep.NodeRoutes = l.Mode != netlink.IPVLAN_MODE_L2
	}
	// An index means nothing without its namespace.
	if kind := link.Type(); (kind == "macvlan" || kind == "ipvlan") && attrs.NetNsID >= 0 {
		switch {
		case attrs.NetNsID == homeID:
			ep.Parent = attrs.ParentIndex
		case !spec.InPod:
			return ep, fmt.Errorf("the parent link of %s in %s %w; run mustang in the one that it is in (`nsenter --net=…`), or attach inside the pod alone (`--in-pod`)", ep.IfName, ep.Netns, ErrElsewhere)
		}
	}
	return ep, nil
}

// examine fills in what the pod's namespace knows. It runs there.
func examine(ep *state.Endpoint) (netlink.Link, error) {
	l, err := netlink.LinkByName(ep.IfName)
	if err != nil {
		return nil, fmt.Errorf("interface %q in %s: %w; it has %s", ep.IfName, ep.Netns, err, strings.Join(linkNames(), ", "))
	}
	attrs := l.Attrs()
	ep.PodIndex, ep.MTU, ep.LinkMTU, ep.MAC = attrs.Index, attrs.MTU, attrs.MTU, linkAddress(l)
	ep.NodeMAC = make(net.HardwareAddr, 6)
	if attrs.Flags&net.FlagLoopback != 0 {
		return nil, fmt.Errorf("interface %q in %s is a loopback; give the one that connects the pod", ep.IfName, ep.Netns)
	}
	if len(ep.MAC) != 6 {
		return nil, fmt.Errorf("interface %q in %s has no Ethernet address; only Ethernet interfaces can be endpoints", ep.IfName, ep.Netns)
	}
	addrs, err := netns.Addrs(l)
	if err != nil {
		return nil, fmt.Errorf("list addresses of %s: %w", ep.IfName, err)
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		ip = ip.Unmap()
		if !ok || a.Scope != unix.RT_SCOPE_UNIVERSE || a.Flags&(unix.IFA_F_TEMPORARY|unix.IFA_F_DADFAILED) != 0 {
			continue
		}
		if ip.Is4() && !ep.IP4.IsValid() {
			ep.IP4 = ip
		} else if ip.Is6() && !ep.IP6.IsValid() {
			ep.IP6 = ip
		}
	}
	if len(ep.Addrs()) == 0 {
		return nil, fmt.Errorf("interface %q in %s has no global address; give it one first (`ip -n … addr add`)", ep.IfName, ep.Netns)
	}
	if mac := gatewayMAC(l); mac != nil {
		ep.NodeMAC = mac
	}
	ep.Router6 = linkLocalRouter(l)
	ep.NetnsCookie, err = netns.Cookie()
	return l, err
}

// linkAddress is l's address. A netkit pair in l3 mode has Ethernet headers, but
// only zeros in them.
func linkAddress(l netlink.Link) net.HardwareAddr {
	if mac := l.Attrs().HardwareAddr; mac != nil || l.Type() != "netkit" {
		return mac
	}
	return make(net.HardwareAddr, 6)
}

// linkNames are those of the calling thread's namespace. In a pod's they may hold anything,
// also what a terminal obeys.
func linkNames() []string {
	links, _ := netns.Links()
	names := make([]string, len(links))
	for i, l := range links {
		names[i] = l.Attrs().Name
		if quoted := strconv.Quote(names[i]); quoted != `"`+names[i]+`"` {
			names[i] = quoted
		}
	}
	return names
}

// gatewayMAC is the address of the default gateway behind l, when it is known.
func gatewayMAC(l netlink.Link) net.HardwareAddr {
	routes, err := netns.RoutesBy(l)
	if err != nil {
		return nil
	}
	neighbours, err := netns.Neighbours(l.Attrs().Index)
	if err != nil {
		return nil
	}
	for _, r := range routes {
		if r.Gw == nil || !isDefault(r.Dst) {
			continue
		}
		for _, n := range neighbours {
			if n.IP.Equal(r.Gw) && len(n.HardwareAddr) == 6 {
				return n.HardwareAddr
			}
		}
	}
	return nil
}

// linkLocalRouter is the next hop of l's default route of IPv6, where that is link-local.
func linkLocalRouter(l netlink.Link) netip.Addr {
	routes, _ := netns.RoutesBy(l)
	for _, r := range routes {
		if gw, ok := netip.AddrFromSlice(r.Gw); ok && isDefault(r.Dst) && gw.Is6() && gw.IsLinkLocalUnicast() {
			return gw
		}
	}
	return netip.Addr{}
}

// isDefault is true for a route to everywhere.
func isDefault(dst *net.IPNet) bool {
	if dst == nil {
		return true
	}
	ones, _ := dst.Mask.Size()
	return ones == 0
}

// hostEnd finds the node's end of the pod's veth or netkit pair, and makes sure
// that it is the one: an ifindex means nothing without its namespace.
func hostEnd(ep *state.Endpoint, ns *os.File, podEnd netlink.Link) error {
	pod := podEnd.Attrs()
	elsewhere := fmt.Errorf("the other end of %s in %s %w; run mustang in the one that it is in (`nsenter --net=…`), or attach inside the pod (`--in-pod`)", ep.IfName, ep.Netns, ErrElsewhere)
	l, err := netlink.LinkByIndex(pod.ParentIndex)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return elsewhere
	}
	if err != nil {
		return fmt.Errorf("look up the host end of %s: %w", ep.IfName, err)
	}
	id, err := netlink.GetNetNsIdByFd(int(ns.Fd()))
	if err != nil {
		return fmt.Errorf("ask for the id of %s: %w", ep.Netns, err)
	}
	attrs := l.Attrs()
	if l.Type() != podEnd.Type() || attrs.ParentIndex != pod.Index || attrs.NetNsID != id {
		return elsewhere
	}
	if nk, ok := l.(*netlink.Netkit); ok && !nk.IsPrimary() {
		return fmt.Errorf("%s in %s is the primary end of its netkit pair, and whoever holds that rules the other; create the pair on the node, with the peer in the pod", ep.IfName, ep.Netns)
	}
	ep.Placement = state.HostEnd
	ep.IfIndex, ep.HostIf, ep.NodeMAC = attrs.Index, attrs.Name, linkAddress(l)
	// A packet is handed to the pod past its own interface's MTU: the host's end
	// says what its siblings may send at once.
	ep.MTU = attrs.MTU
	if attrs.MasterIndex != 0 {
		// On a bridge the gateway's address is the bridge's, and so is its MAC.
		if master, err := netlink.LinkByIndex(attrs.MasterIndex); err == nil && master.Type() == "bridge" {
			ep.NodeMAC = master.Attrs().HardwareAddr
		}
	}
	return nil
}
