// SPDX-License-Identifier: Apache-2.0

package link

// What whoever puts programs on a new interface must know of it. It is told
// before the interface goes up: not one packet passes without them.

import (
	"net"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// attachPair is for a pair, whose programs sit on the host's end. gateway is the
// link address of the pod's next hop.
func (b *builder) attachPair(eth, host netlink.Link, gateway net.HardwareAddr) error {
	ep := b.endpoint(eth)
	ep.Placement, ep.IfIndex, ep.HostIf = state.HostEnd, host.Attrs().Index, b.HostIfName
	if gateway != nil {
		ep.NodeMAC = gateway
	}
	if host.Type() == "netkit" {
		ep.Attach = state.AttachNetkit
	}
	// A packet is handed to the pod past its own interface's MTU: the host's end
	// says what its siblings may send at once.
	ep.MTU = host.Attrs().MTU
	return b.attach(ep)
}

// attachInner is for an interface that has its programs inside the pod.
func (b *builder) attachInner(eth netlink.Link) error {
	ep := b.endpoint(eth)
	ep.Placement, ep.IfIndex = state.InPod, eth.Attrs().Index
	if kind := eth.Type(); kind == "macvlan" || kind == "ipvlan" {
		ep.Parent = eth.Attrs().ParentIndex
	}
	ep.NodeRoutes = b.Mode == IPVlanL3
	return b.attach(ep)
}

func (b *builder) endpoint(eth netlink.Link) state.Endpoint {
	a := eth.Attrs()
	ep := state.Endpoint{
		Netns: b.NetNS, IfName: b.IfName, PodIndex: a.Index, IP4: b.IPv4.Addr(), IP6: b.IPv6.Addr(),
		MAC: a.HardwareAddr, NodeMAC: make(net.HardwareAddr, 6), MTU: a.MTU, LinkMTU: a.MTU,
	}
	if ep.MAC == nil { // a netkit pair in l3 mode has Ethernet headers, but only zeros in them
		ep.MAC = make(net.HardwareAddr, 6)
	}
	return ep
}

func (b *builder) attach(ep state.Endpoint) (err error) {
	if b.Attach != nil {
		if err := b.inPod(func() error {
			ep.NetnsCookie, err = netns.Cookie()
			return err
		}); err != nil {
			return err
		}
		if err := b.Attach(ep); err != nil {
			return err
		}
	}
	if b.ToNodes != nil {
		b.RouteMTU, b.Tunnel, err = b.ToNodes()
	}
	return err
}
