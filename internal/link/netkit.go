// SPDX-License-Identifier: Apache-2.0

package link

// netkit, routed like veth: a pair whose programs run as the other end
// transmits, without a pass through the backlog. The primary end is the
// node's; who holds it rules both. Unless it is to be open, the pair is made
// with the policy to drop everything while no program is attached: it opens with
// its programs, and closes when they go.

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
)

func (b *builder) addNetkit() (Result, error) {
	eth, host, err := b.makeNetkit()
	if err != nil {
		return Result{}, err
	}
	return b.routedPair(eth, host)
}

// makeNetkit creates the pair from the node, for that makes the node's end the
// primary one; the other appears in the pod.
func (b *builder) makeNetkit() (eth, host netlink.Link, err error) {
	policy, mode := netlink.NETKIT_POLICY_BLACKHOLE, netlink.NetkitMode(netlink.NETKIT_MODE_L2)
	if b.Open {
		policy = netlink.NETKIT_POLICY_FORWARD
	}
	var hostMAC, podMAC net.HardwareAddr
	if b.Mode == NetkitL3 {
		mode = netlink.NETKIT_MODE_L3
	} else {
		hostMAC, podMAC = randomMAC(), b.podMAC()
	}
	nk := &netlink.Netkit{LinkAttrs: b.attrs(b.HostIfName, hostMAC), Mode: mode, Policy: policy, PeerPolicy: policy,
		Scrub: netlink.NETKIT_SCRUB_DEFAULT, PeerScrub: netlink.NETKIT_SCRUB_DEFAULT}
	peer := b.attrs(b.IfName, podMAC)
	peer.Namespace = netlink.NsFd(b.podNS.Fd())
	nk.SetPeerAttrs(&peer)
	if err := b.node.LinkAdd(nk); err != nil {
		return nil, nil, fmt.Errorf("create netkit %s with peer %s: %w", b.HostIfName, b.IfName, err)
	}
	if eth, err = must(b.pod, b.IfName); err != nil {
		return nil, nil, err
	}
	if err := b.pod.LinkSetGroup(eth, linkGroup); err != nil {
		return nil, nil, fmt.Errorf("set group of %s: %w", b.IfName, err)
	}
	if host, err = must(b.node, b.HostIfName); err != nil {
		return nil, nil, err
	}
	return eth, host, nil
}

// halfNetkit says whether l, in the pod, is what an Add that was killed right
// after creating the pair left: not yet in our group, but the peer of a host end
// that nobody else names so.
func (b *builder) halfNetkit(l netlink.Link) bool {
	host, err := find(b.node, b.HostIfName)
	return err == nil && host != nil && l.Type() == "netkit" && host.Type() == "netkit" &&
		host.Attrs().ParentIndex == l.Attrs().Index && l.Attrs().ParentIndex == host.Attrs().Index
}
