// SPDX-License-Identifier: Apache-2.0

package lab

// Telling the nodes of each other.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Join says how nodes reach each other's pods. What is zero is mustang's default.
type Join struct {
	Mode        string   // direct or vxlan
	HostRouting string   // ebpf or legacy
	Underlay    string   // "ipv4" or "ipv6": nodes have addresses of this family only
	Devices     []string // to the other nodes
	VNI, Port   int
	// Kernel joins the nodes by plain routes and, with vxlan, a plain VXLAN device
	// with a forwarding entry for each node: without mustang.
	Kernel bool
}

type joinSettings struct {
	HostRouting string   `json:"hostRouting,omitempty"`
	Devices     []string `json:"devices,omitempty"`
	VNI         int      `json:"vni,omitempty"`
	Port        int      `json:"port,omitempty"`
}

type joinNode struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
	PodCIDRs  []string `json:"podCIDRs"`
	Mode      string   `json:"mode,omitempty"`
}

// Join joins the nodes: each is told of all by `mustang node apply`. Again, it
// replaces what was.
func (l *Lab) Join(ctx context.Context, j Join) error {
	if len(l.nodes) < 2 {
		return errors.New("a lab of one node has nothing to join: set Config.Nodes")
	}
	for _, n := range l.nodes {
		if err := n.Join(ctx, j); err != nil {
			return fmt.Errorf("join node %s: %w", n.Name, err)
		}
	}
	return nil
}

// Join tells this node alone of all.
func (n *Node) Join(ctx context.Context, j Join) error {
	if j.Kernel {
		return n.Do(func() error { return n.kernelRoutes(j) })
	}
	file := filepath.Join(n.lab.info.dir(), "nodes.json")
	list := []joinNode{}
	for _, n := range n.lab.nodes {
		list = append(list, joinNode{n.Name, n.underlay(j), []string{n.PodNet4.String(), n.PodNet6.String()}, j.Mode})
	}
	raw, err := json.Marshal(map[string]any{"settings": joinSettings{j.HostRouting, j.Devices, j.VNI, j.Port}, "nodes": list})
	if err == nil {
		err = os.WriteFile(file, raw, 0o600)
	}
	if err != nil {
		return err
	}
	_, err = n.Mustang(ctx, "node", "apply", "-f", file)
	return err
}

func (n *Node) underlay(j Join) []string {
	switch j.Underlay {
	case "ipv4":
		return []string{n.Wire4.String()}
	case "ipv6":
		return []string{n.Wire6.String()}
	}
	return []string{n.Wire4.String(), n.Wire6.String()}
}

const (
	kernelVXLAN    = "vx0"
	kernelVNI      = 1
	kernelVTEPPort = 4789
	vxlanOverhead  = 50
)

// kernelVTEP is the link address of a node's plain VXLAN device: the one that
// mustang's nodes give frames to it.
func (n *Node) kernelVTEP() []byte {
	b := n.Wire4.As4()
	return []byte{0x02, 0x6d, b[0], b[1], b[2], b[3]}
}

// kernelRoutes is what a router's manual would say.
func (n *Node) kernelRoutes(j Join) error {
	dev, mtu := Wire, 0
	if j.Mode == "vxlan" {
		dev, mtu = kernelVXLAN, n.lab.cfg.MTU-vxlanOverhead
		if err := n.makeVXLAN(j, mtu); err != nil {
			return err
		}
	}
	link, err := netlink.LinkByName(dev)
	if err != nil {
		return fmt.Errorf("look up %s: %w", dev, err)
	}
	for _, o := range n.lab.nodes {
		if o == n {
			continue
		}
		for net, via := range map[netip.Prefix]netip.Addr{o.PodNet4: o.Wire4, o.PodNet6: o.Wire6} {
			r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(net), Gw: via.AsSlice()}
			if j.Mode == "vxlan" {
				// The other device as a next hop: an address that no pod has.
				via = net.Addr()
				r.Gw, r.Flags = via.AsSlice(), int(netlink.FLAG_ONLINK)
				neigh := &netlink.Neigh{LinkIndex: r.LinkIndex, IP: via.AsSlice(), HardwareAddr: o.kernelVTEP(), State: netlink.NUD_PERMANENT}
				if err := netlink.NeighSet(neigh); err != nil {
					return fmt.Errorf("add neighbour %s: %w", via, err)
				}
			}
			if err := netlink.RouteReplace(r); err != nil {
				return fmt.Errorf("add route to %s: %w", net, err)
			}
		}
	}
	return nil
}

// makeVXLAN makes a plain VXLAN device: no learning, an entry for each node.
func (n *Node) makeVXLAN(j Join, mtu int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = kernelVXLAN, mtu, n.kernelVTEP()
	vni, port := j.VNI, j.Port
	if vni == 0 {
		vni = kernelVNI
	}
	if port == 0 {
		port = kernelVTEPPort
	}
	vx := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: vni, Port: port, SrcAddr: n.Wire4.AsSlice()}
	if err := netlink.LinkAdd(vx); err != nil {
		return fmt.Errorf("create %s: %w", kernelVXLAN, err)
	}
	if err := linkUp(kernelVXLAN); err != nil {
		return err
	}
	for _, o := range n.lab.nodes {
		if o == n {
			continue
		}
		e := &netlink.Neigh{LinkIndex: vx.Attrs().Index, Family: unix.AF_BRIDGE, State: netlink.NUD_PERMANENT | netlink.NUD_NOARP,
			Flags: netlink.NTF_SELF, IP: o.Wire4.AsSlice(), HardwareAddr: o.kernelVTEP()}
		if err := netlink.NeighAppend(e); err != nil {
			return fmt.Errorf("add forwarding entry for %s: %w", o.Name, err)
		}
	}
	return nil
}
